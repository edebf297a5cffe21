"""Prefill, decoding, memory and kernels of converted models and stock, for each attention of transformers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import measuring
import report
import torch
import torch_speed
from measuring import STEPS, STOCK, WARM_UP, Cell, Measured, Setup
from report import Document, ratio, say

from gpu import kernels
from gpu.part import (
    BLOOM_1B7,
    BLOOM_560M,
    DTYPES,
    EXACT,
    MPT_7B,
    ROUNDING,
    Settings,
    Side,
    available,
    load,
    repositories,
    shared,
)

TITLE = "prefill, decoding, memory and kernels in torch"
MODELS = {"BLOOM-560m": BLOOM_560M, "BLOOM-1b7": BLOOM_1B7, "MPT-7B": MPT_7B}
WEIGHTS = (1, 2, 3)
"""How the models share the time."""
RUNS, LONG = 3, 0.25
"""Timed prompts; seconds of a shorter prompt from which on a prompt gets no run to warm up."""
SIDES = (
    Side(STOCK, STOCK, None, required=True, exact=True),
    Side("sdpa", "none", "sdpa", required=True, exact=True),
    Side("flash_attention_2", "none", "flash_attention_2"),
    Side("flash_attention_3", "none", "flash_attention_3"),
    Side("flex_attention", "none", "flex_attention"),
    Side("sdpa, ntk static", "static", "sdpa", required=True, dtypes=DTYPES[:1]),
    Side("sdpa, ntk by position", "position", "sdpa", required=True, exact=True, dtypes=DTYPES[:1]),
    Side("flash_attention_2, ntk by position", "position", "flash_attention_2", dtypes=DTYPES[:1]),
)
INTRO = f"""\
One row. *Prefill*: a prompt with a mask of ones and a cache, logits of the last token; the median of up to
{RUNS} runs. *Extra*: the peak of torch's allocator during it, minus what was in use before; it includes the
cache. *Decoding*: one token over a cache of this many random tokens; the median of {STEPS}. Factors are
stock's number divided by this one. Each side has the GPU to itself. {kernels.SAID}

Weights are random, and the same for all sides. *{STOCK}* is the class in transformers, with the attention
that it has by default. The others are converted: with scaling none or, where the name says so, with ntk."""
HEAD = ["tokens", "side", "prefill ms", "factor", "extra MB", "factor", "decoding ms", "factor", "runs"]


def run(settings: Settings, document: Document) -> None:
    document.intro = INTRO
    lengths = settings.size((2048, 8192, 32768, 65536), (24, 48))
    for (name, geometry), until in shared(list(MODELS.items()), settings.until, WEIGHTS):
        setup = settings.setup(name, geometry, lengths[-1])
        with repositories(setup, "none", "static", "position"):
            comparison = Comparison(document, setup, name, lengths)
            for side, side_until in shared(available(document, setup, SIDES), until):
                try:
                    comparison.measure(side, side_until)
                except Exception as error:  # the other sides can still be measured
                    document.fail(f"{name}, {side.name}", error)
                measuring.release()
                comparison.show()


class Comparison:
    """All sides of one model."""

    def __init__(self, document: Document, setup: Setup, name: str, lengths: Sequence[int]):
        self.document = document
        self.setup = setup
        self.name = name
        self.lengths = lengths
        self.cells: dict[tuple[str, int, str], Cell] = {}
        """(dtype, length, side) -> measurements."""
        self.differences: dict[tuple[str, str], float] = {}
        """(side, dtype) -> largest difference from stock in float32, relative to the largest logit."""
        self.reference: torch.Tensor | None = None
        """Stock's logits in float32 after the shortest prompt."""
        self.profiles: list[list[str]] = []

    @torch.inference_mode()
    def measure(self, side: Side, until: float) -> None:
        """Measures one side in all its dtypes and lengths, as far as there is time."""
        model = load(self.setup, side)
        if side.exact:
            self.compare(side, model.float(), "float32")
        for dtype, dtype_until in shared(side.dtypes, until):
            model.to(getattr(torch, dtype))
            self.compare(side, model, dtype)
            self.profiles += profiles(self.setup, side.name, model, self.lengths[0])
            cells = measure_lengths(self.setup, model, self.lengths, dtype_until)
            for length, cell in zip(self.lengths, cells, strict=False):
                self.cells[dtype, length, side.name] = cell
                where = f"{self.name}, {side.name}, {dtype}, {length}"
                say(f"{where}: {cell.prompt.milliseconds} ms, a token {cell.token.milliseconds} ms")
                for what, measured in (("prefill", cell.prompt), ("decoding", cell.token)):
                    if measured.failure == "fails":
                        self.document.fail(f"{where}, {what}", measured.reason)

    def compare(self, side: Side, model: Any, dtype: str) -> None:
        """Notes how far logits are from stock's in float32, and whether that is too far."""
        logits = measuring.prefill(model, measuring.tokens(self.setup, self.lengths[0])).cpu()
        if side.name == STOCK and self.reference is None:
            self.reference = logits
        if self.reference is None or side.folder == "static":  # which computes another function
            return
        found = measuring.difference(self.reference, logits)
        self.differences[side.name, dtype] = found
        limit = EXACT if dtype == "float32" else ROUNDING * self.differences.get((STOCK, dtype), 0.0)
        if side.name != STOCK and not found <= limit:
            self.document.fail(
                f"{self.name}, {side.name}, {dtype}",
                f"logits differ from stock's in float32 by {found:.1e} of the largest, more than {limit:.1e}",
            )

    def show(self) -> None:
        """Puts what is known into the document."""
        for dtype in DTYPES:
            rows = list(self.rows(dtype))
            if rows:
                self.document.put(f"{self.name}, {dtype}", report.table(HEAD, rows, texts=2))
        dtypes, rows = ("float32", *DTYPES), []
        for side in dict.fromkeys(side for side, _ in self.differences):
            found = [self.differences.get((side, dtype)) for dtype in dtypes]
            rows.append([side, *("-" if one is None else f"{one:.1e}" for one in found)])
        self.document.put(
            f"{self.name}: the same function",
            f"{self.setup.said()}. The largest difference of the last logits from stock's in float32, "
            f"relative to the largest logit, after {self.lengths[0]} tokens:\n\n"
            + report.table(["side", *dtypes], rows),
        )
        head = ["side", "dtype", "run", *kernels.HEAD]
        table = report.table(head, self.profiles, texts=len(head))
        self.document.put(f"{self.name}: kernels at {self.lengths[0]} tokens", table)

    def rows(self, dtype: str) -> Iterator[list[str]]:
        """The lines of one dtype's table."""
        for length in self.lengths:
            cells = {side: cell for (*key, side), cell in self.cells.items() if key == [dtype, length]}
            for side, cell in cells.items():
                stock = Cell() if side == STOCK else cells.get(STOCK, Cell())
                yield [
                    *(str(length), side),
                    *(cell.prompt.milliseconds, ratio(stock.prompt.median, cell.prompt.median)),
                    *(cell.prompt.megabytes, ratio(stock.prompt.extra, cell.prompt.extra)),
                    *(cell.token.milliseconds, ratio(stock.token.median, cell.token.median)),
                    str(len(cell.prompt.seconds)),
                ]


def measure_lengths(setup: Setup, model: Any, lengths: Sequence[int], until: float) -> Iterator[Cell]:
    """Measures a model at each length, in rising order, as far as there is time and memory."""
    before, shorter = Cell(), lengths[0]
    for length in lengths:
        cell, growth = Cell(), length / shorter
        slowest = max(before.prompt.seconds, default=0.0)
        if can_start(cell.prompt, before.prompt, growth**2 * slowest, until):
            with measuring.noting_failure(cell.prompt):
                ids = measuring.tokens(setup, length)
                if slowest < LONG:  # this run fills the memory pool, and may compile
                    torch_speed.measure_prefill(setup, model, ids, cell.prompt, keep=False)
                for _ in measuring.turns([model], RUNS, seconds=2.0):
                    torch_speed.measure_prefill(setup, model, ids, cell.prompt, keep=True)
        if can_start(cell.token, before.token, 2 * growth * sum(before.token.seconds), until):
            with measuring.noting_failure(cell.token):
                cache = measuring.random_cache(setup, model, length)
                ids = measuring.tokens(setup, WARM_UP + STEPS)
                for step in range(WARM_UP + STEPS):
                    call = partial(measuring.decode, model, ids[:, step, None], length + step, cache)
                    taken, _ = measuring.timed(setup.device, call)
                    cell.token.seconds += [taken] if step >= WARM_UP else []
        if cell.failure:
            measuring.release()
        yield cell
        before, shorter = cell, length


def can_start(measured: Measured, before: Measured, expected: float, until: float) -> bool:
    """Whether to try a length; if not, ``measured`` says why.

    Args:
        before: what the next shorter length gave. Where that failed, this would fail too.
        expected: about how many seconds it takes.
    """
    late = time.monotonic() + expected > until
    measured.failure = before.failure or ("no time" if late else None)
    return measured.failure is None


def profiles(setup: Setup, side: str, model: Any, length: int) -> Iterator[list[str]]:
    """A line for a prompt, and one for a token over a cache of that length."""
    dtype = str(model.dtype).removeprefix("torch.")
    cache, cached = measuring.random_cache(setup, model, length), itertools.count(length)
    ids = measuring.tokens(setup, length)
    for name, call in (
        ("prefill", lambda: measuring.prefill(model, ids)),
        ("decoding", lambda: measuring.decode(model, ids[:, :1], next(cached), cache)),
    ):
        yield [side, dtype, name, *kernels.described(kernels.profile(call, setup.device))]
