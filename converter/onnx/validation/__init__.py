"""Checks of ONNX graphs: the file, and what it computes under onnxruntime against the torch model.

structure.py   onnx's checker; the graph points to these weights and has this scaling
cases.py       what is run: prompts, padding, decoding, chunks, greedy tokens; and how much of a model
reference.py   the patched torch model
derive.py      the first layers of a graph's file; a bfloat16 graph in float32
check.py       tolerances and the report
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from converter.errors import ProviderError
from converter.onnx.build import Repository
from converter.onnx.describe import Description, description
from converter.onnx.options import QUANTISED
from converter.onnx.session import PROVIDERS, Session, available, check_available
from converter.onnx.validation.cases import GREEDY, Answer, Case, Extent, choose_cases, extent, greedy
from converter.onnx.validation.check import (
    TOLERANCES,
    GraphCheck,
    GraphReport,
    ProviderReport,
    ValidationReport,
)
from converter.onnx.validation.derive import excerpt, in_float32, serialised
from converter.onnx.validation.reference import Reference
from converter.onnx.validation.structure import check_structure
from converter.progress import steps

__all__ = ["TOLERANCES", "GraphCheck", "GraphReport", "ProviderReport", "ValidationReport", "run"]

Array = NDArray[Any]
HEAVY = ("GroupQueryAttention", "Gemm", "MatMul", "FusedMatMul", "MatMulNBits")
"""Operators that must run on the provider that was asked for."""

WIDENED = "in float32, since the CPU provider has no bfloat16 kernels"


def run(
    repository: Repository, graphs: Mapping[str, Path], provider: str | None, *, progress: bool = False
) -> ValidationReport:
    """Validates graphs of one repository.

    Args:
        repository: the converted repository.
        graphs: name in the repository -> where the file is, all made by this tool.
        provider: ``cpu``, ``cuda`` as well, or None for the CPU and, where there is one, CUDA.
        progress: draw a bar on stderr.

    Raises:
        ValidationError: a graph that belongs to other weights or another scaling.
        ProviderError: the provider that was asked for is not there, or fell back to the CPU.
    """
    import torch
    import transformers

    started = time.monotonic()
    if provider is not None:
        check_available(provider)
    described = {name: description(path, name) for name, path in graphs.items()}
    cuda = provider == "cuda" or (provider is None and cuda_works())
    places = {
        name: ["cpu", "cuda"] if cuda and cuda_has(made) else ["cpu"] for name, made in described.items()
    }
    if provider == "cuda" and not any("cuda" in found for found in places.values()):
        raise ProviderError(
            "the CUDA provider has no float32 GroupQueryAttention; export with --onnx-dtype fp16 or bf16, "
            "or with --onnx-profile portable"
        )
    structure = {
        name: check_structure(path, name, described[name], repository) for name, path in graphs.items()
    }
    scope = extent(repository)
    ort = any(made.profile == "ort" for made in described.values())
    asked = list(choose_cases(scope, cached=repository.decoder, one_row_chunks=ort))
    reports = []
    with steps("validating", 1 + sum(map(len, places.values())), show=progress) as advance:
        right = answers(repository, scope, asked)
        advance(1)
        for name, path in graphs.items():
            graph = GraphRun(path, scope, described[name])
            results = []
            for place in places[name]:
                results.append(graph.on(place, asked, right))
                advance(1)
            reports.append(
                GraphReport(
                    file=name,
                    profile=described[name].profile,
                    dtype=described[name].dtype,
                    bytes=path.stat().st_size,
                    extent=scope.note or "the whole model",
                    structure=structure[name],
                    providers=results,
                )
            )
    modules = (onnx, onnxruntime, torch, transformers)
    versions = {module.__name__: str(module.__version__) for module in modules}
    return ValidationReport(reports, versions, round(time.monotonic() - started, 3))


class Right(NamedTuple):
    """What the torch model says."""

    answers: Mapping[str, Sequence[Answer]]
    """Case -> what its steps compute."""
    greedy: tuple[Array, Array] | None
    """Of a decoder: greedy tokens, int64 [count], and the logits they were chosen from, float32 [count,
    vocabulary]."""


def answers(repository: Repository, scope: Extent, asked: Sequence[Case]) -> Right:
    """Runs the torch model, and lets go of it."""
    with Reference.load(repository, scope.layers, scope.vocabulary) as reference:
        found = {case.name: case.run(reference) for case in asked}
        return Right(found, greedy(reference, scope) if repository.decoder else None)


def cuda_works() -> bool:
    """Whether onnxruntime has CUDA and torch sees a device for it."""
    if not available("cuda"):
        return False
    import torch

    return torch.cuda.is_available()


def cuda_has(made: Description) -> bool:
    """Whether the CUDA provider has the kernels: GroupQueryAttention, of decoders, for half precision."""
    return made.profile != "ort" or made.computes_in != "fp32" or not made.head_size


class GraphRun:
    """One graph under onnxruntime."""

    def __init__(self, path: Path, scope: Extent, made: Description):
        self.path = path
        self.scope = scope
        self.made = made

    def on(self, provider: str, asked: Sequence[Case], right: Right) -> ProviderReport:
        """Runs everything on one provider.

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
        checks = []
        for case in asked:
            try:
                checks.append(self.compare(case.name, case.run(session), right.answers[case.name], tolerance))
            except Exception as error:
                checks.append(GraphCheck(case.name, False, one_line(error)))
        if right.greedy is not None:
            try:
                checks.append(self.greedy(session, *right.greedy, tolerance))
            except Exception as error:
                checks.append(GraphCheck("greedy tokens", False, one_line(error)))
        del session
        ran = self.operators(provider, asked[0])
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

    def open(self, provider: str, *, profile: bool = False) -> Session:
        """A session of the graph's file, or of what is derived from it to be run."""
        widen = self.widened(provider)
        if self.scope.whole and not widen:
            return Session(self.path, provider, profile=profile)
        model = ir.load(self.path)
        if not self.scope.whole:
            excerpt(model, self.scope.layers, self.scope.vocabulary)
        if widen:
            in_float32(model)
        return Session(serialised(model), provider, folder=self.path.parent, profile=profile)

    def widened(self, provider: str) -> bool:
        """Whether the provider lacks the graph's dtype, which then runs in float32."""
        return provider == "cpu" and self.made.computes_in == "bf16"

    def compare(
        self, name: str, results: Sequence[Answer], expected: Sequence[Answer], tolerance: float
    ) -> GraphCheck:
        """The difference of what all steps compute, as ``TOLERANCES`` defines it."""
        pairs = [
            (ours, theirs)
            for found, answer in zip(results, expected, strict=True)
            for ours, theirs in zip(found, answer, strict=True)
            if ours is not None and theirs is not None
        ]
        errors = [ours - theirs for ours, theirs in pairs]
        right = [theirs for _, theirs in pairs]
        if self.made.dtype in QUANTISED:
            what = "root mean square of the differences {} of the values'"
            difference = math.sqrt(mean_square(errors) / mean_square(right))
        else:
            what = "largest difference {} of the largest value"
            difference = largest(errors) / largest(right)
        # NaN if one logit is, which compares as false.
        detail = f"{what.format(f'{difference:.1e}')} (at most {tolerance:g})"
        return GraphCheck(name, difference <= tolerance, detail, difference)

    def greedy(self, session: Session, tokens: Array, scores: Array, tolerance: float) -> GraphCheck:
        """Greedy tokens, in the way a server runs, against the torch model's and their logits.

        One that differs is a tie if the reference has the two logits within the tolerance. A quantised
        graph may prefer other tokens; its own must not depend on the buffer, and its logits be finite.
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
        margin /= float(np.abs(scores[same]).max())
        return GraphCheck(
            name,
            margin <= 2 * tolerance,
            f"{same} of {len(tokens)} identical, {where}; then a token whose logit is {margin:.1e} of the "
            "largest below the reference's choice",
            margin,
        )

    def operators(self, provider: str, case: Case) -> dict[str, dict[str, int]]:
        """Which provider ran which operators, from onnxruntime's profile."""
        session = self.open(provider, profile=True)
        case.run(session)
        return {name: dict(found) for name, found in session.operators().items()}


def mean_square(arrays: Sequence[Array]) -> float:
    """The mean of the arrays' mean squares."""
    return float(np.mean([np.square(array).mean() for array in arrays]))


def largest(arrays: Sequence[Array]) -> float:
    """The largest absolute value; NaN if there is one."""
    return float(np.max([np.abs(array).max() for array in arrays]))


def one_line(error: Exception) -> str:
    """An exception's message without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
