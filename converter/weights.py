"""Weights from the source into the repository: copied byte for byte, or ``.bin`` made safetensors."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from converter.checkpoint import Checkpoint
from converter.errors import SourceError
from converter.progress import Advance, byte_bar

CHUNK = 64 << 20
"""Bytes copied between two looks at signals and the progress bar; bounds the memory too."""
READ = 8 << 20
"""Bytes read at once where the kernel cannot copy by itself."""


def transfer(checkpoint: Checkpoint, source: Path, folder: Path, *, progress: bool = False) -> None:
    """Writes the checkpoint's weights to ``folder``, with their tensors' names and bytes unchanged.

    Safetensors files and their index keep their names and every byte. ``.bin`` files are loaded
    shard by shard, as tensors only (``weights_only=True``), and written as safetensors.

    Args:
        checkpoint: what ``source`` holds, from ``read_checkpoint``.
        source: folder of the weight files.
        folder: an existing folder to write to.
        progress: draw a bar on stderr.

    Raises:
        SourceError: a file that changed or ended short meanwhile, or a ``.bin`` that is unreadable
            or holds more than tensors.
    """
    title = "copying" if checkpoint.format == "safetensors" else "converting"
    with byte_bar(f"{title} weights", checkpoint.total_bytes, show=progress) as advance:
        if checkpoint.format == "bin":
            from converter.pickles import convert_shards

            convert_shards(checkpoint, source, folder, advance)
            return
        for name, size in checkpoint.files.items():
            copy_file(source / name, folder / name, size, advance)
        if checkpoint.index is not None:
            copy_file(source / checkpoint.index, folder / checkpoint.index)


def copy_file(source: Path, target: Path, size: int | None = None, advance: Advance = int) -> None:
    """Copies a file's bytes, inside the kernel where the system can (some file systems share them).

    Args:
        source: file to read; links are followed.
        target: file to write; it must not exist.
        size: bytes that the file had when it was checked; None for its size now.
        advance: told the bytes done.

    Raises:
        SourceError: the file does not have that size any more, or changed while it was read.
    """
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        before = os.fstat(reader.fileno())
        expected = before.st_size if size is None else size
        done = 0
        while done < expected and (
            count := _copy(reader.fileno(), writer.fileno(), min(CHUNK, expected - done))
        ):
            done += count
            advance(count)
        after = os.fstat(reader.fileno())
    if done != expected or (after.st_size, after.st_mtime_ns) != (expected, before.st_mtime_ns):
        raise SourceError(f"{source.name} changed while it was read ({done} of {expected} bytes); try again")


def _copy(reader: int, writer: int, count: int) -> int:
    if hasattr(os, "copy_file_range"):
        # Where it fails or, as on some file systems, claims an early end, plain reading decides.
        with suppress(OSError):
            copied = os.copy_file_range(reader, writer, count)
            if copied:
                return copied
    block = os.read(reader, min(count, READ))
    written = 0
    while written < len(block):
        written += os.write(writer, memoryview(block)[written:])
    return len(block)
