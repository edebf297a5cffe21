"""Windows of a text, and the loss in them by length and by position.

The text is cut into windows of the longest length, without overlap, and each window into pieces of every
shorter length. So all lengths predict the same tokens, but with more or less of the text before each token.
The first token of a piece is not predicted (Press et al., ICLR 2022, section 3, "nonoverlapping").
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.evaluation.results import Bucket

BUCKETS = 16
"""Parts of equal width into which a window is divided for the loss by position."""


def pieces(windows: NDArray[Any], length: int) -> NDArray[Any]:
    """The windows cut into pieces, [windows * pieces, length]; a shorter remainder is dropped."""
    count = windows.shape[1] // length
    return windows[:, : count * length].reshape(-1, length)


def window_losses(losses: NDArray[np.float64], windows: int) -> tuple[float, ...]:
    """The mean loss of each window in nats per token, from the losses of all pieces [pieces, length - 1]."""
    return tuple(float(loss) for loss in losses.reshape(windows, -1).mean(axis=1))


def by_position(losses: NDArray[np.float64]) -> tuple[Bucket, ...]:
    """The mean loss by position, from losses [windows, length - 1] of the positions from 1 on."""
    length = losses.shape[1] + 1
    edges = np.unique(np.linspace(1, length, min(BUCKETS, losses.shape[1]) + 1).astype(int))
    return tuple(
        Bucket(int(start), int(end), float(losses[:, start - 1 : end - 1].mean()))
        for start, end in pairwise(edges)
    )
