"""Checks of ONNX graphs: the file, and what it computes under onnxruntime against the torch model.

structure.py   onnx's checker; the graph points to these weights and has this scaling
cases.py       the runs (prompts, padding, decoding, chunks, greedy tokens) and how much of a model they use
reference.py   the patched torch model
expected.py    what it computes in the cases
derive.py      the first layers of a graph's file; a bfloat16 graph in float32
check.py       tolerances and the report
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from converter.errors import ProviderError
from converter.exports.onnx.choices import INTEGER, PROVIDERS, QUANTISED
from converter.exports.onnx.describe import Description, describe, description, has_weights
from converter.exports.onnx.files import standalone_graph
from converter.exports.onnx.pooling import graph_pooling
from converter.exports.onnx.quantise import QuantisedGraph
from converter.exports.onnx.requirements import for_task
from converter.exports.onnx.session import Session, available, check_available
from converter.exports.onnx.validation.cases import GREEDY, Answer, Case, Extent, greedy
from converter.exports.onnx.validation.check import (
    TOLERANCES,
    UNKNOWN,
    GraphCheck,
    GraphReport,
    ProviderReport,
    ValidationReport,
    one_line,
)
from converter.exports.onnx.validation.derive import excerpt, in_float32, serialised
from converter.exports.onnx.validation.expected import TINY, Expected, mean_square, run_torch
from converter.exports.onnx.validation.structure import AGAIN, check_structure
from converter.progress import steps
from converter.result.converted import ConvertedRepository
from converter.source.pooling import SENTENCES, Pooling

__all__ = ["TOLERANCES", "GraphCheck", "GraphReport", "ProviderReport", "ValidationReport", "run"]

Array = NDArray[Any]
HEAVY = (
    *("GroupQueryAttention", "Gemm", "MatMul", "FusedMatMul", "MatMulNBits"),
    *("MatMulInteger", "MatMulIntegerToFloat"),
)
"""Operators that must run on the provider that was asked for."""

WIDENED = "in float32, since the CPU provider has no bfloat16 kernels"


def run(
    repository: ConvertedRepository,
    graphs: Mapping[str, Path],
    provider: str | None,
    *,
    listed: Collection[str] = (),
    progress: bool = False,
) -> ValidationReport:
    """Validates graphs of one repository.

    Args:
        repository: the converted repository.
        graphs: name in the repository -> where the file is.
        provider: ``cpu``; ``cuda``, which includes the CPU; None for the CPU and, if there is one, CUDA.
        listed: names of files in the manifest. Such a graph is this tool's own, even if it is too damaged to
            say so; it then fails.
        progress: draw a bar on stderr.

    Raises:
        ValidationError: a graph that this tool did not make, or for other weights or another scaling.
        UnsupportedModel: a graph of a task that the repository has no weights for.
        ProviderError: the provider is not available, or fell back to the CPU.
    """
    import torch
    import transformers

    started = time.monotonic()
    if provider is not None:
        check_available(provider)
    described = {
        name: description(path, name)
        for name, path in graphs.items()
        if name not in listed or describe(path) is not None
    }
    for name in [name for name, made in described.items() if made.dtype in QUANTISED]:
        if not has_weights(graphs[name]):
            del described[name]  # the torch model could not compute with these weights either
    cuda = provider == "cuda" or (provider is None and cuda_works())
    places = {
        name: ["cpu", "cuda"] if cuda and cuda_has(made, repository) else ["cpu"]
        for name, made in described.items()
    }
    if provider == "cuda" and described and not any("cuda" in found for found in places.values()):
        raise ProviderError(
            "the CUDA provider has no float32 GroupQueryAttention, and no products of integers (w8a8); "
            "export with --onnx-dtype fp16 or bf16, or in another dtype with --onnx-profile portable"
        )
    with silent():
        structure = {
            name: check_structure(graphs[name], name, made, repository) for name, made in described.items()
        }
    views = {name: for_task(repository, made.task) for name, made in described.items()}
    ort = any(made.profile == "ort" for made in described.values())
    quantised = {
        name: quantised_graph(graphs[name], made)
        for name, made in described.items()
        if made.dtype in QUANTISED
    }
    poolings = {
        name: graph_pooling(repository.folder) if made.pooling is not None else None
        for name, made in described.items()
    }
    models = {
        name: (views[name].head, poolings[name], name if name in quantised else None) for name in described
    }
    expected: dict[Hashable, Expected] = {}
    reports = []
    count = len(set(models.values())) + sum(map(len, places.values()))
    with silent(), steps("validating", count, show=progress) as advance:
        for name, model in models.items():
            if model not in expected:
                expected[model] = run_torch(
                    views[name], poolings[name], quantised.get(name), one_row_chunks=ort
                )
                advance(1)
        for name, path in graphs.items():
            if name not in described:
                reports.append(damaged(path, name))
                continue
            right = expected[models[name]]
            graph = GraphRun(path, right.scope, described[name])
            results = []
            for place in places[name]:
                results.append(graph.on(place, right))
                advance(1)
            reports.append(
                GraphReport(
                    file=name,
                    profile=described[name].profile,
                    dtype=described[name].dtype,
                    bytes=path.stat().st_size,
                    extent=right.scope.note or "the whole model",
                    structure=[*structure[name], *right.loss],
                    providers=results,
                )
            )
    modules = (onnx, onnxruntime, torch, transformers)
    versions = {module.__name__: str(module.__version__) for module in modules}
    return ValidationReport(reports, versions, round(time.monotonic() - started, 3))


@contextmanager
def silent() -> Iterator[None]:
    """Keeps what onnx_ir says about invalid graphs off stderr; a failed check says it in the report."""
    log = logging.getLogger("onnx_ir")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="onnx_ir")
            yield
    finally:
        log.setLevel(level)


def quantised_graph(path: Path, made: Description) -> QuantisedGraph:
    return QuantisedGraph(ir.load(path).graph.initializers, calibrated=made.calibrated)


def damaged(path: Path, name: str) -> GraphReport:
    """The report of a graph that was exported here, and cannot be read any more with all its weights."""
    dtype = next((dtype for dtype in QUANTISED if standalone_graph(dtype) == name), None)
    again = AGAIN if dtype is None else f"{AGAIN} --onnx-dtype {dtype}"
    check = GraphCheck("file", False, f"damaged: it is not as the export wrote it; {again}")
    return GraphReport(name, UNKNOWN, UNKNOWN, path.stat().st_size, "nothing", [check], [])


def cuda_works() -> bool:
    """Whether onnxruntime has CUDA and torch sees a device for it."""
    if not available("cuda"):
        return False
    import torch

    return torch.cuda.is_available()


def cuda_has(made: Description, repository: ConvertedRepository) -> bool:
    """Whether the CUDA provider can run a graph.

    Its GroupQueryAttention has half precision only, and its MatMulInteger takes no unsigned activations.
    """
    if made.dtype == INTEGER:
        return False
    return made.profile != "ort" or made.computes_in != "fp32" or not repository.decoder


class GraphRun:
    """One graph under onnxruntime."""

    def __init__(self, path: Path, scope: Extent, made: Description):
        self.path = path
        self.scope = scope
        self.made = made

    def on(self, provider: str, right: Expected) -> ProviderReport:
        """Runs all cases on one provider.

        Raises:
            ProviderError: the provider fell back to the CPU.
        """
        widened = self.widened(provider)
        note = WIDENED if widened else None
        tolerance = TOLERANCES["fp32" if widened else self.made.dtype]
        try:
            session = self.open(provider)
        except ProviderError:
            raise
        except Exception as error:
            return ProviderReport(provider, {}, tolerance, [GraphCheck("load", False, one_line(error))], note)
        checks, answers = [], {}
        for case in right.cases:
            try:
                answers[case.name] = case.run(session)
                checks.append(self.compare_case(case.name, answers[case.name], right, tolerance))
            except Exception as error:
                checks.append(GraphCheck(case.name, False, one_line(error)))
        if self.made.pooling is not None:
            checks.append(self.compare_sentences(answers, right, tolerance))
        if right.greedy is not None:
            try:
                checks.append(self.greedy(session, *right.greedy, tolerance))
            except Exception as error:
                checks.append(GraphCheck("greedy tokens", False, one_line(error)))
        del session
        try:
            ran = self.operators(provider, right.cases[0])
        except ProviderError:
            raise
        except Exception as error:
            checks.append(GraphCheck("provider", False, one_line(error)))
            return ProviderReport(provider, {}, tolerance, checks, note)
        elsewhere = [
            f"{operator} on {name}"
            for name, operators in ran.items()
            for operator in operators
            if operator in HEAVY and name != PROVIDERS[provider]
        ]
        placed = ", ".join(f"{sum(found.values())} on {name}" for name, found in ran.items())
        checks.append(
            GraphCheck(
                "provider", not elsewhere, "; ".join(elsewhere) or f"operators of a short prompt: {placed}"
            )
        )
        return ProviderReport(provider, ran, tolerance, checks, note)

    def open(self, provider: str, *, profile: Path | None = None) -> Session:
        """A session of the graph's file, or of a graph derived from it that can be run."""
        widen = self.widened(provider)
        if self.scope.whole and not widen:
            return Session(self.path, provider, profile=profile)
        model = ir.load(self.path)
        if not self.scope.whole:
            scope = self.scope
            excerpt(model, scope.layers, scope.vocabulary, scope.full_vocabulary)
        if widen:
            in_float32(model)
        return Session(serialised(model), provider, folder=self.path.parent, profile=profile)

    def widened(self, provider: str) -> bool:
        """Whether the graph has to run in float32 because the provider does not support its dtype."""
        return provider == "cpu" and self.made.computes_in == "bf16"

    def compare_case(
        self, name: str, results: Sequence[Answer], expected: Expected, tolerance: float
    ) -> GraphCheck:
        """Compares the results of all steps, without vectors of texts."""
        errors = [
            ours - theirs
            for found, answer in zip(results, expected.answers[name], strict=True)
            for ours, theirs in ((found.last, answer.last), (found.spread, answer.spread))
            if ours is not None and theirs is not None
        ]
        # Of all cases: where a classifier's score is near 0, its terms and their rounding are not smaller.
        return self.compare(name, errors, expected.results, tolerance)

    def compare_sentences(
        self, answers: Mapping[str, Sequence[Answer]], expected: Expected, tolerance: float
    ) -> GraphCheck:
        """Compares the vectors of the texts of all cases that ran."""
        pairs = [
            (found.sentences, answer.sentences)
            for name, steps in answers.items()
            for found, answer in zip(steps, expected.answers[name], strict=True)
        ]
        complete = [(a, b) for a, b in pairs if a is not None and b is not None and a.shape == b.shape]
        if not complete or len(complete) < len(pairs):
            return GraphCheck(SENTENCES, False, f"not the vectors of {Pooling(**self.made.pooling)}")
        return self.compare(SENTENCES, [a - b for a, b in complete], [b for _, b in complete], tolerance)

    def compare(
        self, name: str, errors: Sequence[Array], right: Sequence[Array], tolerance: float
    ) -> GraphCheck:
        """Whether errors are small beside the right values; ``TOLERANCES`` defines the difference."""
        if self.made.dtype in QUANTISED:
            what = "root mean square of the differences {} of the values'"
            difference = math.sqrt(mean_square(errors) / max(mean_square(right), TINY))
            # The root mean square of n normal errors is more than 3 / sqrt(2 n) above its mean once in 1000
            # times; it matters for a classifier, which has few results.
            tolerance *= 1 + 3 / math.sqrt(2 * sum(error.size for error in errors))
        else:
            what = "largest difference {} of the largest value"
            difference = largest(errors) / max(largest(right), TINY)
        # If one logit is NaN, so is the difference, and the comparison is false.
        detail = f"{what.format(f'{difference:.1e}')} (at most {tolerance:.2g})"
        return GraphCheck(name, difference <= tolerance, detail, difference)

    def greedy(self, session: Session, tokens: Array, scores: Array, tolerance: float) -> GraphCheck:
        """Compares greedy tokens, generated as a server does, with those of the torch model.

        A different token is a tie if the reference has both logits within the tolerance. A quantised graph
        may prefer other tokens; but they must not depend on the buffer, and its logits must be finite.
        """
        name = "greedy tokens"
        shared = self.made.profile == "ort"
        where = "past and present in one buffer" if shared else "a new cache at every step"
        engine = session.shared(1, self.scope.beyond + GREEDY) if shared else session
        found, own = greedy(engine, self.scope)
        same = int(np.cumprod(found == tokens).sum())
        if self.made.dtype in QUANTISED:
            alone = greedy(session, self.scope)[0] if shared else found
            passed = bool((found == alone).all()) and bool(np.isfinite(own).all())
            how = f", {'as' if passed else 'not as'} without" if shared else ""
            return GraphCheck(name, passed, f"{where}{how}; the first {same} as the torch model")
        if same == len(tokens):
            return GraphCheck(name, True, f"all {same} identical, {where}")
        margin = float(scores[same][tokens[same]] - scores[same][found[same]])
        margin /= max(float(np.abs(scores[same]).max()), TINY)
        return GraphCheck(
            name,
            margin <= 2 * tolerance,
            f"{same} of {len(tokens)} identical, {where}; then a token whose logit is {margin:.1e} of the "
            "largest below the reference's choice",
            margin,
        )

    def operators(self, provider: str, case: Case) -> dict[str, dict[str, int]]:
        """Which provider ran which operators, from onnxruntime's profile."""
        with tempfile.TemporaryDirectory(prefix="ntk-convert-") as folder:
            session = self.open(provider, profile=Path(folder))
            case.run(session)
            return {name: dict(found) for name, found in session.operators().items()}


def largest(arrays: Sequence[Array]) -> float:
    """The largest absolute value; NaN if there is one."""
    return float(np.max([np.abs(array).max() for array in arrays]))
