"""All weight files of a checkpoint: copied byte for byte, shared, or made safetensors anew."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, get_args

from converter.checkpoint import ITEM_BYTES, Checkpoint, read_header, target_names
from converter.errors import SourceError
from converter.jsonfile import read_object
from converter.progress import Advance, byte_bar
from converter.weights.files import How, Link, can_link, changed, copy_file, is_zip, place_file, sha256
from converter.weights.journal import Finished, Journal, identity, is_finished
from converter.weights.worker import Request, Worker

Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
STORED = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""What ``--dtype`` is in the safetensors format."""
TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""What torch and a config.json call it."""
FLOATS = ("F64", *STORED.values())
AT_ONCE = 4
"""Files in work at the same time, at most; more only make disks seek."""
LEAST = 256 << 20
"""Bytes of work for which one more thread, and its process, is worth starting."""


@dataclass(frozen=True)
class Order:
    """How the weights are wanted."""

    dtype: Dtype | None = None
    """What floating point tensors are rounded to; None leaves every byte."""
    link: Link | None = None
    """Share bytes with the source, see ``place_file``."""
    keep: Collection[str] = ()
    """Names of tensors that ``dtype`` does not change."""
    tied: Collection[str] = ()
    """Names that a ``.bin`` file's copy does without where they are one tensor with another name."""


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
    """Writes the checkpoint's weights to ``folder``, with their tensors' names unchanged.

    Safetensors files and their index keep their names and every byte, unless another dtype is asked
    for. ``.bin`` files become safetensors, loaded as tensors only (``weights_only=True``).
    Files that an unfinished run left complete in ``folder``, by its journal, are kept.

    Args:
        checkpoint: what ``source`` holds, from ``read_checkpoint``.
        source: folder of the weight files.
        folder: an existing folder to write to; it gets a journal, which is the caller's to remove.
        order: how they are wanted.
        space: called with the bytes that will be written, before the first is.
        progress: draw bars on stderr.

    Returns:
        How the files came here (see ``How``, or kept of an unfinished run), and how many each.

    Raises:
        SourceError: a file that changed or ended short meanwhile, a ``.bin`` that is unreadable or
            holds more than tensors, or a value that the dtype cannot hold.
        OSError: the disk's.
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
        _check_shards(checkpoint, folder, targets)
        if checkpoint.index in targets:  # a single .bin file needs none any more
            _write_index(checkpoint, source, folder, targets)
    elif checkpoint.index is not None:
        copy_file(source / checkpoint.index, folder / checkpoint.index)
    return dict(work.how)


class _Stopped(Exception):
    """Raised in a thread whose run has ended for another reason."""


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
        """The files that are left to do, of which nothing is in the folder any more."""
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
        """An upper bound for these files."""
        total = sum(self.checkpoint.files[name] for name in names)
        if self.order.dtype is not None:
            return _size_in(self.checkpoint, names, STORED[self.order.dtype])
        if names and self.order.link and not self.rewritten:
            first = self.source / next(iter(names))
            if can_link(first, self.folder, self.order.link):
                return 0
        return total

    def make(self, name: str, worker: Worker, advance: Advance) -> None:
        """One file, and its line in the journal."""
        source, target = self.source / name, self.folder / self.targets[name]
        made_from = self._identity(name)
        if self.rewritten:
            size, dtype = self.checkpoint.files[name], self.order.dtype
            if source.stat().st_size != size:
                raise changed(name, source.stat().st_size, size)
            expected = [tensor for tensor, file in self.checkpoint.weight_map.items() if file == name]
            request = Request(
                str(source),
                str(target),
                dtype=STORED[dtype] if dtype else None,
                keep=list(self.order.keep),
                expected=expected if self.checkpoint.format == "bin" else [],
                tied=list(self.order.tied),
            )
            worker.rewrite(request, advance, self._check)
            if self._identity(name) != made_from:
                raise changed(name, size, size)
            how: How = "converted"
            digest: str | None = sha256(target, check=self._check)
        else:
            size = self.checkpoint.files[name]
            how, digest = place_file(
                source, target, size, link=self.order.link, advance=advance, check=self._check
            )
        if digest is not None:
            self.journal.add(Finished(target.name, target.stat().st_size, digest, made_from))
        self.how[how] += 1

    def run(self, names: list[str], task: Callable[[str, Worker], None]) -> None:
        """Does a task for each file, some at once, each thread with a worker of its own.

        The first failure, or an interruption, stops all of them.
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
                futures = [pool.submit(thread, worker) for worker in workers]
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
            except BaseException:
                self._stop.set()
                for worker in workers:
                    worker.kill()
                raise

    def _at_once(self, names: Collection[str]) -> int:
        if self.checkpoint.format == "bin" and not all(is_zip(self.source / name) for name in names):
            return 1  # a file of the old formats is in memory whole while it is converted
        worth = 1 + sum(self.checkpoint.files[name] for name in names) // LEAST
        return min(AT_ONCE, os.cpu_count() or 1, worth)

    def _identity(self, name: str) -> str:
        order = self.order
        how = f"{order.dtype} {sorted(order.keep)} {sorted(order.tied)}" if self.rewritten else "bytes"
        return identity(self.source / name, how)

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def _size_in(checkpoint: Checkpoint, names: Collection[str], dtype: str) -> int:
    """Bytes of these files in another dtype; of ``.bin`` files, which do not tell, at most."""
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


def _check_shards(checkpoint: Checkpoint, folder: Path, targets: dict[str, str]) -> None:
    """Each tensor is in one file only, as ``.bin`` files do not tell before they are converted."""
    found: dict[str, str] = {}
    for name in checkpoint.files:
        for tensor in read_header(folder / targets[name]):
            if tensor in found:
                raise SourceError(f"the tensor {tensor!r} is in both {found[tensor]} and {name}")
            found[tensor] = name


def _write_index(checkpoint: Checkpoint, source: Path, folder: Path, targets: dict[str, str]) -> None:
    """The index of the new files, with what else the source's says of them."""
    assert checkpoint.index is not None
    old = read_object(source / checkpoint.index).get("metadata")
    weight_map: dict[str, str] = {}
    total = 0
    for name in checkpoint.files:
        tensors = read_header(folder / targets[name])
        weight_map |= dict.fromkeys(tensors, targets[name])
        total += sum(tensor.end - tensor.start for tensor in tensors.values())
    metadata = {**(old if isinstance(old, dict) else {}), "total_size": total}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / targets[checkpoint.index]).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
