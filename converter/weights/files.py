"""Copies one file and computes its SHA-256 on the way, or shares the source's bytes."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Literal

from converter.errors import SourceError
from converter.progress import Advance

BLOCK = 4 << 20
"""Bytes read at once. Times the number of files processed in parallel, this bounds the memory."""
FICLONE = 0x40049409
"""ioctl that makes a file share another's blocks until one of them changes (linux/fs.h)."""

Look = Callable[[memoryview], object]
"""Called with the next bytes of a file that is read from its start; they are valid during the call only."""
Link = Literal["reflink", "hard", "symbolic"]


def link_file(source: Path, target: Path, size: int, link: Link) -> str | None:
    """Gives ``target``, a new file, the bytes of ``source`` without reading them; links are followed.

    ``reflink`` shares the blocks where the file system can, ``hard`` falls back to a hard link within one
    file system, and ``symbolic`` is for a result that does not outlive its source. Returns what was made
    ("shared", "hard-linked" or "linked"), or None if the file system can do neither. Raises ``SourceError``
    if the file no longer has ``size`` bytes.
    """
    if link == "symbolic":
        target.symlink_to(source.resolve())
        return "linked"
    made = "shared" if _cloned(source, target) else None
    if made is None and link == "hard":
        try:
            os.link(source.resolve(), target)
            made = "hard-linked"
        except OSError:  # another file system, or one without hard links
            return None
    if made is not None and target.stat().st_size != size:
        target.unlink()
        raise changed(source.name)
    return made


def copy_file(source: Path, target: Path, size: int | None = None, look: Look = bool) -> str:
    """Copies a file's bytes to a new file and returns their SHA-256, as hexadecimal digits.

    ``look`` is called with each block in order. Raises ``SourceError`` if the file changed while it was read,
    or no longer has ``size`` bytes.
    """
    digest = hashlib.sha256()
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        before = os.fstat(reader.fileno())
        for block in _blocks(reader):
            digest.update(block)
            look(block)
            write_all(writer.fileno(), block)
        done = writer.tell()
        after = os.fstat(reader.fileno())
    if done != (before.st_size if size is None else size) or after.st_mtime_ns != before.st_mtime_ns:
        raise changed(source.name)
    return digest.hexdigest()


def changed(name: str) -> SourceError:
    return SourceError(f"{name} changed while it was read; try again")


def sha256(path: Path, advance: Advance = int, look: Look = bool) -> str:
    """The SHA-256 of a file, as hexadecimal digits; ``look`` gets each block, and ``advance`` its bytes."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for block in _blocks(file):
            digest.update(block)
            look(block)
            advance(len(block))
    return digest.hexdigest()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of ``data``: one call of the system may write less."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def is_zip(path: Path) -> bool:
    """Whether a ``.bin`` file has the zip format of torch 1.6 and later; only that one can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _blocks(file: FileIO) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(BLOCK, os.fstat(file.fileno()).st_size)))
    while count := file.readinto(buffer):
        yield buffer[:count]


def _cloned(source: Path, target: Path) -> bool:
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
        except OSError:
            target.unlink()
            return False
    return True
