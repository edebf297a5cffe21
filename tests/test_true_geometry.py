"""Every command on checkpoints with the vocabulary, heads, widths, dtype and files of published ones.

They have one layer and random weights, see ``true_geometry.py``. ``make test`` converts the smallest of one
layout; ``make test-slow`` runs all that users run.

Memory has budgets. They are for what a process allocates, without the pages of mapped weight files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from converter.onnx.coverage import TABLE
from converter.onnx.options import QUANTISED
from converter.source.checkpoint import read_checkpoint
from tests import tiny
from tests.conftest import RunCli
from tests.hub_server import TOKEN, Account, Command, HubServer
from tests.memory import MB, measured, needs_proc
from tests.onnx_graphs import PROFILES
from tests.patched import CHECKED, assert_logits, config_of
from tests.reference import ENCODERS, FAMILIES
from tests.true_geometry import LARGEST, SMALLEST

ROOT = Path(__file__).parent.parent
LENGTH = 16
"""A short trained length, so validation runs few tokens."""
SCALING = ("--scale", "2", "--train-length", str(LENGTH))
FLOATS = [(profile, dtype) for profile in PROFILES for dtype in ("native", "fp16")]
INTEGERS = [(profile, dtype) for profile in PROFILES for dtype in QUANTISED]
GRAPHS = {
    name: (FLOATS[number % len(FLOATS)], INTEGERS[(number + 1) % len(INTEGERS)])
    for number, name in enumerate(SMALLEST)
}
"""Layout -> profile and dtype of two graphs; each kind of graph has several layouts."""
LARGE_GRAPHS = {
    "bloom-7b1": ("ort", "native"),
    "mpt-7b-storywriter": ("portable", "int8"),
    "baichuan2-13b": ("portable", "native"),
}
"""The largest checkpoints -> profile and dtype of a graph."""
LARGE_RUNS = ("bloom-7b1", "mpt-7b-storywriter")
"""Those whose graph is run too; that takes most of the time."""
CONVERSION, WITHOUT_TORCH, WITH_TORCH = 1408 * MB, 128 * MB, 512 * MB
"""Budgets: a conversion of any size, with its checks, which hold a layer of up to 1 GB in float32 and map a
larger one; and beside the weights, a process that writes a graph, and one that runs it and a torch model.
Seen were 360 to 1150, 65 to 105 and 300 MB."""
NAMES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed after the test: pytest would keep gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def graph_words(profile: str, dtype: str) -> list[str]:
    return ["--onnx-profile", profile, "--onnx-dtype", dtype]


def largest_weight(folder: Path) -> int:
    """How many numbers a repository's largest weight has."""
    return max(int(np.prod(tensor.shape)) for tensor in read_checkpoint(folder).tensors.values())


def export_budget(folder: Path) -> int:
    """Bytes for writing a graph: 4 and 1 for scale and zero point of 32 numbers in the largest weight.

    The profile ``portable`` transposes them, so there are two copies. The weight itself in int8 would be six
    times as large as one of them.
    """
    return WITHOUT_TORCH + 2 * largest_weight(folder) * 5 // 32


def validation_budget(folder: Path) -> int:
    """Bytes for running a layer and the first tokens: float32 weights, and onnxruntime's second copy."""
    tensors = read_checkpoint(folder).tensors
    vocabulary = config_of(folder)["vocab_size"]
    sizes = [
        min(int(np.prod(tensor.shape)), TABLE) if vocabulary in tensor.shape else int(np.prod(tensor.shape))
        for tensor in tensors.values()
    ]
    return WITH_TORCH + 2 * 4 * sum(sizes)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGEST)
def test_the_largest(place: Path, run: RunCli, layout: str) -> None:
    """What users run on a real size, each command in a process of its own and within its budget."""
    stored, out = LARGEST[layout], place / "out"
    source = stored.write(place / "source")
    looked = run("inspect", source, "--json")
    assert looked.json["family"] == stored.family
    result, peak = measured(source, *SCALING, "--out", out)
    assert result.code == 0, result.err
    assert peak <= CONVERSION
    shutil.rmtree(source)
    result, peak = measured("export", out, *graph_words(*LARGE_GRAPHS[layout]), "--no-validate")
    assert result.code == 0, result.err
    assert peak <= export_budget(out)
    if layout in LARGE_RUNS:
        result, peak = measured("validate", out)
        assert result.code == 0, result.err
        assert peak <= validation_budget(out)


def test_a_conversion(place: Path, run: RunCli) -> None:
    stored = SMALLEST["bloom"]
    source = stored.write(place / "source")
    result = run(source, *SCALING, "--out", place / "out", "--json")
    assert result.code == 0, result.err
    assert [check["name"] for check in result.json["checks"]] == CHECKED
    again = run(place / "out", "--scale", "4", "--out", place / "again", "--hard-link", "--json")
    assert again.code == 0, again.err
    assert [check["name"] for check in again.json["checks"]] == CHECKED
    found = run("inspect", place / "out", "--json").json
    assert found["converted"]
    config = stored.config(1)
    assert NAMES[found["dtype"]] == stored.dtype or str(NAMES[found["dtype"]]).endswith(config["torch_dtype"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in SMALLEST if name != "bloom"])
def test_what_users_run(place: Path, run: RunCli, layout: str) -> None:
    stored = SMALLEST[layout]
    source = stored.write(place / "source")
    looked = run("inspect", source, "--json")
    assert looked.code == 0, looked.err
    geometry = looked.json
    assert geometry["family"] == stored.family
    assert geometry["num_layers"] == 1

    out = place / "out"
    graphs = [("export", out, *graph_words(*graph), "--no-validate") for graph in GRAPHS[layout]]
    for words in ((source, *SCALING, "--out", out), *graphs, ("validate", out, "--json")):
        result = run(*words)
        assert result.code == 0, result.err
    validated = result.json["graphs"]["graphs"]
    found = {(graph["profile"], graph["dtype"].replace("fp32", "native")) for graph in validated}
    assert found >= {GRAPHS[layout][1]}
    if tiny.FAMILY[stored.family].kind == "encoder":
        check_embeddings(out, layout)
        return
    check_logits(out, stored.family, check_generation(out))


def check_logits(folder: Path, family: str, model: Any) -> None:
    """The model's logits are the reference's."""
    config, tensors = tiny.read(folder)
    ids, _ = tokens(folder, rows=1)
    with torch.no_grad():
        found = model(ids).logits
    assert_logits(found, FAMILIES[family].logits(config, tensors, ids.numpy()))


def check_embeddings(folder: Path, layout: str) -> None:
    """The hidden states are the reference's."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    ids, mask = tokens(folder, rows=2)
    mask[1, 12:] = 0
    config, tensors = tiny.read(folder)
    expected = ENCODERS[layout].trunk(config, tensors, ids.numpy(), mask.numpy())
    with torch.no_grad():
        found = model(ids, attention_mask=mask).last_hidden_state
    assert_logits(found, expected.hidden, mask)


def check_generation(folder: Path) -> Any:
    """Generation with a cache gives the tokens of the logits; the model in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    ids, _ = tokens(folder, rows=1)
    with torch.no_grad():
        generated = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        again = model(generated, use_cache=False).logits[:, ids.shape[1] - 1 : -1].argmax(-1)
    assert generated[:, ids.shape[1] :].tolist() == again.tolist()
    return model


def tokens(folder: Path, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids from the whole vocabulary and a mask of ones, both [rows, 24]."""
    vocabulary = config_of(folder)["vocab_size"]
    ids = np.random.default_rng(0).integers(4, vocabulary, size=(rows, 24))
    ids[0, 0] = vocabulary - 1
    return torch.from_numpy(ids), torch.ones(rows, 24, dtype=torch.int64)


LOADED = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model.generate(torch.tensor([[5, 6, int(sys.argv[2]) - 1, 7]]), max_new_tokens=3).tolist())
"""


@pytest.mark.slow
def test_from_the_hub_to_the_hub(place: Path, hub: HubServer, command: Command, work: Path) -> None:
    """By its published name a checkpoint is converted, pushed, loaded and measured; its length is known."""
    stored, name = SMALLEST["falcon"], "tiiuae/falcon-rw-1b"
    source = stored.write(place / "source")
    hub.accounts[TOKEN] = Account("ada", ())
    hub.commit(name, source)
    reached = ("--target-length", "16384", "--out", "out", "--push-to-hub", "ada/model")
    result = command(name, *reached, HF_TOKEN=TOKEN)
    assert result.code == 0, result.err
    shutil.rmtree(source)
    vocabulary = str(stored.config(1)["vocab_size"])
    found = [
        command(model, vocabulary, start=("-c", LOADED), HF_TOKEN=TOKEN)
        for model in ("ada/model", str(work / "out"))
    ]
    assert [one.code for one in found] == [0, 0], found[0].err
    assert found[0].out == found[1].out
    (work / "text.txt").write_text(" ".join(f"w{number}" for number in range(4, 204)))
    words = ("--tasks", "perplexity", "--text", "text.txt", "--lengths", "64", "--json")
    result = command("eval", "ada/model", *words, HF_TOKEN=TOKEN)
    assert result.code == 0, result.err
    assert np.isfinite(result.json["measurements"][0]["value"])
