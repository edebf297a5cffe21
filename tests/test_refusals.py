"""Everything that is refused: one clear line, the right error, nothing written or changed.

The tables go through the Python API; test_cli.py has the command line. What makes no sense whatever the model
is in test_scaling.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter import convert, inspect
from converter.errors import ConverterError, UsageError
from converter.rotary.models import REFUSED
from tests.conftest import MakeSource, Pristine, Refused, Refuses, edit_json, into_a_subfolder
from tests.tiny.layout import change_tensors

LARGE = 10**30


def mpt(**attention: Any) -> dict[str, Any]:
    return {"attn_config": {"alibi": True, **attention}}


def by_parts(**options: Any) -> dict[str, Any]:
    return {"method": "by-parts", "scale": 2, **options}


# A tiny checkpoint, options of ``convert``, words of the message.
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {"target_length": 64}, "`train_length`"),
    (
        "bloom",
        by_parts(train_length=2048, ramp=(1, 2)),
        "`method` by-parts would scale no head: the longest span is 1280 tokens, and the ramp starts at 2048",
    ),
    # Falcon divides its bias by the root of the head's size.
    ("falcon", by_parts(train_length=2048, ramp=(2, 4)), "the longest span is 3620 tokens, and the ramp"),
    ("bloom", {"scale": 2, "revision": "main"}, "local folder"),
    ("bloom", {"scale": 2, "subfolder": ".."}, "not a folder inside MODEL"),
    # Rotary models
    (
        "llama",
        {"scale": 2, "method": "ntk-published"},
        "ALiBi only, and 'llama' is rotary; give `method` ntk",
    ),
    ("llama", {"dynamic": "position"}, "each key is rotated once"),
    ("llama", {"dynamic": "length", "method": "linear"}, "no dynamic linear"),
    ("llama", {"dynamic": "length", "method": "by-parts"}, "no dynamic by-parts"),
    ("llama", {"dynamic": "position", "method": "by-parts"}, "no dynamic by-parts"),
    ("llama", {"dynamic": "length", "rate": 1.5}, "give a rate that divides 64"),
    ("llama", {"dynamic": "length", "rate": 64}, "at 1 tokens"),
    ("llama", by_parts(ramp=(3000, 4000)), "would scale nothing"),
    ("llama", by_parts(ramp=(0.001, 0.01)), "would scale nothing"),
    ("phi3", by_parts(), "does not read a yarn rope_scaling"),
    ("phi3", {"scale": 2, "method": "linear"}, "does not read a linear rope_scaling for 'phi3'"),
    ("olmo", {"dynamic": "length"}, "dynamic rope_scaling that 'olmo' would need"),
]

# A tiny checkpoint, changes of its config.json with None removing a key, words of the message.
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    # Families that have no ALiBi, or not the kind that is supported
    ("mpt", mpt(alibi=False), "attn_config.alibi is False"),
    ("mpt", mpt(alibi="yes"), "'yes'"),
    ("mpt", mpt(prefix_lm=True), "attn_config.prefix_lm is True"),
    ("mpt", mpt(attn_type="multiquery_attention", kv_n_heads=4), "attn_type 'multiquery_attention' means 1"),
    ("mpt", mpt(kv_n_heads=2), "attn_config.kv_n_heads is 2"),
    ("mpt", mpt(rope=True), "attn_config.rope is True"),
    ("mpt", mpt(sliding_window_size=128), "sliding_window_size is 128"),
    ("mpt", mpt(alibi_bias_max=-1), "alibi_bias_max is -1"),
    ("mpt", mpt(softmax_scale="big"), "softmax_scale is 'big'"),
    ("mpt", {"attn_config": [1]}, "attn_config is [1]"),
    ("falcon", {"alibi": False}, "rotary"),
    ("falcon", {"alibi": None}, "rotary"),
    ("falcon", {"alibi": None, "model_type": "RefinedWebModel"}, "rotary"),  # falcon-7b's first revision
    *(
        ("falcon", {key: value}, f"{key} is True; only a Falcon")
        for key, value in (("multi_query", True), ("parallel_attn", None), ("new_decoder_architecture", True))
    ),
    ("bloom", {"model_type": "gptj"}, "'gptj' has rotary positions that cannot be scaled"),
    ("bloom", {"model_type": "gpt2"}, "'gpt2' has learned positions"),
    # Relatives of the families that cannot be converted
    ("bloom", {"model_type": "jais2"}, "unlike the first Jais, Jais 2 has no ALiBi"),
    ("bloom", {"model_type": "gpt_neox", "pos_emb": "alibi"}, "trained with ALiBi (pos_emb is 'alibi')"),
    (
        "bloom",
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXALiBiForCausalLM"]},
        "was trained with ALiBi (its class is GPTNeoXALiBiForCausalLM)",
    ),
    (
        "bloom",
        {"model_type": "hf_olmo", "alibi": False, "alibi_bias_max": 8.0},
        "convert the same model in transformers' layout (model_type olmo",
    ),
    ("bloom", {"model_type": "hf_olmo", "alibi": True}, "hf_olmo was trained with ALiBi (alibi is True)"),
    ("bloom", {"model_type": "emotion2vec"}, "learns a scale for its ALiBi bias"),
    ("bloom", {"model_type": "data2vec2"}, "learns a scale for its ALiBi bias"),
    ("bloom", {"model_type": "jina_clip"}, "convert a jina-embeddings-v2 model"),
    ("mpt", {"model_type": "llava_mpt"}, "to convert its language model alone"),
    ("bloom", {"model_type": "hyena"}, "bloom, mpt, falcon"),
    ("bloom", {"model_type": None}, "model_type is None"),
    ("bloom", {"model_type": ["bloom"]}, "model_type is ['bloom']"),
    ("bloom", {"quantization_config": {"bits": 4}}, "quantised"),
    ("bloom", {"architectures": ["BloomForDreaming"]}, "'BloomForDreaming'"),
    ("bloom", {"architectures": ["MptForCausalLM"]}, "'MptForCausalLM'"),
    ("bloom", {"architectures": "BloomForCausalLM"}, "not a list"),
    # What would be silently wrong: found by changing each option and comparing with the original code
    ("bloom", {"alibi_scaling": {"factor": 2}}, "does not read"),
    ("jina_bert", {"alibi_scaling": 4}, "which JinaBERT does not"),
    ("jina_bert", {"auto_map": {"AutoModel": "my_rewrite.JinaBertModel"}}, "not JinaBERT's own code"),
    ("jina_bert", {"architectures": ["JBertForMaskedLM"]}, "first revision"),
    ("replit", {"layer_norm_epsilon": 0.3}, "`overrides` norm_eps=0.3"),
    ("mpt", {"residual_coeff": 0.5}, "residual_coeff is 0.5"),
    ("mpt", {"attention_bias": True}, "attention_bias is True"),
    ("jais", {"scale_attn_weights": ...}, "scale_attn_weights is None"),  # a null that is false
    # Impossible sizes
    ("bloom", {"n_head": None}, "n_head"),
    ("bloom", {"n_head": 4.5}, "n_head is 4.5"),
    ("bloom", {"n_head": LARGE}, f"n_head is {LARGE}"),
    ("bloom", {"n_head": 5}, "hidden size 32 is not a multiple of the number of heads, 5"),
    ("bloom", {"num_attention_heads": 8}, "n_head 4 and num_attention_heads 8"),
    ("bloom", {"n_head": 1 << 20, "hidden_size": 1 << 20}, "1048576 heads, more than any model"),
    ("bloom", {"n_layer": 10**6}, "config.json gives 1000000 layers, more than any model has (8192)"),
    ("bloom", {"hidden_size": 1 << 20}, "channels per head, more than any model"),
    ("bloom", {"num_labels": 1 << 24}, "num_labels is 16777216, more than any model has (131072)"),
    *(
        ("bloom", {"id2label": value}, "id2label does not give numbers names")
        for value in (5, [1], {"a": "x"})
    ),
    ("bloom", {"architectures": [["BloomForCausalLM"]]}, "architectures names ['BloomForCausalLM']"),
    ("bloom", {"architectures": [{}]}, "architectures names {}"),
    *(
        ("llama", {"architectures": named}, f"architectures is {named!r}, not a list of class names")
        for named in (1.5, {"a": "b"}, [1])
    ),
    ("mpt", {"n_layers": None}, "n_layers"),
    ("falcon", {"hidden_size": None}, "hidden_size"),
    ("bloom", {"model_type": "t5"}, "'t5' has relative positions that were learned, not ALiBi: there are no"),
    *(
        (family, {key: value}, f"config.json: {key} is {value!r}, expected a small positive number")
        for family, key in (("bloom", "layer_norm_epsilon"), ("llama", "rms_norm_eps"))
        for value in (0, -0.001, "nonsense")
    ),
    # Rotary models
    *(
        ("llama", {"model_type": name}, f"{name!r} has rotary positions that cannot be scaled: {reason}")
        for name, reason in sorted(REFUSED.items())
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has type 'llama3'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "parameters has type 'yarn'"),
    ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "scaled already"),
    (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
        "for each kind of layer (full_attention, sliding_attention)",
    ),
    ("llama", {"rope_scaling": "linear"}, "not an object"),
    (
        "llama",
        {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}},
        "(auto_map: modeling_llama.LlamaForCausalLM)",
    ),
    ("llama", {"quantization_config": {"bits": 4}}, "quantised"),
    ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "contradicts itself"),
    ("cohere", {"rope_theta": None}, "disagree about its default for 'cohere'"),
    ("llama", {"rope_theta": "10000"}, "rope_theta is '10000'"),
    ("llama", {"rope_theta": 1}, "not a base above 1"),
    ("llama", {"partial_rotary_factor": 0.5}, "does not read for 'llama'"),
    ("phi", {"partial_rotary_factor": 0.45}, "7 rotary channels"),
    ("gemma", {"head_dim": None}, "config.json has no head_dim"),
    ("llama", {"num_attention_heads": 5}, "not a multiple of the number of heads, 5"),
    ("llama", {"num_hidden_layers": 1_000_000}, "1000000 layers"),
]

# The same for what the weights contradict, or what the options need: inspect takes it.
CONVERSIONS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("bloom", {"n_layer": 1}, {}, "config.json says 1 layers, but the weights have 2"),
    ("bloom", {"model_type": "ntk_bloom"}, {}, "and a converted BLOOM has one of NtkBloomModel"),
    ("bloom", {}, {"subfolder": "last"}, "cannot read the folder"),
    (
        "bloom",
        {"alibi_scaling": {}, "ntk_convert": {"source": "x/y"}},
        {},
        "the model was saved by the stock class, which computes without the scaling",
    ),
    ("llama", {"ntk_convert": {"source": "x/y"}}, {}, "it has ntk_convert's record, but not the"),
    *(("llama", {"architectures": [name]}, {}, f"{name!r}") for name in ("MistralForCausalLM", "MyModel")),
    ("llama", {"num_hidden_layers": 1}, {}, "left over"),
    ("llama", {"vocab_size": 98}, {}, "has shape"),
    ("bloom", {"seq_length": 4096}, {"scale": None, "dynamic": "length"}, "4096"),
    ("mpt", {"max_seq_len": 777}, {"scale": None, "dynamic": "position"}, "max_seq_len 777"),
    ("mistral", {"sliding_window": 32}, {"scale": None, "target_length": 256}, "`train_length`"),
    ("stablelm", {"partial_rotary_factor": 0.125}, {}, "give `method` linear"),
]


def drop(folder: Path, name: str) -> None:
    [path] = folder.glob(name)
    path.unlink()


def into_a_folder(folder: Path) -> None:
    (folder / "last").mkdir()
    (folder / "config.json").rename(folder / "last" / "config.json")


def shorten(folder: Path, pattern: str) -> None:
    last = max(folder.glob(pattern))
    os.truncate(last, last.stat().st_size - 7)


def add_to_index(folder: Path) -> None:
    [index] = folder.glob("*.index.json")
    files = json.loads(index.read_text())["weight_map"]
    edit_json(index, {"weight_map": files | {"transformer.ghost": next(iter(files.values()))}})


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def many(folder: Path) -> None:
    for number in range(1001):
        (folder / f"{number}.json").write_text("{}")


def add_to_config(text: str) -> Callable[[Path], object]:
    def add(folder: Path) -> None:
        content = (folder / "config.json").read_text().rstrip()
        (folder / "config.json").write_text(f"{content[:-1]}, {text}}}")

    return add


def change_weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: change_tensors(folder, change)


def as_integers(dtype: torch.dtype, end: str = "") -> Callable[[Path], object]:
    return change_weights(
        lambda tensors: tensors.update(
            {name: tensor.to(dtype) for name, tensor in tensors.items() if name.endswith(end)}
        )
    )


def renamed(name: str) -> Callable[[Path], object]:
    """The weights get another name."""
    return lambda folder: next(path for path in folder.glob("*model.*") if path.suffix != ".json").rename(
        folder / name
    )


class Evil:
    """Unpickled, it would run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def config(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_bytes(content)


BIN, SHARDS, BIN_SHARDS = {"fmt": "bin"}, {"sharded": True}, {"fmt": "bin", "sharded": True}
# How a tiny BLOOM is stored, what happens to its folder, words of the message.
FOLDERS: list[tuple[dict[str, Any], Callable[[Path], object], str]] = [
    ({}, lambda folder: drop(folder, "config.json"), "has no config.json"),
    ({}, into_a_folder, "has no config.json, but its folder last has one; give `subfolder` last"),
    ({}, config(b""), "not valid JSON"),
    ({}, config(b"[]"), "JSON list"),
    ({}, lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "LoRA adapter"),
    ({}, lambda folder: (folder / "config.json").rename(folder / "config.yaml"), "such as emotion2vec"),
    (BIN_SHARDS, lambda folder: drop(folder, "*-00002-of-*.bin"), "-00002-of-"),
    ({}, lambda folder: shorten(folder, "*.safetensors"), "model.safetensors"),
    (BIN, lambda folder: shorten(folder, "*.bin"), "pytorch_model.bin"),
    (BIN_SHARDS, lambda folder: shorten(folder, "*.bin"), "-00004-of-00004.bin"),
    (BIN_SHARDS, add_to_index, "'transformer.ghost'"),
    (
        BIN_SHARDS,
        lambda folder: save_file({"stub": torch.zeros(1)}, folder / "model.safetensors"),
        "model.safetensors has 1 tensors, pytorch_model.bin.index.json lists",
    ),
]

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
INTEGERS = "in model.safetensors has dtype {}, and weights are floating point"
# The same for what ``inspect`` refuses in the same words.
ALIKE: list[tuple[dict[str, Any], Callable[[Path], object], str]] = [
    (
        {"fmt": "bin"},
        write("quantize_config.json", "{}"),
        "quantised (it has quantize_config.json); convert the",
    ),
    (
        {"fmt": "bin"},
        write("quant_config.json", "{}"),
        "quantised (it has quant_config.json); convert the unquantised",
    ),
    (
        {},
        change_weights(lambda tensors: tensors.update({"h.0.mlp.qweight": torch.zeros(4, 4).int()})),
        "quantised (tensor 'h.0.mlp.qweight'); convert the unquantised one",
    ),
    ({}, as_integers(torch.int8), INTEGERS.format("I8")),
    ({}, as_integers(torch.bool), INTEGERS.format("BOOL")),
    ({}, as_integers(torch.int64, "ln_f.bias"), f"'transformer.ln_f.bias' {INTEGERS.format('I64')}"),
    (BIN, write("pytorch_model.bin", ""), "pytorch_model.bin is empty; download it again"),
    ({}, write("model.safetensors", POINTER), "safetensors is a git-lfs pointer, not the file itself; run"),
    (BIN, write("pytorch_model.bin", POINTER), "pytorch_model.bin is a git-lfs pointer"),
    ({}, write("config.json", POINTER), "config.json is a git-lfs pointer, not the file itself; run git lfs"),
    ({}, add_to_config('"a": 1e999'), "config.json: 'a' is not a finite number; correct it there"),
    ({}, add_to_config('"a": [[NaN]]'), "config.json: 'a' is not a finite number; correct it there"),
    (
        {},
        lambda folder: (folder / "model.safetensors").rename(folder / "q4.gguf"),
        "has q4.gguf: GGUF files cannot be converted; give the repository with the original safetensors",
    ),
]
# And for what ``inspect`` does not read.
FOLDERS += [
    (SHARDS, lambda folder: drop(folder, "*.index.json"), "shards such as model-00001-of-00004.safetensors"),
    (BIN_SHARDS, lambda folder: drop(folder, "*.index.json"), "but no pytorch_model.bin.index.json"),
    ({}, renamed("consolidated.safetensors"), "but consolidated.safetensors; if this is the whole model"),
    (BIN, renamed("model.pt"), "but model.pt; if this is the whole model"),
    (BIN, renamed("ds_inference_config.json"), "in DeepSpeed-inference's format"),
    (BIN, renamed("training_args.bin"), "has no weights"),
    (BIN, as_integers(torch.int8), INTEGERS.format("I8")),
    (
        BIN,
        change_weights(lambda tensors: tensors.update(evil=Evil())),
        "pytorch_model.bin holds more than tensors: posix.system, which this tool does not run; convert",
    ),
    ({}, many, "the source has 1004 small files such as '0.json', more than a model has (1000); move those"),
    ({}, write("tokenizer.json", POINTER), "tokenizer.json is a git-lfs pointer"),
    ({}, write("tokenizer_config.json", POINTER), "tokenizer_config.json is a git-lfs pointer"),
]

# MODEL itself, relative to a folder that has a file and an original in GGUF.
MODELS = [
    ("./no/such/folder", "no folder ./no/such/folder"),
    ("/no/such/folder", "no folder /no/such/folder"),
    ("a/b/c", "no folder a/b/c"),
    ("", "neither a folder nor a Hub id"),
    ("bad\nname\x1b[2J", r"'bad\nname\x1b[2J'"),
    ("x" * 5000, "neither a folder nor a Hub id"),
    *((name, "") for name in ("a\x00b", "~nobody/x", "~a\x00b", "/dev/null", "a/" * 3000, "http://x/y", "-")),
    ("config.json", "is a file"),
    ("q4.gguf", "has q4.gguf: GGUF files cannot be converted; give the repository"),
]


def folder_with(name: str) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        (place / "out").mkdir()
        (place / "out" / name).write_text("keep me")

    return make


def weights_elsewhere(place: Path) -> None:
    (place / "store").mkdir()
    (place / "source/model.safetensors").rename(place / "store/blob")
    (place / "source/model.safetensors").symlink_to(place / "store/blob")


def project(place: Path) -> None:
    """A person's own, with a config.json."""
    for name in ("config.json", ".git/HEAD", "thesis.tex"):
        (place / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "out" / name).write_text("{}")


def result_and(name: str) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        convert(place / "source", place / "out", scale=2, verify=False)
        (place / "out" / name).parent.mkdir(exist_ok=True)
        (place / "out" / name).write_text("keep me")

    return make


# What is there beside "source", the output folder, options, words of the message.
OUTPUTS: list[tuple[Callable[[Path], object], str, dict[str, Any], str]] = [
    (folder_with("letter.txt"), "out", {}, "`overwrite`"),
    *(
        (make, "out", options, f"out holds {name!r}, and `overwrite` replaces only a result or a folder with")
        for make, name in (
            (folder_with("letter.txt"), "letter.txt"),
            (folder_with(".gitkeep"), ".gitkeep"),
            (folder_with("README.md"), "README.md"),
            (project, "thesis.tex"),
            (result_and("notes.txt"), "notes.txt"),
            (result_and("model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors"),
            (result_and("checkpoint-10/config.json"), "checkpoint-10/config.json"),
        )
        for options in ({}, {"overwrite": True})
    ),
    (result_and("README.md"), "out", {}, "exists and is not empty; name another folder or give `overwrite`"),
    (lambda place: (place / "out").write_text("keep me"), "out", {"overwrite": True}, "is a file"),
    (lambda place: (place / "loop").symlink_to("loop"), "loop", {}, "points back to itself"),
    (lambda _: None, "x" * 201, {}, "longer than 200 bytes"),
    (lambda _: None, "x" * 256, {}, "is too long: file systems allow 255 bytes in a name"),
    (lambda _: None, "x" * 256 + "/out", {}, "is too long: file systems allow 255 bytes in a name"),
    (lambda _: None, "x/" * 1750, {}, "about 3500 in a path; choose a shorter one"),
    (lambda _: None, "source", {"overwrite": True}, "overlap"),
    (lambda _: None, "source/out", {"overwrite": True}, "overlap"),
    (lambda _: None, ".", {"overwrite": True}, "overlap"),
    (lambda place: os.chdir(place / "empty"), "empty", {}, "current folder"),
    (lambda place: (place / "link").symlink_to("source"), "link", {"overwrite": True}, "overlap"),
    (weights_elsewhere, "store", {"overwrite": True}, "overlap"),
]


@pytest.mark.parametrize(("name", "options", "words"), OPTIONS)
def test_options(
    name: str, options: dict[str, Any], words: str, make_source: MakeSource, refuses: Refuses
) -> None:
    refuses(make_source(name), words, error=UsageError, **{"scale": None, **options})


@pytest.mark.parametrize(("name", "changes", "words"), CONFIGS)
def test_configs(
    name: str, changes: dict[str, Any], words: str, make_source: MakeSource, refuses: Refuses
) -> None:
    source = make_source(name, changes)
    assert not isinstance(refuses(source, words), UsageError)
    if words == "quantised":  # only a conversion with verification finds out that these weights are not
        return
    with pytest.raises(ConverterError, match=re.escape(words)):
        inspect(source)


@pytest.mark.parametrize(("name", "changes", "options", "words"), CONVERSIONS)
def test_conversions(
    name: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    words: str,
    make_source: MakeSource,
    refuses: Refuses,
) -> None:
    refuses(make_source(name, changes), words, verify=True, **options)


@pytest.mark.parametrize(("storage", "change", "words"), [*FOLDERS, *ALIKE])
def test_folders(
    storage: dict[str, Any],
    change: Callable[[Path], object],
    words: str,
    make_source: MakeSource,
    refuses: Refuses,
) -> None:
    source = make_source("bloom", **storage)
    change(source)
    refuses(source, words)
    if (storage, change, words) in ALIKE:
        with pytest.raises(ConverterError, match=re.escape(words)):
            inspect(source)


@pytest.mark.parametrize(("model", "words"), MODELS)
def test_models(
    model: str, words: str, refuses: Refuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "q4.gguf"):
        (tmp_path / name).write_text("{}")
    refuses(model, words)


@pytest.mark.parametrize(("prepare", "out", "options", "words"), OUTPUTS)
def test_outputs(
    prepare: Callable[[Path], object],
    out: str,
    options: dict[str, Any],
    words: str,
    make_source: MakeSource,
    refuses: Refuses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # and back
    source = make_source()
    (tmp_path / "empty").mkdir()
    prepare(tmp_path)
    refuses(source, words, out=tmp_path / out, **options)


def test_a_disk_that_is_full(
    make_source: MakeSource, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source()
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refuses(source, "has 1.0 kB free, and the result needs ")


@pytest.mark.parametrize("command", ["export", "convert"])
def test_graphs_of_rotary_models_are_for_optimum(
    command: str, make_source: MakeSource, tmp_path: Path, refused: Refused
) -> None:
    pytest.importorskip("onnxruntime")
    source, onnx = make_source("llama"), ("--out", tmp_path / "graph", "--onnx")
    if command == "convert":
        assert "optimum-cli export onnx" in refused(source, "--scale", 2, *onnx)
        assert "with --scale (tracing would freeze" in refused(source, "--dynamic", "length", *onnx)
    else:
        convert(source, tmp_path / "out", scale=2)
        assert "optimum-cli export onnx" in refused(command, tmp_path / "out")


# What is not refused


def move_weights(folder: Path) -> None:
    """As links to another disk, or to a Hub cache that is not the user's."""
    (folder.parent / "store").mkdir()
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.rename(folder.parent / "store" / path.name)
        path.symlink_to(folder.parent / "store" / path.name)


def mask(name: str) -> Callable[[Path], object]:
    return change_weights(lambda tensors: tensors.update({name: torch.full((4, 4), -torch.inf)}))


@pytest.mark.parametrize(
    ("name", "storage", "change"),
    [
        ("bloom", {}, move_weights),
        ("bloom", SHARDS, move_weights),
        ("bloom", {}, lambda folder: (folder / "LICENSE").symlink_to("LICENSE")),
        (
            "bloom",
            {},
            lambda folder: (folder / "config.json").write_text(
                (folder / "config.json").read_text(), "utf-8-sig"
            ),
        ),
        ("bloom", SHARDS, into_a_subfolder),
        ("bloom", BIN_SHARDS, into_a_subfolder),
        ("bloom", {}, mask("transformer.h.0.self_attention.attn_mask")),
        ("baichuan", {}, mask("model.future_mask")),
        ("llama", {}, mask("model.layers.0.self_attn.causal_mask")),
        ("falcon", {}, mask("transformer.h.0.self_attention.scale_mask_softmax.causal_mask")),
    ],
)
def test_folders_that_are_not_refused(
    name: str,
    storage: dict[str, Any],
    change: Callable[[Path], object],
    make_source: MakeSource,
    pristine: Pristine,
    tmp_path: Path,
) -> None:
    """The result has the weights, in files of its own."""
    source = make_source(name, **storage)
    change(source)
    inspect(source)
    assert convert(source, tmp_path / "out", scale=2).checks
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert not any(path.is_symlink() for path in files)
    found = {tensor: value for path in files for tensor, value in load_file(path).items()}
    stored = load_file(pristine(name) / "model.safetensors")
    assert all(torch.equal(found[tensor], value) for tensor, value in stored.items())
    if storage:
        [index] = (tmp_path / "out").glob("*.index.json")
        placed = json.loads(index.read_text())["weight_map"]
        assert placed.keys() == found.keys()
        assert set(placed.values()) == {path.name for path in files}


def older_manifest(place: Path) -> None:
    result_and("README.md")(place)
    listed = json.loads((place / "out/ntk_convert.json").read_text())["files"]
    (place / "out/ntk_convert.json").write_text(json.dumps({"files": list(listed)}))


def used_result(place: Path) -> None:
    """Without a file that is listed, and with what tools leave."""
    result_and("README.md")(place)
    for name in ("__pycache__/a.pyc", ".cache/huggingface/a", ".gitattributes", "model.onnx.failed"):
        (place / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "out" / name).write_text("x")
    (place / "out/tokenizer.json").unlink()


def downloaded(place: Path) -> None:
    shutil.copytree(place / "source", place / "out")
    (place / "out/.cache/huggingface").mkdir(parents=True)
    (place / "out/.cache/huggingface/a.metadata").write_text("x")


@pytest.mark.parametrize("prepare", [older_manifest, used_result, downloaded])
def test_folders_that_are_replaced(
    prepare: Callable[[Path], object], make_source: MakeSource, tmp_path: Path
) -> None:
    source = make_source()
    prepare(tmp_path)
    convert(source, tmp_path / "out", scale=2, verify=False, overwrite=True)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert names == {
        *json.loads((tmp_path / "out/ntk_convert.json").read_text())["files"],
        "README.md",
        "ntk_convert.json",
    }


@pytest.mark.parametrize("name", ["mosaic_gpt", "mosaic_bert"])
def test_options_that_the_originals_ignore_change_nothing(
    name: str, make_source: MakeSource, tmp_path: Path
) -> None:
    source = make_source(name)
    edit_json(source / "config.json", {"tie_word_embeddings": ...})
    convert(source, tmp_path / "out", scale=2)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
