"""Transfers all weight files of a checkpoint: copied byte for byte, linked, or rewritten as safetensors."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from converter.config import Dtype
from converter.errors import SourceError
from converter.progress import byte_bar
from converter.source.checkpoint import (
    ITEM_BYTES,
    PICKLED,
    Checkpoint,
    Tensor,
    loads_everywhere,
    read_header,
    read_metadata,
    read_weight_map,
    target_names,
)
from converter.source.jsonfile import parse_object, read_bytes
from converter.source.source import check_digest
from converter.weights import worker
from converter.weights.files import Link, changed, copy_file, is_zip, link_file
from converter.weights.finite import Scan

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
STORED = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Value of ``--dtype`` -> its name in the safetensors format."""
TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Value of ``--dtype`` -> its name in torch and in config.json."""
FLOATS = ("F64", *STORED.values())
AT_ONCE = 4
"""Most files at once; more would only make disks seek."""
LEAST = 256 << 20
"""Bytes of work that justify one more."""
NOT_LINKED = {None: "copied", "reflink": "not shared", "hard": "not linked", "symbolic": "not linked"}
"""The link that was asked for -> how a file was made that is a copy."""


@dataclass(frozen=True)
class TransferOptions:
    """How all weight files are transferred."""

    dtype: Dtype | None = None
    """Round floating point tensors to this dtype; None changes no byte."""
    link: Link | None = None
    """How to share bytes with the source, where the file system can; see ``link_file``."""
    keep: Collection[str] = ()
    """Names of tensors that ``dtype`` does not change."""
    tied: Collection[str] = ()
    """Names to leave out of a rewritten ``.bin`` file where they are the same tensor as another name."""
    ignored: re.Pattern[str] | None = None
    """Finds the names of tensors that may hold NaN or infinities; None lets all of them. The values of linked
    files are not read."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """What the Hub says of weight files, see ``check_digest``; these are read even where they are linked."""


DEFAULTS = TransferOptions()


@dataclass(frozen=True)
class _Job:
    """One weight file to make."""

    source: Path
    target: Path
    size: int
    """Of the source in bytes, when the run first looked at it."""
    options: TransferOptions
    rewritten: bool
    """Whether its bytes change; else it is copied."""
    digest: str | None
    """What the Hub says of the source; see ``check_digest``."""
    expected: Sequence[str]
    """The names of tensors that the index says are in a ``.bin`` file; see ``rewrite``."""

    @property
    def pickled(self) -> bool:
        return self.source.suffix in PICKLED

    def do(self, advance: Callable[[int], object]) -> str:
        """Makes the file, and returns its SHA-256.

        Raises ``SourceError`` or ``OSError``. ``advance`` is called with the bytes that were just made; what
        it raises ends the work.
        """
        ignored, before = self.options.ignored, _state(self.source)
        if self.source.stat().st_size != self.size:
            raise changed(self.source.name)
        if self.rewritten:
            check_digest(self.source, self.digest)
            digest = self._rewrite(advance)
        else:

            def look(block: memoryview) -> None:
                advance(len(block))
                if scan is not None:
                    scan(block)

            try:
                tensors = {} if ignored is None else read_header(self.source)
                scan = ignored and Scan(tensors.values(), self.source.name, ignored)
                digest = copy_file(self.source, self.target, self.size, look)
            except SourceError:
                check_digest(self.source, self.digest)  # what is wrong with a download is its digest
                raise
            check_digest(self.source, self.digest, digest)
        if _state(self.source) != before:
            raise changed(self.source.name)
        return digest

    def _rewrite(self, advance: Callable[[int], object]) -> str:
        options, done = self.options, 0
        names: dict[str, Any] = {
            "dtype": STORED[options.dtype] if options.dtype else None,
            "keep": list(options.keep),
            "expected": self.expected,
            "tied": list(options.tied),
        }
        if not self.pickled:
            from converter.weights.rewrite import rewrite

            def look(data: memoryview) -> None:
                advance(data.nbytes)

            return rewrite(self.source, self.target, ignored=options.ignored, look=look, **names)

        def grown() -> None:
            nonlocal done
            before, done = done, self.target.stat().st_size if self.target.exists() else 0
            advance(done - before)

        ignored = None if options.ignored is None else options.ignored.pattern
        return worker.rewrite_apart(self.source, self.target, {"ignored": ignored, **names}, grown)


def transfer(
    checkpoint: Checkpoint,
    source: Path,
    folder: Path,
    options: TransferOptions = DEFAULTS,
    *,
    space: Callable[[int], object] = bool,
    progress: bool = False,
) -> tuple[dict[str, int], dict[str, str]]:
    """Writes the checkpoint's weights to ``folder``; tensor names do not change.

    Safetensors files and their index keep their names and every byte, unless ``options`` name a dtype, or
    some supported transformers does not load them as they are.
    ``.bin`` files become safetensors; they are loaded as tensors only (``weights_only=True``), in a process
    of their own. ``space`` is called with the number of bytes to write, before anything is written.

    Returns how the files were made -> how many of them: "copied"; "shared" (a reflink), "hard-linked" or
    "linked"; "not shared" or "not linked" if a link was asked for, but the file was copied; "converted" if
    rewritten. And the new files that were read or written -> their SHA-256.
    """
    targets = target_names(checkpoint.files, checkpoint.index)
    jobs: dict[str, _Job] = {}
    how: Counter[str] = Counter()
    for name, size in checkpoint.files.items():
        target, digest = folder / targets[name], options.digests.get(name)
        rewritten = options.dtype is not None or checkpoint.format == "bin"
        if not rewritten:
            rewritten = not loads_everywhere(read_metadata(source / name))
        made = None
        if options.link and not rewritten:
            check_digest(source / name, digest)
            made = link_file(source / name, target, size, options.link)
        if made is None:
            expected = [tensor for tensor, file in checkpoint.weight_map.items() if file == name]
            jobs[name] = _Job(source / name, target, size, options, rewritten, digest, expected)
        how[made or ("converted" if rewritten else NOT_LINKED[options.link])] += 1
    size = sum(job.size for job in jobs.values())
    if options.dtype is not None:
        size = _size_in(checkpoint, jobs, STORED[options.dtype])
    space(size)
    what = "converting weights" if how["converted"] else "copying weights"
    with byte_bar(what, size, show=progress) as advance:
        digests = _do(list(jobs.values()), advance)
    if checkpoint.index is not None and checkpoint.index in targets:  # one .bin file no longer needs an index
        moved = any(name != target for name, target in targets.items())  # shards of a subfolder
        _transfer_index(checkpoint, source, folder, targets, anew=moved or bool(how["converted"]))
    return dict(how), digests


def _do(jobs: Sequence[_Job], advance: Callable[[int], object]) -> dict[str, str]:
    """Does all jobs, large ones several at once; new file -> its SHA-256.

    An interruption or the first failure ends all of them and is raised.
    """
    count = min(AT_ONCE, os.cpu_count() or 1, len(jobs), 1 + sum(job.size for job in jobs) // LEAST)
    if any(job.pickled and not is_zip(job.source) for job in jobs):
        count = 1  # a file in an older format is held in memory as a whole while it is converted
    if count < 2:
        return {job.target.name: job.do(advance) for job in jobs}
    stopped = threading.Event()

    def step(done: int) -> None:
        if stopped.is_set():
            raise CancelledError
        advance(done)

    with ThreadPoolExecutor(count) as pool:
        futures = {job.target.name: pool.submit(job.do, step) for job in jobs}
        try:
            for future in as_completed(futures.values()):
                future.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
    return {name: future.result() for name, future in futures.items()}


def _state(path: Path) -> tuple[int, ...]:
    """Changes with a file's content; ctime cannot be set back."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _size_in(checkpoint: Checkpoint, names: Collection[str], dtype: str) -> int:
    """Bytes of these files in another dtype; an upper bound for ``.bin`` files, whose dtypes are unknown."""
    total = sum(checkpoint.files[name] for name in names)
    if not checkpoint.tensors:
        return total * (2 if dtype == "F32" else 1)
    sizes = (
        (tensor.end - tensor.start)
        * (ITEM_BYTES[dtype] if tensor.dtype in FLOATS else ITEM_BYTES[tensor.dtype])
        // ITEM_BYTES[tensor.dtype]
        for tensor in checkpoint.tensors.values()
        if tensor.file in names
    )
    return sum(sizes)


def _read_shards(
    checkpoint: Checkpoint, folder: Path, targets: dict[str, str]
) -> dict[str, Mapping[str, Tensor]]:
    """New file -> its tensors. Checks that no tensor is in two files, which ``.bin`` files do not show."""
    headers: dict[str, Mapping[str, Tensor]] = {
        targets[name]: read_header(folder / targets[name]) for name in checkpoint.files
    }
    found: dict[str, str] = {}
    for name in checkpoint.files:
        for tensor in headers[targets[name]]:
            if tensor in found:
                raise SourceError(f"the tensor {tensor!r} is in both {found[tensor]} and {name}")
            found[tensor] = name
    return headers


def _transfer_index(
    checkpoint: Checkpoint, source: Path, folder: Path, targets: dict[str, str], *, anew: bool
) -> None:
    """Copies the index, or writes it anew if its files changed, or no library could load what it says."""
    index = checkpoint.index or ""
    raw = read_bytes(source / index)
    content = parse_object(raw, index)
    if read_weight_map(index, content) != checkpoint.weight_map:
        raise changed(index)  # it may be a private file by now
    metadata = content.get("metadata")
    all_stored = checkpoint.weight_map.keys() <= checkpoint.tensors.keys()
    # transformers adds keys to the metadata as it loads, and so needs an object.
    if not anew and all_stored and isinstance(metadata, dict):
        (folder / index).write_bytes(raw)
        return
    headers = _read_shards(checkpoint, folder, targets)
    total = sum(tensor.end - tensor.start for tensors in headers.values() for tensor in tensors.values())
    weight_map = {tensor: file for file, tensors in headers.items() for tensor in tensors}
    new = {
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / targets[index]).write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
