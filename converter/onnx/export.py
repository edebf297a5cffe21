"""The export, from top to bottom: graphs are built, validated and only then put in place."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import OutputError, SourceError, ValidationError, option
from converter.families.family import TASKS
from converter.formatting import bytes_text
from converter.interrupts import held
from converter.model.alibi import AlibiModel
from converter.onnx.card import section
from converter.onnx.files import (
    BYTES,
    FLOAT32_GRAPH,
    GENAI,
    GRAPH,
    REPORT,
    STANDALONE,
    STORED,
    graphs_in,
    in_one_file,
    served_by_genai,
    standalone_graph,
)
from converter.onnx.options import INTEGER, OnnxOptions
from converter.onnx.requirements import check_installed, for_task, graph_pooling
from converter.result import manifest
from converter.result.card.update import GRAPHS, with_section
from converter.result.converted import open_converted
from converter.result.staging import check_space, workspace
from converter.source.sentence_transformers import Pooling
from converter.source.source import CARD
from converter.weights.files import sha256

if TYPE_CHECKING:
    from converter.onnx.describe import Description
    from converter.onnx.report import ValidationReport

DEFAULT = OnnxOptions()


@dataclass(frozen=True)
class ExportResult:
    path: Path
    """The repository, absolute."""
    files: dict[str, int]
    """File, relative to it -> bytes."""
    report: ValidationReport | None
    """None without validation."""
    replaced: Mapping[str, str]
    """Graph -> dtype of the one that it replaced, if that is another."""
    seconds: float
    note: str | None = None
    """What onnxruntime-genai lacks; None if it has all."""

    def summary(self) -> str:
        """What was written and what validation found, for people."""
        lines = [f"{name}  {bytes_text(size)}" for name, size in self.files.items()]
        lines += [f"{name} replaces a graph in {dtype}" for name, dtype in self.replaced.items()]
        lines.append(self.report.summary() if self.report else "not validated")
        if self.note is not None:
            lines.append(f"note: {self.note}")
        return "\n".join([*lines, f"in {self.seconds:.1f} s"])

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "files": self.files,
            "replaced": dict(self.replaced),
            "validation": self.report.to_json() if self.report else None,
            "seconds": round(self.seconds, 3),
            "note": self.note,
        }


def export(folder: str | Path, options: OnnxOptions = DEFAULT, *, progress: bool = False) -> ExportResult:
    """Writes an ONNX graph of a converted repository into it, validated under onnxruntime.

    Unless it is standalone, the graph points to the weights where they are and does not copy them; if they
    have half precision, there is a second graph, ``model_fp32.onnx``, which computes in float32, for CPUs.
    With the profile ``ort``, a ``genai_config.json`` lets onnxruntime-genai serve a causal language model.

    Args:
        folder: a repository that ``convert`` wrote.
        options: what graph to write.
        progress: draw progress bars on stderr.

    Raises:
        MissingPackage: onnx, onnx-ir or onnxruntime is not installed.
        SourceError: not a converted repository, a damaged one, or one whose model was changed since.
        UnsupportedModel: a family or class that has no graph, or no weights for the task.
        UsageError: logits of last tokens are asked for, of a model that is not a language model.
        OutputError: there is a graph of the same name that this tool did not write.
        ValidationError: the graph is wrong; nothing was put in place.
        ProviderError: the execution provider is not available.
    """
    started = time.monotonic()
    check_installed(options)
    model = open_converted(Path(folder))
    repository = for_task(model, options.computes, last_logits=options.last_logits)
    pooling = None
    if options.pooled:
        pooling = graph_pooling(repository.source, options.pooling)
    check_no_links(repository, options)
    if manifest.listed(model.source):
        manifest.compare(model, manifest.model_files(model), progress=progress)
    place = repository.folder
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(f"no permission to write in {place}; export a copy of it")

    with workspace(place / STANDALONE) as work:
        graphs = write_graphs(repository, options, pooling, work, progress=progress)
        names = [*graphs, *(f"{name}_data" for name in graphs if (work / f"{name}_data").exists())]
        before = check_others(place, names)
        report = None
        if options.validate:
            report = validated(repository, options, {name: work / name for name in graphs}, progress=progress)
            write_json(work / REPORT, report.to_json())
        note = None
        served = options.profile == "ort" and repository.has_cache
        if served:
            note = write_genai(repository, [*graphs], work)
        names += [name for name in (GENAI, REPORT) if (work / name).exists()]
        others = {name: made for name, made in before.items() if name not in graphs}
        about = section({**graphs, **others}, report, served)
        obsolete = outdated(place, [*graphs], options).difference(names)
        put_in_place(place, work, names, obsolete, about)

    sizes = {name: (place / name).stat().st_size for name in names}
    replaced = {
        name: before[name].dtype
        for name, graph in graphs.items()
        if name in before and before[name].dtype != graph.dtype
    }
    return ExportResult(place.resolve(), sizes, report, replaced, time.monotonic() - started, note)


def validated(
    repository: AlibiModel, options: OnnxOptions, graphs: Mapping[str, Path], *, progress: bool
) -> ValidationReport:
    """What validation says of new graphs, by their names; raises ``ValidationError`` if one is wrong."""
    from converter.onnx.validate import validate_graphs

    report = validate_graphs(repository, graphs, options.provider, progress=progress)
    if report.failure:
        problem = f"{report.failure}; no graph was written"
        if options.dtype == INTEGER:
            # With 8 bits for activations, too, outliers among them leave too few for the others.
            problem += f"; {option.onnx_dtype} int8 does not round activations"
        raise ValidationError(problem)
    return report


def write_genai(repository: AlibiModel, graphs: Sequence[str], work: Path) -> str | None:
    """Writes onnxruntime-genai's config for the last of these graphs; what it lacks, None if it has all."""
    from converter.onnx.genai import NEVER_ENDS, genai_config

    # Of two graphs, the second one computes in float32, for CPUs.
    config = genai_config(repository, file_name=graphs[-1])
    write_json(work / GENAI, config)
    if "eos_token_id" in config["model"]:
        return None
    return NEVER_ENDS


def outdated(place: Path, graphs: Sequence[str], options: OnnxOptions) -> set[str]:
    """The files of a repository that new graphs of these names make wrong, unless they are written anew."""
    found = {REPORT}
    if options.copies_weights:
        # An older graph of this name may have had its weights beside it.
        found |= {f"{name}_data" for name in graphs}
    if served_by_genai(place) in graphs:
        found.add(GENAI)
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def put_in_place(folder: Path, work: Path, names: Sequence[str], obsolete: Iterable[str], about: str) -> None:
    """Moves finished files into a repository, last to first: a file comes before those that it needs.

    ``obsolete`` files are removed, and ``about`` becomes the card's section. A signal does not stop it: it is
    the last step, and takes no time.
    """
    digests = {name: sha256(work / name) for name in names if name != REPORT}
    moved = list(reversed(names))
    # A card in the Hub's cache is a link to a file that others share, so it is replaced and not written to.
    if (folder / CARD).is_file():
        text = (folder / CARD).read_text(encoding="utf-8", errors="surrogateescape")
        text = with_section(text, GRAPHS, about)
        (work / CARD).write_text(text, encoding="utf-8", errors="surrogateescape")
        moved.append(CARD)
    with held():
        for name in moved:
            (folder / name).parent.mkdir(exist_ok=True)
            (work / name).replace(folder / name)
        for name in obsolete:
            (folder / name).unlink(missing_ok=True)
        manifest.update(folder, digests)


def write_graphs(
    repository: AlibiModel,
    options: OnnxOptions,
    pooling: Pooling | None,
    work: Path,
    *,
    progress: bool,
) -> dict[str, Description]:
    """Writes the graphs into a folder, under the names that they will have in the repository."""
    from converter.onnx.build import build_graph
    from converter.onnx.describe import Description

    dtype = options.dtype
    if dtype == "native":
        stored = repository.checkpoint.dtypes[0]
        if stored not in STORED:
            raise SourceError(f"the weights are {stored}; graphs are built over {', '.join(STORED)}")
        dtype = STORED[stored]
    description = Description(
        profile=options.profile,
        dtype=dtype,
        task=TASKS.get(repository.head),
        last_logits=options.last_logits,
        pooling=pooling,
        standalone=options.copies_weights,
        calibrated=bool(options.calibrate),
        alibi_scaling=repository.result_config.get("alibi_scaling"),
    )
    if not options.copies_weights:
        graphs = {GRAPH: description}
        if dtype != "fp32":
            graphs[FLOAT32_GRAPH] = replace(description, dtype="fp32")
        for name, each in graphs.items():
            build_graph(repository, each).save(work / name, each.metadata)
        return graphs

    elements = repository.checkpoint.parameters or 0
    check_space(
        work, elements * BYTES[dtype], "the graph's own weights need", f"leave out {option.onnx_standalone}"
    )
    name = standalone_graph(dtype)
    (work / name).parent.mkdir()
    calibrated: Mapping[str, Path] = {}
    if options.calibrate:
        from converter.onnx.calibrate import calibrate

        scales = "float16" if description.computes_in == "fp16" else "float32"
        calibrated = calibrate(repository, options.calibrate, work, scales, progress=progress)
    build_graph(repository, description, calibrated=calibrated).save(
        work / name,
        description.metadata,
        copy_weights=True,
        one_file=in_one_file(elements, dtype, cached=repository.has_cache),
        progress=progress,
    )
    return {name: description}


def check_others(folder: Path, names: Iterable[str]) -> dict[str, Description]:
    """This tool's graphs that are there before files of these names are written.

    Raises ``OutputError`` for a graph of such a name that this tool did not write.
    """
    from converter.onnx.describe import read_graph

    before = {}
    for name, path in graphs_in(folder).items():
        found = read_graph(path)
        if found is not None:
            before[name] = found[1]
        elif name in names:
            raise OutputError(f"{path} was not written by ntk-convert; move it away first")
    return before


def check_no_links(repository: AlibiModel, options: OnnxOptions) -> None:
    """Raises ``OutputError`` for links: onnxruntime follows none to weights, and their files are others'."""
    if options.copies_weights:
        if (repository.folder / STANDALONE).is_symlink():
            raise OutputError(
                f"{repository.folder / STANDALONE} is a link to another folder; remove it first"
            )
        return
    for name in repository.checkpoint.files:
        if (repository.folder / name).is_symlink():
            raise OutputError(
                f"{name} is a link, as in the Hub's cache, and onnxruntime refuses weights outside the "
                f"graph's folder; export a copy of the repository, or give {option.onnx_standalone}"
            )
