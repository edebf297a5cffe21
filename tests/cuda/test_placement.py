"""Where onnxruntime-gpu puts the operators of graphs, without a GPU; docs/onnx.md has the table.

`make test-cuda-placement` makes the environments, of onnxruntime-gpu, NumPy and the stand-in for CUDA's
libraries (runtime.c). Without them, the tests are skipped. Numbers and speed need a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from converter.onnx.options import Profile
from tests import tiny
from tests.cuda import place
from tests.onnx_graphs import TRAIN_LENGTH, converted_copy, edit, exported

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.25.0", "1.31.1")
"""The oldest onnxruntime-gpu that pyproject.toml allows, and the newest."""
LAYERS = 4
COPIES = 3
"""In one run; fewer than layers, so that a copy in each layer is too much."""
SIZES = 64
"""Bytes of an output on the CPU that does not grow with the tokens: a few sizes."""
HEAVY = {"GroupQueryAttention", "MatMulInteger", "MatMulIntegerToFloat"}
"""Operators without a CUDA kernel for some dtypes. Small ones around them run on the CPU too."""

CONCAVE = "bloom concave"
"""BLOOM with a concave penalty."""
DECODERS, ENCODERS = (*tiny.FACTORIES, CONCAVE), tuple(tiny.ENCODERS)
HALF, MIXED, WHOLE = ("fp16", "bf16"), ("int8-fp16", "int4-fp16"), ("fp32", "int8", "int4")
FORMS: dict[str, tuple[Iterable[str], Profile, tuple[str, ...]]] = {
    "decoder, `ort`, `fp16`, `bf16`": (DECODERS, "ort", HALF),
    "decoder, `ort`, `int8-fp16`, `int4-fp16`": (DECODERS, "ort", MIXED),
    "decoder, `ort`, `fp32`, `int8`, `int4`": (DECODERS, "ort", WHOLE),
    "decoder, `ort`, `w8a8`": (DECODERS, "ort", ("w8a8",)),
    "decoder, `portable`, all but `w8a8`": (DECODERS, "portable", (*HALF, *MIXED, *WHOLE)),
    "decoder, `portable`, `w8a8`": (DECODERS, "portable", ("w8a8",)),
    "encoder, `ort`, `fp16`, `bf16`, `int8-fp16`, `int4-fp16`": (ENCODERS, "ort", (*HALF, *MIXED)),
    "encoder, `portable`, all but `w8a8`": (ENCODERS, "portable", (*HALF, *MIXED, *WHOLE)),
    "encoder, `portable`, `w8a8`": (ENCODERS, "portable", ("w8a8",)),
}
"""Row of the table -> families, profile and dtypes."""


def environment(version: str) -> Path:
    return ROOT / f".venv-cuda-{version}"


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    if not (environment(request.param) / "ready").exists():
        pytest.skip("make test-cuda-placement makes the environment")
    return str(request.param)


def run_there(version: str, folder: Path, graphs: Iterable[Path]) -> dict[str, Any]:
    """Path of a graph -> what ``place.place`` finds."""
    there = environment(version)
    words = [there / "bin/python", "-I", place.__file__, folder / "found.json", *graphs]
    more = {"LD_LIBRARY_PATH": str(there / "stand-in"), "STAND_IN_LOG": str(folder / "log")}
    subprocess.run(words, env=os.environ | more, check=True)
    return dict(json.loads((folder / "found.json").read_text(encoding="utf-8")))


def cell(cases: dict[str, Any] | str) -> str:
    """What the table says of a graph."""
    if isinstance(cases, str):
        return f"does not load: {cases}"
    errors = [f"{name}: {case['error']}" for name, case in cases.items() if case["error"]]
    if errors:
        return "\n".join(errors)
    host = {name for case in cases.values() for name, size in case["host"].items() if size > SIZES}
    if host:
        return ", ".join(f"`{name}`" for name in sorted(host & HEAVY or host)) + " on the CPU"
    if max(case["copies"] for case in cases.values()) > COPIES:
        return "on CUDA, with copies in each layer"
    notes = [[line.split(" ", 1) for line in case["log"]] for case in cases.values()]
    if max(sum(kind == "to" for kind, _ in case) for case in notes) > COPIES:
        return "on CUDA, which the host waits for in each layer"
    flash = [any("flash_fwd" in text for kind, text in case if kind == "kernel") for case in notes]
    return "on CUDA, with FlashAttention" if all(flash) else "on CUDA"


def made(folder: Path, name: str) -> Path:
    """A converted tiny checkpoint."""
    scaling = {"method": "concave", "train_length": TRAIN_LENGTH} if name == CONCAVE else {}
    family = name.split(maxsplit=1)[0]
    write, layers = (tiny.FACTORIES | tiny.ENCODERS)[family], {tiny.CHECKPOINTS[family].layers: LAYERS}
    folder.mkdir(parents=True)
    return converted_copy(write(folder / "source", **layers), folder / "converted", **scaling)


def graph_of(converted: Path, profile: Profile, dtype: str) -> Path:
    """The graph of a dtype, in the same folder as those of other dtypes and profiles."""
    before = set(converted.rglob("*.onnx"))
    new = set(exported(converted, profile, dtype=dtype).rglob("*.onnx")) - before
    [path] = [path for path in new if path.name != "model_fp32.onnx"]
    name = path.with_name(f"{profile}-{dtype}-{path.name}")
    return path.rename(name)


def table() -> dict[str, dict[str, str]]:
    """Version -> row -> cell, of docs/onnx.md."""
    text = (ROOT / "docs/onnx.md").read_text(encoding="utf-8")
    heading = "| graph | " + " | ".join(VERSIONS) + " |\n"
    assert text.count(heading) == 1
    lines = text.split(heading)[1].split("\n\n")[0].splitlines()[1:]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines]
    return {version: {row[0]: row[number] for row in rows} for number, version in enumerate(VERSIONS, 1)}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tuple[str, str]]:
    """Path of a graph -> its row, and its family and dtype."""
    folder = tmp_path_factory.mktemp("graphs")
    converted = {name: made(folder / name, name) for name in (*DECODERS, *ENCODERS)}
    return {
        graph_of(converted[name], profile, dtype): (form, f"{name} {dtype}")
        for form, (names, profile, dtypes) in FORMS.items()
        for name in names
        for dtype in dtypes
    }


@pytest.mark.slow
def test_the_table_says_what_runs_where(
    tmp_path: Path, version: str, graphs: dict[Path, tuple[str, str]]
) -> None:
    """One graph of each family and dtype runs prompt, batch, decoding, chunk and shared buffer."""
    found: dict[str, dict[str, list[str]]] = {form: {} for form in FORMS}
    for path, cases in run_there(version, tmp_path, graphs).items():
        form, graph = graphs[Path(path)]
        found[form].setdefault(cell(cases), []).append(graph)
    said = table()[version]
    assert said.keys() == FORMS.keys()
    # An assertion shows the graphs that differ from their row.
    wrong = {
        form: {text: names for text, names in cells.items() if text != said[form]}
        for form, cells in found.items()
    }
    assert wrong == {form: {} for form in FORMS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "method", "channels"),
    [(64, "none", 96), (112, "concave", 128), (120, "none", 128), (128, "none", 192), (128, "concave", 192)],
)
def test_kernel_of_flash_attention(
    tmp_path: Path, version: str, size: int, method: str, channels: int
) -> None:
    """The kernel of 192 channels was wrong on a GPU; benchmarks/results/gpu-choices.md."""
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 2, hidden_size=2 * size)
    converted = converted_copy(source, tmp_path / "converted", method=method, train_length=TRAIN_LENGTH)
    [cases] = run_there(version, tmp_path, [graph_of(converted, "ort", "fp16")]).values()
    kernels = [line for line in cases["prompt"]["log"] if "flash_fwd" in line]
    assert kernels
    assert all(f"Flash_fwd_kernel_traitsILi{channels}E" in line for line in kernels)


def on_the_cpu(model: onnx.ModelProto) -> None:
    """An operator without a CUDA kernel, before the logits."""
    [last] = [node for node in model.graph.node if "logits" in node.output]
    model.graph.node.insert(
        list(model.graph.node).index(last), helper.make_node("Atan", [last.input[0]], ["moved"])
    )
    last.input[0] = "moved"


def copied(model: onnx.ModelProto) -> None:
    """A number from the CPU in each layer."""
    nodes = model.graph.node
    for number, node in enumerate([node for node in nodes if node.op_type == "GroupQueryAttention"]):
        output, attended, rows, added = node.output[0], *(f"{name} {number}" for name in "abc")
        node.output[0] = attended
        for new in (
            helper.make_node("Add", [attended, added], [output]),
            helper.make_node("Cast", [rows], [added], to=onnx.TensorProto.FLOAT16),
            helper.make_node("Shape", [attended], [rows], start=0, end=1),
        ):
            nodes.insert(list(nodes).index(node) + 1, new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "right"),
    [(on_the_cpu, "`Atan`, `Cast` on the CPU"), (copied, "on CUDA, with copies in each layer")],
)
def test_a_planted_mistake_is_found(
    tmp_path: Path, version: str, change: Callable[[onnx.ModelProto], None], right: str
) -> None:
    path = graph_of(made(tmp_path / "bloom", "bloom"), "ort", "fp16")
    edit(path, change)
    [cases] = run_there(version, tmp_path, [path]).values()
    assert cell(cases) == right
