"""The export, from top to bottom: graphs are built, validated and only then put in place."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.bytesize import bytes_text
from converter.errors import OutputError, ValidationError
from converter.exports.onnx.card import TITLE, section
from converter.exports.onnx.choices import INTEGER
from converter.exports.onnx.files import (
    BYTES,
    FLOAT32_GRAPH,
    GENAI,
    GRAPH,
    REPORT,
    STANDALONE,
    graphs_in,
    in_one_file,
    served_by_genai,
    standalone_graph,
)
from converter.exports.onnx.options import OnnxOptions
from converter.exports.onnx.requirements import (
    check_installed,
    check_last_logits,
    check_repository,
    for_task,
    graph_pooling,
)
from converter.exports.staging import Draft, draft
from converter.families.family import TASKS
from converter.result.converted import ConvertedRepository, open_converted
from converter.result.staging import check_space
from converter.source.sentence_transformers import Pooling

if TYPE_CHECKING:
    from converter.exports.onnx.describe import Description
    from converter.exports.onnx.report import ValidationReport

DEFAULT = OnnxOptions()


@dataclass(frozen=True)
class ExportResult:
    """What was exported."""

    path: Path
    """The repository, absolute."""
    files: dict[str, int]
    """File, relative to it -> bytes."""
    report: ValidationReport | None
    """None without validation."""
    seconds: float

    def summary(self) -> str:
        """What was written and what validation found, for people."""
        lines = [f"{name}  {bytes_text(size)}" for name, size in self.files.items()]
        lines += [self.report.summary() if self.report else "not validated"]
        return "\n".join([*lines, f"in {self.seconds:.1f} s"])

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {
            "path": str(self.path),
            "files": self.files,
            "validation": self.report.to_json() if self.report else None,
            "seconds": round(self.seconds, 3),
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
        SourceError: not a converted repository, or a damaged one.
        UnsupportedModel: a family or class that has no graph, or no weights for the task.
        UsageError: logits of last tokens are asked for, of a model that is not a language model.
        OutputError: there is a graph of the same name that this tool did not write.
        ValidationError: the graph is wrong; nothing was put in place.
        ProviderError: the execution provider is not available.
        Interrupted: the user stopped it when the graph was in place.
    """
    check_installed(options)
    return write(open_converted(Path(folder).resolve()), options, progress=progress)


def write(repository: ConvertedRepository, options: OnnxOptions, *, progress: bool = False) -> ExportResult:
    """Writes an ONNX graph of a converted repository; see ``export``."""
    started = time.monotonic()
    check_repository(repository)
    repository = for_task(repository, options.computes)
    check_last_logits(options, repository.config["architectures"][0], repository.family)
    pooling = graph_pooling(repository.folder) if options.pooled else None
    check_no_links(repository, options)
    report = None
    with draft(repository.folder, STANDALONE) as made:
        made.files = write_graphs(repository, options, pooling, made, progress=progress)
        others = check_others(repository, made.files)
        graphs = {name: path for name, path in made.files.items() if name.endswith(".onnx")}
        if options.copies_weights:
            # An older graph of this name may have had its weights beside it.
            made.obsolete += [f"{name}_data" for name in graphs if f"{name}_data" not in made.files]
        if options.validate:
            from converter.exports.onnx.comparison import run

            report = run(repository, graphs, options.provider, progress=progress)
            if report.failure:
                # With 8 bits for activations, too, outliers among them leave too few for the others.
                instead = "; `OnnxOptions.dtype` int8 does not round activations" * (options.dtype == INTEGER)
                raise ValidationError(f"{report.failure}; no graph was written{instead}")
        longest = add_genai(repository, options, graphs, made)
        if report is not None:
            made.reports[REPORT] = made.work / REPORT
            made.reports[REPORT].write_text(as_json(report.to_json()), encoding="utf-8")
        else:
            made.obsolete.append(REPORT)  # it is about a graph that is replaced now
        dtype = resolved(repository, options)
        made.section = (
            TITLE,
            section(options, dtype, pooling, graphs, repository.has_cache, others, report, longest),
        )
    return ExportResult(repository.folder, made.sizes, report, time.monotonic() - started)


def resolved(repository: ConvertedRepository, options: OnnxOptions) -> str:
    """The dtype to write, ``native`` resolved."""
    from converter.exports.onnx.build import dtype_of

    return dtype_of(repository) if options.dtype == "native" else options.dtype


def write_graphs(
    repository: ConvertedRepository,
    options: OnnxOptions,
    pooling: Pooling | None,
    made: Draft,
    *,
    progress: bool,
) -> dict[str, Path]:
    """Builds the graphs and writes them into a draft; name in the repository -> where the file is for now."""
    from converter.exports.onnx.build import build_graph
    from converter.exports.onnx.describe import Description

    dtype = resolved(repository, options)
    description = Description(
        profile=options.profile,
        dtype=dtype,
        task=TASKS.get(repository.head),
        last_logits=options.last_logits,
        pooling=pooling.to_json() if pooling else None,
        standalone=options.copies_weights,
        calibrated=bool(options.calibrate),
        alibi_scaling=repository.config.get("alibi_scaling"),
    )
    if not options.copies_weights:
        graphs = {GRAPH: description}
        if dtype != "fp32":
            graphs[FLOAT32_GRAPH] = replace(description, dtype="fp32")
        for name, each in graphs.items():
            build_graph(repository, each).save(made.work / name, each.metadata)
        return {name: made.work / name for name in graphs}

    elements = repository.checkpoint.parameters or 0
    check_space(
        made.work,
        elements * BYTES[dtype],
        "the graph's own weights need",
        "leave out `OnnxOptions.standalone`",
    )
    own = made.work / standalone_graph(dtype)
    own.parent.mkdir()
    calibrated: Mapping[str, Path] = {}
    if options.calibrate:
        from converter.exports.onnx.calibrate import calibrate

        calibrated = calibrate(repository, options.calibrate, made.work, progress=progress)
    build_graph(repository, description, calibrated=calibrated).save(
        own,
        description.metadata,
        copy_weights=True,
        one_file=in_one_file(elements, dtype, cached=repository.has_cache),
        progress=progress,
    )
    return {f"{STANDALONE}/{path.name}": path for path in sorted(own.parent.iterdir())}


def add_genai(
    repository: ConvertedRepository, options: OnnxOptions, graphs: Mapping[str, Path], made: Draft
) -> int | None:
    """Adds genai_config.json to a draft, if onnxruntime-genai can serve one of the graphs.

    Returns its ``context_length``, in tokens; None if there is no such file.
    """
    from converter.exports.onnx.genai import context_length, genai_config

    served = FLOAT32_GRAPH if FLOAT32_GRAPH in graphs else next(iter(graphs))
    before = served_by_genai(repository.folder)
    if options.profile == "ort" and repository.has_cache:
        stays = before is not None and before not in graphs and (repository.folder / before).is_file()
        if resolved(repository, options) == "bf16" and served != FLOAT32_GRAPH and stays:
            return context_length(repository)  # the CPU provider cannot run the new graph
        made.files[GENAI] = made.work / GENAI
        config = genai_config(repository, file_name=served)
        made.files[GENAI].write_text(as_json(config), encoding="utf-8")
        return int(config["model"]["context_length"])
    if before in graphs:
        made.obsolete.append(GENAI)
    return None


def as_json(content: Any) -> str:
    """JSON as it is written to a file."""
    return json.dumps(content, indent=2) + "\n"


def check_others(repository: ConvertedRepository, names: Iterable[str]) -> dict[str, Description]:
    """The graphs that are there already and stay when files of these names are written, if this tool's own.

    Raises:
        OutputError: a graph that would be replaced, but was not written by this tool; or one that would
            stay, but was made for another scaling.
    """
    from converter.exports.onnx.describe import read_graph

    others = {}
    for name, path in graphs_in(repository.folder).items():
        found = read_graph(path, name)
        if name in names:
            if found is None:
                raise OutputError(f"{path} was not written by ntk-convert; move it away first")
        elif found is not None:
            if found.made.alibi_scaling != repository.config.get("alibi_scaling"):
                raise OutputError(
                    f"{path} was made for another alibi_scaling than config.json has; remove it first"
                )
            others[name] = found.made
    return others


def check_no_links(repository: ConvertedRepository, options: OnnxOptions) -> None:
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
                "graph's folder; export a copy of the repository, or give `OnnxOptions.standalone`"
            )
