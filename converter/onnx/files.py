"""The files of ONNX graphs: their names, and the disk space that they need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from converter.errors import SourceError

if TYPE_CHECKING:
    from converter.model.alibi import AlibiModel
    from converter.onnx.options import OnnxOptions
    from converter.plan import Plan

GRAPH, FLOAT32_GRAPH = "model.onnx", "model_fp32.onnx"
STANDALONE = "onnx"
"""Folder of a graph with its own copy of the weights; exporters for the Hub use the same name."""
GENAI = "genai_config.json"
REPORT = "onnx_validation.json"
"""What validation found. Nothing computes with it, so the manifest does not list it."""
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "int4": 2, "int8-fp16": 2, "int4-fp16": 2, "w8a8": 2}
"""dtype of a graph -> disk space for each weight that it copies, in bytes, scales included."""
SUFFIX = {
    "fp32": "",
    "fp16": "_fp16",
    "bf16": "_bf16",
    "int8": "_quantized",
    "int4": "_q4",
    "int8-fp16": "_q8f16",
    "int4-fp16": "_q4f16",
    "w8a8": "_int8",
}
"""dtype of a graph with its own weights -> end of its name, so that several are side by side.

transformers.js chooses a file by these names (its utils/dtypes.js; bf16 and q8f16 are not among them)."""
STORED = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""safetensors dtype -> dtype of a graph."""
ONE_FILE = 2_000_000_000
"""Bytes. protobuf, the format of a graph's file, has a limit of 2 GiB."""


def standalone_graph(dtype: str) -> str:
    """Name of the graph of this dtype with its own copy of the weights."""
    return f"{STANDALONE}/model{SUFFIX[dtype]}.onnx"


def in_one_file(elements: int, dtype: str, *, cached: bool) -> bool:
    """Whether such a graph has its weights inside, because those who load it fetch one file.

    Loaders of language models (``cached``) know the second file.
    """
    # A bfloat16 graph is run in float32 by validation, which must fit as well.
    return not cached and elements * (4 if dtype == "bf16" else BYTES[dtype]) <= ONE_FILE


def planned_files(plan: Plan, options: OnnxOptions) -> list[str]:
    """Names of the files that an export of a planned conversion would write."""
    from converter.onnx.requirements import class_for, has_cache

    family, elements = cast("AlibiModel", plan.model).family, plan.weights.elements
    cached = has_cache(class_for(options.computes, family, plan.files.config), family)
    stored = max(elements, key=lambda dtype: elements[dtype], default="F32")
    dtype = STORED.get(stored, "fp32") if options.dtype == "native" else options.dtype
    names = [GRAPH, *[FLOAT32_GRAPH] * (dtype in ("fp16", "bf16"))]
    if options.copies_weights:
        graph = standalone_graph(dtype)
        inside = in_one_file(sum(elements.values()), dtype, cached=cached)
        names = [graph, *[f"{graph}_data"] * (not inside)]
    return names + [GENAI] * (cached and options.profile == "ort") + [REPORT] * options.validate


def graph_bytes(plan: Plan, options: OnnxOptions) -> int:
    """Bytes that the graph's own weights need, as far as they are known before a download."""
    if not options.copies_weights:
        return 0
    from converter.source.checkpoint import ITEM_BYTES

    elements = plan.weights.elements
    native = ITEM_BYTES[max(elements, key=lambda dtype: elements[dtype], default="F16")]
    count: int = sum(elements.values()) or plan.weights.result_bytes // 2
    return count * BYTES.get(options.dtype, native)


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
