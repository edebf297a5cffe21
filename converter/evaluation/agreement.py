"""How much of an index stays valid: neighbours under a scaling against those of the unscaled model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from converter.evaluation.embeddings import Vectors
from converter.evaluation.tasks.ranking import CUTOFF

ROWS_AT_ONCE = 64
"""Texts whose similarities with all others are in memory at a time."""
MEASURES = ("nearest", f"nearest {CUTOFF}", "cosine")
"""What ``agreement`` measures, in this order: the same nearest neighbour; the share of the ten nearest that
are the same; the cosine of the two vectors of a text, or 0 if it is negative."""


def agreement(vectors: Vectors, reference: Vectors) -> tuple[tuple[float, ...], ...]:
    """A score from 0 to 1 for each text, by each of ``MEASURES``.

    Args:
        vectors: of length 1, float32 [texts, hidden], of the scaled model.
        reference: the same texts' of the unscaled model.
    """
    ours, theirs = _nearest(vectors), _nearest(reference)
    same = [len({*mine} & {*other}) / len(mine) for mine, other in zip(ours, theirs, strict=True)]
    cosine = np.nan_to_num(np.sum(vectors * reference, axis=1, dtype=np.float64), nan=0.0).clip(0.0, 1.0)
    return tuple((ours[:, 0] == theirs[:, 0]).astype(float)), tuple(same), tuple(map(float, cosine))


def _nearest(vectors: Vectors) -> NDArray[np.intp]:
    """The nearest other texts of each text, nearest first: int [texts, at most ten]."""
    found = []
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        similar = np.nan_to_num(vectors[start : start + ROWS_AT_ONCE] @ vectors.T, nan=-1.0)
        places = np.arange(start, start + len(similar))
        similar[np.arange(len(similar)), places] = -np.inf  # a text is not its own neighbour
        found.append(np.argsort(-similar, axis=1, kind="stable")[:, :CUTOFF])
    return np.concatenate(found)
