"""Runs one graph on a provider of onnxruntime, and compares what it gives with the torch model's results."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from converter.errors import ProviderError, ValidationError
from converter.model.alibi import AlibiModel
from converter.onnx.build import build_graph
from converter.onnx.cases import CHUNKS, several_rows
from converter.onnx.comparison import compare_sentences, compare_values
from converter.onnx.coverage import Coverage
from converter.onnx.describe import read_graph
from converter.onnx.options import INTEGER, PROVIDERS, QUANTISED
from converter.onnx.quantise import QuantisedGraph
from converter.onnx.reference import Expected
from converter.onnx.report import (
    AGAIN,
    SCORES,
    TOLERANCES,
    GraphCheck,
    GraphReport,
    ProviderReport,
    failed,
)
from converter.onnx.requirements import for_task
from converter.onnx.session import Outputs, Ran, Session
from converter.onnx.structure import check_structure

ONE_BUFFER = "past and present in one buffer"


class OpenedGraph:
    """One graph of a repository: its file, whether that is what is built, and its runs.

    Raises ``ValidationError`` for a graph that this tool did not make, ``UnsupportedModel`` for one of a task
    that the repository has no weights for.
    """

    def __init__(self, name: str, path: Path, repository: AlibiModel):
        found = read_graph(path)
        if found is None:
            raise ValidationError(f"{name} was not written by ntk-convert, or is damaged; {AGAIN}")
        model, made = found
        self.name, self.path, self.made = name, path, made
        self.repository = for_task(repository, made.task)
        """With the class that computes the graph's task."""
        self.structure = check_structure(model, made, self.repository)
        self.pooling = made.pooling if self.structure.passed else None
        self.quantised: QuantisedGraph | None = None
        if made.dtype in QUANTISED:
            self.quantised = QuantisedGraph(model.graph.initializers, calibrated=made.calibrated)

    @property
    def compared_with(self) -> Hashable:
        """The torch model that must give the same; for graphs with equal ones, it is run once.

        A quantised graph has one of its own, with the weights that it stores.
        """
        return self.repository.head, self.pooling, self.name if self.quantised else None

    def providers(self, *, cuda: bool) -> list[str]:
        """Where it is run, of the CPU and ``cuda``; nowhere, if its file is not what is built.

        CUDA has no GroupQueryAttention in float32 and no products of integers, and it would wait for the host
        computer in every block of an encoder's ``PackedAttention``.
        """
        if not self.structure.passed:
            return []
        for_cpus = self.made.dtype == INTEGER or (self.made.profile, self.made.computes_in) == ("ort", "fp32")
        if cuda and not for_cpus:
            return ["cpu", "cuda"]
        return ["cpu"]

    def run_on(self, provider: str, expected: Expected) -> ProviderReport:
        """Runs all cases on one provider; raises ``ProviderError`` if it fell back to the CPU.

        Onnxruntime computes no bfloat16 on the CPU, so such a graph is ``widened`` to float32 there.
        """
        widened = provider == "cpu" and self.made.computes_in == "bf16"
        tolerance = self.tolerance("fp32" if widened else self.made.dtype, expected.coverage)
        checks: list[GraphCheck] = []
        ran: Mapping[str, Mapping[str, int]] = {}
        session = None
        with as_failed_check("load", checks):
            session = self.open(provider, expected.coverage, widened=widened)
        if session is not None:
            checks += self.run_cases(session, expected, tolerance)
            del session  # before there is another one: each may have the weights in memory
            with as_failed_check("provider", checks):
                events, tokens = self.operators_run(provider, expected, widened=widened)
                ran = count_operators(events)
                checks.append(check_placement(events, provider, tokens))
        note = "in float32, since the CPU provider has no bfloat16 kernels" if widened else None
        return ProviderReport(provider, ran, tolerance, checks, note)

    def run_cases(self, session: Session, expected: Expected, tolerance: float) -> list[GraphCheck]:
        """Runs all cases and compares each; at last the vectors of texts of all of them."""
        quantised = self.quantised is not None
        checks: list[GraphCheck] = []
        all_found: list[Outputs] = []
        all_right: list[Outputs] = []
        runs = [(case.name, case, False) for case in expected.cases]
        if self.repository.has_cache and self.made.profile == "ort":
            chunks = next(case for case in expected.cases if case.name == CHUNKS)
            runs.append((ONE_BUFFER, chunks, True))  # as a server runs it
        for name, case, one_buffer in runs:
            with as_failed_check(name, checks):
                engine = session
                if one_buffer:
                    engine = session.shared(1, case.mask.shape[1] + 1)  # it is longer than its content
                found, right = case.run(engine), expected.results[case.name]
                checks.append(
                    compare_values(name, found, right, expected.values, tolerance, quantised=quantised)
                )
                all_found += found
                all_right += right
        if self.pooling is not None and all_found:
            checks.append(
                compare_sentences(all_found, all_right, tolerance, pooling=self.pooling, quantised=quantised)
            )
        return checks

    def operators_run(self, provider: str, expected: Expected, *, widened: bool) -> tuple[list[Ran], int]:
        """The operators that run for a batch of several rows, and the number of its tokens."""
        case = several_rows(expected.cases)
        with tempfile.TemporaryDirectory(prefix="ntk-convert-") as folder:
            session = self.open(provider, expected.coverage, widened=widened, profile=Path(folder))
            case.run(session)
            return session.ran(), case.mask.size

    def open(
        self, provider: str, coverage: Coverage, *, widened: bool, profile: Path | None = None
    ) -> Session:
        """A session of the graph's file; of a graph that is built again if a part is run or widened."""
        folder = self.path.parent if self.made.standalone else self.repository.folder
        if coverage.whole and not widened:
            # A graph that is not in place yet points to weights of the folder where it will be.
            source = self.path if self.path.parent == folder else self.path.read_bytes()
            return Session(source, provider, folder=folder, profile=profile)
        part = coverage.layers, coverage.vocabulary
        model = build_graph(self.repository, self.made, part=part, widened=widened).model()
        if self.made.standalone:
            copy_weights(model.graph, ir.load(self.path).graph)
        return Session(ir.to_proto(model).SerializeToString(), provider, folder=folder, profile=profile)

    def tolerance(self, dtype: str, coverage: Coverage) -> float:
        """The largest difference that is right for a graph that is run in ``dtype``.

        See ``TOLERANCES`` and, for the lengths that are run, ``SCORES``.
        """
        tolerance = TOLERANCES[dtype]
        if dtype == "fp32" and self.repository.decoder:
            slopes = self.repository.stock(self.repository.result_config)
            tolerance += SCORES * max(slopes) * self.repository.bias_scale * coverage.beyond
        return tolerance

    def report(
        self, extent: str, checks: Sequence[GraphCheck] = (), providers: Sequence[ProviderReport] = ()
    ) -> GraphReport:
        """``extent``: how much of the model was run; ``checks``: of what it stores."""
        return GraphReport(
            file=self.name,
            profile=self.made.profile,
            dtype=self.made.dtype,
            bytes=self.path.stat().st_size,
            extent=extent,
            structure=[self.structure, *checks],
            providers=providers,
        )


def copy_weights(graph: ir.Graph, stored: ir.Graph) -> None:
    """Gives a graph the weights that another one stores, of the tables the first rows."""
    for name, value in graph.initializers.items():
        wanted = value.const_value
        if isinstance(wanted, ir.Tensor):
            continue  # a constant: those of a widened graph have other dtypes and numbers
        own = stored.initializers[name].const_value
        assert wanted is not None
        assert own is not None
        if own.shape == wanted.shape:
            value.const_value = own
            continue
        rows = int(wanted.shape.numpy()[0])
        if isinstance(own, ir.ExternalTensor):
            row_bytes = (own.length or 0) // int(own.shape.numpy()[0])
            value.const_value = ir.ExternalTensor(
                own.location,
                own.offset,
                row_bytes * rows,
                own.dtype,
                shape=ir.Shape(wanted.shape.numpy()),
                name=name,
                base_dir=own.base_dir,
            )
        else:
            first = np.ascontiguousarray(own.numpy()[:rows])
            value.const_value = ir.tensor(first, dtype=own.dtype, name=name)


@contextmanager
def as_failed_check(name: str, checks: list[GraphCheck]) -> Iterator[None]:
    """What onnxruntime and damaged weights raise, as a failed check; a missing provider stays an error."""
    try:
        yield
    except ProviderError:
        raise
    except Exception as error:
        checks.append(failed(name, error))


def check_placement(events: Sequence[Ran], provider: str, tokens: int) -> GraphCheck:
    """Whether nothing of the size of a batch's tokens was computed on another provider.

    Single numbers and shapes may be: onnxruntime has them on the CPU, and they do not grow with the tokens.
    """
    large = [event for event in events if event.elements >= tokens]
    elsewhere = count_operators([event for event in large if event.provider != PROVIDERS[provider]])
    if elsewhere:
        placed = [f"{operator} on {name}" for name, counts in elsewhere.items() for operator in counts]
        return GraphCheck("provider", False, "; ".join(placed))
    totals = [f"{sum(counts.values())} on {name}" for name, counts in count_operators(events).items()]
    return GraphCheck("provider", True, f"operators of a small batch: {', '.join(totals)}")


def count_operators(events: Sequence[Ran]) -> dict[str, dict[str, int]]:
    """onnxruntime's provider -> operator -> how often it ran."""
    found: dict[str, Counter[str]] = {}
    for event in events:
        found.setdefault(event.provider, Counter())[event.operator] += 1
    return {provider: dict(counts) for provider, counts in found.items()}
