"""Prefill, decoding, memory and kernels of converted models and stock, for each attention of transformers."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import measuring
import numpy as np
import report
import torch
from measuring import STOCK, Cell, Setup
from report import Document, say

from gpu import kernels
from gpu.part import BLOOM_1B7, BLOOM_560M, EXACT, ROUNDING, Settings, Side, load, repositories, shared

TITLE = "prefill, decoding, memory and kernels in torch"
MODELS = {"BLOOM-1b7": BLOOM_1B7, "BLOOM-560m": BLOOM_560M}
WEIGHTS = (3, 2)
"""How the models share the time."""
RUNS = 3
"""Timed prompts at most."""
SIDES = (
    Side(STOCK, STOCK, None, required=True, exact=True),
    Side("sdpa", "none", "sdpa", required=True, exact=True),
    Side("sdpa, ntk by position", "position", "sdpa", required=True, exact=True),
    Side("flash_attention_2", "none", "flash_attention_2"),
    Side("flash_attention_3", "none", "flash_attention_3"),
    Side("flex_attention", "none", "flex_attention"),
)
INTRO = f"""\
{measuring.SAID} Prefill is the median of up to {RUNS} runs. Ratios are to stock. *Difference*: of the last
logits from stock's in float32, relative to the largest logit, for the shortest prompt; in float32 at most
{EXACT:g}. Each side has the GPU to itself. {kernels.SAID}

Weights are random, in bfloat16, and the same for all sides. *{STOCK}* is the class in transformers, with the
attention that it has by default. The others are converted: with scaling none or, where the name says so,
with ntk."""
# Without the ratio of decoding, whose time is the processor's; the part ``decoding`` says more.
HEAD = ["tokens", "side", *measuring.COLUMNS[:-1], "difference"]


def run(settings: Settings, document: Document) -> None:
    document.intro = INTRO
    lengths = settings.size((2048, 8192, 32768, 65536), (24, 48))
    for (name, geometry), until in shared(list(MODELS.items()), settings.until, WEIGHTS):
        setup = settings.setup(name, geometry, lengths[-1])
        with repositories(setup, "none", "position"):
            comparison = Comparison(document, setup, name, lengths)
            for side, side_until in shared(SIDES, until):
                if time.monotonic() > side_until:
                    document.skip(f"{name}, {side.name}", "no time")
                    continue
                try:
                    comparison.measure(side, side_until)
                except Exception as error:  # the other sides can still be measured
                    absent = not side.required and isinstance(error, (ImportError, ValueError))
                    (document.skip if absent else document.fail)(f"{name}, {side.name}", error)
                measuring.release()


@dataclass
class Comparison:
    """All sides of one model."""

    document: Document
    setup: Setup
    name: str
    lengths: Sequence[int]
    cells: dict[int, dict[str, Cell]] = field(default_factory=lambda: defaultdict(dict))
    """Length -> side -> measurements."""
    reference: np.ndarray | None = None
    """Stock's logits in float32 after the shortest prompt."""
    kernels: list[list[str]] = field(default_factory=list)

    @torch.inference_mode()
    def measure(self, side: Side, until: float) -> None:
        """Measures one side at all lengths, as far as there is time."""
        model = load(self.setup, side)
        if side.exact:
            logits = measuring.prefill(model.float(), measuring.tokens(self.setup, self.lengths[0]))
            self.reference = logits.cpu().numpy() if side.name == STOCK else self.reference
            self.check(side, "float32", logits.cpu().numpy(), EXACT)
            model.to(getattr(torch, self.setup.dtype))
        found = measure_lengths(self.setup, model, self.lengths, until)
        for length, cell in zip(self.lengths, found, strict=True):
            self.cells[length][side.name] = cell
            where = f"{self.name}, {side.name}, {length}"
            say(f"{where}: {' | '.join(cell.columns())}")
            if cell.failure == "fails":
                self.document.fail(where, cell.prompt.reason or cell.token.reason)
            self.show()
        cells = self.cells[self.lengths[0]]
        stock = self.difference(cells.get(STOCK))
        if cells[side.name].logits and stock is not None:
            self.check(side, self.setup.dtype, cells[side.name].logits[0], ROUNDING * stock)
        self.kernels.append([side.name, *kernels_of(self.setup, model, self.lengths[0])])
        self.show()

    def difference(self, cell: Cell | None) -> float | None:
        """From stock in float32."""
        if self.reference is None or cell is None or not cell.logits:
            return None
        return measuring.difference(self.reference, cell.logits[0])

    def check(self, side: Side, dtype: str, logits: np.ndarray, limit: float) -> None:
        """Notes logits that are too far from stock's in float32."""
        if self.reference is not None and side.name != STOCK:
            found = measuring.difference(self.reference, logits)
            if not found <= limit:
                said = f"logits differ from stock's in float32 by {found:.1e}, more than {limit:.1e}"
                self.document.fail(f"{self.name}, {side.name}, {dtype}", said)

    def show(self) -> None:
        """Puts what is known into the document."""
        rows = []
        for length, cells in self.cells.items():
            for side, cell in cells.items():
                gap = self.difference(cell) if length == self.lengths[0] else None
                columns = cell.columns(None if side == STOCK else cells.get(STOCK))[:-1]
                rows.append([str(length), side, *columns, "-" if gap is None else f"{gap:.1e}"])
        said = f"{self.setup.said()}:"
        self.document.put(self.name, f"{said}\n\n{report.table(HEAD, rows, texts=2)}")
        table = report.table(["side", "prefill", "decoding"], self.kernels, texts=3)
        self.document.put(f"{self.name}: kernels at {self.lengths[0]} tokens", table)


def measure_lengths(setup: Setup, model: Any, lengths: Sequence[int], until: float) -> Iterator[Cell]:
    """Measures a model at each length, in rising order, as far as there is time and memory."""
    before = Cell()
    for length in lengths:
        cell = Cell()
        # The next length is at most four times as long, so its attention takes at most 16 times as long.
        late = time.monotonic() + 16 * max(before.prompt.seconds, default=0.0) > until
        cell.prompt.failure = before.failure or ("no time" if late else None)
        if not cell.failure:
            measuring.measure_model(setup, model, length, cell, RUNS)
            measuring.release()
        yield cell
        before = cell


def kernels_of(setup: Setup, model: Any, length: int) -> list[str]:
    """The kernels of a prompt, and of a token over a cache of that length."""
    cache, cached = measuring.random_cache(setup, model, length), itertools.count(length)
    ids = measuring.tokens(setup, length)
    calls = (
        lambda: measuring.prefill(model, ids),
        lambda: measuring.decode(model, ids[:, :1], next(cached), cache),
    )
    return [kernels.described(kernels.profile(call, setup.device)) for call in calls]
