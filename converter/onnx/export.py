"""The export, from top to bottom: graphs are built, validated and only then put in place."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter import manifest
from converter.checkpoint import ITEM_BYTES, Checkpoint
from converter.errors import MissingPackage, OutputError, SourceError, ValidationError
from converter.interrupts import Interrupted, held
from converter.jsonfile import read_object
from converter.onnx.card import with_section
from converter.onnx.options import QUANTISED, OnnxOptions
from converter.source import CARD
from converter.staging import check_space, workspace
from converter.weights.files import sha256

if TYPE_CHECKING:
    from converter.onnx.build import Repository
    from converter.onnx.validation import ValidationReport

GRAPH, FLOAT32_GRAPH = "model.onnx", "model_fp32.onnx"
STANDALONE = "onnx"
"""Folder of a graph that has its own copy of the weights, as exporters for the Hub lay it out."""
DEFAULT = OnnxOptions()
GENAI, REPORT = "genai_config.json", manifest.REPORT
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "int4": 2}
"""Disk space that a copy of the weights needs, in bytes for each of them, scales included."""
PACKAGES = ("onnx", "onnx_ir", "onnxruntime")


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

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {
            "path": str(self.path),
            "files": self.files,
            "validation": self.report.to_json() if self.report else None,
            "seconds": round(self.seconds, 3),
        }


def check_requirements(options: OnnxOptions = DEFAULT) -> None:
    """What can be known before anything is read.

    Raises:
        MissingPackage: onnx, onnx-ir or onnxruntime is not installed.
        ProviderError: onnxruntime does not have the provider.
    """
    from importlib.util import find_spec

    missing = [name.replace("_", "-") for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"ONNX needs {' and '.join(missing)}: pip install 'ntk-convert[onnx]', "
            "or 'ntk-convert[onnx-gpu]' for CUDA"
        )
    if options.provider is not None and options.validate:
        from converter.onnx.session import check_available

        check_available(options.provider)


def export(folder: str | Path, options: OnnxOptions = DEFAULT, *, progress: bool = False) -> ExportResult:
    """Writes an ONNX graph of a converted repository into it, validated under onnxruntime.

    The graph points to the weights where they are and adds none; of half-precision weights there is a
    second one, ``model_fp32.onnx``, which computes in float32 over the same weights, for CPUs. With
    the profile ``ort`` a ``genai_config.json`` lets onnxruntime-genai serve a causal language model.

    Args:
        folder: a repository that ``convert`` wrote.
        options: what graph to write.
        progress: draw progress bars on stderr.

    Raises:
        MissingPackage: onnx, onnx-ir or onnxruntime is not installed.
        SourceError: no converted repository, or a damaged one.
        UnsupportedModel: a family or class that has no graph.
        OutputError: there is a graph of the same name that this tool did not write.
        ValidationError: the graph is not right; nothing was put in place.
        ProviderError: the execution provider is not there.
        Interrupted: the user stopped it when the graph was in place.
    """
    started = time.monotonic()
    check_requirements(options)
    from converter.onnx.build import open_repository

    repository = open_repository(Path(folder).resolve())
    if not os.access(repository.folder, os.W_OK | os.X_OK):
        raise OutputError(f"no permission to write in {repository.folder}; export a copy of it")
    check_no_links(repository, options)
    files: dict[str, int] = {}
    try:
        with workspace(repository.folder / STANDALONE) as work:
            remove_leftovers(repository.folder)
            try:
                staged = write_graphs(repository, options, work, progress=progress)
                check_others(repository, staged)
                report = None
                if options.validate:
                    from converter.onnx.validation import run

                    graphs = {name: path for name, path in staged.items() if name.endswith(".onnx")}
                    report = run(repository, graphs, options.provider, progress=progress)
                    if report.failure:
                        raise ValidationError(f"{report.failure}; no graph was written")
                texts = write_texts(repository, options, staged, report, work)
                digests = {name: sha256(path) for name, path in {**staged, **texts}.items()}
                with held() as waiting:
                    files = publish(repository.folder, staged, texts)
                    manifest.update(repository.folder, digests)
                if waiting:
                    raise KeyboardInterrupt
            finally:
                remove_leftovers(repository.folder, own=work)
    except KeyboardInterrupt as error:
        if files:
            raise Interrupted(f"the graph is in place: {', '.join(files)}") from error
        raise
    return ExportResult(repository.folder, files, report, time.monotonic() - started)


def planned_files(options: OnnxOptions, dtypes: Sequence[str], *, decoder: bool) -> list[str]:
    """What an export would write.

    Args:
        options: what graph.
        decoder: whether it has a cache.
        dtypes: safetensors dtypes of the weights, the commonest first; empty if they are not known.
    """
    half = options.dtype in ("fp16", "bf16") or (
        options.dtype == "native" and dtypes[:1] not in ((), ("F32",))
    )
    graph = f"{STANDALONE}/{GRAPH}" if options.copies_weights else GRAPH
    names = [graph, f"{graph}_data"] if options.copies_weights else [graph, *[FLOAT32_GRAPH] * half]
    return names + [GENAI] * (decoder and options.profile == "ort") + [REPORT] * options.validate


def graph_bytes(options: OnnxOptions, checkpoint: Checkpoint, dtype: str | None) -> int:
    """Disk that a graph takes, beside some hundred kilobytes: of weights of its own.

    Args:
        options: what graph.
        checkpoint: of the model; the parameters of ``.bin`` files are taken to be of two bytes.
        dtype: safetensors dtype that the weights will have; None for the checkpoint's.
    """
    if not options.copies_weights:
        return 0
    native = ITEM_BYTES[dtype or next(iter(checkpoint.dtypes), "F16")]
    parameters = checkpoint.parameters or checkpoint.total_bytes // 2
    return parameters * BYTES.get(options.dtype, native)


def resolved(repository: Repository, options: OnnxOptions) -> str:
    """The dtype to write, ``native`` resolved."""
    return repository.dtype if options.dtype == "native" else options.dtype


def write_graphs(
    repository: Repository, options: OnnxOptions, work: Path, *, progress: bool
) -> dict[str, Path]:
    """Builds the graphs under names of their own.

    Args:
        repository: what they are built from.
        options: which.
        work: an empty folder in the repository, for what does not have to stand beside the weights.
        progress: draw a bar where weights are copied.

    Returns:
        Name in the repository -> where the file is for now: graphs, and the data of a standalone one.
    """
    from converter.onnx.build import COMPUTE, build_graph
    from converter.onnx.graph import METADATA, Graph

    def build(compute: str, *, copied: bool = False, converted: bool = False) -> Graph:
        return build_graph(
            repository,
            profile=options.profile,
            dtype=compute,
            last_logits=options.last_logits,
            follow_links=copied,
            convert_weights=converted,
        )

    def save(graph: Graph, path: Path, dtype: str, *, copied: bool = False) -> Path:
        made = {
            "profile": options.profile,
            "dtype": dtype,
            "last_logits": options.last_logits,
            "standalone": copied,
            "alibi_scaling": repository.config.get("alibi_scaling"),
        }
        graph.save(path, {METADATA: json.dumps(made)}, copy_weights=copied, progress=progress)
        return path

    dtype = resolved(repository, options)
    own = work / STANDALONE
    files: dict[str, Path] = {}
    if options.copies_weights:
        needed = (repository.checkpoint.parameters or 0) * BYTES[dtype]
        check_space(work, needed, "the graph's own weights need", "leave out --onnx-standalone")
        own.mkdir()
    if dtype in QUANTISED:
        from converter.onnx.quantise import quantise

        graph = build("fp32", copied=True)
        quantise(graph.main, QUANTISED[dtype], fused=options.profile == "ort", progress=progress)
        save(graph, own / GRAPH, dtype, copied=True)
    elif options.standalone:
        save(build(dtype, copied=True, converted=True), own / GRAPH, dtype, copied=True)
    else:
        files[GRAPH] = save(build(dtype), unfinished(repository.folder, GRAPH, work), dtype)
    if dtype in COMPUTE and dtype != "fp32" and not options.copies_weights:
        path = unfinished(repository.folder, FLOAT32_GRAPH, work)
        files[FLOAT32_GRAPH] = save(build("fp32"), path, "fp32")
    if own.is_dir():
        files |= {f"{STANDALONE}/{path.name}": path for path in sorted(own.iterdir())}
    return files


def write_texts(
    repository: Repository,
    options: OnnxOptions,
    staged: Mapping[str, Path],
    report: ValidationReport | None,
    work: Path,
) -> dict[str, Path]:
    """Writes what belongs to the graphs: genai_config.json, the report, and the card where there is one.

    Args:
        staged: the graphs, as ``write_graphs`` returns them.
        report: of their validation, if there was one.
        work: the folder for all of it, so that nothing is written to what is there: a file in the Hub's
            cache is a link to one that others share, and another may be the same file as the source's.

    Returns:
        Name in the repository -> where the file is for now; the card last.
    """
    from converter.onnx.describe import description
    from converter.onnx.genai import genai_config

    texts: dict[str, str] = {}
    graphs = [name for name in staged if name.endswith(".onnx")]
    served = FLOAT32_GRAPH if FLOAT32_GRAPH in graphs else graphs[0]
    found = description(staged[served], served)
    if found.profile == "ort" and repository.decoder:
        texts[GENAI] = as_json(genai_config(repository, file_name=served, head_size=found.head_size))
    if report is not None:
        texts[REPORT] = as_json(report.to_json())
    card = repository.folder / CARD
    if card.is_file():
        old = card.read_text(encoding="utf-8", errors="surrogateescape")
        texts[CARD] = with_section(old, options, resolved(repository, options), [*staged, *texts], report)
    for name, text in texts.items():
        (work / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return {name: work / name for name in texts}


def as_json(content: Any) -> str:
    """As it stands in a file."""
    return json.dumps(content, indent=2) + "\n"


def publish(folder: Path, graphs: Mapping[str, Path], texts: Mapping[str, Path]) -> dict[str, int]:
    """Puts finished files in place, graphs after what belongs to them; returns the sizes of all but the card.

    Args:
        folder: the repository.
        graphs, texts: name in it -> where the file is for now.
    """
    files = {**texts, **graphs}
    for name in sorted(files, key=lambda name: name.endswith(".onnx")):
        (folder / name).parent.mkdir(exist_ok=True)
        files[name].replace(folder / name)
    if REPORT not in texts:
        (folder / REPORT).unlink(missing_ok=True)  # it is about a graph that has just been replaced
    if GENAI not in texts and served_by_genai(folder) in graphs:
        (folder / GENAI).unlink()  # it was for the graph that has just been replaced
    names = [*graphs, *(name for name in texts if name != CARD)]
    return {name: (folder / name).stat().st_size for name in names}


def served_by_genai(folder: Path) -> str | None:
    """The graph that the repository's genai_config.json names; None without one."""
    try:
        name = read_object(folder / GENAI)["model"]["decoder"]["filename"]
    except (SourceError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def check_others(repository: Repository, names: Iterable[str]) -> None:
    """Checks the graphs that are there already.

    Raises:
        OutputError: one that would be replaced, but was not written by this tool; or one that would stay,
            but was made for another scaling.
    """
    from converter.onnx.describe import describe

    for path in graphs_in(repository.folder):
        made, name = describe(path), path.relative_to(repository.folder).as_posix()
        if name in names and made is None:
            raise OutputError(f"{path} was not written by ntk-convert; move it away first")
        if name not in names and made and made.alibi_scaling != repository.config.get("alibi_scaling"):
            raise OutputError(
                f"{path} was made for another alibi_scaling than config.json has; remove it first"
            )


def graphs_in(folder: Path) -> list[Path]:
    """The ONNX files of a repository, wherever ``export`` may write one."""
    found = (path for pattern in ("*.onnx", f"{STANDALONE}/*.onnx") for path in sorted(folder.glob(pattern)))
    return [path for path in found if not path.name.startswith(".")]


def check_no_links(repository: Repository, options: OnnxOptions) -> None:
    """Raises ``OutputError`` where the graph would stand in a folder that is a link, to somebody else's
    files; or beside weights that are links, of which onnxruntime follows none from a real graph."""
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
                "graph's folder; export a copy of the repository, or give --onnx-standalone"
            )


def unfinished(folder: Path, name: str, work: Path) -> Path:
    """Where a file of this run is, beside the weights, until it is put in place."""
    return folder / f".{name}{work.name.removeprefix('.' + STANDALONE)}"


def remove_leftovers(folder: Path, *, own: Path | None = None) -> None:
    """Removes unfinished files: those whose run is gone, with its working folder, and those of ``own``."""
    for path in folder.glob(".*.ntk-convert-*"):
        run = path.parent / f".{STANDALONE}.ntk-convert-{path.name.partition('.ntk-convert-')[2]}"
        if not path.is_dir() and (run == own or not run.exists()):
            path.unlink(missing_ok=True)
