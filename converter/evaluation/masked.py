"""Which tokens are masked for an encoder, and the loss of these tokens by window and by position.

Each token of a window of the longest length is masked with probability 0.15 (as in BERT, but never left as
it is or replaced by another token). The choice depends on the window's tokens alone. So the same tokens are
predicted at every length and under every scaling, with more or less text around them.
"""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.evaluation.perplexity import BUCKETS
from converter.evaluation.results import Bucket
from converter.fitting.samples import MASKED


def masked_positions(windows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which tokens are masked, bool [windows, length]; at least one in each window."""
    chosen = np.empty(windows.shape, dtype=np.bool_)
    for row, window in enumerate(windows):
        drawn = np.random.default_rng(zlib.crc32(window.tobytes())).random(len(window))
        chosen[row] = drawn < max(MASKED, float(drawn.min()) + 1e-12)
    return chosen


def window_losses(losses: NDArray[np.float64], chosen: NDArray[np.bool_], windows: int) -> tuple[float, ...]:
    """The mean loss of each window's masked tokens in nats.

    Args:
        losses: of all pieces, [pieces, length], 0 where no token is masked.
        chosen: the masked tokens of the pieces, [pieces, length].
        windows: how many windows the pieces are of.

    Raises:
        UsageError: the pieces hold no masked token of a window.
    """
    sums, counts = losses.reshape(windows, -1).sum(axis=1), chosen.reshape(windows, -1).sum(axis=1)
    if not counts.all():
        raise UsageError(
            f"pieces of {losses.shape[1]} tokens leave out the only masked token of a text; give longer "
            "--lengths, or lengths that divide the longest"
        )
    return tuple(map(float, sums / counts))


def by_position(losses: NDArray[np.float64], chosen: NDArray[np.bool_]) -> tuple[Bucket, ...]:
    """The mean loss of the masked tokens by position; parts without a masked token are left out."""
    length = losses.shape[1]
    edges = np.unique(np.linspace(0, length, min(BUCKETS, length) + 1).astype(int))
    return tuple(
        Bucket(int(start), int(end), float(losses[:, start:end].sum() / chosen[:, start:end].sum()))
        for start, end in pairwise(edges)
        if chosen[:, start:end].any()
    )
