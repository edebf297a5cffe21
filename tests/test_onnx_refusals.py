"""What export and validate refuse: one line that says why, and nothing changed."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from converter.errors import ValidationError
from converter.result import manifest
from converter.source.open import open_folder
from tests.conftest import MakeSource, Pristine, Refused, RunCli, edit_json, fingerprint
from tests.onnx_graphs import POOLING, TRAIN_LENGTH, Make, exported, graphs_report, with_modules
from tests.tiny.layout import Tensors, change_tensors

CONVERT = ("--scale", "2", "--train-length", TRAIN_LENGTH)
REPORT = "onnx_validation.json"
WEIGHT = "transformer.h.1.mlp.dense_h_to_4h.weight"

Change = Callable[[Path], object]


def weights(change: Callable[[Tensors], object], **metadata: str) -> Change:
    return lambda folder: change_tensors(folder, change, **metadata)


def config(**changes: Any) -> Change:
    return lambda folder: edit_json(folder / "config.json", changes)


def spoil(tensors: Tensors, value: float) -> None:
    tensors["transformer.h.0.mlp.dense_h_to_4h.bias"][3] = value


def pickled(folder: Path) -> None:
    """A graph can only point into safetensors."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
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


def as_float64(tensors: Tensors, *names: str) -> None:
    tensors.update({name: tensors[name].double() for name in names or tensors})


def written(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def somebody_s(folder: Path) -> None:
    theirs = folder.parent / "theirs"
    theirs.mkdir()
    (theirs / "model.onnx_data").write_bytes(b"theirs")
    (folder / "onnx").symlink_to(theirs)


def no_pooling_config(folder: Path) -> None:
    (with_modules(folder) / "1_Pooling/config.json").unlink()


class Row(NamedTuple):
    """What is wrong with an export of a model, and what is said."""

    message: str
    change: Change = nothing
    words: tuple[str, ...] = ()
    model: tuple[str, dict[str, Any]] = ("bloom", {})
    code: int = 1


CONCAVE = {"type": "concave", "dynamic": "position", "power": 8}
NOT_OURS = "was not written by ntk-convert"
PORTABLE = ("--onnx-profile", "portable")
BACKBONE = ("--onnx-task", "feature-extraction")
ENCODER = ("jina_bert", {"head": "Model"})
MASKED = ("jina_bert", {"head": "MaskedLM"})
CALIBRATE = ("--onnx-dtype", "int4", "--calibrate")
NO_LIST = "modules.json is not a list of modules"
OUTSIDE = [
    {"type": "sentence_transformers.Transformer"},
    {"type": "sentence_transformers.Pooling", "path": "../1_Pooling"},
]
BROKEN: dict[str, Row] = {
    "a tensor is missing": Row(
        "no tensor 'h.1.mlp.dense_h_to_4h.weight'", weights(lambda tensors: tensors.pop(WEIGHT))
    ),
    "a tensor of another shape": Row(
        f"{WEIGHT!r} has shape [127, 32], not [128, 32]",
        weights(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].clone()})),
    ),
    "a tensor of float64": Row(f"{WEIGHT!r} is F64", weights(lambda ts: as_float64(ts, WEIGHT))),
    "weights of float64": Row("the weights are F64", weights(as_float64)),
    "weights cut off": Row("model.safetensors", shortened),
    "no weights": Row("weights", lambda folder: (folder / "model.safetensors").unlink()),
    "pickled weights": Row("safetensors", pickled),
    "a larger vocabulary": Row("[97, 32], not [98, 32]", config(vocab_size=98)),
    "no vocabulary": Row("vocab_size", config(vocab_size=None)),
    "more layers": Row("no tensor 'h.2.", config(n_layer=3)),
    "an activation": Row(
        "no graph for the activation 'tanh'", config(activation="tanh"), model=("falcon", {})
    ),
    "a steep concave penalty in float16": Row(
        "float16 does not hold the concave penalty of this model's steepest slope; give --onnx-dtype bf16 or",
        config(alibi_scaling={**CONCAVE, "train_seq_len": 1 << 22}),
        ("--onnx-dtype", "fp16"),
    ),
    "NaN": Row("model.onnx: prompt of", weights(lambda tensors: spoil(tensors, torch.nan))),
    "infinity": Row("model.onnx: prompt of", weights(lambda tensors: spoil(tensors, torch.inf)), PORTABLE),
    "bytes": Row(NOT_OURS, written("model.onnx", b"foreign")),
    "another tool's graph": Row(NOT_OURS, foreign),
    "a folder of somebody else": Row("onnx is a link to another folder", somebody_s, ("--onnx-standalone",)),
    "last logits of a backbone": Row(
        "--last-logits is for language models, and NtkBloomModel is not one",
        words=("--last-logits", *BACKBONE),
        code=2,
    ),
    "a profile": Row("'openvino'", words=("--onnx-profile", "openvino"), code=2),
    "a dtype": Row("'fp8'", words=("--onnx-dtype", "fp8"), code=2),
    "a provider": Row("'tpu'", words=("--provider", "tpu"), code=2),
    # A head that the checkpoint has no weights for would be random.
    "no head": Row(
        "(NtkJinaBertModel) does not have; choose feature-extraction",
        words=("--onnx-task", "fill-mask"),
        model=ENCODER,
    ),
    "another head": Row(
        "choose fill-mask or feature-extraction", words=("--onnx-task", "text-classification"), model=MASKED
    ),
    "a head of tokens": Row(
        "(NtkBloomForCausalLM) does not have; choose text-generation or feature-extraction\n",
        words=("--onnx-task", "token-classification"),
    ),
    "pooling with a head": Row(
        "give --onnx-task feature-extraction with it",
        with_modules,
        ("--pooled", "--onnx-task", "fill-mask"),
        MASKED,
        2,
    ),
    **{
        f"pooling {number}": Row(message, change, ("--pooled",), ENCODER)
        for number, (message, change) in enumerate(
            (
                ("add --pooling mean", nothing),
                ("lists Transformer, Pooling, Dense; what can", lambda f: with_modules(f, POOLING, "Dense")),
                (
                    "mode median is not one of cls, max, mean",
                    lambda f: with_modules(f, {"pooling_mode": "median"}),
                ),
                ("leaves out a prompt", lambda f: with_modules(f, {**POOLING, "include_prompt": False})),
                ("1_Pooling/config.json is missing", no_pooling_config),
                (NO_LIST, written("modules.json", b"{}")),
                ("lists a; what can be computed", written("modules.json", b'[{"type": "a", "path": ""}]')),
                (NO_LIST, written("modules.json", json.dumps(OUTSIDE).encode())),
            )
        )
    },
    "pooling twice": Row(
        "modules.json says how to pool already (mean); leave it out\n",
        with_modules,
        ("--pooled", "--pooling", "cls"),
        ENCODER,
        2,
    ),
    "pooling of nothing": Row("add it, or drop --pooling", words=("--pooling", "cls"), model=ENCODER, code=2),
    "calibrated int8": Row(
        "give --onnx-dtype int4 with it",
        written("text", b"a few words"),
        ("--onnx-dtype", "int8", "--calibrate", "{}/text"),
        code=2,
    ),
    "a short text": Row(
        f"3 tokens, but one window takes {TRAIN_LENGTH}; give more text",
        written("text", b"a few words"),
        (*CALIBRATE, "{}/text"),
        code=2,
    ),
    "no text": Row("does not exist", words=(*CALIBRATE, "{}/none"), code=2),
}


@pytest.mark.parametrize("row", BROKEN.values(), ids=BROKEN.keys())
def test_export_refuses(repository: Make, refused: Refused, row: Row) -> None:
    family, options = row.model
    folder = repository(family, **options)
    row.change(folder)
    if (folder / "config.json").is_file():
        listed = manifest.listed(open_folder(folder))
        manifest.write(folder, [name for name in listed if (folder / name).is_file()], {})
    assert row.message in refused(
        "export", folder, *(word.format(folder) for word in row.words), code=row.code
    )
    if row.message == NOT_OURS:
        with pytest.raises(ValidationError, match=re.escape(row.message)):
            graphs_report(folder)


def test_what_is_no_converted_repository(make_source: MakeSource, refused: Refused, tmp_path: Path) -> None:
    source = make_source()
    (tmp_path / "empty").mkdir()
    for command in ("export", "validate"):
        assert "is not converted (model_type 'bloom')" in refused(command, source)
        assert "is not a folder" in refused(command, tmp_path / "nowhere")
        assert "is not a folder" in refused(command, source / "config.json")
        assert "has no config.json" in refused(command, tmp_path / "empty")


def test_a_language_model_whose_config_names_the_backbone(
    make_source: MakeSource, run: RunCli, refused: Refused, tmp_path: Path
) -> None:
    """As TurkuNLP's gpt3-finnish do: transformers' auto class gives them a head, which is tied."""
    source, out = make_source("bloom", head="Model"), tmp_path / "out"
    remedy = "--onnx-task feature-extraction; if it is a language model whose head is the embedding table, "
    remedy += """convert the source with --set 'architectures=["BloomForCausalLM"]'"""
    assert remedy in refused(source, *CONVERT, "--out", out, "--onnx")
    words = (*CONVERT, "--set", 'architectures=["BloomForCausalLM"]', "--out", out, "--onnx")
    assert run(source, *words).code == 0
    assert (out / "model.onnx").is_file()


def test_missing_packages_are_named_with_their_installation(
    repository: Make, pristine: Pristine, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, find, lacking = repository(), importlib.util.find_spec, ("onnx_ir", "onnxruntime")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name in lacking else find(name, *rest)
    )
    conversion = (pristine("bloom"), *CONVERT, "--out", tmp_path / "out", "--onnx")
    for words in (("export", folder), conversion):
        assert "pip install onnx-ir onnxruntime " in refused(*words)


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA")
def test_a_provider_that_is_not_there(repository: Make, refused: Refused, run: RunCli) -> None:
    folder = repository()
    assert "has no CUDAExecutionProvider here" in refused("export", folder, "--provider", "cuda")
    assert run("export", folder, "--provider", "cpu").code == 0
    assert "has no CUDAExecutionProvider here" in refused("validate", folder, "--provider", "cuda")


REFUSED: dict[str, Row] = {
    **{
        words[0]: Row("need --onnx", words=words, code=2)
        for words in (("--onnx-dtype", "fp16"), PORTABLE, ("--onnx-standalone",), ("--provider", "cpu"))
    },
    "no padding": Row(
        "convert the source with --set pad_token_id=N\n",
        config(pad_token_id=None),
        ("--onnx",),
        ("mpt", {"head": "SequenceClassification"}),
    ),
    "pooling": Row(
        "mode median is not one of",
        lambda folder: with_modules(folder, {"pooling_mode": "median"}),
        ("--onnx", "--pooled"),
        ENCODER,
    ),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_convert_refuses(make_source: MakeSource, refused: Refused, tmp_path: Path, row: Row) -> None:
    source = make_source(row.model[0], **row.model[1])
    row.change(source)
    words = (*CONVERT, "--out", tmp_path / "out", *row.words)
    assert row.message in refused(source, *words, code=row.code)
    assert row.message in refused(source, *words, "--dry-run", code=row.code)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (weights(lambda tensors: None, note="x" * 100), "is not what ntk-convert"),
        (
            weights(lambda tensors: tensors.pop(WEIGHT)),
            "does not belong to this repository: the weights have no",
        ),
        (config(alibi_scaling={"type": "ntk", "factor": 3.0}), 'made for the alibi_scaling {"factor": 2.0, '),
    ],
    ids=["other weights", "no weights", "another scaling"],
)
def test_a_graph_of_something_else(repository: Make, change: Change, message: str) -> None:
    folder = exported(repository())
    change(folder)
    failure = graphs_report(folder).failure or ""
    assert message in failure
    assert "; export it again: ntk-convert export" in failure


def test_a_full_disk(repository: Make, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = repository()
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "has 1.0 kB free, and the graph's own weights need " in refused(
        "export", folder, "--onnx-standalone"
    )


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (ValueError("two\nlines"), "error: unexpected ValueError: "),
        (KeyboardInterrupt(), "error: interrupted; nothing was written\n"),
    ],
)
def test_a_bug_or_an_interrupt_is_one_line_and_leaves_nothing(
    repository: Make, run: RunCli, monkeypatch: pytest.MonkeyPatch, failure: BaseException, line: str
) -> None:
    folder = repository()
    before, names = fingerprint(folder), sorted(folder.rglob("*"))

    def broken(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("converter.onnx.reference.Reference.step", broken)
    result = run("export", folder)
    assert (result.code, result.out) == (1, "")
    said = result.err.lstrip("\n")  # after ^C the line begins anew
    assert said.startswith(line)
    assert said.count("\n") == 1
    assert (fingerprint(folder), sorted(folder.rglob("*"))) == (before, names)


CHANGED: dict[str, Change] = {
    "model.safetensors": weights(lambda tensors: spoil(tensors, 3.0)),
    "config.json": config(note="mine"),
    "ntk_alibi.py": lambda folder: (folder / "ntk_alibi.py").write_text("mine"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_that_was_changed_since_it_was_converted(
    repository: Make, refused: Refused, name: str
) -> None:
    """A graph of it would be right about a model that ``validate`` and ``push`` then refuse."""
    folder = repository()
    CHANGED[name](folder)
    line = refused("export", folder)
    assert name in line
    assert f"ntk-convert {folder} --out NEW" in line
