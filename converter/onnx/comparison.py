"""Runs graphs, and compares their results with those of the torch model."""

from __future__ import annotations

import logging
import math
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from converter.errors import ProviderError, ValidationError
from converter.model.alibi import AlibiModel
from converter.onnx.build import build_graph
from converter.onnx.describe import read_graph
from converter.onnx.options import INTEGER, PROVIDERS, QUANTISED
from converter.onnx.quantise import QuantisedGraph
from converter.onnx.reference import TINY, Expected, Extent, mean_square, run_torch
from converter.onnx.report import (
    AGAIN,
    SCORES,
    TOLERANCES,
    GraphCheck,
    GraphReport,
    ProviderReport,
    ValidationReport,
    failed,
)
from converter.onnx.requirements import for_task
from converter.onnx.session import Outputs, Ran, Session, check_available
from converter.onnx.structure import check_structure
from converter.progress import steps
from converter.source.sentence_transformers import SENTENCES

Array = NDArray[Any]
ONE_BUFFER = "past and present in one buffer"


def run(
    repository: AlibiModel,
    graphs: Mapping[str, Path],
    provider: str | None,
    *,
    progress: bool = False,
) -> ValidationReport:
    """Validates graphs of one repository, name in it -> where the file is; ``provider`` as in ``validate``.

    Raises ``ValidationError`` for a graph that this tool did not make, ``UnsupportedModel`` for one of a task
    that the repository has no weights for, ``ProviderError`` for a provider that is not available.
    """
    import torch
    import transformers

    started = time.monotonic()
    cuda, note = takes_cuda(provider)
    with silent():
        runs = {name: GraphRun(name, path, repository) for name, path in graphs.items()}
    # A graph that is not what it should be is not run.
    places = {
        name: ["cpu", "cuda"] if cuda and each.on_cuda else ["cpu"]
        for name, each in runs.items()
        if each.structure.passed
    }
    if provider == "cuda" and places and not any("cuda" in each for each in places.values()):
        raise ProviderError(
            "graphs of the profile ort that compute in float32 are for CPUs; export with "
            "`OnnxOptions.dtype` fp16, bf16, int8-fp16 or int4-fp16, or, if it is not w8a8, with "
            "`OnnxOptions.profile` portable"
        )
    expected: dict[Hashable, Expected] = {}
    reports = []
    count = len({runs[name].model for name in places}) + sum(map(len, places.values()))
    with silent(), steps("validating", count, show=progress) as advance:
        for name, each in runs.items():
            if name not in places:
                reports.append(each.report("nothing"))
                continue
            if each.model not in expected:
                expected[each.model] = run_torch(each.view, each.pooling, each.quantised)
                advance(1)
            right, results = expected[each.model], []
            for place in places[name]:
                results.append(each.on(place, right))
                advance(1)
            reports.append(each.report(right.scope.note or "the whole model", right.loss, results))
    modules = (onnx, onnxruntime, torch, transformers)
    versions = {module.__name__: str(module.__version__) for module in modules}
    return ValidationReport(reports, versions, round(time.monotonic() - started, 3), note)


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


def takes_cuda(provider: str | None) -> tuple[bool, str | None]:
    """Whether to run on CUDA, and why not if it is there and nobody asked; raises ``ProviderError``."""
    if provider is not None:
        check_available(provider)
        return provider == "cuda", None
    if PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        return False, None
    try:
        check_available("cuda")
    except ProviderError as error:
        return False, f"no graph was run on CUDA: {error}"
    return True, None


class GraphRun:
    """One graph, its file and its results; raises what ``run`` raises."""

    def __init__(self, name: str, path: Path, repository: AlibiModel):
        found = read_graph(path)
        if found is None:
            raise ValidationError(f"{name} was not written by ntk-convert, or is damaged; {AGAIN}")
        model, made = found
        self.path, self.name, self.made = path, name, made
        self.view = for_task(repository, made.task)
        """The repository with the class that computes the graph's task."""
        self.structure = check_structure(model, made, self.view)
        self.pooling = made.pooling if self.structure.passed else None
        self.quantised: QuantisedGraph | None = None
        if made.dtype in QUANTISED:
            self.quantised = QuantisedGraph(model.graph.initializers, calibrated=made.calibrated)

    @property
    def model(self) -> Hashable:
        """What torch model the graph is compared with."""
        return self.view.head, self.pooling, self.name if self.quantised else None

    @property
    def on_cuda(self) -> bool:
        """Whether it is for the CUDA provider too.

        That has no GroupQueryAttention in float32 and no products of integers, and it would wait for the host
        in every block of an encoder's ``PackedAttention``.
        """
        made = self.made
        return made.dtype != INTEGER and (made.profile, made.computes_in) != ("ort", "fp32")

    def report(
        self, extent: str, loss: Sequence[GraphCheck] = (), providers: Sequence[ProviderReport] = ()
    ) -> GraphReport:
        structure, size = [self.structure, *loss], self.path.stat().st_size
        return GraphReport(self.name, self.made.profile, self.made.dtype, size, extent, structure, providers)

    def on(self, provider: str, right: Expected) -> ProviderReport:
        """Runs all cases on one provider; raises ``ProviderError`` if it fell back to the CPU."""
        widened = provider == "cpu" and self.made.computes_in == "bf16"
        dtype = "fp32" if widened else self.made.dtype
        tolerance = TOLERANCES[dtype]
        if dtype == "fp32" and self.view.decoder:
            steepest = max(self.view.stock(self.view.config)) * self.view.bias_scale
            tolerance += SCORES * steepest * right.scope.beyond
        checks: list[GraphCheck] = []
        pairs: list[tuple[Outputs, Outputs]] = []
        runs = [(case.name, case) for case in right.cases]
        if self.view.has_cache and self.made.profile == "ort":
            runs.append((ONE_BUFFER, right.cases[-1]))  # as a server runs it
        ran: Mapping[str, Mapping[str, int]] = {}
        session = None
        with failing("load", checks):
            session = self.open(provider, right.scope, widened=widened)
        if session is not None:
            for name, case in runs:
                with failing(name, checks):
                    length = case.mask.shape[1] + 1  # one buffer is longer than its content
                    found = case.run(session.shared(1, length) if name == ONE_BUFFER else session)
                    steps = [*zip(found, right.answers[case.name], strict=True)]
                    # A graph may have the values of last tokens only.
                    errors = [ours.values - theirs.values[: len(ours.values)] for ours, theirs in steps]
                    # Beside all cases: a classifier's score may be near 0, and the rounding of its terms not.
                    checks.append(self.compare(name, errors, right.results, tolerance))
                    pairs += steps
            if self.pooling is not None:
                checks.append(self.compare_sentences(pairs, tolerance))
            del session
            with failing("provider", checks), tempfile.TemporaryDirectory(prefix="ntk-convert-") as folder:
                profiled = self.open(provider, right.scope, widened=widened, profile=Path(folder))
                case = next(case for case in right.cases if len(case.mask) > 1)
                case.run(profiled)
                events = profiled.ran()
                ran = counted(events)
                checks.append(check_placement(events, provider, case.mask.size))
        note = "in float32, since the CPU provider has no bfloat16 kernels" if widened else None
        return ProviderReport(provider, ran, tolerance, checks, note)

    def open(self, provider: str, scope: Extent, *, widened: bool, profile: Path | None = None) -> Session:
        """A session of the graph's file, or of one that is built again because the file cannot be run."""
        path = self.path
        folder = path.parent if self.made.standalone else self.view.folder
        if scope.whole and not widened:
            # A graph that is not in place yet points to weights of the folder where it will be.
            source = path if path.parent == folder else path.read_bytes()
            return Session(source, provider, folder=folder, profile=profile)
        part = scope.layers, scope.vocabulary
        model = build_graph(self.view, self.made, part=part, widened=widened).model()
        if self.made.standalone:
            take_weights(model.graph, ir.load(path).graph)
        return Session(ir.to_proto(model).SerializeToString(), provider, folder=folder, profile=profile)

    def compare_sentences(self, steps: Sequence[tuple[Outputs, Outputs]], tolerance: float) -> GraphCheck:
        """Compares the vectors of the texts of all cases that ran."""
        pairs = [(ours.sentences, theirs.sentences) for ours, theirs in steps]
        complete = [(a, b) for a, b in pairs if a is not None and b is not None and a.shape == b.shape]
        if not complete or len(complete) < len(pairs):
            return GraphCheck(SENTENCES, False, f"not the vectors of {self.pooling}")
        return self.compare(SENTENCES, [a - b for a, b in complete], [b for _, b in complete], tolerance)

    def compare(
        self, name: str, errors: Sequence[Array], right: Sequence[Array], tolerance: float
    ) -> GraphCheck:
        """Whether errors are small beside the right values; ``TOLERANCES`` defines the difference."""
        if self.quantised is not None:
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


@contextmanager
def failing(name: str, checks: list[GraphCheck]) -> Iterator[None]:
    """What onnxruntime and damaged weights raise, as a failed check; a missing provider stays an error."""
    try:
        yield
    except ProviderError:
        raise
    except Exception as error:
        checks.append(failed(name, error))


def check_placement(ran: Sequence[Ran], provider: str, tokens: int) -> GraphCheck:
    """Whether nothing of the size of a batch's tokens was computed on another provider.

    Single numbers and shapes may be: onnxruntime has them on the CPU, and they do not grow with the tokens.
    """
    small = [event for event in ran if event.provider == PROVIDERS[provider] or event.elements < tokens]
    elsewhere = counted([event for event in ran if event not in small])
    if elsewhere:
        detail = "; ".join(
            f"{operator} on {name}" for name, operators in elsewhere.items() for operator in operators
        )
    else:
        placed = ", ".join(f"{sum(found.values())} on {name}" for name, found in counted(ran).items())
        detail = f"operators of a small batch: {placed}"
    return GraphCheck("provider", not elsewhere, detail)


def counted(ran: Sequence[Ran]) -> dict[str, dict[str, int]]:
    """Provider -> operator -> how often it ran."""
    counts: dict[str, Counter[str]] = {}
    for event in ran:
        counts.setdefault(event.provider, Counter())[event.operator] += 1
    return {provider: dict(found) for provider, found in counts.items()}


def largest(arrays: Sequence[Array]) -> float:
    """The largest absolute value; NaN if there is one."""
    return float(np.max([np.abs(array).max() for array in arrays]))


def take_weights(graph: ir.Graph, stored: ir.Graph) -> None:
    """Gives a graph the weights that another one stores, of the tables the first rows."""
    for name, value in graph.initializers.items():
        right = value.const_value
        if isinstance(right, ir.Tensor):
            continue  # a constant: those of a widened graph have other dtypes and numbers
        own = stored.initializers[name].const_value
        assert right is not None
        assert own is not None
        size, shape = int(own.shape.numpy()[0]) if own.shape else 0, right.shape
        if own.shape == shape:
            value.const_value = own
        elif isinstance(own, ir.ExternalTensor):
            length = (own.length or 0) // size * int(shape.numpy()[0])
            where: dict[str, Any] = {"shape": shape, "name": name, "base_dir": own.base_dir}
            value.const_value = ir.ExternalTensor(own.location, own.offset, length, own.dtype, **where)
        else:
            kept = np.ascontiguousarray(own.numpy()[: int(shape.numpy()[0])])
            value.const_value = ir.tensor(kept, dtype=own.dtype, name=name)
