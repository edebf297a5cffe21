"""The result file of one part, which is written anew whenever the part knows more."""

from __future__ import annotations

import re

import click
import report
from torch_speed import say

from gpu.settings import Settings

PACKAGES = ("accelerate", "flash-attn", "kernels", "onnxruntime", "onnxruntime-gpu", "pytest", "triton")
LONGEST = 200
"""Characters of a reason."""
TRIAL = "A trial on the CPU with tiny sizes: it shows that the parts run, and nothing about a GPU."


class Document:
    """Sections with headings, what was skipped and what failed.

    Without a folder for results, as in a trial, it is printed at its end.
    """

    def __init__(self, settings: Settings, name: str, title: str):
        self.title = title
        self.facts = report.facts(report.load(), PACKAGES)
        self.trial = settings.trial
        self.path = settings.results and settings.results / f"gpu-{name}.md"
        self.intro = ""
        self.sections: dict[str, str] = {}
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self.ended = False

    def put(self, heading: str, text: str) -> None:
        """Adds a section, or replaces it."""
        self.sections[heading] = text
        self.save()

    def skip(self, what: str, why: object) -> None:
        """Notes what was not measured, and why."""
        self._note(self.skipped, "skipped", what, why)

    def fail(self, what: str, why: object) -> None:
        """Notes a failure; the whole run then ends with an error."""
        self._note(self.failed, "failed", what, why)

    def _note(self, notes: list[str], word: str, what: str, why: object) -> None:
        line = f"{what}: {sentence(why)}"
        if line not in notes:
            say(f"{word}: {line}")
            notes.append(line)
        self.save()

    def end(self) -> None:
        """The part has done all that it could."""
        self.ended = True
        self.save()
        if self.path is None:
            click.echo(f"\n{self.text()}")

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(self.text(), encoding="utf-8")
            new.replace(self.path)

    def text(self) -> str:
        """The file's content."""
        blocks = [f"# GPU: {self.title}", *([TRIAL] if self.trial else []), self.facts]
        if not self.ended:
            blocks.append("**Not complete**: the run ended, or was ended, before this part was done.")
        blocks += [self.intro] if self.intro else []
        for heading, notes in (("Failed", self.failed), ("Skipped", self.skipped)):
            if notes:
                blocks.append(f"## {heading}\n\n" + "\n".join(f"* {note}" for note in notes))
        blocks += [f"## {heading}\n\n{text}" for heading, text in self.sections.items()]
        return "\n\n".join(blocks) + "\n"


def sentence(why: object) -> str:
    """The first sentence of a reason or an error, without paths of this machine.

    Errors of classes that transformers does not use for what it lacks are shown with their class.
    """
    lines = str(why).strip().splitlines()
    text = re.split(r"(?<=[.!?])\s", lines[0])[0] if lines else ""
    if isinstance(why, BaseException):
        text = text if isinstance(why, (ImportError, ValueError)) else f"{type(why).__name__}: {text}"
    text = re.sub(r"(?<![\w.])/[\w.~-]+/[^\s'\"]*", "PATH", text)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
