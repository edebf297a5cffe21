"""What export and validate refuse: one line that says why, and nothing changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file, save_file

from converter.errors import UsageError
from converter.exports.onnx.choices import Profile
from converter.exports.onnx.decoder import Decoder
from converter.exports.onnx.encoder import Encoder
from converter.exports.onnx.families import network_class
from converter.exports.onnx.options import OnnxOptions
from converter.families import FAMILIES
from tests.conftest import MakeSource, Run, edit_json, fingerprint
from tests.onnx_graphs import (
    PROFILES,
    TRAIN_LENGTH,
    Make,
)

ROOT = Path(__file__).parent.parent
CONVERT = ("--scale", "2", "--train-length", TRAIN_LENGTH)
CARD = "README.md"
GENAI, REPORT = "genai_config.json", "onnx_validation.json"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

Command = Callable[..., Run]


def test_what_is_no_converted_repository(
    make_source: MakeSource, refused: Callable[..., str], tmp_path: Path
) -> None:
    source = make_source()
    (tmp_path / "empty").mkdir()
    for command in ("export", "validate"):
        assert "is not converted (model_type 'bloom')" in refused(command, source)
        assert "is not a folder" in refused(command, tmp_path / "nowhere")
        assert "is not a folder" in refused(command, source / "config.json")
        assert "has no config.json" in refused(command, tmp_path / "empty")


def test_every_family_has_a_graph() -> None:
    kinds = {"decoder": Decoder, "encoder": Encoder}
    for family in FAMILIES:
        assert issubclass(network_class(family), kinds[family.kind])


def test_a_language_model_whose_config_names_the_trunk(
    make_source: MakeSource, run: Command, refused: Callable[..., str], tmp_path: Path
) -> None:
    """As TurkuNLP's gpt3-finnish do: transformers' auto class gives them a head, which is tied."""
    source = make_source("bloom", head="Model")
    remedy = (
        """--onnx-task feature-extraction; if it is a language model whose head is the embedding table, """
    )
    remedy += """convert the source with --set 'architectures=["BloomForCausalLM"]'"""
    assert remedy in refused(source, *CONVERT, "--out", tmp_path / "out", "--onnx")
    words = (*CONVERT, "--set", 'architectures=["BloomForCausalLM"]', "--out", tmp_path / "out", "--onnx")
    assert run(source, *words).code == 0
    assert (tmp_path / "out" / "model.onnx").is_file()


@pytest.mark.parametrize("package", ["onnx", "onnx_ir", "onnxruntime"])
def test_missing_packages_are_named_with_their_installation(
    repository: Make,
    pristine: Callable[..., Path],
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    folder = repository()
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == package else find(name, *rest)
    )
    conversion = (pristine("bloom"), *CONVERT, "--out", tmp_path / "out", "--onnx")
    for words in (("export", folder), ("validate", folder), conversion):
        line = refused(*words)
        assert f"pip install {package.replace('_', '-')} " in line


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA")
def test_a_provider_that_is_not_there(repository: Make, refused: Callable[..., str], run: Command) -> None:
    folder = repository()
    assert "has no CUDAExecutionProvider here" in refused("export", folder, "--provider", "cuda")
    assert run("export", folder, "--provider", "cpu").code == 0
    assert "has no CUDAExecutionProvider here" in refused("validate", folder, "--provider", "cuda")


@pytest.mark.parametrize(
    "words",
    [
        ("--onnx-dtype", "fp8"),
        ("--onnx-profile", "openvino"),
        ("--provider", "tpu"),
    ],
)
def test_unknown_choices(repository: Make, refused: Callable[..., str], words: tuple[str, ...]) -> None:
    assert repr(words[1]) in refused("export", repository(), *words, code=2)
    field = words[0].removeprefix("--onnx-").removeprefix("--")
    with pytest.raises(UsageError, match=words[1]):
        OnnxOptions(**{field: words[1]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [
        ("--onnx-dtype", "fp16"),
        ("--onnx-profile", "portable"),
        ("--onnx-standalone",),
        ("--last-logits",),
        ("--provider", "cpu"),
    ],
)
def test_options_of_a_graph_without_one(
    make_source: MakeSource, refused: Callable[..., str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert "need --onnx" in refused(make_source(), *CONVERT, "--out", tmp_path / "out", *words, code=2)


def test_last_logits_of_what_has_none(
    repository: Make, make_source: MakeSource, refused: Callable[..., str], tmp_path: Path
) -> None:
    line = "--last-logits is for language models, and NtkBloomModel is not one"
    words = ("--last-logits", "--onnx-task", "feature-extraction")
    assert line in refused("export", repository(), *words, code=2)
    assert line in refused(make_source(), *CONVERT, "--out", tmp_path / "out", "--onnx", *words, code=2)


@pytest.mark.parametrize("content", [b"", b"foreign", "valid"])
def test_a_foreign_graph_is_not_overwritten(
    repository: Make, refused: Callable[..., str], content: bytes | str
) -> None:
    folder = repository()
    if isinstance(content, str):
        node = onnx.helper.make_node("Identity", ["x"], ["y"])
        values = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
        onnx.save(
            onnx.helper.make_model(onnx.helper.make_graph([node], "g", values[:1], values[1:])),
            folder / "model.onnx",
        )
    else:
        (folder / "model.onnx").write_bytes(content)
    assert "was not written by ntk-convert" in refused("export", folder)
    assert "was not written by ntk-convert" in refused("validate", folder)


def test_a_folder_without_a_graph_has_nothing_to_validate(
    repository: Make, refused: Callable[..., str]
) -> None:
    assert "has no ONNX graph" in refused("validate", repository())


def resave(folder: Path, change: Callable[[dict[str, Any]], Any], **metadata: str) -> None:
    """Writes the weights anew, changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **metadata})


def test_a_graph_of_other_weights(repository: Make, run: Command, refused: Callable[..., str]) -> None:
    folder = repository()
    assert run("export", folder).code == 0
    resave(folder, lambda tensors: None, note="x" * 100)
    (folder / REPORT).unlink()  # which says that the graph is right, and would not stay
    line = refused("validate", folder)
    assert "model.onnx does not belong to these weights" in line
    assert "ntk-convert export" in line
    assert run("export", folder).code == 0


def test_a_report_that_is_no_longer_so_does_not_stay(repository: Make, run: Command) -> None:
    folder = repository()
    assert run("export", folder).code == 0
    resave(folder, lambda tensors: None, note="x" * 100)
    assert run("validate", folder).code == 1
    assert not (folder / REPORT).exists()


def test_a_graph_of_another_scaling(repository: Make, run: Command, refused: Callable[..., str]) -> None:
    folder = repository()
    assert run("export", folder).code == 0
    edit_json(folder / "config.json", {"alibi_scaling": {"type": "ntk", "factor": 3.0}})
    (folder / REPORT).unlink()  # which says that the graph is right, and would not stay
    line = refused("validate", folder)
    assert 'was made for alibi_scaling {"type": "ntk", "factor": 2.0}' in line
    assert run("export", folder).code == 0


def test_an_activation_without_a_graph(repository: Make, refused: Callable[..., str]) -> None:
    folder = repository("falcon")
    edit_json(folder / "config.json", {"activation": "tanh"})
    assert "no graph for the activation 'tanh'" in refused("export", folder)


def test_damaged_weights(repository: Make, refused: Callable[..., str]) -> None:
    folder = repository()
    name = "transformer.h.1.mlp.dense_h_to_4h.weight"
    whole = (folder / "model.safetensors").read_bytes()

    resave(folder, lambda tensors: tensors.pop(name))
    assert "no tensor 'h.1.mlp.dense_h_to_4h.weight'" in refused("export", folder)

    (folder / "model.safetensors").write_bytes(whole)
    resave(folder, lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))
    assert f"{name!r} has shape [127, 32], not [128, 32]" in refused("export", folder)

    (folder / "model.safetensors").write_bytes(whole)
    resave(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.float64)}))
    assert f"{name!r} is F64" in refused("export", folder)

    (folder / "model.safetensors").write_bytes(whole)
    resave(folder, lambda tensors: tensors.update({k: v.astype(np.float64) for k, v in tensors.items()}))
    assert "the weights are F64" in refused("export", folder)

    (folder / "model.safetensors").write_bytes(whole[:-7])
    assert "model.safetensors" in refused("export", folder)

    (folder / "model.safetensors").unlink()
    assert "weights" in refused("export", folder)


def test_weights_that_were_pickled(repository: Make, refused: Callable[..., str]) -> None:
    """A graph can only point into safetensors."""
    folder = repository()
    tensors = load_file(folder / "model.safetensors")
    torch.save({k: torch.from_numpy(v) for k, v in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "safetensors" in refused("export", folder)


def test_a_config_that_does_not_fit(repository: Make, refused: Callable[..., str]) -> None:
    folder = repository()
    edit_json(folder / "config.json", {"vocab_size": 98})
    assert "[97, 32], not [98, 32]" in refused("export", folder)
    edit_json(folder / "config.json", {"vocab_size": None})
    assert "vocab_size" in refused("export", folder)
    edit_json(folder / "config.json", {"vocab_size": 97, "n_layer": 3})
    assert "no tensor 'h.2." in refused("export", folder)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("profile", PROFILES)
def test_weights_that_are_no_numbers(
    repository: Make, refused: Callable[..., str], profile: Profile, value: float
) -> None:
    folder = repository()

    def spoil(tensors: dict[str, Any]) -> None:
        tensors["transformer.h.0.mlp.dense_h_to_4h.bias"][3] = value

    resave(folder, spoil)
    assert "model.onnx: prompt of" in refused("export", folder, "--onnx-profile", profile)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(repository: Make, refused: Callable[..., str]) -> None:
    folder = repository()
    folder.chmod(0o500)
    assert "no permission" in refused("export", folder)


def test_a_full_disk(repository: Make, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = repository()
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "GB free" in refused("export", folder, "--onnx-standalone")


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (ValueError("two\nlines"), "error: unexpected ValueError: "),
        (KeyboardInterrupt(), "error: interrupted; nothing was written\n"),
    ],
)
def test_a_bug_or_an_interrupt_is_one_line_and_leaves_nothing(
    repository: Make, run: Command, monkeypatch: pytest.MonkeyPatch, failure: BaseException, line: str
) -> None:
    folder = repository()
    before, names = fingerprint(folder), sorted(folder.rglob("*"))

    def broken(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("converter.exports.onnx.validation.run", broken)
    result = run("export", folder)
    assert (result.code, result.out) == (1, "")
    said = result.err.lstrip("\n")  # after ^C the line begins anew
    assert said.startswith(line)
    assert said.count("\n") == 1
    assert (fingerprint(folder), sorted(folder.rglob("*"))) == (before, names)
