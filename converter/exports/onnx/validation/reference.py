"""The patched torch model with the repository's own code and weights, whole or its first layers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.pytorch_utils import Conv1D

from converter.exports.onnx.quantise import QuantisedGraph
from converter.exports.onnx.session import Outputs, stacked
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
from converter.result.converted import ConvertedRepository
from converter.scaling.scaling import first_layers
from converter.source.pooling import Pooling
from converter.verification.patched import Patched, build

Array = NDArray[Any]
TINY = float(np.finfo(np.float32).tiny)
"""What differences are compared with if the right results are all 0."""
VOCABULARY_TENSORS = (
    "lm_head.weight",
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
)
"""Tensors of heads that have a row for each token of the vocabulary."""
RESULTS = ("last_hidden_state", "logits", "start_logits", "end_logits")
"""Outputs that a model may have, in the order of a graph's outputs."""

POOLED: dict[str, Callable[[Array], Array]] = {
    "cls": lambda states: states[0],
    "max": lambda states: states.max(0),
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / math.sqrt(len(states)),
    "weightedmean": lambda states: np.average(states, 0, np.arange(1, len(states) + 1)),
    "lasttoken": lambda states: states[-1],
}
"""Mode of pooling -> its vector [hidden] of a text's states [tokens, hidden]."""


LARGEST_CHANGE, NOISE = 0.5, 1e-6
"""Largest change of a weight by calibration, and of its values by rounding of float32; see ``distance``.

Rounding to the nearest changes normal weights by 0.08 of their root mean square. Calibration moves them
further, by up to 0.15 in the small models tried. Weights in the wrong place differ by 1.4."""


class Reference:
    """The torch model in float32, which computes the right results."""

    def __init__(
        self, model: Any, stored: Mapping[str, str], *, has_cache: bool, pooling: Pooling | None = None
    ):
        self.model = model
        self.pooling = pooling
        """How a backbone's hidden states also become one vector of each text."""
        self.stored = stored
        """Parameter -> its stored name."""
        self.has_cache = has_cache

    @classmethod
    @contextlib.contextmanager
    def load(
        cls,
        repository: ConvertedRepository,
        layers: int,
        vocabulary: int,
        *,
        pooling: Pooling | None = None,
    ) -> Iterator[Reference]:
        """Loads the first ``layers`` layers and the first ``vocabulary`` rows of the embeddings."""
        with Patched.load(repository) as patched:
            scaling = first_layers(repository.scaling, layers)
            config = patched.build_config(alibi_scaling=scaling.to_json())
            config.num_hidden_layers = layers
            config.vocab_size = vocabulary
            if repository.decoder:
                config.use_cache = repository.has_cache
            padding = config.pad_token_id
            if padding is not None and padding >= vocabulary:
                config.pad_token_id = None  # it is outside the shortened vocabulary
            model = build(patched.architecture, config, device="meta")
            family = repository.family
            tables = {*family.tensor_names(family.embeddings), *VOCABULARY_TENSORS}
            stored = patched.checkpoint.tensors
            state, names = {}, {}
            for name in model.state_dict():
                found = patched.stored_name(name)
                if found is None:
                    continue
                whole = name not in tables or stored[found].shape[0] == vocabulary
                tensor = patched.tensor(found) if whole else patched.first_rows(found, vocabulary)
                state[name], names[name] = tensor.float(), found
            model.load_state_dict(state, strict=False, assign=True)
            del state  # or quantised weights would lie beside those that they replace
            model.tie_weights()
            yield cls(model, names, has_cache=repository.has_cache, pooling=pooling)

    def quantise(self, graph: QuantisedGraph) -> GraphCheck:
        """Gives weights the values that a quantised graph stores.

        Returns:
            Whether these are the weights, rounded to the nearest; or near them, if they were calibrated.
        """
        by_column = {id(module.weight) for module in self.model.modules() if isinstance(module, Conv1D)}
        largest = 0.0
        for parameter_name, parameter in self.model.named_parameters():
            name = self.stored.get(parameter_name, "")
            if name not in graph.bits:
                continue
            weight = (parameter.data.T if id(parameter) in by_column else parameter.data).numpy()
            found = graph.values(name, *weight.shape)
            if graph.calibrated and graph.bits[name] == 4:
                largest = max(largest, change := distance(found, weight))
                right = change <= LARGEST_CHANGE
            else:
                right = distance(found, graph.rounded(name, weight)) <= NOISE
            if not right:
                return GraphCheck("stored weights", False, f"{name} is not the checkpoint's, rounded")
            values = torch.from_numpy(found)
            parameter.data = values.T if id(parameter) in by_column else values
        detail = "the checkpoint's, rounded to the nearest"
        if graph.calibrated:
            detail = f"calibrated; within {largest:.2f} of the root mean square of the checkpoint's"
        return GraphCheck("stored weights", True, detail)

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Outputs, Any]:
        """See ``Session.step``."""
        cache = {"past_key_values": past, "use_cache": True} if self.has_cache else {}
        with torch.no_grad():
            output = self.model(
                torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), return_dict=True, **cache
            )
        values = stacked([output[name].numpy() for name in RESULTS if name in output], ids.shape[1])
        sentences = pooled(values, mask, self.pooling) if self.pooling else None
        return Outputs(values, sentences), output.get("past_key_values")


def distance(found: Array, right: Array) -> float:
    """The root mean square of the differences, in parts of that of the right values."""
    return float(np.linalg.norm(found - right) / max(np.linalg.norm(right), TINY))


def pooled(states: Array, mask: Array, pooling: Pooling) -> Array:
    """One vector of each text, float32 [B, modes * hidden], of hidden states [B, S, hidden]."""
    vectors = [
        np.concatenate([POOLED[mode](row[real]) for mode in pooling.modes])
        for row, real in zip(states.astype(np.float64), mask.astype(bool), strict=True)
    ]
    found = np.stack(vectors)
    if pooling.normalised:
        found /= np.linalg.norm(found, axis=1, keepdims=True)
    return found.astype(np.float32)


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
