"""Transfers all weight files of a checkpoint: copied byte for byte, linked, or rewritten as safetensors."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, get_args

from converter.errors import SourceError
from converter.progress import Advance, byte_bar
from converter.source.checkpoint import ITEM_BYTES, Checkpoint, Tensor, read_header, target_names
from converter.source.jsonfile import read_object
from converter.weights.files import How, Link, Look, can_link, changed, copy_file, is_zip, place_file, sha256
from converter.weights.finite import Scan
from converter.weights.journal import Finished, Journal, identity, is_finished
from converter.weights.worker import Job, Worker

Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
STORED = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Value of ``--dtype`` -> its name in the safetensors format."""
TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Value of ``--dtype`` -> its name in torch and in config.json."""
FLOATS = ("F64", *STORED.values())
DAMAGED = "download the file again (convert --no-verify keeps such values)"
AT_ONCE = 4
"""Most files processed at the same time; more would only make disks seek."""
LEAST = 256 << 20
"""Bytes of work that justify starting one more thread with its process."""


@dataclass(frozen=True)
class Order:
    """How to transfer the weights."""

    dtype: Dtype | None = None
    """Round floating point tensors to this dtype; None changes no byte."""
    link: Link | None = None
    """How to share bytes with the source; see ``place_file``."""
    keep: Collection[str] = ()
    """Names of tensors that ``dtype`` does not change."""
    tied: Collection[str] = ()
    """Names to leave out of a rewritten ``.bin`` file where they are the same tensor as another name."""
    unread: re.Pattern[str] | None = None
    """Finds the names of tensors that may hold NaN or infinities; None lets all of them. The values of linked
    files are not read."""


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
    ``.bin`` files become safetensors; they are loaded as tensors only (``weights_only=True``).
    Files in ``folder`` that an unfinished run completed, according to its journal, are kept.

    Args:
        checkpoint: what ``source`` holds, from ``read_checkpoint``.
        source: folder of the weight files.
        folder: an existing folder to write to. It gets a journal, which the caller removes.
        order: how to transfer them.
        space: called with the number of bytes to write, before anything is written.
        progress: draw progress bars on stderr.

    Returns:
        How the files were made (a ``How``, or "kept" from an unfinished run) -> how many of them.

    Raises:
        SourceError: a file changed or was cut off meanwhile, a ``.bin`` is unreadable or holds more than
            tensors, or a value does not fit the dtype, or is NaN or infinite.
        OSError: reading or writing failed, for example on a full disk.
    """
    targets = target_names(checkpoint.files, checkpoint.index)
    rewritten = order.dtype is not None or checkpoint.format == "bin"
    work = _Work(checkpoint, source, folder, order, targets, rewritten)
    left = work.resume(progress)
    space(work.bytes_to_write(left))
    titles = {True: "converting weights", False: "linking weights" if order.link else "copying weights"}
    with byte_bar(titles[rewritten], sum(checkpoint.files[name] for name in left), show=progress) as advance:
        work.run(left, lambda name, worker: work.make(name, worker, advance))
    if rewritten:
        headers = _read_shards(checkpoint, folder, targets)
        index = checkpoint.index
        if index is not None and index in targets:  # a single .bin file no longer needs an index
            _write_index(source / index, folder / targets[index], headers)
    elif checkpoint.index is not None:
        copy_file(source / checkpoint.index, folder / checkpoint.index)
    return dict(work.how)


class _Stopped(Exception):
    """Raised in a thread when the run has failed or stopped elsewhere."""


class _Work:
    """The files of one transfer."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Path,
        folder: Path,
        order: Order,
        targets: dict[str, str],
        rewritten: bool,
    ) -> None:
        self.checkpoint, self.source, self.folder = checkpoint, source, folder
        self.order, self.targets, self.rewritten = order, targets, rewritten
        self.journal = Journal(folder)
        self.how: Counter[str] = Counter()
        self._stop = threading.Event()

    def resume(self, progress: bool) -> list[str]:
        """Returns the files still to do, and removes what an earlier run left of them in the folder."""
        noted = self.journal.entries()
        entries = {
            name: noted[self.targets[name]] for name in self.checkpoint.files if self.targets[name] in noted
        }
        finished: set[str] = set()
        if entries:
            total = sum(entry.size for entry in entries.values())
            with byte_bar("checking finished weights", total, show=progress) as advance:

                def look(name: str, _: Worker) -> None:
                    if is_finished(self.folder, entries[name], self._identity(name), advance, self._check):
                        finished.add(name)

                self.run(list(entries), look)
        if entries:
            self.journal.rewrite(entries[name] for name in finished)
            if finished:
                self.how["kept"] = len(finished)
        left = [name for name in self.checkpoint.files if name not in finished]
        for name in left:
            (self.folder / self.targets[name]).unlink(missing_ok=True)
        return left

    def bytes_to_write(self, names: Collection[str]) -> int:
        """An upper bound on the bytes that these files take."""
        total = sum(self.checkpoint.files[name] for name in names)
        if self.order.dtype is not None:
            return _size_in(self.checkpoint, names, STORED[self.order.dtype])
        if names and self.order.link and not self.rewritten:
            first = self.source / next(iter(names))
            if can_link(first, self.folder, self.order.link):
                return 0
        return total

    def make(self, name: str, worker: Worker, advance: Advance) -> None:
        """Makes one file and records it in the journal."""
        source, target = self.source / name, self.folder / self.targets[name]
        made_from = self._identity(name)
        if self.rewritten:
            size, dtype = self.checkpoint.files[name], self.order.dtype
            if source.stat().st_size != size:
                raise changed(name, source.stat().st_size, size)
            expected = [tensor for tensor, file in self.checkpoint.weight_map.items() if file == name]
            job = Job(
                str(source),
                str(target),
                dtype=STORED[dtype] if dtype else None,
                keep=list(self.order.keep),
                expected=expected if self.checkpoint.format == "bin" else [],
                tied=list(self.order.tied),
            )
            worker.rewrite(job, advance, self._check)
            if self._identity(name) != made_from:
                raise changed(name, size, size)
            how: How = "converted"
            digest: str | None = sha256(target, check=self._check, look=self._look(name, made=True))
        else:
            size = self.checkpoint.files[name]
            how, digest = place_file(
                source,
                target,
                size,
                link=self.order.link,
                advance=advance,
                check=self._check,
                look=self._look(name),
            )
        if digest is not None:
            self.journal.add(Finished(target.name, target.stat().st_size, digest, made_from))
        self.how[how] += 1

    def run(self, names: list[str], task: Callable[[str, Worker], None]) -> None:
        """Runs a task for each file, several at once; each thread has its own worker.

        The first failure, or an interruption, stops all threads.
        """
        queue: SimpleQueue[str] = SimpleQueue()
        for name in names:
            queue.put(name)
        workers = [Worker() for _ in names[: self._at_once(names)]]

        def thread(worker: Worker) -> None:
            try:
                while True:
                    self._check()
                    task(queue.get_nowait(), worker)
            except (Empty, _Stopped):
                pass
            except BaseException:
                self._stop.set()
                raise
            finally:
                worker.close()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                left: set[Future[None]] = {pool.submit(thread, worker) for worker in workers}
                while left:
                    # Not without a timeout: a signal that the system gives to another thread does not wake
                    # this one, and only this one can act on it.
                    ended, left = wait(left, timeout=0.1, return_when=FIRST_EXCEPTION)
                    for future in ended:
                        future.result()
            except BaseException:
                self._stop.set()
                for worker in workers:
                    worker.kill()
                raise

    def _at_once(self, names: Collection[str]) -> int:
        if self.checkpoint.format == "bin" and not all(is_zip(self.source / name) for name in names):
            return 1  # a file in an older format is held in memory as a whole while it is converted
        worth = 1 + sum(self.checkpoint.files[name] for name in names) // LEAST
        return min(AT_ONCE, os.cpu_count() or 1, worth)

    def _identity(self, name: str) -> str:
        order = self.order
        how = f"{order.dtype} {sorted(order.keep)} {sorted(order.tied)}" if self.rewritten else "bytes"
        # Values that were not looked at do not count as finished for a run that looks at them.
        return identity(self.source / name, how if order.unread else f"{how}, not checked")

    def _look(self, name: str, *, made: bool = False) -> Look:
        """What looks at the values of a source's file, or of the file ``made`` from it."""
        unread = self.order.unread
        if unread is None:
            return bool
        tensors = read_header(self.folder / self.targets[name] if made else self.source / name)
        return Scan(tensors.values(), name, unread, DAMAGED)

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped


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
