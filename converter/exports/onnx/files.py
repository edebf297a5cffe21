"""The files of ONNX graphs: their names, and the disk space that they need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from converter.errors import SourceError

if TYPE_CHECKING:
    from converter.exports.onnx.choices import GraphOptions
    from converter.source.checkpoint import Checkpoint

GRAPH, FLOAT32_GRAPH = "model.onnx", "model_fp32.onnx"
STANDALONE = "onnx"
"""Folder of a graph with its own copy of the weights; exporters for the Hub use the same name."""
GENAI = "genai_config.json"
"""Config of onnxruntime-genai."""
REPORT = "onnx_validation.json"
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "int4": 2}
"""dtype of a graph -> disk space for each weight that it copies, in bytes, scales included."""


def planned_files(options: GraphOptions, dtypes: Sequence[str], *, decoder: bool) -> list[str]:
    """Names of the files that an export would write; see ``Export.planned_files``."""
    half = options.dtype in ("fp16", "bf16") or (
        options.dtype == "native" and dtypes[:1] not in ((), ("F32",))
    )
    graph = f"{STANDALONE}/{GRAPH}" if options.copies_weights else GRAPH
    names = [graph, f"{graph}_data"] if options.copies_weights else [graph, *[FLOAT32_GRAPH] * half]
    return names + [GENAI] * (decoder and options.profile == "ort") + [REPORT] * options.validate


def graph_bytes(options: GraphOptions, checkpoint: Checkpoint, dtype: str | None) -> int:
    """Disk space that the graph's own weights need, in bytes; see ``Export.bytes_needed``."""
    from converter.source.checkpoint import ITEM_BYTES

    if not options.copies_weights:
        return 0
    native = ITEM_BYTES[dtype or next(iter(checkpoint.dtypes), "F16")]
    parameters = checkpoint.parameters or checkpoint.total_bytes // 2
    return parameters * BYTES.get(options.dtype, native)


def graphs_in(folder: Path) -> dict[str, Path]:
    """The ONNX files of a repository, wherever ``export`` may write one: name -> path."""
    found = (path for pattern in ("*.onnx", f"{STANDALONE}/*.onnx") for path in sorted(folder.glob(pattern)))
    return {path.relative_to(folder).as_posix(): path for path in found if not path.name.startswith(".")}


def served_by_genai(folder: Path) -> str | None:
    """The graph that the repository's genai_config.json names; None without one."""
    from converter.source.jsonfile import read_object

    try:
        name = read_object(folder / GENAI)["model"]["decoder"]["filename"]
    except (SourceError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None
