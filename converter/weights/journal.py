"""Records which weight files an unfinished run has finished, so that ``--resume`` can continue from there.

The journal is a file in the staging folder, with one JSON object per line. Each finished file adds a line:
what was read (its ``identity``, which changes with the file) and what was made (size and SHA-256). A file's
name alone proves nothing: the file may have been cut off, or come from another source.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from converter.config import is_integer
from converter.progress import Advance
from converter.weights.files import sha256

JOURNAL = "weights.journal"


@dataclass(frozen=True)
class Finished:
    """One weight file that is complete."""

    file: str
    """Its name in the staging folder."""
    size: int
    sha256: str
    source: str
    """What it was made from, and how; see ``identity``."""


def identity(source: Path, how: str) -> str:
    """Everything a file's content depends on: the source's path, size and times of change, and ``how``.

    The change time (ctime), which the file system keeps itself, cannot be set back.
    """
    found = source.stat()
    numbers = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return f"{source.resolve()} {' '.join(map(str, numbers))} {how}"


class Journal:
    """The journal of one staging folder. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._lock = threading.Lock()

    def add(self, entry: Finished) -> None:
        """Records a finished file."""
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def entries(self) -> dict[str, Finished]:
        """The recorded files, by name; lines that were cut off or damaged are ignored."""
        found: dict[str, Finished] = {}
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return found
        for line in lines:
            try:
                entry = Finished(**json.loads(line))
            except (TypeError, ValueError, RecursionError):
                continue
            if isinstance(entry.file, str) and is_integer(entry.size):
                found[entry.file] = entry
        return found

    def rewrite(self, entries: Iterable[Finished]) -> None:
        """Replaces the journal's lines with these."""
        new = self.path.with_name(f"{JOURNAL}.new")
        lines = [json.dumps(asdict(entry)) + "\n" for entry in entries]
        new.write_text("".join(lines), encoding="utf-8")
        new.replace(self.path)

    def remove(self) -> None:
        """Deletes the journal once the folder is complete."""
        self.path.unlink(missing_ok=True)


def is_finished(
    folder: Path, entry: Finished, source: str, advance: Advance, check: Callable[[], object]
) -> bool:
    """Whether a file is still as the journal says, and was made from what ``source`` identifies now."""
    path = folder / Path(entry.file).name
    if path.is_symlink() or not path.is_file():
        return False
    if (entry.source, entry.size) != (source, path.stat().st_size):
        return False
    return sha256(path, advance, check) == entry.sha256


def prune(folder: Path) -> None:
    """Removes everything from an unfinished run's folder except the journal and the files it names."""
    named = {JOURNAL, *Journal(folder).entries()}
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in named:
            path.unlink()


def finished_bytes(folder: Path) -> int:
    """The size of all files that the journal names."""
    return sum(entry.size for entry in Journal(folder).entries().values())


def kept(folder: Path) -> str | None:
    """Tells the user what ``--resume`` can reuse from a staging folder; None if there is nothing."""
    count = len(Journal(folder).entries())
    if count == 0:
        return None
    files = "1 finished weight file is" if count == 1 else f"{count} finished weight files are"
    return f"{files} kept in {folder}: repeat the command with --resume to continue from there"
