"""Windows of a text, which of their tokens are predicted, and the loss by window and by position.

The text is cut into windows of the longest length, without overlap, and each window into pieces of every
shorter length. So all lengths predict the same tokens, but with more or less of the text before each token.
A decoder predicts every token of a piece but the first (Press et al., ICLR 2022, section 3,
"nonoverlapping").

An encoder predicts tokens that are masked. Each token of a window of the longest length is masked with
probability 0.15 (as in BERT, but never left as it is or replaced by another token). The choice depends on the
window's tokens alone, so it is the same at every length and under every scaling.
"""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError, option
from converter.evaluation.batches import MASKED_SHARE
from converter.evaluation.results import Bucket

BUCKETS = 16
"""Parts of equal width into which a window is divided for the loss by position."""


def pieces(windows: NDArray[Any], length: int) -> NDArray[Any]:
    """The windows cut into pieces, [windows * pieces, length]; a shorter remainder is dropped."""
    count = windows.shape[1] // length
    return windows[:, : count * length].reshape(-1, length)


def masked_positions(windows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which tokens are masked, bool [windows, length]; at least one in each window."""
    chosen = np.empty(windows.shape, dtype=np.bool_)
    for row, window in enumerate(windows):
        drawn = np.random.default_rng(zlib.crc32(window.tobytes())).random(len(window))
        chosen[row] = drawn < max(MASKED_SHARE, float(drawn.min()) + 1e-12)
    return chosen


def window_losses(
    losses: NDArray[np.float64], predicted: NDArray[np.bool_], windows: int
) -> tuple[float, ...]:
    """The mean loss of each window's predicted tokens, from those of its pieces [pieces, tokens]."""
    sums = losses.reshape(windows, -1).sum(axis=1)
    counts = predicted.reshape(windows, -1).sum(axis=1)
    if not counts.all():
        raise UsageError(
            f"pieces of {losses.shape[1]} tokens leave out the only masked token of a text; give longer "
            f"{option.lengths}, or lengths that divide the longest"
        )
    return tuple(map(float, sums / counts))


def by_position(
    losses: NDArray[np.float64], predicted: NDArray[np.bool_], first: int = 0
) -> tuple[Bucket, ...]:
    """The mean loss by position, counted from ``first``; parts without a predicted token are left out."""
    width = losses.shape[1]
    edges = np.unique(np.linspace(0, width, min(BUCKETS, width) + 1).astype(int))
    found = []
    for start, end in pairwise(edges):
        count = predicted[:, start:end].sum()
        if count:
            mean = float(losses[:, start:end].sum() / count)
            found.append(Bucket(int(start) + first, int(end) + first, mean))
    return tuple(found)
