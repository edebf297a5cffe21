"""Graphs that a repository has, run against its torch model: for ``validate``, and again for ``push``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from converter.errors import SourceError, ValidationError
from converter.onnx.export import as_json
from converter.onnx.files import REPORT, STANDALONE, graphs_in
from converter.onnx.requirements import check_installed, check_recipe
from converter.progress import byte_bar
from converter.result import manifest
from converter.result.converted import ConvertedRepository, code_names, open_converted
from converter.result.staging import workspace
from converter.source.source import CONFIG
from converter.weights.files import sha256

if TYPE_CHECKING:
    from converter.onnx.report import ValidationReport
    from converter.verification import Check

FAILED = ".failed"
"""Added to the name of a graph that fails, so that nothing serves it and nothing is lost."""


def validate(folder: str | Path, *, provider: str | None = None, progress: bool = False) -> ValidationReport:
    """Validates all graphs of a converted repository and writes the report into it.

    A graph that fails is renamed to end in ``.failed``. If all graphs pass, the config, the code, the weights
    and the graphs are compared with the manifest: torch and the graphs read the same weights, so a run does
    not show that these have changed.

    Args:
        folder: a repository with graphs that ``export`` wrote.
        provider: ``cpu``; ``cuda``, which includes the CPU; None for the CPU and, if there is one, CUDA.
        progress: draw a progress bar on stderr.

    Returns:
        The report, whose ``failure`` says what was wrong if anything was.

    Raises:
        MissingPackage: onnx, onnx-ir or onnxruntime is not installed.
        SourceError: not a converted repository, one without a graph, or one with a file that is not as the
            conversion or export wrote it.
        UnsupportedModel: a model that has no graph.
        ValidationError: a graph that this tool did not write, or one too damaged to say so.
        ProviderError: the execution provider is not available.
    """
    check_installed()
    from converter.onnx.comparison import run

    repository = open_converted(Path(folder))
    check_recipe(repository.recipe, repository.config)
    graphs = graphs_in(repository.folder)
    if not graphs:
        manifest.read(repository.folder)  # a fine-tuned model has to be adopted first
        raise SourceError(f"{folder} has no ONNX graph; write one first: ntk-convert export {folder}")
    listed = manifest.read(repository.folder) if (repository.folder / manifest.MANIFEST).is_file() else {}
    try:
        report = run(repository, graphs, provider, progress=progress)
        if report.passed:
            check_as_written(repository, graphs, listed, progress=progress)
    except (ValidationError, SourceError):
        (repository.folder / REPORT).unlink(missing_ok=True)  # it is no longer true
        raise
    for graph in report.graphs:
        if not graph.passed:
            path = graphs[graph.file]
            path.rename(path.with_name(path.name + FAILED))
    with workspace(repository.folder / STANDALONE) as work:
        # The old report is replaced, not written to: in the Hub's cache it is a link to a shared file.
        (work / REPORT).write_text(as_json(report.to_json()), encoding="utf-8")
        (work / REPORT).replace(repository.folder / REPORT)
    return report


def check_as_written(
    repository: ConvertedRepository,
    graphs: Iterable[str],
    listed: Mapping[str, manifest.Entry],
    *,
    progress: bool = False,
) -> None:
    """Raises ``SourceError`` if what the graphs and the model are made of is not as the manifest lists it.

    Linked weights have no SHA-256 there, and files that users may edit (the card, the tokenizer, generation
    configs) are not compared.
    """
    checkpoint, folder = repository.checkpoint, repository.folder
    names = [CONFIG, *code_names(folder, repository.recipe.templates), *checkpoint.files]
    names += [checkpoint.index] if checkpoint.index else []
    names += [name for graph in graphs for name in (graph, f"{graph}_data") if (folder / name).is_file()]
    digests = {name: listed[name].sha256 for name in names if name in listed}
    compared = [name for name, digest in digests.items() if digest]
    total = sum((folder / name).stat().st_size for name in compared)
    with byte_bar(f"comparing with {manifest.MANIFEST}", total, show=progress) as advance:
        found = {name: sha256(folder / name, advance) for name in compared}
    remedy = f"{manifest.ADOPT.format(folder)}, otherwise put it back, or convert or export again"
    manifest.check_digests(digests, found, remedy=remedy)


def check_again(
    repository: ConvertedRepository, listed: Collection[str], *, progress: bool = False
) -> list[Check]:
    """Validates the graphs that the manifest lists, and changes nothing; raises ``ValidationError``."""
    graphs = {name: path for name, path in graphs_in(repository.folder).items() if name in listed}
    if not graphs:
        return []
    check_installed()
    from converter.onnx.comparison import run
    from converter.verification import Check

    report = run(repository, graphs, None, progress=progress)
    if report.failure:
        raise ValidationError(f"{report.failure}; export it again, or remove it")
    return [
        Check(
            "graph",
            f"{graph.file} gives what the model gives, on "
            + ", ".join(place.provider for place in graph.providers),
        )
        for graph in report.graphs
    ]
