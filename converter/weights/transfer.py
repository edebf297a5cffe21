"""Transfers all weight files of a checkpoint: copied byte for byte, linked, or rewritten as safetensors."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from converter.errors import SourceError
from converter.progress import byte_bar
from converter.source.checkpoint import (
    ITEM_BYTES,
    PICKLED,
    Checkpoint,
    Tensor,
    read_header,
    target_names,
    weight_files,
)
from converter.source.jsonfile import parse_object, read_bytes, read_object
from converter.source.source import check_digest
from converter.weights import journal, worker
from converter.weights.files import Link, changed, is_zip, link_file
from converter.weights.worker import Job

Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
STORED = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Value of ``--dtype`` -> its name in the safetensors format."""
TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Value of ``--dtype`` -> its name in torch and in config.json."""
FLOATS = ("F64", *STORED.values())
AT_ONCE = 4
"""Most processes; more would only make disks seek."""
LEAST = 256 << 20
"""Bytes of work that justify one more process."""


@dataclass(frozen=True)
class Order:
    """How to transfer the weights."""

    dtype: Dtype | None = None
    """Round floating point tensors to this dtype; None changes no byte."""
    link: Link | None = None
    """How to share bytes with the source, where the file system can; see ``link_file``."""
    keep: Collection[str] = ()
    """Names of tensors that ``dtype`` does not change."""
    tied: Collection[str] = ()
    """Names to leave out of a rewritten ``.bin`` file where they are the same tensor as another name."""
    unread: re.Pattern[str] | None = None
    """Finds the names of tensors that may hold NaN or infinities; None lets all of them. The values of linked
    files are not read."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """What the Hub says of weight files, see ``check_digest``; these are read even where they are linked."""


ORDER = Order()


def transfer(
    checkpoint: Checkpoint,
    source: Path,
    folder: Path,
    order: Order = ORDER,
    *,
    space: Callable[[int], object] = bool,
    progress: bool = False,
) -> dict[str, int]:
    """Writes the checkpoint's weights to ``folder``; tensor names do not change.

    Safetensors files and their index keep their names and every byte, unless ``order`` names a dtype.
    ``.bin`` files become safetensors; they are loaded as tensors only (``weights_only=True``). Files in
    ``folder`` that an unfinished run completed, according to its journal, are kept; the caller removes that.
    ``space`` is called with the number of bytes to write, before anything is written.

    Returns how the files were made -> how many of them: "copied"; "shared" (a reflink), "hard-linked" or
    "linked"; "not shared" or "not linked" if a link was asked for, but the file was copied; "converted" if
    rewritten; "kept".
    """
    targets = target_names(checkpoint.files, checkpoint.index)
    rewritten = order.dtype is not None or checkpoint.format == "bin"
    jobs = {name: _job(checkpoint, source, name, folder / targets[name], order) for name in checkpoint.files}
    finished = journal.finished(folder)
    how: Counter[str] = Counter()
    for name, job in list(jobs.items()):
        if targets[name] in finished and finished[targets[name]].source == job.identity:
            how["kept"] += 1
            del jobs[name]
            continue
        Path(job.target).unlink(missing_ok=True)
        made = None
        if order.link and not rewritten:
            check_digest(source / name, job.digest)
            made = link_file(source / name, Path(job.target), job.size, order.link)
        if made is not None:
            how[made] += 1
            del jobs[name]
    size = sum(job.size for job in jobs.values())
    if order.dtype is not None:
        size = _size_in(checkpoint, jobs, STORED[order.dtype])
    space(size)
    _do(list(jobs.values()), size, "converting weights" if rewritten else "copying weights", progress)
    copied = {None: "copied", "reflink": "not shared"}.get(order.link, "not linked")
    how.update(["converted" if rewritten else copied] * len(jobs))
    moved = any(name != target for name, target in targets.items())  # shards of a subfolder
    if rewritten or moved or checkpoint.weight_map.keys() - checkpoint.tensors.keys():
        headers = _read_shards(checkpoint, folder, targets)
        index = checkpoint.index
        if index is not None and index in targets:  # a single .bin file no longer needs an index
            _write_index(source / index, folder / targets[index], headers)
    elif checkpoint.index is not None:
        index, raw = checkpoint.index, read_bytes(source / checkpoint.index)
        if weight_files(index, lambda _: parse_object(raw, index)) != checkpoint.weight_map:
            raise changed(index)  # it may be a private file by now
        (folder / index).write_bytes(raw)
    return dict(how)


def _job(checkpoint: Checkpoint, folder: Path, name: str, target: Path, order: Order) -> Job:
    source, size = folder / name, checkpoint.files[name]
    unread = None if order.unread is None else order.unread.pattern
    # Values that were not looked at do not count as finished for a run that looks at them.
    how = "" if unread else "not checked"
    digest = order.digests.get(name)
    if order.dtype is None and checkpoint.format == "safetensors":
        return Job(str(source), str(target), size, how, digest, unread=unread)
    expected = [tensor for tensor, file in checkpoint.weight_map.items() if file == name]
    return Job(
        str(source),
        str(target),
        size,
        f"{how} {order.dtype} {sorted(order.keep)} {sorted(order.tied)}",
        digest,
        rewrite=True,
        dtype=STORED[order.dtype] if order.dtype else None,
        keep=list(order.keep),
        expected=expected if checkpoint.format == "bin" else [],
        tied=list(order.tied),
        unread=unread,
    )


def _do(jobs: Sequence[Job], size: int, title: str, progress: bool) -> None:
    """Does all jobs: in this process if that is safe and short, else in processes of their own."""
    count = min(AT_ONCE, os.cpu_count() or 1, len(jobs), 1 + sum(job.size for job in jobs) // LEAST)
    if not any(job.rewrite for job in jobs) and count < 2:
        for job in jobs:
            job.do()
        return
    if any(job.source.endswith(PICKLED) and not is_zip(Path(job.source)) for job in jobs):
        count = 1  # a file in an older format is held in memory as a whole while it is converted
    with byte_bar(title, size, show=progress) as advance:
        done = 0

        def look() -> None:
            nonlocal done
            before, done = done, sum(map(_made, jobs))
            advance(done - before)

        worker.run(jobs, count, look)


def _made(job: Job) -> int:
    """Bytes of a job's result that are there."""
    for path in (job.part, Path(job.target)):
        with suppress(FileNotFoundError):
            return path.stat().st_size
    return 0


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


def _write_index(old: Path, new: Path, headers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Writes the index of the new files, and carries over the other metadata of the source's index."""
    metadata = read_object(old).get("metadata")
    total = sum(tensor.end - tensor.start for tensors in headers.values() for tensor in tensors.values())
    weight_map = {tensor: file for file, tensors in headers.items() for tensor in tensors}
    index = {
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    new.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
