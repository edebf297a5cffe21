"""The export as a user sees it: what is written, what is left alone, what it costs."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from converter.exports.onnx.card import section
from converter.exports.onnx.choices import Profile
from converter.exports.onnx.export import ExportResult, export
from converter.exports.onnx.options import OnnxOptions
from tests import tiny
from tests.conftest import MakeSource, Run, edit_json, fingerprint
from tests.dealt import dealt, quick
from tests.onnx_graphs import (
    PROFILES,
    TRAIN_LENGTH,
    Engine,
    Make,
    assert_close,
    converted_copy,
    expected,
    external,
    nodes_of,
)
from tests.patched import FAMILIES

ROOT = Path(__file__).parent.parent
CONVERT = ("--scale", "2", "--train-length", TRAIN_LENGTH)
CARD = "README.md"
MANIFEST = "ntk_convert.json"
GENAI, REPORT = "genai_config.json", "onnx_validation.json"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

Command = Callable[..., Run]


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def new_files(run: Command, folder: Path, *words: object) -> set[str]:
    """What an export adds; it must leave everything but the card as it was."""
    before = fingerprint(folder)
    result = run("export", folder, *words)
    assert result.code == 0, result.err
    after = fingerprint(folder)
    assert {name for name in before if after.get(name) != before[name]} <= {CARD, MANIFEST}
    return files_of(folder) - before.keys()


# What is written


@pytest.mark.parametrize("family", quick(FAMILIES, "bloom", "refact"))
def test_a_graph_and_what_serves_it(repository: Make, run: Command, family: str) -> None:
    folder = repository(family)
    assert new_files(run, folder) == {"model.onnx", GENAI, REPORT}
    assert json.loads((folder / REPORT).read_text())["passed"] is True
    assert json.loads((folder / GENAI).read_text())["model"]["decoder"]["filename"] == "model.onnx"
    assert run("validate", folder).code == 0


@pytest.mark.parametrize("family", quick(FAMILIES, "mpt"))
def test_the_portable_profile_has_no_config_of_genai(repository: Make, run: Command, family: str) -> None:
    folder = repository(family)
    assert new_files(run, folder, "--onnx-profile", "portable") == {"model.onnx", REPORT}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("profile", PROFILES)
def test_half_precision_weights_get_a_float32_graph_too(
    repository: Make, run: Command, profile: Profile, dtype: str
) -> None:
    folder = repository("mpt", dtype=HALF[dtype])
    added = new_files(run, folder, "--onnx-profile", profile)
    assert added - {GENAI} == {"model.onnx", "model_fp32.onnx", REPORT}
    graphs = json.loads((folder / REPORT).read_text())["graphs"]
    assert [(graph["file"], graph["dtype"]) for graph in graphs] == [
        ("model.onnx", dtype),
        ("model_fp32.onnx", "fp32"),
    ]
    ids = tiny.token_ids(1, 20)
    logits, _ = Engine(folder / "model_fp32.onnx").step(ids, np.ones_like(ids))
    assert_close(logits, expected(folder, "mpt", ids))


def test_the_card_gives_genai_no_more_than_the_context_length(repository: Make, run: Command) -> None:
    """genai refuses a ``max_length`` beyond it."""
    folder = repository()
    run("export", folder, "--no-validate")
    longest = json.loads((folder / GENAI).read_text())["model"]["context_length"]
    assert longest == 2 * TRAIN_LENGTH
    text = (folder / CARD).read_text(encoding="utf-8")
    assert f"(max_length={longest})  # prompt and answer; at most {longest}\n" in text
    text = section(OnnxOptions(), "fp32", None, ["model.onnx"], True, {}, None, 8192)
    assert "(max_length=4096)  # prompt and answer; at most 8192\n" in text
    assert "max_length" not in section(OnnxOptions(), "fp32", None, ["model.onnx"], True, {}, None, None)


def test_nothing_is_validated_with_no_validate(repository: Make, run: Command) -> None:
    folder = repository()
    assert new_files(run, folder, "--no-validate") == {"model.onnx", GENAI}


def test_path_and_report_are_on_stdout(repository: Make, run: Command) -> None:
    folder = repository()
    result = run("export", folder)
    assert result.out.startswith(f"{folder}\nmodel.onnx")
    assert "ran on CPUExecutionProvider" in result.out
    assert result.err == ""
    quiet = run("export", folder, "-q")
    assert (quiet.out, quiet.err) == (f"{folder}\n", "")
    values = run("export", folder, "--json").json
    assert values["path"] == str(folder)
    assert values["files"] == {name: (folder / name).stat().st_size for name in ("model.onnx", GENAI, REPORT)}
    assert values["validation"] == json.loads((folder / REPORT).read_text())
    report = run("validate", folder)
    assert (report.code, report.err) == (0, "")
    assert "CPUExecutionProvider" in report.out
    assert run("validate", folder, "--json").json["passed"] is True


def test_python_and_command_line_give_the_same(repository: Make, run: Command) -> None:
    folder = repository()
    result = export(folder)
    assert isinstance(result, ExportResult)
    graph = (folder / "model.onnx").read_bytes()
    run("export", folder)
    assert (folder / "model.onnx").read_bytes() == graph
    assert result.report is not None
    assert result.report.passed


def test_exporting_twice_replaces(repository: Make, run: Command) -> None:
    folder = repository()
    assert run("export", folder, "--last-logits").code == 0
    other = (folder / "model.onnx").read_bytes()
    assert run("export", folder).code == 0
    files, graph = files_of(folder), (folder / "model.onnx").read_bytes()
    assert graph != other
    assert run("export", folder).code == 0
    assert files_of(folder) == files
    assert (folder / "model.onnx").read_bytes() == graph
    assert (folder / CARD).read_text().count("## ONNX") == 1


def test_what_another_graph_left_does_not_stay(repository: Make, run: Command) -> None:
    """A report of a graph that is gone, or a genai_config.json that is wrong about the new one."""
    folder = repository()
    assert run("export", folder).code == 0
    assert run("export", folder, "--onnx-profile", "portable", "--no-validate").code == 0
    assert not (folder / REPORT).exists()
    assert not (folder / GENAI).exists()


def test_leftovers_of_killed_exports_are_removed(repository: Make, run: Command) -> None:
    folder = repository()
    script = (
        "import os, signal, sys\n"
        "from converter import OnnxOptions, export\n"
        "import converter.exports.staging as module\n"
        "module._put_in_place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "export(sys.argv[1], OnnxOptions(validate=False))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=False)
    assert killed.returncode < 0
    assert [name for name in files_of(folder) if name.startswith(".")]
    assert run("export", folder, "--no-validate").code == 0
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


# The graph's file


def header(file: Path) -> tuple[int, dict[str, Any]]:
    """Of a safetensors file: where its data starts and what is in it."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return 8 + length, json.loads(content[8 : 8 + length])


@pytest.mark.parametrize(("family", "profile", "sharded"), dealt(FAMILIES, PROFILES, [False, True], each=1))
def test_initialisers_point_into_the_weights(
    repository: Make, run: Command, profile: Profile, family: str, sharded: bool
) -> None:
    folder = repository(family, sharded=sharded)
    assert run("export", folder, "--onnx-profile", profile).code == 0
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    used: dict[str, set[str]] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            assert tensor.ByteSize() < 2048
            continue
        place = external(tensor)
        start, tensors = header(folder / place["location"])
        begin, end = tensors[tensor.name]["data_offsets"]
        assert (int(place["offset"]), int(place["length"])) == (start + begin, end - begin)
        assert list(tensor.dims) == tensors[tensor.name]["shape"]
        used.setdefault(place["location"], set()).add(tensor.name)
    stored = {file.name: header(file)[1].keys() - {"__metadata__"} for file in folder.glob("*.safetensors")}
    assert len(stored) == 1 or sharded
    # Every tensor is used but a tied head's second name and what no version of the model reads.
    unused = {name for names in stored.values() for name in names} - {
        n for names in used.values() for n in names
    }
    dead = ("lm_head.weight", ".attn.bias", ".attn.masked_bias", "relative_pe.slopes")
    assert all(name.endswith(dead) for name in unused)
    assert all(used[file] <= stored[file] for file in used)


@pytest.mark.parametrize("prefix", [True, False])
def test_tensors_are_found_without_their_prefix(repository: Make, run: Command, prefix: bool) -> None:
    assert run("export", repository(prefix=prefix)).code == 0


@pytest.mark.parametrize("profile", PROFILES)
def test_the_size_does_not_depend_on_the_weights(tmp_path: Path, run: Command, profile: Profile) -> None:
    sizes = []
    for width in (4, 16):
        folder = converted_copy(
            tiny.FACTORIES["bloom"](tmp_path / f"{width}", width), tmp_path / f"out-{width}"
        )
        assert run("export", folder, "--no-validate", "--onnx-profile", profile).code == 0
        sizes.append((folder / "model.onnx").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 2048
    assert max(sizes) < 200_000


@pytest.mark.parametrize(
    ("family", "profile", "last_logits"), dealt(FAMILIES, PROFILES, [False, True], each=1)
)
def test_inputs_and_outputs_are_named_as_the_ecosystem_binds_them(
    repository: Make, run: Command, profile: Profile, family: str, last_logits: bool
) -> None:
    folder = repository(family)
    words = ["--onnx-profile", profile, *(["--last-logits"] if last_logits else [])]
    assert run("export", folder, *words).code == 0
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph

    def described(values: Any) -> dict[str, tuple[int, list[str | int]]]:
        return {
            value.name: (
                value.type.tensor_type.elem_type,
                [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim],
            )
            for value in values
        }

    size = tiny.HEAD_DIM + (8 if profile == "ort" else 0)
    kept = tiny.CHECKPOINTS[family].kv_heads
    names = [f"{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    assert list(described(graph.input).items()) == [
        ("input_ids", (7, ["batch_size", "sequence_length"])),
        ("attention_mask", (7, ["batch_size", "total_sequence_length"])),
        *(
            (f"past_key_values.{name}", (1, ["batch_size", kept, "past_sequence_length", size]))
            for name in names
        ),
    ]
    length = 1 if last_logits else "sequence_length"
    assert list(described(graph.output).items()) == [
        ("logits", (1, ["batch_size", length, tiny.VOCAB_SIZE])),
        *((f"present.{name}", (1, ["batch_size", kept, "total_sequence_length", size])) for name in names),
    ]


@pytest.mark.parametrize(("family", "dtype"), dealt(FAMILIES, ["native", "fp16"], each=1))
def test_a_portable_graph_has_standard_operators_only(
    repository: Make, run: Command, family: str, dtype: str
) -> None:
    folder = repository(family)
    words = ("--onnx-profile", "portable", "--onnx-dtype", dtype, "--no-validate")
    assert run("export", folder, *words).code == 0
    nodes = list(nodes_of(onnx.load(folder / "model.onnx", load_external_data=False).graph))
    assert {node.domain for node in nodes} <= {"", "ai.onnx"}
    assert len(nodes) > 50


@pytest.mark.parametrize(("family", "profile"), dealt(FAMILIES, PROFILES, each=1))
def test_node_names_follow_the_model(repository: Make, run: Command, family: str, profile: Profile) -> None:
    folder = repository(family)
    run("export", folder, "--no-validate", "--onnx-profile", profile)
    names = [node.name for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node]
    assert len(set(names)) == len(names)
    assert all(re.match(r"/(embeddings|alibi|head|layers\.[01])/", name) for name in names if "/" in name[1:])


@pytest.mark.parametrize("dtype", ["native", "fp32"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_standalone_graph_needs_only_its_folder(
    repository: Make, run: Command, tmp_path: Path, profile: Profile, dtype: str
) -> None:
    folder = repository("falcon", dtype=torch.float16)
    words = ("--onnx-standalone", "--onnx-dtype", dtype, "--onnx-profile", profile)
    added = new_files(run, folder, *words)
    name = "onnx/model.onnx" if dtype == "fp32" else "onnx/model_fp16.onnx"
    assert added - {GENAI} == {name, f"{name}_data", REPORT}
    if profile == "ort":
        served = json.loads((folder / GENAI).read_text())["model"]["decoder"]["filename"]
        assert served == name
    assert run("validate", folder).code == 0
    moved = shutil.move(folder / "onnx", tmp_path / "elsewhere")
    ids = tiny.token_ids(1, 20)
    logits, _ = Engine(Path(moved) / Path(name).name).step(ids, np.ones_like(ids))
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    assert_close(logits, expected(folder, "falcon", ids), relative=tolerance)


def as_in_the_cache(folder: Path, hub: Path) -> Path:
    """Moves a repository into the layout of the Hub's cache: links into a folder of blobs."""
    blobs, links = hub / "blobs", hub / "snapshots/1234"
    blobs.mkdir(parents=True)
    links.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040d}")
        (links / file.name).symlink_to(f"../../blobs/{number:040d}")
    return links


@pytest.mark.parametrize("profile", PROFILES)
def test_a_graph_from_the_hub_s_cache_runs_and_validates(
    repository: Make, run: Command, tmp_path: Path, profile: Profile
) -> None:
    """The graph itself is a link there, and so are the weights that it points to."""
    folder = repository()
    assert run("export", folder, "--onnx-profile", profile).code == 0
    links = as_in_the_cache(folder, tmp_path / "hub")
    ids = tiny.token_ids(1, 20)
    logits, _ = Engine(links / "model.onnx").step(ids, np.ones_like(ids))
    assert_close(logits, expected(links, "bloom", ids))
    result = run("validate", links)
    assert result.code == 0, result.err


def test_a_graph_of_its_own_weights_can_be_exported_into_the_hub_s_cache(
    repository: Make, run: Command, tmp_path: Path
) -> None:
    links = as_in_the_cache(repository(), tmp_path / "hub")
    before = fingerprint(tmp_path / "hub/blobs")
    result = run("export", links, "--onnx-standalone")
    assert result.code == 0, result.err
    assert run("validate", links).code == 0
    # Blobs are named after their hashes and shared by revisions.
    assert fingerprint(tmp_path / "hub/blobs") == before


def test_a_graph_beside_links_to_its_weights_is_refused(
    repository: Make, refused: Callable[..., str], tmp_path: Path
) -> None:
    """onnxruntime reads such weights only where the graph is a link too."""
    links = as_in_the_cache(repository(), tmp_path / "hub")
    line = refused("export", links)
    assert "link" in line
    assert "--onnx-standalone" in line


# In one go with the conversion


@pytest.mark.parametrize("family", quick(FAMILIES, "bloom", "falcon"))
def test_convert_with_a_graph(
    pristine: Callable[..., Path], run: Command, tmp_path: Path, family: str
) -> None:
    out = tmp_path / "out"
    result = run(pristine(family), *CONVERT, "--out", out, "--onnx", "--last-logits", "--json")
    assert result.code == 0, result.err
    values = result.json
    assert values["files"] == {name: (out / name).stat().st_size for name in files_of(out)}
    assert {"model.onnx", GENAI, REPORT} <= files_of(out)
    assert not [name for name in files_of(out) if name.startswith(".")]
    assert values["onnx"]["validation"]["passed"] is True
    assert values["onnx"]["path"] == values["path"] == str(out)
    card = (out / CARD).read_text(encoding="utf-8")
    assert "--onnx --last-logits" in card
    assert "## ONNX" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_wrong_graph_leaves_no_conversion_either(
    make_source: MakeSource, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source()
    monkeypatch.setattr("converter.exports.onnx.decoder.Decoder.epsilon", 0.5)
    line = refused(source, *CONVERT, "--out", tmp_path / "out", "--onnx")
    assert "model.onnx: prompt of" in line


# What it costs

MEASURED = """
import json, sys, time
from pathlib import Path
from converter.cli import main
def peak():  # bytes; ru_maxrss starts with the parent's
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024
read = lambda: int(Path("/proc/self/io").read_text().split()[1])
started = time.process_time()
import converter.exports.onnx.build
before = read()
try:
    main(["export", sys.argv[1], "--no-validate", "-q", *sys.argv[2:]])
except SystemExit as error:
    code = error.code
print(json.dumps({
    "code": code or 0,
    "seconds": time.process_time() - started,
    "bytes_read": read() - before,
    "peak": peak(),
    "modules": sorted({"torch", "transformers", "onnxruntime"} & sys.modules.keys()),
}))
"""


def measured(folder: Path, *words: str) -> dict[str, Any]:
    """An export in a process of its own, and what it used."""
    command = [sys.executable, "-c", MEASURED, str(folder), *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def grow(folder: Path, *, layers: int, heads: int, head_dim: int, vocabulary: int) -> None:
    """Makes a tiny BLOOM a large one of float16, whose weights are a hole in a sparse file."""
    hidden = heads * head_dim
    _, tiny_header = header(folder / "model.safetensors")
    sizes = {4 * tiny.HEAD_DIM: hidden, 12 * tiny.HEAD_DIM: 3 * hidden, 16 * tiny.HEAD_DIM: 4 * hidden}
    sizes[tiny.VOCAB_SIZE] = vocabulary
    tensors: dict[str, Any] = {}
    end = 0
    for name, entry in tiny_header.items():
        if name == "__metadata__" or ".h.1." in name:
            continue
        for layer in range(layers if ".h.0." in name else 1):
            shape = [sizes[size] for size in entry["shape"]]
            start, end = end, end + 2 * int(np.prod(shape))
            tensors[name.replace(".h.0.", f".h.{layer}.")] = {
                "dtype": "F16",
                "shape": shape,
                "data_offsets": [start, end],
            }
    content = json.dumps(tensors).encode()
    content += b" " * (-len(content) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)
    changes = {"n_layer": layers, "hidden_size": hidden, "n_head": heads, "vocab_size": vocabulary}
    edit_json(folder / "config.json", changes)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--onnx-standalone", "--onnx-profile", "portable")], ids=str)
def test_no_heavy_package_is_loaded_without_validation(repository: Make, words: tuple[str, ...]) -> None:
    folder = repository()
    for _ in range(2):  # nor to look at what would be replaced
        used = measured(folder, *words)
        assert used["code"] == 0
        assert used["modules"] == []


@pytest.mark.parametrize("profile", PROFILES)
def test_a_large_checkpoint_takes_no_time_and_no_memory(repository: Make, profile: Profile) -> None:
    """BLOOM-1b7's sizes: 3.4 GB that are never read."""
    folder = repository()
    grow(folder, layers=24, heads=16, head_dim=128, vocabulary=250880)
    assert (folder / "model.safetensors").stat().st_size > 3e9
    used = measured(folder, "--onnx-profile", profile)
    assert used["code"] == 0
    assert used["peak"] < 500e6
    assert used["bytes_read"] < 30e6
    assert used["seconds"] < 10
    graphs = [folder / "model.onnx", folder / "model_fp32.onnx"]
    assert all(graph.stat().st_size < 2e6 for graph in graphs)
