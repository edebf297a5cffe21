"""Compares results of a model, step by step; each comparison is a named check.

The values of a quantised graph are compared by their root mean square, all others by the largest difference;
``TOLERANCES`` says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.onnx.report import GraphCheck
from converter.onnx.session import Outputs
from converter.source.sentence_transformers import SENTENCES, Pooling

Array = NDArray[Any]

TINY = float(np.finfo(np.float32).tiny)
"""What differences are compared with if the right results are all 0."""


def compare_values(
    name: str,
    found: Sequence[Outputs],
    right: Sequence[Outputs],
    all_right: Sequence[Array],
    tolerance: float,
    *,
    quantised: bool,
) -> GraphCheck:
    """Whether the steps of one case give what the torch model gives, beside the results of all cases.

    Beside all cases, because a classifier's score may be near 0, and the rounding of its terms not.
    """
    errors = []
    for ours, theirs in zip(found, right, strict=True):
        count = len(ours.values)  # a graph may have the values of last tokens only, which come first
        errors.append(ours.values - theirs.values[:count])
    return _check(name, errors, all_right, tolerance, quantised=quantised)


def compare_sentences(
    found: Sequence[Outputs],
    right: Sequence[Outputs],
    tolerance: float,
    *,
    pooling: Pooling,
    quantised: bool,
) -> GraphCheck:
    """Whether the vectors of the texts of all cases are what the torch model gives."""
    errors, vectors = [], []
    for ours, theirs in zip(found, right, strict=True):
        own, other = ours.sentences, theirs.sentences
        if own is not None and other is not None and own.shape == other.shape:
            errors.append(own - other)
            vectors.append(other)
    if not errors or len(errors) < len(found):
        return GraphCheck(SENTENCES, False, f"not the vectors of {pooling}")
    return _check(SENTENCES, errors, vectors, tolerance, quantised=quantised)


def compare_quantised(found: Sequence[Outputs], before: Sequence[Outputs]) -> GraphCheck:
    """What quantising the weights changes in a model's results.

    Only a loss of all information is a failure: zeros would differ from the results by 1.
    """
    errors = [ours.values - theirs.values for ours, theirs in zip(found, before, strict=True)]
    difference = mean_square_difference(errors, [step.values for step in before])
    detail = f"change the results by {difference:.1e} of their root mean square"
    if not difference < 1:
        detail += ": nothing is left of them; choose another dtype"
    return GraphCheck("quantised weights", difference < 1, detail, difference)


def _check(
    name: str, errors: Sequence[Array], right: Sequence[Array], tolerance: float, *, quantised: bool
) -> GraphCheck:
    """Whether errors are small beside the right values; ``TOLERANCES`` defines the difference."""
    if quantised:
        difference = mean_square_difference(errors, right)
        said = f"root mean square of the differences {difference:.1e} of the values'"
        # The root mean square of n normal errors is more than 3 / sqrt(2 n) above its mean once in 1000
        # times; it matters for a classifier, which has few results.
        count = sum(error.size for error in errors)
        tolerance *= 1 + 3 / math.sqrt(2 * count)
    else:
        difference = largest_difference(errors, right)
        said = f"largest difference {difference:.1e} of the largest value"
    # If one value is NaN, so is the difference, and the comparison is false.
    return GraphCheck(name, difference <= tolerance, f"{said} (at most {tolerance:.2g})", difference)


def largest_difference(errors: Sequence[Array], right: Sequence[Array]) -> float:
    """The largest error, divided by the largest right value; NaN if there is one."""
    return _largest(errors) / max(_largest(right), TINY)


def mean_square_difference(errors: Sequence[Array], right: Sequence[Array]) -> float:
    """The root mean square of errors, divided by that of the right values; each array counts alike."""
    return math.sqrt(_mean_square(errors) / max(_mean_square(right), TINY))


def _largest(arrays: Sequence[Array]) -> float:
    return float(np.max([np.abs(array).max() for array in arrays]))


def _mean_square(arrays: Sequence[Array]) -> float:
    return float(np.mean([np.square(array).mean() for array in arrays]))
