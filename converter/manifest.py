"""What a conversion or an export wrote into a repository: every file's size and SHA-256.

``push`` sends what stands here and nothing else, and only as it was when it was verified. The card and the
report on graphs are not in it: they compute nothing, and may be edited or made anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from converter.errors import SourceError
from converter.jsonfile import read_object
from converter.source import CARD
from converter.weights.files import sha256

MANIFEST = "ntk_convert.json"
REPORT = "onnx_validation.json"
UNLISTED = (CARD, REPORT, MANIFEST)


@dataclass(frozen=True)
class Entry:
    """One file."""

    size: int
    """In bytes."""
    sha256: str | None
    """None of weights that are linked to a source's, which nobody read."""


def write(folder: Path, names: Iterable[str], known: Mapping[str, str | None]) -> None:
    """Lists files of a repository.

    Args:
        folder: the repository.
        names: its files, relative.
        known: SHA-256 of some of them, or None for those that are not to be read; the others are.
    """
    entries = {
        name: Entry((folder / name).stat().st_size, known[name] if name in known else sha256(folder / name))
        for name in sorted(set(names) - set(UNLISTED))
    }
    content = {"files": {name: asdict(entry) for name, entry in entries.items()}}
    new = folder / f".{MANIFEST}.new"
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    new.replace(folder / MANIFEST)


def read(folder: Path) -> dict[str, Entry]:
    """What is listed, by name.

    Raises:
        SourceError: there is no list, or it is damaged.
    """
    if not (folder / MANIFEST).is_file():
        raise SourceError(f"{folder} has no {MANIFEST}, which a conversion writes; convert the source again")
    files = read_object(folder / MANIFEST).get("files")
    entries = {}
    for name, found in files.items() if isinstance(files, dict) else ():
        size, digest = (found.get("size"), found.get("sha256")) if isinstance(found, dict) else (None, None)
        plain = not Path(name).is_absolute() and ".." not in Path(name).parts and name not in UNLISTED
        if not plain or not isinstance(size, int) or not isinstance(digest, str | None):
            raise SourceError(f"{MANIFEST} is damaged ({name[:100]!r}); convert the source again")
        entries[name] = Entry(size, digest)
    return entries


def update(folder: Path, added: Mapping[str, str]) -> None:
    """Lists files that were added or replaced too, by their SHA-256, and no longer what is gone.

    A folder without a list gets none: nobody knows what else is in it.
    """
    if not (folder / MANIFEST).is_file():
        return
    known = {name: entry.sha256 for name, entry in read(folder).items() if (folder / name).is_file()}
    known.update(added)
    write(folder, known, known)
