"""What serve_onnx.py does beside HTTP: reading requests, lending slots, and generating in them.

A slot is the buffers of one request's caches: a ``Batch`` of one row. All slots are allocated at the start,
and used again for every request.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generate_onnx import Batch, Model, generate, text_functions

PATIENCE = 30
"""Seconds that a request waits for a slot."""
DEFAULT_LENGTH = 2048
DEFAULTS: dict[str, Any] = {"prompt": None, "input_ids": None, "max_new_tokens": 32, "stream": False}


class Refused(Exception):
    """A request that gets an error: the HTTP status, and one line that says why."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_new_tokens: int
    stream: bool


class Service:
    """A model, its slots, and what a request may ask for.

    Args:
        slots: requests that run at the same time.
        length: most tokens of a prompt and its answer; None: the context length, but at most 2048.
        waiting: requests that may wait for a slot.
        chunk: most tokens of a prompt that are run at once.

    Raises:
        ValueError: a number is too small.
        RuntimeError: ``length`` is beyond the context length.
    """

    def __init__(
        self, model: Model, folder: Path, slots: int, length: int | None, waiting: int, chunk: int = 512
    ):
        self.model = model
        self.encode, self.decode = text_functions(folder)
        longest = context_length(folder)
        self.length = min(longest or DEFAULT_LENGTH, DEFAULT_LENGTH) if length is None else length
        if longest is not None and self.length > longest:
            raise RuntimeError(f"--length {length} is beyond the context length, {longest} tokens")
        if min(slots, self.length, chunk, waiting + 1) < 1:
            raise ValueError("--slots, --length and --chunk must be at least 1, --queue at least 0")
        # With length-dynamic scaling, a prompt in chunks would not give the logits of the whole prompt.
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        whole = (config.get("alibi_scaling") or {}).get("dynamic") == "length"
        self.chunk = self.length if whole else chunk
        self.places = threading.BoundedSemaphore(slots + waiting)
        self.slots: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        for _ in range(slots):
            self.slots.put(Batch(model, 1, self.length))

    def parse(self, body: bytes) -> Request:
        """A request from its JSON; raises ``Refused`` with status 400 for one that cannot be run."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(given, dict) or not given.keys() <= DEFAULTS.keys():
            raise Refused(400, f"the body must be an object with keys among {', '.join(DEFAULTS)}")
        prompt, ids, new, stream = (DEFAULTS | given).values()
        if (prompt is None) == (ids is None):
            raise Refused(400, "give either prompt or input_ids")
        if type(new) is not int or new < 1 or type(stream) is not bool:
            raise Refused(400, "max_new_tokens must be a number of at least 1, stream true or false")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise Refused(400, "prompt must be a text")
            try:
                ids = self.encode(prompt)
            except ValueError as error:
                raise Refused(400, str(error)) from None
        known = range(self.model.logits.shape[2])
        if not isinstance(ids, list) or not ids or not all(type(n) is int and n in known for n in ids):
            raise Refused(400, f"a prompt is one token or more, each an id from 0 to {known[-1]}")
        if len(ids) + new > self.length:
            raise Refused(
                400, f"{len(ids)} tokens and max_new_tokens {new} are more than the {self.length} of a slot"
            )
        return Request(ids, new, stream)

    @contextmanager
    def slot(self) -> Iterator[Batch]:
        """A free slot, or the next one that becomes free; raises ``Refused`` with status 503."""
        if not self.places.acquire(blocking=False):
            raise Refused(503, "all slots are taken and the queue is full; try again")
        try:
            batch = self.slots.get(timeout=PATIENCE)
        except queue.Empty:
            self.places.release()
            raise Refused(503, f"no slot became free within {PATIENCE} seconds; try again") from None
        try:
            batch.clear()
            yield batch
        finally:
            # In this order, so that where a slot is free, there is a place for who comes next.
            self.places.release()
            self.slots.put(batch)

    def steps(self, batch: Batch, request: Request) -> Iterator[list[int]]:
        """Runs a request in a slot; yields each token, and nothing ([]) after a chunk of the prompt."""
        last = (len(request.prompt) - 1) // self.chunk * self.chunk
        for start in range(0, last, self.chunk):
            batch.prefill([request.prompt[start : start + self.chunk]])
            yield []
        for [token] in generate(batch, [request.prompt[last:]], request.max_new_tokens):
            yield [] if token is None else [token]


def context_length(folder: Path) -> int | None:
    """The number of tokens that the scaling is made for, which the export wrote down; None if it did not."""
    path = folder / "genai_config.json"
    return json.loads(path.read_text(encoding="utf-8"))["model"]["context_length"] if path.is_file() else None
