"""Prefill, decoding and memory of converted models and stock, for each attention of transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import report
import torch
import torch_speed
from torch_speed import Measured, factor, megabytes, milliseconds, say

from gpu.document import Document
from gpu.models import DTYPES, STOCK, Side, available, load, repositories
from gpu.settings import BLOOM, MPT, Geometry, Settings, shared

TITLE = "prefill, decoding and memory in torch"
WARM_UP, STEPS = 8, 16
"""Decoded tokens that are not timed, and that are."""
LONG = 0.25
"""Seconds of a shorter prompt from which on a prompt gets no run to warm up."""
EXACT = 1e-3
"""Largest difference of float32 logits from stock's, relative to the largest logit."""
ROUNDING = 3.0
"""In half precision, a side may differ from stock in float32 this many times as much as stock does."""
SIDES = (
    Side(STOCK, STOCK, None, required=True, exact=True),
    Side("sdpa", "none", "sdpa", required=True, exact=True),
    Side("flash_attention_2", "none", "flash_attention_2"),
    Side("flash_attention_3", "none", "flash_attention_3"),
    Side("flex_attention", "none", "flex_attention"),
    Side("sdpa, ntk by position", "position", "sdpa", required=True, exact=True, dtypes=DTYPES[:1]),
)
INTRO = f"""\
One row. *Prefill*: a prompt with a mask of ones and a cache, logits of the last token; the median of up to
3 runs. *Extra*: the peak of torch's allocator during it, minus what was in use before; it includes the
cache. *Decoding*: one token over a cache of this many random tokens; the median of {STEPS}. Factors are
stock's number divided by this one. Each side has the GPU to itself.

Weights are random, and the same for all sides. *{STOCK}* is the class in transformers, with the attention
that it has by default. The others are converted: with scaling none or, where the name says so, with ntk by
position, which scales beyond the trained length only."""
HEAD = ["tokens", "side", "prefill ms", "factor", "extra MB", "factor", "decoding ms", "factor", "runs"]


@dataclass
class Cell:
    """One side, dtype and length."""

    prompt: Measured = field(default_factory=Measured)
    token: Measured = field(default_factory=Measured)


def run(settings: Settings, document: Document) -> None:
    document.intro = INTRO
    lengths = settings.size((2048, 8192, 32768, 65536), (24, 48))
    for model, until in shared([BLOOM, MPT], settings.until, [1, 2]):
        geometry = settings.geometry(model)
        started = time.monotonic()
        with repositories(settings, geometry, lengths[-1]) as setup:
            say(f"{geometry.name}: made in {time.monotonic() - started:.0f} s")
            comparison = Comparison(document, setup, geometry, lengths)
            for side, side_until in shared(available(document, setup, SIDES), until):
                try:
                    comparison.measure(side, side_until)
                except Exception as error:  # the other sides can still be measured
                    document.fail(f"{geometry.name}, {side.name}", error)
                torch_speed.release()
                comparison.show()


class Comparison:
    """All sides of one geometry."""

    def __init__(
        self, document: Document, setup: torch_speed.Setup, geometry: Geometry, lengths: Sequence[int]
    ):
        self.document = document
        self.setup = setup
        self.geometry = geometry
        self.lengths = lengths
        self.cells: dict[tuple[str, int, str], Cell] = {}
        """(dtype, length, side) -> measurements."""
        self.differences: dict[tuple[str, str], float] = {}
        """(side, dtype) -> largest difference from stock in float32, relative to the largest logit."""
        self.reference: torch.Tensor | None = None
        """Stock's logits in float32 after the shortest prompt."""

    @torch.inference_mode()
    def measure(self, side: Side, until: float) -> None:
        """Measures one side in all its dtypes and lengths, as far as there is time."""
        started = time.monotonic()
        model = load(self.setup, side)
        say(f"{self.geometry.name}, {side.name}: loaded in {time.monotonic() - started:.0f} s")
        if side.exact:
            self.compare(side, model.float(), "float32")
        for dtype, dtype_until in shared(side.dtypes, until):
            model.to(getattr(torch, dtype))
            self.compare(side, model, dtype)
            cells = measure_lengths(self.setup, model, self.lengths, dtype_until)
            for length, cell in zip(self.lengths, cells, strict=False):
                self.cells[dtype, length, side.name] = cell
                where = f"{self.geometry.name}, {side.name}, {dtype}, {length}"
                say(
                    f"{where}: prefill {milliseconds(cell.prompt)} ms, {megabytes(cell.prompt)} MB, "
                    f"a token {milliseconds(cell.token)} ms"
                )
                for what, measured in (("prefill", cell.prompt), ("decoding", cell.token)):
                    if measured.reason and measured.failure == "fails":
                        self.document.fail(f"{where}, {what}", measured.reason)

    def compare(self, side: Side, model: Any, dtype: str) -> None:
        """Notes how far logits are from stock's in float32, and whether that is too far."""
        ids = torch_speed.tokens(self.setup, self.lengths[0])
        logits = torch_speed.prefill(model, ids).cpu()
        if side.name == STOCK and self.reference is None:
            self.reference = logits
        if self.reference is None:
            return
        found = torch_speed.difference(self.reference, logits)
        self.differences[side.name, dtype] = found
        limit = EXACT if dtype == "float32" else ROUNDING * self.differences.get((STOCK, dtype), 0.0)
        if side.name != STOCK and not found <= limit:
            self.document.fail(
                f"{self.geometry.name}, {side.name}, {dtype}",
                f"logits differ from stock's in float32 by {found:.1e} of the largest, more than {limit:.1e}",
            )

    def show(self) -> None:
        """Puts what is known into the document."""
        for dtype in DTYPES:
            rows = list(self.rows(dtype))
            if rows:
                self.document.put(f"{self.geometry.name}, {dtype}", report.table(HEAD, rows, texts=2))
        dtypes = ("float32", *DTYPES)
        rows = []
        for side in dict.fromkeys(side for side, _ in self.differences):
            found = [self.differences.get((side, dtype)) for dtype in dtypes]
            rows.append([side, *("-" if one is None else f"{one:.1e}" for one in found)])
        self.document.put(
            f"{self.geometry.name}: the same function",
            f"{self.geometry.said()}. The largest difference of the last logits from stock's in float32, "
            f"relative to the largest logit, after {self.lengths[0]} tokens:\n\n"
            + report.table(["side", *dtypes], rows),
        )

    def rows(self, dtype: str) -> Iterator[list[str]]:
        """The lines of one dtype's table."""
        for length in self.lengths:
            cells = {side: cell for (*key, side), cell in self.cells.items() if key == [dtype, length]}
            stock = cells.get(STOCK, Cell())
            for side, cell in cells.items():
                factors = [
                    factor(median(stock.prompt), median(cell.prompt)),
                    factor(stock.prompt.extra, cell.prompt.extra),
                    factor(median(stock.token), median(cell.token)),
                ]
                if side == STOCK:
                    factors = ["-"] * 3
                yield [
                    str(length),
                    side,
                    *(milliseconds(cell.prompt), factors[0]),
                    *(megabytes(cell.prompt), factors[1]),
                    *(milliseconds(cell.token), factors[2]),
                    str(len(cell.prompt.seconds)),
                ]


def measure_lengths(
    setup: torch_speed.Setup, model: Any, lengths: Sequence[int], until: float
) -> Iterator[Cell]:
    """Measures a model at each length, in rising order, as far as there is time and memory."""
    before, shorter = Cell(), lengths[0]
    for length in lengths:
        cell, growth = Cell(), length / shorter
        slowest = max(before.prompt.seconds, default=0.0)
        if can_start(cell.prompt, before.prompt, growth**2 * slowest, until):
            measure_prompt(setup, model, length, cell.prompt, warm_up=slowest < LONG)
        if can_start(cell.token, before.token, 2 * growth * sum(before.token.seconds), until):
            measure_tokens(setup, model, length, cell.token)
        if cell.prompt.failure or cell.token.failure:
            torch_speed.release()
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


def measure_prompt(
    setup: torch_speed.Setup, model: Any, length: int, measured: Measured, *, warm_up: bool
) -> None:
    """Times some runs of a prompt, and finds their memory.

    Args:
        warm_up: make a first run that does not count: it fills the memory pool, and may compile.
    """
    ids = torch_speed.tokens(setup, length)
    started = time.monotonic()
    with torch_speed.noting_failure(measured):
        for turn in range(-1 if warm_up else 0, setup.repeats):
            if turn > 0 and time.monotonic() - started > setup.seconds:
                break
            torch_speed.measure_prefill(setup, model, ids, measured, keep=turn >= 0)


def measure_tokens(setup: torch_speed.Setup, model: Any, length: int, measured: Measured) -> None:
    """Times tokens over a cache."""
    ids = torch_speed.tokens(setup, WARM_UP + STEPS)
    with torch_speed.noting_failure(measured):
        cache = torch_speed.random_cache(setup, model, length)
        for step in range(WARM_UP + STEPS):
            mask = torch.ones(1, length + step + 1, dtype=torch.int64, device=setup.device)
            call = partial(torch_speed.decode, model, ids[:, step, None], mask, cache)
            taken, _ = torch_speed.seconds(setup, call)
            measured.seconds += [taken] if step >= WARM_UP else []


def median(measured: Measured) -> float | None:
    """The median of the seconds; None where a run failed."""
    values = sorted(measured.seconds)
    return None if measured.failure or not values else values[len(values) // 2]
