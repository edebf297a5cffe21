"""The cases that a graph and the torch model both run.

A case is a sequence of steps over one cache. Both sides are engines, so prefill, chunks and decoding are one
loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from converter.onnx.coverage import Coverage
from converter.onnx.session import Outputs

Array = NDArray[Any]

CHUNKS = "chunked prefill"
SHORT, DECODED = 48, 8
"""Tokens of a short prompt, decoding steps."""
KEPT = 256
"""Positions of a long prompt whose results are compared: spread over it, always including the last."""


class Engine(Protocol):
    """What runs a case: the torch model, or a session of onnxruntime."""

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Outputs, Any]:
        """See ``Session.step``."""


@dataclass(frozen=True)
class Case:
    """Steps over one cache."""

    name: str
    steps: Sequence[Array]
    """int64 [B, S]: the tokens of each step."""
    mask: Array
    """int64 [B, all steps' tokens]."""

    def run(self, engine: Engine) -> list[Outputs]:
        """What is compared of each step, values as [any, vocabulary].

        First those of each row's last real token; then, if the engine returns all positions, up to ``KEPT``
        that are spread over the real ones.
        """
        results = []
        past = None
        start = 0
        for ids in self.steps:
            end = start + ids.shape[1]
            (values, sentences), past = engine.step(ids, self.mask[:, :end], past)
            if values.shape[1] == ids.shape[1]:
                compared = last_and_spread(values, self.mask[:, start:end])
            else:
                compared = values[:, 0]
            results.append(Outputs(compared, sentences))
            start = end
        return results


def last_and_spread(values: Array, mask: Array) -> Array:
    """Of values [B, S, any], those of each row's last real token, and at most ``KEPT`` of all real ones."""
    real = mask.astype(bool)
    padded_after = real[:, ::-1].argmax(axis=1)
    last = values[np.arange(len(values)), real.shape[1] - 1 - padded_after]
    rows, columns = real.nonzero()
    spread = np.unique(np.linspace(0, len(rows) - 1, KEPT).astype(int))
    return np.concatenate([last, values[rows[spread], columns[spread]]])


def choose_cases(coverage: Coverage, *, cached: bool, padding: int | None = None) -> list[Case]:
    """The cases that every graph of a model runs; those over a cache only if it is ``cached``.

    ``padding`` is the id that padded tokens must have, None if any will do.
    """
    generator = np.random.default_rng(0)

    def tokens(rows: int, length: int) -> Array:
        return generator.integers(0, coverage.vocabulary, size=(rows, length))

    cases = []
    short = max(4, min(SHORT, coverage.trained // 2))
    for length in (short, coverage.trained, coverage.beyond):
        cases.append(Case(f"prompt of {length}", [tokens(1, length)], all_real(length)))

    left = padded_left(3, 2 * SHORT)
    right = left[:, ::-1].copy()
    for side, mask in (("left", left), ("right", right)):
        ids = tokens(3, 2 * SHORT)
        if padding is not None:
            ids = np.where(mask == 1, ids, padding)
        cases.append(Case(f"{side} padding", [ids], mask))

    if cached:
        decoding = [tokens(2, SHORT)]
        for _ in range(DECODED):
            decoding.append(tokens(2, 1))
        cases.append(Case("decoding", decoding, padded_left(2, SHORT + DECODED)))

        # GroupQueryAttention takes chunks of one row only.
        lengths = (max(coverage.continued - 16, 8), 24, 1, 16)
        chunks = [tokens(1, length) for length in lengths]
        cases.append(Case(CHUNKS, chunks, all_real(sum(lengths))))
    return cases


def several_rows(cases: Sequence[Case]) -> Case:
    """The first case of several rows; it is short."""
    return next(case for case in cases if len(case.mask) > 1)


def all_real(length: int) -> Array:
    """The mask of one row without padding."""
    return np.ones((1, length), dtype=np.int64)


def padded_left(rows: int, length: int) -> Array:
    """A mask of rows that end together; each starts later than the row before."""
    starts = np.arange(rows)[:, None] * (length // (2 * rows))
    return (np.arange(length)[None] >= starts).astype(np.int64)
