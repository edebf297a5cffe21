"""Records which weight files an unfinished run has finished, so that ``--resume`` can continue from there.

The journal is a file in the staging folder, with one JSON object per line. Each finished file adds a line:
what was read, what was made and its SHA-256. A file's name alone proves nothing: the file may have been cut
off, or come from another source.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

JOURNAL = "weights.journal"


@dataclass(frozen=True)
class Finished:
    """One weight file that is complete."""

    source: str
    """What it was made from, and how; see ``identity``."""
    made: str
    """What the file was when it was finished; see ``identity``."""
    sha256: str


def identity(path: Path, how: str = "") -> str:
    """Text that changes with a file's content, and ``how``; ctime cannot be set back."""
    found = path.stat()
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {how}"


def add(file: Path, source: str, sha256: str) -> None:
    """Records a finished file in the journal beside it; its bytes must be on the disk already."""
    line = json.dumps({"file": file.name, **asdict(Finished(source, identity(file), sha256))}) + "\n"
    with (file.parent / JOURNAL).open("ab", buffering=0) as journal:  # one write: others append to it too
        journal.write(line.encode())


def entries(folder: Path) -> dict[str, Finished]:
    """The files that the journal of a folder names; a line that was cut off is ignored."""
    found: dict[str, Finished] = {}
    path = folder / JOURNAL
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        with suppress(ValueError):  # a full disk or a crash cut it off
            values = json.loads(line)
            name = values.pop("file")
            found[name] = Finished(**values)
    return found


def finished(folder: Path) -> dict[str, Finished]:
    """Those of the entries whose files are still as they were when they were finished."""
    found = {}
    for name, entry in entries(folder).items():
        with suppress(OSError):
            if not (folder / name).is_symlink() and identity(folder / name) == entry.made:
                found[name] = entry
    return found


def prune(folder: Path) -> None:
    """Removes everything from an unfinished run's folder except the journal and the files it names."""
    kept = {JOURNAL, *finished(folder)}
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()


def remove(folder: Path) -> None:
    """Deletes the journal once the folder is complete."""
    (folder / JOURNAL).unlink(missing_ok=True)


def kept(folder: Path) -> str | None:
    """Tells the user what ``--resume`` can reuse from a staging folder; None if there is nothing."""
    count = len(finished(folder))
    if count == 0:
        return None
    files = "1 finished weight file is" if count == 1 else f"{count} finished weight files are"
    return f"{files} kept in {folder}: repeat the command with `resume` to continue from there"
