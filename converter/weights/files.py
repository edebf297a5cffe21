"""Copies one file and computes its SHA-256 on the way, or shares the source's bytes."""

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
"""Bytes read at once. Times the number of files processed in parallel, this bounds the memory."""
FICLONE = 0x40049409
"""ioctl that makes a file share another's blocks until one of them changes (linux/fs.h)."""

Look = Callable[[memoryview], object]
"""Called with the next bytes of a file that is read from its start; they are valid during the call only."""
Link = Literal["reflink", "hard", "symbolic"]
How = Literal["copied", "shared", "hard-linked", "linked", "not shared", "not linked", "converted"]
"""How a file was made. ``shared``: a reflink shares the source's blocks. ``not shared``, ``not linked``: a
reflink or a hard link was asked for, but the file was copied. ``converted``: rewritten as safetensors."""


def place_file(
    source: Path,
    target: Path,
    size: int,
    *,
    link: Link | None,
    advance: Advance = int,
    check: Callable[[], object] = bool,
    look: Look = bool,
) -> tuple[How, str | None]:
    """Gives ``target`` the bytes of ``source``, in the cheapest way that ``link`` allows.

    Args:
        source: file to read; links are followed.
        target: file to make; it must not exist.
        size: the source's size in bytes when the run first looked at it.
        link: ``reflink``: share the blocks where the file system can. ``hard``: the same, falling back to a
            hard link, which works within one file system. If neither works, the bytes are copied.
            ``symbolic``: a symbolic link, for a result that does not outlive its source.
        advance: called with the number of bytes just done.
        check: called between blocks; an exception that it raises ends the copy.
        look: called with each block in order; an exception that it raises ends the copy.

    Returns:
        How the file was made, and the SHA-256 of a copy; None if it is linked, since nothing was read.

    Raises:
        Unfinished: the file no longer has that size, or it changed while it was read.
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
    return how, copy_file(source, target, size, advance, check, look)


def copy_file(
    source: Path,
    target: Path,
    size: int | None = None,
    advance: Advance = int,
    check: Callable[[], object] = bool,
    look: Look = bool,
) -> str:
    """Copies a file's bytes, keeps its holes, and returns the SHA-256.

    Args:
        source, target, advance, check, look: as for ``place_file``.
        size: the source's size in bytes when the run first looked at it; None for its present size.

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
            look(block)
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
    """The error for a file that changed while it was read."""
    return Unfinished(f"{name} changed while it was read ({done} of {expected} bytes); try again")


def sha256(path: Path, advance: Advance = int, check: Callable[[], object] = bool, look: Look = bool) -> str:
    """The SHA-256 of a file, as hexadecimal digits.

    Args:
        path: file to read.
        advance, check, look: as for ``place_file``.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as reader:
        for block, _ in _blocks(reader.fileno(), os.fstat(reader.fileno()).st_size):
            check()
            digest.update(block)
            look(block)
            advance(len(block))
    return digest.hexdigest()


def is_zip(path: Path) -> bool:
    """Whether a ``.bin`` file has the zip format of torch 1.6 and later; only that one can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def can_link(source: Path, folder: Path, link: Link) -> bool:
    """Whether ``link`` can give a file in ``folder`` the bytes of ``source`` without a copy."""
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
    """The file's bytes in order, and whether each block is a hole; stops early if the file is shorter."""
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
    """Where the next stretch of data begins and ends; the rest of the file if holes are not reported."""
    if not hasattr(os, "SEEK_DATA"):
        return at, size
    try:
        data = os.lseek(descriptor, at, os.SEEK_DATA)
        return data, min(os.lseek(descriptor, data, os.SEEK_HOLE), size)
    except OSError as error:
        # No more data: either the rest is a hole, or the file is shorter than expected.
        if error.errno == errno.ENXIO:
            return min(os.fstat(descriptor).st_size, size), size
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
    except OSError:  # another file system, or one without hard links
        return False
    made = target.stat().st_size
    if made != size:
        target.unlink()
        raise changed(source.name, made, size)
    return True
