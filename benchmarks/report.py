"""What all benchmarks report: the machine, the command, Markdown tables, and files in ``results/``."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import click

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("ntk-convert", "torch", "transformers")
LONGEST_REASON = 200
"""Characters of the reason for a failure."""
F = TypeVar("F", bound=Callable[..., Any])

sys.path.insert(0, str(ROOT))  # use the checkout's converter even if another one is installed


def machine() -> str:
    """Processor, cores, memory and GPUs, but nothing that identifies the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = found[1] if found else platform.processor() or platform.machine()
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return ", ".join([processor, f"{os.cpu_count()} cores", f"{gigabytes:.0f} GiB", *gpus()])


def gpus() -> list[str]:
    """The names of the GPUs that the driver lists."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def versions(more: Sequence[str] = ()) -> str:
    """The versions of Python and of those packages that are installed."""
    names = [f"Python {platform.python_version()}"]
    for package in (*PACKAGES, *more):
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(names)


def command() -> str:
    """The command line without paths on this machine."""
    words = []
    for word in sys.argv[1:]:
        if "/" in word:
            word = f"{word.partition('=')[0]}=PATH" if word.startswith("--") else "PATH"
        if word != "--write":
            words.append(word)
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def load() -> float:
    """How many processes wanted to run over the last minute; the reports give it from before the run."""
    return os.getloadavg()[0]


def facts(load_before: float, packages: Sequence[str] = ()) -> str:
    """What a reader must know about a run, as a list in Markdown."""
    lines = [
        f"* Date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        f"* Machine: {machine()}; load average before: {load_before:.1f}",
        f"* Versions: {versions(packages)}",
        f"* Command: `{command()}`",
    ]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """A Markdown table; the first columns, ``texts`` of them, hold text, and the others hold numbers."""
    lines = [head, ["---"] * texts + ["---:"] * (len(head) - texts), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, scale: float = 1.0) -> str:
    """``value`` times ``scale`` with at least three significant digits, without an exponent."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratio(first: float | None, second: float | None) -> str:
    return f"{first / second:.2f}x" if first and second else "-"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def finish(
    name: str,
    title: str,
    sections: Sequence[str],
    load_before: float,
    packages: Sequence[str] = (),
    *,
    write: bool,
) -> None:
    """Prints a report and, if ``write``, writes ``results/NAME.md``, which replaces that of the last run."""
    print("\n" + "\n\n".join(sections))
    if write:
        RESULTS.mkdir(exist_ok=True)
        text = "\n\n".join([f"# {title}", facts(load_before, packages), *sections]) + "\n"
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
        say(f"wrote results/{name}.md")


# --- options that scripts share


HELP = {
    "repeats": "Turns of each side.",
    "seconds": "Start no new turn of a length after this.",
    "threads": "On the CPU.",
    "batch_tokens": "A batch has this / length texts.",
}


def numbers(**defaults: float) -> Callable[[F], F]:
    """An option for each name, with this default."""

    def decorated(function: F) -> F:
        for name, default in reversed(defaults.items()):
            option = f"--{name.replace('_', '-')}"
            function = click.option(option, default=default, show_default=True, help=HELP.get(name))(function)
        return function

    return decorated


def lengths(default: str) -> Callable[[F], F]:
    """The option ``--lengths``; the command gets them in rising order."""

    def integers(_: click.Context, __: click.Parameter, value: str) -> list[int]:
        return sorted(int(word) for word in value.split(",") if word)

    return click.option("--lengths", default=default, show_default=True, callback=integers, help="Tokens.")


def common(**quick: Any) -> Callable[[F], F]:
    """The options ``--write`` and ``--quick``; ``quick`` has the defaults of the second."""

    def smallest(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.default_map = quick if value else None

    keys = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": smallest}

    def decorated(function: F) -> F:
        function = click.option("--quick", help="The smallest sizes, to see that it runs.", **keys)(function)
        return click.option("--write", is_flag=True, help="Write the tables to benchmarks/results/.")(
            function
        )

    return decorated


# --- a report that grows


class Document:
    """Sections with headings, what was skipped and what failed; its file is written anew with each change.

    Args:
        name: of the file in ``folder``.
        folder: None to print the document at its end.
        packages: whose versions it states, beside those of every report.
    """

    def __init__(self, name: str, title: str, folder: Path | None, packages: Sequence[str] = ()):
        self.head = [f"# {title}", facts(load(), packages)]
        self.path = folder and folder / f"{name}.md"
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
        self._note(self.skipped, "skipped", f"{what}: {sentence(why)}")

    def fail(self, what: str, why: object) -> None:
        """Notes a failure; the whole run then ends with an error."""
        self._note(self.failed, "failed", f"{what}: {sentence(why)}")

    def _note(self, notes: list[str], word: str, line: str) -> None:
        if line not in notes:
            say(f"{word}: {line}")
            notes.append(line)
        self.save()

    def end(self) -> None:
        """All that could be measured was measured."""
        self.ended = True
        self.save()
        if self.path is None:
            print(f"\n{self.text()}", flush=True)

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(self.text(), encoding="utf-8")
            new.replace(self.path)

    def text(self) -> str:
        """The file's content."""
        blocks = [*self.head]
        if not self.ended:
            blocks.append("**Not complete**: the run ended, or was ended, before this part was done.")
        blocks += [self.intro] if self.intro else []
        for heading, notes in (("Failed", self.failed), ("Skipped", self.skipped)):
            if notes:
                blocks.append(f"## {heading}\n\n" + "\n".join(f"* {note}" for note in notes))
        blocks += [f"## {heading}\n\n{text}" for heading, text in self.sections.items()]
        return "\n\n".join(blocks) + "\n"


def sentence(why: object) -> str:
    """The first sentence of a reason or an error, without paths of this machine."""
    lines = str(why).strip().splitlines()
    text = re.split(r"(?<=[.!?])\s", lines[0])[0] if lines else ""
    # These two say in words what is lacking; of others, the class says more than the message.
    if isinstance(why, BaseException) and not isinstance(why, (ImportError, ValueError)):
        text = f"{type(why).__name__}: {text}"
    text = re.sub(r"(?<![\w.])/[\w.~-]+/[^\s'\"]*", "PATH", text)
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
