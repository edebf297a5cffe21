"""Continuous batching on an exported graph: requests join and leave while others run.

One thread runs the graph. In each round it runs one chunk of one new prompt, and then one more token of all
requests whose prompts are done, in one pass. A request has a row of the batch while it runs; rows may have
different lengths. A long prompt holds up the answers of others for a chunk at a time, and the prompts behind
it until it is done.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from generate_onnx import Batch, Model

FEW = 1024
"""Tokens among which those with most of the probability are looked for first."""


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
class Busy:
    """No token follows: no row became free in time."""


@dataclass(frozen=True)
class Failed:
    """No token follows: the model failed."""


Event = PromptDone | Token | Finished | Busy | Failed


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
        seed = None if self.seed is None else self.seed % (1 << 64)
        self.random = np.random.default_rng(seed)

    @property
    def prompt_done(self) -> bool:
        return self.prompt_run == len(self.prompt)

    def sample(self, logits: np.ndarray) -> int:
        """The next token; ``logits`` is float64 [vocabulary]."""
        if self.temperature == 0:
            return int(logits.argmax())
        with np.errstate(over="ignore"):  # at the lowest temperatures, all others are infinitely far below
            weights = np.exp((logits - logits.max()) / self.temperature)
        if self.top_p < 1:
            return self._sample_most_probable(weights)
        return draw(weights, self.random)

    def _sample_most_probable(self, weights: np.ndarray) -> int:
        """One of the most probable tokens, as few as have ``top_p`` of the probability."""
        enough = self.top_p * weights.sum()
        tokens = np.arange(len(weights))
        if len(tokens) > FEW:
            # Sorting all takes ten times as long as finding the first ones.
            first = np.argpartition(weights, -FEW)[-FEW:]
            if weights[first].sum() >= enough:
                tokens = first
        tokens = tokens[weights[tokens].argsort()[::-1]]
        sums = weights[tokens].cumsum()
        count = int(np.searchsorted(sums, enough)) + 1
        return int(tokens[draw(weights[tokens[:count]], self.random)])


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
        """Queues a request; its events begin when it has a row."""
        with self.changed:
            if not self.closed:
                self.waiting.append(request)
                self.changed.notify()
                return
        request.tell(Failed())

    def close(self) -> None:
        """Ends the thread, and with it what still runs or waits."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    def _work(self) -> None:
        try:
            while self._admit():
                self._prefill()
                self._step()
        finally:
            # Also after an error that no request has caused: nobody shall wait for ever.
            with self.changed:
                self.closed = True
                left = [*self.running, *self.waiting]
            for request in left:
                request.tell(Failed())

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
                    request.tell(Busy())
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
        request = next((each for each in self.running if not each.prompt_done), None)
        if request is None:
            return
        start = request.prompt_run
        end = min(start + self.chunk, len(request.prompt))
        try:
            logits = self.batch.prefill(request.row, request.prompt[start:end])
        except Exception:  # for lack of memory, or by a fault of a kernel
            self._fail([request])
            return
        request.prompt_run = end
        if request.prompt_logprobs:
            targets = request.prompt[start + 1 : end + 1]
            for row, token in zip(logits, targets, strict=False):  # the last chunk has one target less
                request.found_logprobs.append(float(log_softmax(row)[token]))
        if request.prompt_done:
            request.tell(PromptDone(request.found_logprobs))
            self._continue(request, logits[-1])

    def _step(self) -> None:
        """Runs the newest token of every request whose prompt is done."""
        requests = {each.row: each for each in self.running if each.prompt_done}
        if not requests:
            return
        try:
            logits = self.batch.step({row: each.last for row, each in requests.items()})
        except Exception:
            self._fail(list(requests.values()))
            return
        for request, own in zip(requests.values(), logits, strict=True):
            self._continue(request, own)

    def _continue(self, request: Request, logits: np.ndarray) -> None:
        """Chooses a request's next token, or ends the request; ``logits`` is [vocabulary]."""
        if request.generated == request.max_tokens:
            self._end(request, Finished("length"))
            return
        wide = logits.astype(np.float64)
        if not np.isfinite(wide.max()):
            print("error: the model gave logits that are no numbers", file=sys.stderr)
            self._end(request, Failed())
            return
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

    def _fail(self, requests: Sequence[Request]) -> None:
        """Ends requests whose pass has failed, and prints the error that is being handled."""
        traceback.print_exc(file=sys.stderr)
        for request in requests:
            self._end(request, Failed())

    def _end(self, request: Request, event: Event) -> None:
        self._leave(request)
        request.tell(event)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.batch.clear(request.row)


def draw(weights: np.ndarray, random: np.random.Generator) -> int:
    """An index, as often as its weight says."""
    sums = weights.cumsum()
    return int(np.searchsorted(sums, random.random() * sums[-1], side="right"))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of probabilities, float64 [vocabulary]."""
    shifted = logits.astype(np.float64) - logits.max()
    logs: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return logs
