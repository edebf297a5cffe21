"""What export and validate refuse: one line that says why, and nothing changed."""

from __future__ import annotations

import importlib.util
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
from converter.exports.onnx.decoder import Decoder
from converter.exports.onnx.encoder import Encoder
from converter.exports.onnx.families import network_class
from converter.exports.onnx.options import OnnxOptions
from converter.families import FAMILIES
from tests.conftest import MakeSource, Run, edit_json, fingerprint
from tests.onnx_graphs import PROFILES, TRAIN_LENGTH, Make

CONVERT = ("--scale", "2", "--train-length", TRAIN_LENGTH)
REPORT = "onnx_validation.json"
WEIGHT = "transformer.h.1.mlp.dense_h_to_4h.weight"

Command = Callable[..., Run]
Refused = Callable[..., str]
Change = Callable[[Path], object]


def resave(folder: Path, change: Callable[[dict[str, Any]], Any], **metadata: str) -> None:
    """Writes the weights anew, changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **metadata})


def weights(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: resave(folder, change)


def config(**changes: Any) -> Change:
    return lambda folder: edit_json(folder / "config.json", changes)


def spoil(tensors: dict[str, Any], value: float) -> None:
    tensors["transformer.h.0.mlp.dense_h_to_4h.bias"][3] = value


def pickled(folder: Path) -> None:
    """A graph can only point into safetensors."""
    tensors = load_file(folder / "model.safetensors")
    torch.save({k: torch.from_numpy(v) for k, v in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def shortened(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-7])


def foreign(folder: Path) -> None:
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    values = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph), folder / "model.onnx")


def nothing(folder: Path) -> None:
    pass


def as_float64(tensors: dict[str, Any], *names: str) -> None:
    tensors.update({name: tensors[name].astype(np.float64) for name in names or tensors})


NOT_OURS = "was not written by ntk-convert"
PORTABLE = ("--onnx-profile", "portable")
BROKEN: dict[str, tuple[str, Change, tuple[str, ...], str]] = {
    "a tensor is missing": (
        "bloom",
        weights(lambda tensors: tensors.pop(WEIGHT)),
        (),
        "no tensor 'h.1.mlp.dense_h_to_4h.weight'",
    ),
    "a tensor of another shape": (
        "bloom",
        weights(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].copy()})),
        (),
        f"{WEIGHT!r} has shape [127, 32], not [128, 32]",
    ),
    "a tensor of float64": ("bloom", weights(lambda ts: as_float64(ts, WEIGHT)), (), f"{WEIGHT!r} is F64"),
    "weights of float64": ("bloom", weights(as_float64), (), "the weights are F64"),
    "weights cut off": ("bloom", shortened, (), "model.safetensors"),
    "no weights": ("bloom", lambda folder: (folder / "model.safetensors").unlink(), (), "weights"),
    "pickled weights": ("bloom", pickled, (), "safetensors"),
    "a larger vocabulary": ("bloom", config(vocab_size=98), (), "[97, 32], not [98, 32]"),
    "no vocabulary": ("bloom", config(vocab_size=None), (), "vocab_size"),
    "more layers": ("bloom", config(n_layer=3), (), "no tensor 'h.2."),
    "an activation": ("falcon", config(activation="tanh"), (), "no graph for the activation 'tanh'"),
    **{
        f"{value} in {profile}": (
            "bloom",
            weights(lambda tensors, value=value: spoil(tensors, value)),
            ("--onnx-profile", profile),
            "model.onnx: prompt of",
        )
        for value in (np.nan, np.inf)
        for profile in PROFILES
    },
    "an empty graph": ("bloom", lambda folder: (folder / "model.onnx").write_bytes(b""), (), NOT_OURS),
    "bytes": ("bloom", lambda folder: (folder / "model.onnx").write_bytes(b"foreign"), (), NOT_OURS),
    "another tool's graph": ("bloom", foreign, (), NOT_OURS),
    "last logits of a backbone": (
        "bloom",
        nothing,
        ("--last-logits", "--onnx-task", "feature-extraction"),
        "--last-logits is for language models, and NtkBloomModel is not one",
    ),
    "a profile": ("bloom", nothing, ("--onnx-profile", "openvino"), "'openvino'"),
    "a dtype": ("bloom", nothing, ("--onnx-dtype", "fp8"), "'fp8'"),
    "a provider": ("bloom", nothing, ("--provider", "tpu"), "'tpu'"),
}


@pytest.mark.parametrize(("family", "change", "words", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_export_refuses(
    repository: Make, refused: Refused, family: str, change: Change, words: tuple[str, ...], message: str
) -> None:
    folder = repository(family)
    change(folder)
    usage = (words and words[0] != "--onnx-profile") or "openvino" in words
    assert message in refused("export", folder, *words, code=2 if usage else 1)
    if message == NOT_OURS:
        assert message in refused("validate", folder)


@pytest.mark.parametrize("field", [{"dtype": "fp8"}, {"profile": "openvino"}, {"provider": "tpu"}], ids=str)
def test_unknown_choices(field: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(field.values()))):
        OnnxOptions(**field)


def test_what_is_no_converted_repository(make_source: MakeSource, refused: Refused, tmp_path: Path) -> None:
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


def test_a_language_model_whose_config_names_the_backbone(
    make_source: MakeSource, run: Command, refused: Refused, tmp_path: Path
) -> None:
    """As TurkuNLP's gpt3-finnish do: transformers' auto class gives them a head, which is tied."""
    source, out = make_source("bloom", head="Model"), tmp_path / "out"
    remedy = "--onnx-task feature-extraction; if it is a language model whose head is the embedding table, "
    remedy += """convert the source with --set 'architectures=["BloomForCausalLM"]'"""
    assert remedy in refused(source, *CONVERT, "--out", out, "--onnx")
    words = (*CONVERT, "--set", 'architectures=["BloomForCausalLM"]', "--out", out, "--onnx")
    assert run(source, *words).code == 0
    assert (out / "model.onnx").is_file()


@pytest.mark.parametrize("package", ["onnx", "onnx_ir", "onnxruntime"])
def test_missing_packages_are_named_with_their_installation(
    repository: Make,
    pristine: Callable[..., Path],
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    folder, find = repository(), importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == package else find(name, *rest)
    )
    conversion = (pristine("bloom"), *CONVERT, "--out", tmp_path / "out", "--onnx")
    for words in (("export", folder), ("validate", folder), conversion):
        assert f"pip install {package.replace('_', '-')} " in refused(*words)


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA")
def test_a_provider_that_is_not_there(repository: Make, refused: Refused, run: Command) -> None:
    folder = repository()
    assert "has no CUDAExecutionProvider here" in refused("export", folder, "--provider", "cuda")
    assert run("export", folder, "--provider", "cpu").code == 0
    assert "has no CUDAExecutionProvider here" in refused("validate", folder, "--provider", "cuda")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (words, "need --onnx")
            for words in (
                ("--onnx-dtype", "fp16"),
                PORTABLE,
                ("--onnx-standalone",),
                ("--last-logits",),
                ("--provider", "cpu"),
            )
        ),
        (
            ("--onnx", "--last-logits", "--onnx-task", "feature-extraction"),
            "--last-logits is for language models, and NtkBloomModel is not one",
        ),
    ],
    ids=str,
)
def test_convert_refuses(
    make_source: MakeSource, refused: Refused, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    assert message in refused(make_source(), *CONVERT, "--out", tmp_path / "out", *words, code=2)


def test_a_folder_without_a_graph_has_nothing_to_validate(repository: Make, refused: Refused) -> None:
    assert "has no ONNX graph" in refused("validate", repository())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: resave(folder, lambda tensors: None, note="x" * 100),
            "model.onnx does not belong to these weights",
        ),
        (config(alibi_scaling={"type": "ntk", "factor": 3.0}), 'was made for alibi_scaling {"type": "ntk", '),
    ],
    ids=["other weights", "another scaling"],
)
def test_a_graph_of_something_else(
    repository: Make, run: Command, refused: Refused, change: Change, message: str
) -> None:
    folder = repository()
    assert run("export", folder).code == 0
    change(folder)
    assert run("validate", folder).code == 1
    assert not (folder / REPORT).exists(), "it says that the graph is right, and that is no longer so"
    line = refused("validate", folder)
    assert message in line
    assert "ntk-convert export" in line
    assert run("export", folder).code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(repository: Make, refused: Refused) -> None:
    folder = repository()
    folder.chmod(0o500)
    assert "no permission" in refused("export", folder)


def test_a_full_disk(repository: Make, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr("converter.exports.onnx.comparison.run", broken)
    result = run("export", folder)
    assert (result.code, result.out) == (1, "")
    said = result.err.lstrip("\n")  # after ^C the line begins anew
    assert said.startswith(line)
    assert said.count("\n") == 1
    assert (fingerprint(folder), sorted(folder.rglob("*"))) == (before, names)
