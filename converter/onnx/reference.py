"""The torch model that graphs are compared with, and the results that they must give.

It has the repository's own code and weights, whole or its first layers, and computes in float32.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize
from transformers.pytorch_utils import Conv1D

from converter.model.alibi import AlibiModel
from converter.onnx.cases import Case, choose_cases, several_rows
from converter.onnx.comparison import TINY, compare_quantised
from converter.onnx.coverage import Coverage, choose_coverage, padding_id
from converter.onnx.quantise import QuantisedGraph
from converter.onnx.report import GraphCheck
from converter.onnx.rounding import BAND
from converter.onnx.session import Outputs, stacked
from converter.scaling.scaling import first_layers
from converter.source.sentence_transformers import Pooling
from converter.texts import pooled
from converter.verification import unlogged
from converter.verification.imported import ImportedRepository, build
from converter.verification.loaded import failing, load_result, own_modules

Array = NDArray[Any]

VOCABULARY_TENSORS = (
    "lm_head.weight",
    "lm_head.bias",
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
)
"""Tensors of heads that have a row for each token of the vocabulary."""
RESULTS = ("last_hidden_state", "logits", "start_logits", "end_logits")
"""Outputs that a model may have, in the order of a graph's outputs."""
CACHES = ("cache", "past_key_values")
"""The cache's name; transformers 5.24 shortened it."""

LARGEST_CHANGE = 0.5
"""Largest change of a weight by calibration, in parts of its root mean square.

Rounding to the nearest changes normal weights by 0.08. Calibration moves them further, by up to 0.15 in the
small models tried. Weights in the wrong place differ by 1.4."""
NOISE = 1e-6
"""The same for a weight that is rounded to the nearest: what float32 rounds."""


class Expected(NamedTuple):
    """What is run, and the results of the torch model."""

    coverage: Coverage
    cases: Sequence[Case]
    results: Mapping[str, Sequence[Outputs]]
    """Name of a case -> the results of its steps."""
    checks: Sequence[GraphCheck]
    """Of quantised weights: whether the graph stores the checkpoint's, and what rounding them changes."""

    @property
    def values(self) -> list[Array]:
        """The results of all steps of all cases, without vectors of texts."""
        return [step.values for steps in self.results.values() for step in steps]


def run_torch(repository: AlibiModel, pooling: Pooling | None, quantised: QuantisedGraph | None) -> Expected:
    """Runs the torch model and frees it; with a quantised graph, on the values that it stores."""
    coverage = choose_coverage(repository)
    cases = choose_cases(coverage, cached=repository.has_cache, padding=padding_id(repository))
    checks = []
    with Reference.load(repository, coverage, pooling) as reference:
        if quantised is not None:
            case = several_rows(cases)
            before = case.run(reference)
            checks.append(reference.use_stored_weights(quantised))
            checks.append(compare_quantised(case.run(reference), before))
        results = {case.name: case.run(reference) for case in cases}
    return Expected(coverage, cases, results, checks)


@dataclass
class Reference:
    """The torch model in float32, which computes the right results."""

    model: Any
    stored: Mapping[str, str]
    """Parameter -> its stored name."""
    has_cache: bool
    pooling: Pooling | None = None
    """How a backbone's hidden states also become one vector of each text."""

    @classmethod
    @contextlib.contextmanager
    def load(cls, repository: AlibiModel, coverage: Coverage, pooling: Pooling | None) -> Iterator[Reference]:
        """Loads the layers and the rows of the embeddings that are run: all of them as users load them."""
        with ImportedRepository.load(repository) as imported:
            if not coverage.whole:
                model, stored = build_part(imported, coverage)
                yield cls(model, stored, repository.has_cache, pooling)
                return
            with tempfile.TemporaryDirectory(prefix="ntk-convert-") as place, own_modules(Path(place)):
                with unlogged(), failing("the model does not load", "", repository.folder):
                    model, _ = load_result(imported, repository.folder, torch.float32)
                stored = {}
                for name in model.state_dict():
                    found = imported.stored_name(name)
                    if found:
                        stored[name] = found
                yield cls(model, stored, repository.has_cache, pooling)

    def step(self, ids: Array, mask: Array, past: Any = None) -> tuple[Outputs, Any]:
        """See ``Session.step``."""
        over_cache = {"past_key_values": past, "use_cache": True} if self.has_cache else {}
        with torch.no_grad():
            output = self.model(
                torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), return_dict=True, **over_cache
            )
        values = stacked([output[name].numpy() for name in RESULTS if name in output], ids.shape[1])
        sentences = None
        if self.pooling:
            vectors = pooled(torch.from_numpy(values).double(), torch.from_numpy(mask), self.pooling)
            if self.pooling.normalised:
                vectors = normalize(vectors)
            sentences = vectors.float().numpy()
        names = list(output)  # without names that an output only understands, such as older ones
        cache = next((output[name] for name in CACHES if name in names), None)
        return Outputs(values, sentences), cache

    def use_stored_weights(self, graph: QuantisedGraph) -> GraphCheck:
        """Gives weights the values that a graph stores, if they are the checkpoint's, rounded."""
        by_column = {id(module.weight) for module in self.model.modules() if isinstance(module, Conv1D)}
        furthest = 0.0
        for parameter_name, parameter in self.model.named_parameters():
            name = self.stored.get(parameter_name, "")
            if name not in graph.bits:
                continue
            calibrated = graph.calibrated and graph.bits[name] == 4
            weight = parameter.data.T if id(parameter) in by_column else parameter.data
            found, change = stored_values(graph, name, weight.numpy(), calibrated=calibrated)
            most = LARGEST_CHANGE if calibrated else NOISE
            if not change <= most:  # nor if it is NaN
                return GraphCheck("stored weights", False, f"{name} is not the checkpoint's, rounded")
            if calibrated:
                furthest = max(furthest, change)
            values = torch.from_numpy(found)
            parameter.data = values.T if id(parameter) in by_column else values
        detail = "the checkpoint's, rounded to the nearest"
        if graph.calibrated:
            detail = f"calibrated; within {furthest:.2f} of the root mean square of the checkpoint's"
        return GraphCheck("stored weights", True, detail)


def build_part(imported: ImportedRepository, coverage: Coverage) -> tuple[Any, dict[str, str]]:
    """The first layers of a model, with the first rows of its embeddings; and parameter -> stored name."""
    repository = imported.model
    scaling = first_layers(repository.scaling, coverage.layers)
    config = imported.build_config(alibi_scaling=scaling.to_json())
    config.num_hidden_layers = coverage.layers
    config.vocab_size = coverage.vocabulary
    if repository.decoder:
        config.use_cache = repository.has_cache
    if config.pad_token_id is not None and config.pad_token_id >= coverage.vocabulary:
        config.pad_token_id = None  # it is outside the shortened vocabulary
    model = build(imported.architecture, config, device="meta")

    tables = {repository.family.embeddings, *VOCABULARY_TENSORS}

    def read(stored: str) -> Any:
        if repository.family.below(stored) not in tables:
            return imported.tensor(stored)
        with imported.open(stored) as file:
            return file.get_slice(stored)[: coverage.vocabulary]

    names = imported.fill(model, read=read)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    # transformers 5 ties a stored head only if it has the same values, whatever the config says.
    if head is None or head.weight.is_meta or torch.equal(head.weight, table.weight):
        model.tie_weights()
    return model, names


def stored_values(
    graph: QuantisedGraph, name: str, weight: Array, *, calibrated: bool
) -> tuple[Array, float]:
    """What a quantised graph stores for a weight [outputs, inputs], float32, and how far it is from right.

    Right is the weight rounded to the nearest or, if it was ``calibrated``, the weight itself. The distance
    is the root mean square of the differences, divided by that of the right values.
    """
    outputs, inputs = weight.shape
    values = np.empty(weight.shape, np.float32)
    error = norm = 0.0
    height = max(1, BAND // inputs)
    for start in range(0, outputs, height):  # as a whole, it would take several times its memory
        band = slice(start, min(start + height, outputs))
        values[band] = graph.values(name, band, inputs)
        right = weight[band] if calibrated else graph.rounded(name, weight[band])
        error += sum_of_squares(values[band] - right)
        norm += sum_of_squares(right)
    return values, math.sqrt(error) / max(math.sqrt(norm), TINY)


def sum_of_squares(values: Array) -> float:
    return float(np.square(values, dtype=np.float64).sum())
