"""A checkpoint in a local folder."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

from converter.errors import SourceError
from converter.source.base import Source


def _is_file(entry: Path) -> bool:
    """Whether an entry is a file or a link to one. Pipes and devices are never opened."""
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SourceError(f"{entry.name} is a link that leads to itself; remove it") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise


def open_folder(path: Path) -> Source:
    """A checkpoint in a local folder.

    Raises:
        SourceError: the folder cannot be read, or contains a link that leads to itself.
    """
    try:
        files: dict[str, int | None] = {
            entry.name: entry.stat().st_size
            for entry in sorted(path.iterdir())
            # No checkpoint has other names, and listing them could send control codes to a terminal.
            if entry.name.isprintable() and _is_file(entry)
        }
        name = path.resolve().name
    except OSError as error:
        raise SourceError(f"cannot read the folder {path}: {error.strerror}") from error
    printable = "".join(letter if letter.isprintable() else "_" for letter in name)
    return Source(printable or "checkpoint", path, files)
