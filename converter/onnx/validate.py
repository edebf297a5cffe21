"""Validates the graphs of a repository: each must give what the torch model gives.

validate.py      all graphs, and where they are run
coverage.py      how much of the model is run
cases.py         what is run
reference.py     the torch model, and its results
opened_graph.py  one graph under onnxruntime
comparison.py    the checks that compare both
report.py        what is said of it
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnxruntime
import torch
import transformers

from converter.errors import ProviderError, option
from converter.model.alibi import AlibiModel
from converter.onnx.opened_graph import OpenedGraph
from converter.onnx.options import PROVIDERS
from converter.onnx.reference import Expected, run_torch
from converter.onnx.report import GraphReport, ValidationReport
from converter.onnx.session import check_available
from converter.progress import steps


def validate_graphs(
    repository: AlibiModel,
    graphs: Mapping[str, Path],
    provider: str | None,
    *,
    progress: bool = False,
) -> ValidationReport:
    """Validates graphs of one repository, name in it -> where the file is.

    Without ``provider``, they are run on the CPU and, if that is there and works, on CUDA.
    Raises ``ValidationError`` for a graph that this tool did not make, ``UnsupportedModel`` for one of a task
    that the repository has no weights for, ``ProviderError`` for a provider that is not available.
    """
    started = time.monotonic()
    cuda, note = takes_cuda(provider)
    with quiet():
        opened = [OpenedGraph(name, path, repository) for name, path in graphs.items()]
        providers = {graph.name: graph.providers(cuda=cuda) for graph in opened}
        if provider == "cuda":
            check_any_on_cuda(providers)
        reports = run_all(opened, providers, progress=progress)
    modules = (onnx, onnxruntime, torch, transformers)
    versions = {module.__name__: str(module.__version__) for module in modules}
    return ValidationReport(reports, versions, round(time.monotonic() - started, 3), note)


def run_all(
    graphs: Sequence[OpenedGraph], providers: Mapping[str, Sequence[str]], *, progress: bool
) -> list[GraphReport]:
    """Runs each graph on its providers, by its name, and each torch model that graphs are compared with."""
    models = {graph.compared_with for graph in graphs if providers[graph.name]}
    count = len(models) + sum(len(places) for places in providers.values())
    expected: dict[Hashable, Expected] = {}
    reports = []
    with steps("validating", count, show=progress) as advance:
        for graph in graphs:
            if not providers[graph.name]:
                reports.append(graph.report("nothing"))
                continue
            if graph.compared_with not in expected:
                expected[graph.compared_with] = run_torch(graph.repository, graph.pooling, graph.quantised)
                advance(1)
            right = expected[graph.compared_with]
            results = []
            for provider in providers[graph.name]:
                results.append(graph.run_on(provider, right))
                advance(1)
            reports.append(graph.report(right.coverage.note or "the whole model", right.checks, results))
    return reports


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


def check_any_on_cuda(providers: Mapping[str, Sequence[str]]) -> None:
    """Raises ``ProviderError`` if graphs are run, but none of them on CUDA, which was asked for."""
    used = {place for places in providers.values() for place in places}
    if used and "cuda" not in used:
        raise ProviderError(
            "graphs of the profile ort that compute in float32 are for CPUs; export with "
            f"{option.onnx_dtype} fp16, bf16, int8-fp16 or int4-fp16, or, if it is not w8a8, with "
            f"{option.onnx_profile} portable"
        )


@contextmanager
def quiet() -> Iterator[None]:
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
