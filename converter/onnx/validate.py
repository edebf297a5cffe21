"""``validate``: the graphs that a repository has, run against its torch model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from converter.errors import SourceError, ValidationError
from converter.interrupts import Interrupted, held
from converter.onnx.export import REPORT, STANDALONE, as_json, check_requirements, graphs_in
from converter.staging import workspace

if TYPE_CHECKING:
    from converter.onnx.validation import ValidationReport

FAILED = ".failed"
"""End of the name that a graph gets when it fails, so that nothing serves it and nothing is lost."""


def validate(folder: str | Path, *, provider: str | None = None, progress: bool = False) -> ValidationReport:
    """Validates all graphs of a converted repository and writes the report into it.

    A graph that fails is renamed to end in ``.failed``.

    Args:
        folder: a repository with graphs that ``export`` wrote.
        provider: ``cpu``; ``cuda``, and the CPU as well; None for the CPU and, where there is one, CUDA.
        progress: draw a progress bar on stderr.

    Returns:
        The report, whose ``failure`` says what was wrong if anything was.

    Raises:
        MissingPackage: onnx, onnx-ir or onnxruntime is not installed.
        SourceError: no converted repository, or one without a graph.
        ValidationError: a graph that belongs to other weights or another scaling.
        ProviderError: the execution provider is not there.
        Interrupted: the user stopped it when the report was written.
    """
    check_requirements()
    from converter.onnx.build import open_repository
    from converter.onnx.validation import run

    repository = open_repository(Path(folder).resolve())
    found = graphs_in(repository.folder)
    graphs = {path.relative_to(repository.folder).as_posix(): path for path in found}
    if not graphs:
        raise SourceError(f"{folder} has no ONNX graph; write one first: ntk-convert export {folder}")
    try:
        report = run(repository, graphs, provider, progress=progress)
    except ValidationError:
        (repository.folder / REPORT).unlink(missing_ok=True)  # what it says is no longer so
        raise
    with workspace(repository.folder / STANDALONE) as work, held() as waiting:
        # Never written to what is there: in the Hub's cache that is a link to a file that others share.
        (work / REPORT).write_text(as_json(report.to_json()), encoding="utf-8")
        (work / REPORT).replace(repository.folder / REPORT)
        for graph in report.graphs:
            if not graph.passed:
                path = graphs[graph.file]
                path.rename(path.with_name(path.name + FAILED))
    if waiting:
        raise Interrupted(f"{REPORT} is written")
    return report
