"""One file to another place: copied, with its SHA-256 on the way, or sharing the source's bytes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from converter.errors import Unfinished
from converter.progress import Advance

BLOCK = 4 << 20
"""Bytes read at once; with the number of files in work it bounds the memory."""
FICLONE = 0x40049409
"""ioctl that makes a file share another's blocks until one of them changes (linux/fs.h)."""

Link = Literal["reflink", "hard", "symbolic"]
How = Literal["copied", "shared", "hard-linked", "linked", "not shared", "not linked", "converted"]
"""How a file came to its place: ``shared`` are the blocks of a reflink; ``not shared`` and ``not linked`` are
copied though a reflink or a hard link was asked for; ``converted`` is written anew."""


def place_file(
    source: Path,
    target: Path,
    size: int,
    *,
    link: Link | None,
    advance: Advance = int,
    check: Callable[[], object] = bool,
) -> tuple[How, str | None]:
    """Makes ``target`` have the bytes of ``source``, in the cheapest way that ``link`` allows.

    Args:
        source: file to read; links are followed.
        target: file to make; it must not exist.
        size: bytes that the file had when it was looked at.
        link: ``reflink``: share the blocks where the file system can; ``hard``: else be the same file,
            where both are on one file system. Otherwise the bytes are copied. ``symbolic``: only lead
            there, for a result that does not outlive its source.
        advance: told the bytes done.
        check: called between blocks; what it raises ends the copy.

    Returns:
        What was done, and the SHA-256 of a copy (of what is shared there is none: nothing was read).

    Raises:
        Unfinished: the file does not have that size any more, or changed while it was read.
    """
    if link == "symbolic":
        target.symlink_to(source.resolve())
        advance(size)
        return "linked", None
    if link is not None and _shared(source, target, size):
        advance(size)
        return "shared", None
    if link == "hard" and _hard_linked(source, target, size):
        advance(size)
        return "hard-linked", None
    how: How = "copied" if link is None else "not shared" if link == "reflink" else "not linked"
    return how, copy_file(source, target, size, advance, check)


def copy_file(
    source: Path,
    target: Path,
    size: int | None = None,
    advance: Advance = int,
    check: Callable[[], object] = bool,
) -> str:
    """Copies a file's bytes, leaving its holes holes, and returns their SHA-256.

    Args:
        source, target, advance, check: as for ``place_file``.
        size: bytes that the file had when it was looked at; None for its size now.

    Raises:
        Unfinished: see ``place_file``.
    """
    digest = hashlib.sha256()
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        before = os.fstat(reader.fileno())
        expected = before.st_size if size is None else size
        done = 0
        for block, hole in _blocks(reader.fileno(), min(expected, before.st_size)):
            check()
            digest.update(block)
            if hole:
                os.lseek(writer.fileno(), len(block), os.SEEK_CUR)
            else:
                _write(writer.fileno(), block)
            done += len(block)
            advance(len(block))
        if done == expected:
            os.ftruncate(writer.fileno(), done)  # the last bytes may have been a hole
        after = os.fstat(reader.fileno())
    if done != expected or (after.st_size, after.st_mtime_ns) != (expected, before.st_mtime_ns):
        raise changed(source.name, done, expected)
    return digest.hexdigest()


def changed(name: str, done: int, expected: int) -> Unfinished:
    """What is said of a file that did not stay as it was."""
    return Unfinished(f"{name} changed while it was read ({done} of {expected} bytes); try again")


def sha256(path: Path, advance: Advance = int, check: Callable[[], object] = bool) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as reader:
        for block, _ in _blocks(reader.fileno(), os.fstat(reader.fileno()).st_size):
            check()
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def is_zip(path: Path) -> bool:
    """Whether a ``.bin`` file has the format since torch 1.6, which alone can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def can_link(source: Path, folder: Path, link: Link) -> bool:
    """Whether a file in ``folder`` can have the bytes of ``source`` without a copy, as ``link`` allows."""
    if link == "symbolic":
        return True
    probe = folder / ".probe"
    size = source.stat().st_size
    try:
        return _shared(source, probe, size) or (link == "hard" and _hard_linked(source, probe, size))
    finally:
        with suppress(FileNotFoundError):
            probe.unlink()


def _blocks(descriptor: int, size: int) -> Iterator[tuple[memoryview, bool]]:
    """The file's bytes in order, and whether each block is a hole; ends early where the file does."""
    buffer = memoryview(bytearray(min(BLOCK, size)))
    zeros = memoryview(bytes(len(buffer)))
    at = 0
    while at < size:
        data, end = _next_data(descriptor, at, size)
        while at < data:
            block = zeros[: min(len(zeros), data - at)]
            at += len(block)
            yield block, True
        while at < end:
            count = os.preadv(descriptor, [buffer[: min(len(buffer), end - at)]], at)
            if count == 0:
                return
            at += count
            yield buffer[:count], False


def _next_data(descriptor: int, at: int, size: int) -> tuple[int, int]:
    """Where the next stretch of data begins and ends; all of the file where holes are not known."""
    if not hasattr(os, "SEEK_DATA"):
        return at, size
    try:
        data = os.lseek(descriptor, at, os.SEEK_DATA)
        return data, min(os.lseek(descriptor, data, os.SEEK_HOLE), size)
    except OSError as error:
        # No data from here on means a hole up to the end, or a file that ended short.
        if error.errno == errno.ENXIO:
            end = min(os.fstat(descriptor).st_size, size)
            return end, (size if end < size else end)
        return at, size


def _write(descriptor: int, block: memoryview) -> None:
    written = 0
    while written < len(block):
        written += os.write(descriptor, block[written:])


def _shared(source: Path, target: Path, size: int) -> bool:
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
        except OSError:
            cloned = False
        else:
            cloned = True
        made = os.fstat(writer.fileno()).st_size
    if cloned and made == size:
        return True
    target.unlink()
    if cloned:
        raise changed(source.name, made, size)
    return False


def _hard_linked(source: Path, target: Path, size: int) -> bool:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        return False
    made = target.stat().st_size
    if made != size:
        target.unlink()
        raise changed(source.name, made, size)
    return True
