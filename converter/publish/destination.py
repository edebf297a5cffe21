"""Where a conversion's result is pushed to once it is complete."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from converter.errors import ConverterError, PushError
from converter.interrupts import Interrupted
from converter.publish.push import PushResult, preflight, push


@dataclass(frozen=True)
class Destination:
    """A repository on the Hub, and how it is pushed to; see ``push``."""

    repo_id: str
    private: bool
    branch: str | None
    create_pr: bool
    overwrite: bool
    token: str | None

    def preflight(self, source: str) -> None:
        """Finds out what would keep a push from working, before the conversion's work."""
        preflight(**asdict(self), source=source)

    def push(self, place: Path, *, progress: bool) -> PushResult:
        """Pushes a result that was verified a moment ago."""
        try:
            return push(place, **asdict(self), verified=True, progress=progress)
        except (ConverterError, KeyboardInterrupt) as error:
            done = f"{place} is complete, and this sends it: {self._command(place)}"
            kind = Interrupted if isinstance(error, KeyboardInterrupt) else PushError
            raise kind(f"{error}; {done}" if str(error) else done) from error

    def _command(self, place: Path) -> str:
        words = ["ntk-convert", "push", str(place), self.repo_id]
        words += ["--private"] * self.private + ["--create-pr"] * self.create_pr
        words += ["--overwrite"] * self.overwrite + (["--branch", self.branch] if self.branch else [])
        return shlex.join(words)
