"""Continuous batching on an exported graph: requests join and leave while others run.

One thread runs the graph. In each round it runs one chunk of one new prompt, and then one more token of all
requests whose prompts are done, in one pass. A request has a row of the batch while it runs; rows may have
different lengths, and a long prompt holds up the others for a chunk at a time.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from generate_onnx import Batch, Model


@dataclass(frozen=True)
class Token:
    """One generated token, and the natural logarithm of its probability if the request wants it."""

    id: int
    logprob: float | None


@dataclass(frozen=True)
class PromptDone:
    """The prompt was run. ``logprobs`` has one of each token but the first, if the request wants them."""

    logprobs: list[float]


@dataclass(frozen=True)
class Finished:
    """No token follows: ``stop`` after an end token, ``length`` after the most tokens."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """No token follows: nothing was run for ``busy``, the model failed for ``error``."""

    reason: str


Event = Token | PromptDone | Finished | Failed


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and how far it is.

    ``tell`` gets the request's events, in the thread that runs the graph; it must not wait.
    """

    prompt: list[int]
    max_tokens: int
    tell: Callable[[Event], object]
    temperature: float = 1.0
    """0: the most probable token."""
    top_p: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    """Whether tokens have their log-probabilities."""
    prompt_logprobs: bool = False
    waits_until: float = float("inf")
    """When it gives up waiting for a row, on ``time.monotonic``'s clock."""
    cancelled: bool = False
    """Set by whoever no longer wants the answer; its row becomes free."""

    row: int = -1
    prompt_run: int = 0
    """Tokens of the prompt that were run."""
    found_logprobs: list[float] = field(default_factory=list)
    last: int = -1
    """The newest token, which the next step runs."""
    generated: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def sample(self, logits: np.ndarray) -> int:
        """The next token; ``logits`` is [vocabulary]."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = np.exp(log_softmax(logits / self.temperature))
        if self.top_p < 1:
            order = probabilities.argsort()[::-1]
            before = probabilities[order].cumsum() - probabilities[order]
            probabilities[order[before >= self.top_p]] = 0
        return int(self.random.choice(len(probabilities), p=probabilities / probabilities.sum()))


class Batcher:
    """Runs requests in the rows of one batch, in a thread of its own.

    Args:
        model: the graph.
        rows: requests that run at the same time.
        length: most tokens of a prompt and its answer.
        chunk: most tokens of a prompt that are run at once.
    """

    def __init__(self, model: Model, rows: int, length: int, chunk: int):
        self.model = model
        self.batch = Batch(model, rows, length)
        self.chunk = chunk
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.closed = False
        self.changed = threading.Condition()
        """Guards ``waiting`` and ``closed``."""
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def submit(self, request: Request) -> None:
        with self.changed:
            self.waiting.append(request)
            self.changed.notify()

    def close(self) -> None:
        """Ends the thread; requests that still run or wait get no more events."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    def _work(self) -> None:
        while self._admit():
            try:
                self._prefill()
                self._step()
            except Exception:
                # What fails is the pass of all rows: for lack of memory, or by a fault of a kernel.
                traceback.print_exc(file=sys.stderr)
                for request in list(self.running):
                    self._end(request, Failed("error"))

    def _admit(self) -> bool:
        """Gives free rows to waiting requests; waits if there are none. False if the batcher is closed."""
        for request in [each for each in self.running if each.cancelled]:
            self._leave(request)
        with self.changed:
            while not self.running and not self.waiting and not self.closed:
                self.changed.wait()
            if self.closed:
                return False
            now = time.monotonic()
            for request in list(self.waiting):
                if request.cancelled or request.waits_until < now:
                    self.waiting.remove(request)
                    request.tell(Failed("busy"))
            free = set(range(len(self.batch.counts))) - {each.row for each in self.running}
            # The lowest rows first, since a step computes all rows up to the highest one.
            for row in sorted(free):
                if self.waiting:
                    request = self.waiting.popleft()
                    request.row = row
                    self.running.append(request)
        return True

    def _prefill(self) -> None:
        """Runs the next chunk of the first prompt that is not done."""
        request = next((each for each in self.running if each.prompt_run < len(each.prompt)), None)
        if request is None:
            return
        start = request.prompt_run
        end = min(start + self.chunk, len(request.prompt))
        logits = self.batch.prefill(request.row, request.prompt[start:end])
        request.prompt_run = end
        if request.prompt_logprobs:
            targets = request.prompt[start + 1 : end + 1]
            for row, token in zip(logits, targets, strict=False):  # the last chunk has one target less
                request.found_logprobs.append(float(log_softmax(row)[token]))
        if end == len(request.prompt):
            request.tell(PromptDone(request.found_logprobs))
            self._continue(request, logits[-1])

    def _step(self) -> None:
        """Runs the newest token of every request whose prompt is done."""
        requests = {each.row: each for each in self.running if each.prompt_run == len(each.prompt)}
        if not requests:
            return
        logits = self.batch.step({row: each.last for row, each in requests.items()})
        for request, own in zip(requests.values(), logits, strict=True):
            self._continue(request, own)

    def _continue(self, request: Request, logits: np.ndarray) -> None:
        """Chooses a request's next token, or ends the request; ``logits`` is [vocabulary]."""
        if request.generated == request.max_tokens:
            self._end(request, Finished("length"))
            return
        wide = logits.astype(np.float64)
        token = request.sample(wide)
        request.last = token
        request.generated += 1
        logprob = None
        if request.logprobs:
            logprob = float(log_softmax(wide)[token])
        request.tell(Token(token, logprob))
        if token in self.model.end_tokens:
            self._end(request, Finished("stop"))
        elif request.generated == request.max_tokens:
            self._end(request, Finished("length"))

    def _end(self, request: Request, event: Event) -> None:
        self._leave(request)
        request.tell(event)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.batch.clear(request.row)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of probabilities, float64 [vocabulary]."""
    shifted = logits.astype(np.float64) - logits.max()
    logs: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return logs
