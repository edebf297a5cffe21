"""What the torch model computes in the cases, to which graphs are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from converter.exports.onnx.quantise import QuantisedGraph
from converter.exports.onnx.validation.cases import (
    Answer,
    Case,
    Extent,
    choose_cases,
    ends_by_id,
    extent,
    greedy,
)
from converter.exports.onnx.validation.check import GraphCheck
from converter.exports.onnx.validation.reference import Reference
from converter.result.converted import ConvertedRepository
from converter.source.pooling import Pooling

Array = NDArray[Any]
TINY = float(np.finfo(np.float32).tiny)
"""What differences are compared with if the right results are all 0."""


class Expected(NamedTuple):
    """What is run, and the results of the torch model."""

    scope: Extent
    cases: Sequence[Case]
    answers: Mapping[str, Sequence[Answer]]
    """Name of a case -> the results of its steps."""
    greedy: tuple[Array, Array] | None
    """A decoder's greedy tokens, int64 [count], and the logits they were chosen from, float32 [count,
    vocabulary]; None for an encoder."""
    loss: Sequence[GraphCheck]
    """What quantised weights change, if they are quantised."""

    @property
    def results(self) -> list[Array]:
        """The results of all cases, without vectors of texts."""
        steps = [step for steps in self.answers.values() for step in steps]
        return [array for step in steps for array in (step.last, step.spread) if array is not None]


def run_torch(
    repository: ConvertedRepository,
    pooling: Pooling | None,
    quantised: QuantisedGraph | None,
    *,
    one_row_chunks: bool,
) -> Expected:
    """Runs the torch model and frees it.

    Args:
        repository: the repository.
        pooling: how the hidden states also become one vector of each text.
        quantised: the graph, if its weights are quantised. The model then computes with the values that it
            stores.
        one_row_chunks: see ``choose_cases``.
    """
    scope = extent(repository)
    padding = repository.config["pad_token_id"] if ends_by_id(repository) else None
    cached = repository.has_cache
    cases = list(choose_cases(scope, cached=cached, one_row_chunks=one_row_chunks, padding=padding))
    with Reference.load(repository, scope.layers, scope.vocabulary, pooling=pooling) as reference:
        loss = []
        if quantised is not None:
            several = next(case for case in cases if len(case.mask) > 1)
            before = several.run(reference)
            loss = [reference.quantise(quantised), loss_of_weights(several.run(reference), before)]
        found = {case.name: case.run(reference) for case in cases}
        chosen = greedy(reference, scope) if cached else None
        return Expected(scope, cases, found, chosen, loss)


def loss_of_weights(results: Sequence[Answer], before: Sequence[Answer]) -> GraphCheck:
    """What quantising the weights changes in a model's results.

    Only a loss of all information is a failure: zeros would differ from the results by 1.
    """
    pairs = [(answer.last, right.last) for answer, right in zip(results, before, strict=True)]
    right = max(mean_square([b for _, b in pairs]), TINY)
    difference = math.sqrt(mean_square([a - b for a, b in pairs]) / right)
    detail = f"change the results by {difference:.1e} of their root mean square"
    if not difference < 1:
        detail += ": nothing is left of them; choose another --onnx-dtype"
    return GraphCheck("quantised weights", difference < 1, detail, difference)


def mean_square(arrays: Sequence[Array]) -> float:
    """The mean of the arrays' mean squares."""
    return float(np.mean([np.square(array).mean() for array in arrays]))
