"""The export as a user sees it: what is written, what is left alone, what ends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from converter.conversion import convert
from converter.onnx.export import ExportResult, export
from converter.onnx.options import OnnxOptions, Profile
from tests import tiny
from tests.conftest import Pristine, Refused, RunCli, fingerprint
from tests.messages import says
from tests.onnx_graphs import (
    TRAIN_LENGTH,
    Engine,
    Make,
    assert_close,
    edit,
    expected,
    exported,
    nodes_of,
)
from tests.test_onnx_validation import MUTATIONS

ROOT = Path(__file__).parent.parent
CONVERT = ("--scale", "2", "--train-length", TRAIN_LENGTH)
CARD = "README.md"
MANIFEST = "ntk_convert.json"
GENAI, REPORT = "genai_config.json", "onnx_validation.json"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def new_files(run: RunCli, folder: Path, *words: object) -> set[str]:
    """What an export adds; it must leave everything but the card as it was."""
    before = fingerprint(folder)
    result = run("export", folder, *words)
    assert result.code == 0, result.err
    after = fingerprint(folder)
    assert {name for name in before if after.get(name) != before[name]} <= {CARD, MANIFEST}
    return files_of(folder) - before.keys()


# What is written


def with_data(graph: str) -> list[str]:
    return [graph, f"{graph}_data"]


WRITTEN: list[tuple[str, str | None, str, set[str]]] = [
    ("bloom", None, "", {"model.onnx", GENAI, REPORT}),
    ("mpt", None, "--onnx-profile portable", {"model.onnx", REPORT}),
    ("bloom", None, "--no-validate", {"model.onnx", GENAI}),
    ("mpt", "bf16", "", {"model.onnx", "model_fp32.onnx", GENAI, REPORT}),
    ("mpt", "fp16", "--onnx-profile portable", {"model.onnx", "model_fp32.onnx", REPORT}),
    ("falcon", "fp16", "--onnx-standalone", {*with_data("onnx/model_fp16.onnx"), GENAI, REPORT}),
    (
        "falcon",
        "fp16",
        "--onnx-standalone --onnx-profile portable --onnx-dtype fp32",
        {*with_data("onnx/model.onnx"), REPORT},
    ),
]


@pytest.mark.parametrize(("family", "dtype", "words", "files"), WRITTEN)
def test_what_is_written(
    repository: Make, run: RunCli, tmp_path: Path, family: str, dtype: str | None, words: str, files: set[str]
) -> None:
    """Half-precision weights get a graph in float32 too, and a standalone graph needs only its folder."""
    folder = repository(family, **({"dtype": HALF[dtype]} if dtype else {}))
    assert new_files(run, folder, *words.split()) == files
    graphs = sorted(name for name in files if name.endswith(".onnx"))
    if GENAI in files:
        served = json.loads((folder / GENAI).read_text())["model"]["decoder"]["filename"]
        assert served == graphs[-1]
        assert "`onnxruntime_genai.Model(folder)`" in (folder / CARD).read_text(encoding="utf-8")
    if REPORT in files:
        report = json.loads((folder / REPORT).read_text())
        assert report["passed"] is True
        assert [graph["file"] for graph in report["graphs"]] == graphs
    path = folder / graphs[-1]
    if path.parent != folder:
        path = Path(shutil.move(path.parent, tmp_path / "elsewhere")) / path.name
    ids = tiny.token_ids(1, 20)
    logits, _ = Engine(path).step(ids, np.ones_like(ids))
    assert_close(logits, expected(folder, family, ids), relative=1e-2 if "fp16" in path.name else 1e-5)


def test_path_and_report_are_on_stdout(repository: Make, run: RunCli) -> None:
    folder = repository()
    result = run("export", folder)
    assert result.out.startswith(f"{folder}\nmodel.onnx")
    assert "ran on CPUExecutionProvider" in result.out
    assert result.err == ""
    quiet = run("export", folder, "-q", "--no-validate")
    assert (quiet.out, quiet.err) == (f"{folder}\n", "")
    values = run("export", folder, "--json").json
    assert values["path"] == str(folder)
    assert values["files"] == {name: (folder / name).stat().st_size for name in ("model.onnx", GENAI, REPORT)}
    assert values["validation"] == json.loads((folder / REPORT).read_text())
    report = run("validate", folder)
    assert (report.code, report.err) == (0, "")
    says(report.out, "model.onnx: ", "on cpu")
    assert run("validate", folder, "--json").json["passed"] is True


def test_exporting_again_replaces(repository: Make, run: RunCli) -> None:
    """Also the report, and a genai_config.json that is wrong about the new graph."""
    folder = repository()
    assert run("export", folder, "--last-logits", "--no-validate").code == 0
    first = (folder / "model.onnx").read_bytes()
    result = export(folder)
    assert isinstance(result, ExportResult)
    assert result.report is not None
    assert result.report.passed
    files, graph = files_of(folder), (folder / "model.onnx").read_bytes()
    assert graph != first
    assert run("export", folder).code == 0
    assert files_of(folder) == files
    assert (folder / "model.onnx").read_bytes() == graph
    assert (folder / CARD).read_text().count("## ONNX") == 1
    words = ("--onnx-profile", "portable", "--onnx-dtype", "fp16", "--no-validate")
    again = run("export", folder, *words)
    assert again.code == 0
    says(again.out, "model.onnx replaces", "fp32")
    assert files - files_of(folder) == {REPORT, GENAI}


def test_leftovers_of_killed_exports_are_removed(repository: Make, run: RunCli) -> None:
    folder = repository()
    script = (
        "import os, signal, sys\n"
        "from converter import OnnxOptions, export\n"
        "from pathlib import Path\n"
        "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "export(sys.argv[1], OnnxOptions(validate=False))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=False)
    assert killed.returncode < 0
    assert [name for name in files_of(folder) if name.startswith(".")]
    assert run("export", folder, "--no-validate").code == 0
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_what_else_is_there_stays(repository: Make, run: RunCli) -> None:
    """A conversion to a folder in the repository goes on meanwhile, and a card need not be UTF-8."""
    folder = repository()
    other = folder / ".other.ntk-convert-1-0123"
    other.mkdir()
    (other / "config.json").write_text("{}")
    text = (folder / CARD).read_bytes() + b"caf\xe9\n"
    (folder / CARD).write_bytes(text)
    assert run("export", folder, "--no-validate").code == 0
    assert (other / "config.json").exists()
    assert (folder / CARD).read_bytes().startswith(text)


# The graph's file


def described(values: Any) -> list[tuple[str, int, list[str | int]]]:
    """Name, dtype and sizes of inputs or outputs."""
    return [
        (
            value.name,
            value.type.tensor_type.elem_type,
            [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim],
        )
        for value in values
    ]


@pytest.mark.parametrize(
    ("family", "profile", "dtype", "last_logits"),
    [("bloom", "ort", "fp32", False), ("refact", "portable", "fp16", True), ("mpt", "ort", "fp16", True)],
)
def test_the_graph_s_file(
    repository: Make, family: str, profile: Profile, dtype: str, last_logits: bool
) -> None:
    """Names are those that the ecosystem binds, and the model's."""
    folder = repository(family)
    exported(folder, profile, dtype=dtype, last_logits=last_logits)
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph

    kind, size = {"fp32": 1, "fp16": 10}[dtype], tiny.HEAD_DIM + (8 if profile == "ort" else 0)
    kept = tiny.CHECKPOINTS[family].kv_heads
    caches = [f"{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    assert described(graph.input) == [
        ("input_ids", 7, ["batch_size", "sequence_length"]),
        ("attention_mask", 7, ["batch_size", "total_sequence_length"]),
        *(
            (f"past_key_values.{name}", kind, ["batch_size", kept, "past_sequence_length", size])
            for name in caches
        ),
    ]
    length = 1 if last_logits else "sequence_length"
    assert described(graph.output) == [
        ("logits", kind, ["batch_size", length, tiny.VOCAB_SIZE]),
        *((f"present.{name}", kind, ["batch_size", kept, "total_sequence_length", size]) for name in caches),
    ]

    names = [node.name for node in graph.node]
    assert len(names) > 50
    assert len(set(names)) == len(names)
    assert all(re.match(r"/(embeddings|alibi|head|layers\.[01])/", name) for name in names if "/" in name[1:])
    if profile == "portable":
        assert {node.domain for node in nodes_of(graph)} <= {"", "ai.onnx"}


def test_tensors_are_found_without_their_prefix(repository: Make, run: RunCli) -> None:
    assert run("export", repository(prefix=False)).code == 0


def as_in_the_cache(folder: Path, hub: Path) -> Path:
    """Moves a repository into the layout of the Hub's cache: links into a folder of blobs."""
    blobs, links = hub / "blobs", hub / "snapshots/1234"
    blobs.mkdir(parents=True)
    links.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040d}")
        (links / file.name).symlink_to(f"../../blobs/{number:040d}")
    return links


def test_graphs_in_the_hub_s_cache(repository: Make, run: RunCli, refused: Refused, tmp_path: Path) -> None:
    """The graph itself is a link there, and so are the weights that it points to."""
    links = as_in_the_cache(exported(repository()), tmp_path / "hub")
    ids = tiny.token_ids(1, 20)
    logits, _ = Engine(links / "model.onnx").step(ids, np.ones_like(ids))
    assert_close(logits, expected(links, "bloom", ids))
    result = run("validate", links)
    assert result.code == 0, result.err

    # onnxruntime reads weights behind links only where the graph is a link too.
    line = refused("export", links)
    assert "link" in line
    assert "--onnx-standalone" in line
    before = fingerprint(tmp_path / "hub/blobs")
    result = run("export", links, "--onnx-standalone")
    assert result.code == 0, result.err
    assert run("validate", links).code == 0
    # Blobs are named after their hashes and shared by revisions.
    assert fingerprint(tmp_path / "hub/blobs") == before


# In one go with the conversion


def test_convert_with_a_graph(pristine: Pristine, run: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(pristine("falcon"), *CONVERT, "--out", out, "--onnx", "--last-logits", "--json")
    assert result.code == 0, result.err
    values = result.json
    assert values["files"] == {name: (out / name).stat().st_size for name in files_of(out)}
    assert {"model.onnx", GENAI, REPORT} <= files_of(out)
    assert not [name for name in files_of(out) if name.startswith(".")]
    assert values["onnx"]["validation"]["passed"] is True
    assert values["onnx"]["path"] == values["path"] == str(out)
    card = (out / CARD).read_text(encoding="utf-8")
    assert "## ONNX" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_wrong_graph_leaves_the_conversion(
    pristine: Pristine, run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words = (
        tmp_path / "out",
        ("--onnx", "--last-logits", "--provider", "cpu", "--push-to-hub", "org/new"),
    )
    monkeypatch.setattr("converter.publish.push.check_target", lambda *_: None)  # there is no Hub here
    with monkeypatch.context() as patch:
        patch.setattr("converter.onnx.decoder.Decoder.epsilon", 0.5)
        result = run(pristine("bloom"), *CONVERT, "--out", out, *words, "--private", "--json")
    assert result.code == 1
    assert "model.onnx: prompt of" in result.err
    export = f"ntk-convert export {out} --last-logits --provider cpu"
    says(result.err, f"{out} is complete", f"{export} && ntk-convert push {out} org/new --private\n")
    assert (result.json["onnx"], result.json["path"]) == (None, str(out))
    assert not list(out.glob("*.onnx"))
    assert run("export", out, "--last-logits").code == 0


# What it costs

# What is there, and what ends an export


def test_nothing_is_written_to_what_is_there(pristine: Pristine, run: RunCli, tmp_path: Path) -> None:
    """The weights are the source's own files, and all others are somebody's as well."""
    source, folder, others = pristine("bloom"), tmp_path / "model", tmp_path / "others"
    convert(source, folder, scale=2, train_length=TRAIN_LENGTH, link="hard", verify=False)
    export(folder, OnnxOptions(standalone=True, validate=False))
    export(folder)
    for path in sorted(folder.rglob("*.*")):
        if path.is_file():
            same = others / path.relative_to(folder)
            same.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, same)
    before = fingerprint(source), fingerprint(others)
    assert REPORT in before[1]

    for words in (["--onnx-standalone"], ["--onnx-dtype", "int8"]):
        assert run("export", folder, "--no-validate", *words).code == 0
    assert run("export", folder, "--onnx-profile", "portable").code == 0
    graph = folder / "model.onnx"
    content = graph.read_bytes()
    graph.unlink()
    graph.write_bytes(content)
    edit(graph, MUTATIONS["epsilon"][2])
    assert run("validate", folder).code == 1
    assert (fingerprint(source), fingerprint(others)) == before


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, signal.Signals], None]:
    """``signalled(name, number)``: the process gets the signal just before a file is put in place."""
    replace = Path.replace

    def arm(name: str, number: signal.Signals) -> None:
        def then(self: Path, target: Path) -> Path:
            if target.name == name:
                os.kill(os.getpid(), number)
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", then)

    return arm


@pytest.mark.parametrize(
    ("name", "number"),
    [(CARD, signal.SIGINT), ("genai_config.json", signal.SIGTERM), ("model.onnx", signal.SIGINT)],
)
def test_an_export_is_not_stopped_in_the_end(
    repository: Make,
    run: RunCli,
    signalled: Callable[[str, signal.Signals], None],
    name: str,
    number: signal.Signals,
) -> None:
    folder = repository()
    signalled(name, number)
    result = run("export", folder)
    assert (result.code, result.err) == (0, "")
    assert "## ONNX" in (folder / CARD).read_text(encoding="utf-8")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert run("validate", folder).code == 0
