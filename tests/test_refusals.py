"""Everything that is refused: one clear line, the right error, nothing written or changed.

The first tables go through the Python API, the last ones through the command line. test_scaling.py has the
options that make no sense for any model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from converter import convert, inspect
from converter.errors import ConverterError, UsageError, ValidationError
from converter.evaluation.results import Results
from converter.result import manifest
from converter.rotary.models import REFUSED
from converter.source.open import open_folder
from tests.changes import Change, config, nothing, pickled, put, removed, tensors, written
from tests.conftest import (
    MakeSource,
    Pristine,
    Refused,
    Refuses,
    RunCli,
    edit_json,
    fingerprint,
    into_a_subfolder,
)
from tests.messages import Words, raises, says
from tests.onnx_graphs import (
    POOLING,
    TRAIN_LENGTH,
    Make,
    converted_copy,
    exported,
    graphs_report,
    with_modules,
)
from tests.test_embeddings import beir, text_file
from tests.tiny.layout import Tensors

# Conversions of a tiny checkpoint

NO_OPTIONS: dict[str, Any] = {}
SAFE: dict[str, Any] = {}
BIN, SHARDS, BIN_SHARDS = {"fmt": "bin"}, {"sharded": True}, {"fmt": "bin", "sharded": True}


class Conversion(NamedTuple):
    """A tiny checkpoint, what is done to it, how it is converted, and what is said."""

    model: str
    words: Words
    change: Change = nothing
    stored: dict[str, Any] = SAFE
    """How the checkpoint is written."""
    options: dict[str, Any] = NO_OPTIONS
    usage: bool = False
    """Whether the options are to blame, and the error is a ``UsageError``."""
    inspected: bool = False
    """Whether ``inspect`` says the same."""

    @property
    def name(self) -> str:
        words = (self.words,) if isinstance(self.words, str) else self.words
        return " ".join((self.model, *words))


def usage(model: str, *words: str, **options: Any) -> Conversion:
    return Conversion(model, words, options={"scale": None, **options}, usage=True)


def by_parts(model: str, *words: str, **options: Any) -> Conversion:
    return usage(model, *words, method="by-parts", **{"scale": 2, **options})


OPTIONS = [
    usage("bloom", "`train_length`", target_length=64),
    # The longest span, and where the ramp starts
    by_parts("bloom", "by-parts", "1280", "2048", train_length=2048, ramp=(1, 2)),
    # Falcon divides its bias by the root of the head's size.
    by_parts("falcon", "by-parts", "3620", train_length=2048, ramp=(2, 4)),
    usage("bloom", "local folder", scale=2, revision="main"),
    usage("bloom", "not a folder inside MODEL", scale=2, subfolder=".."),
    # Rotary models
    usage("llama", "'llama' is rotary", "`method` ntk", scale=2, method="ntk-published"),
    usage("llama", "each key is rotated once", dynamic="position"),
    usage("llama", "no dynamic linear", dynamic="length", method="linear"),
    usage("llama", "no dynamic by-parts", dynamic="length", method="by-parts"),
    usage("llama", "no dynamic by-parts", dynamic="position", method="by-parts"),
    usage("llama", "a rate that divides 64", dynamic="length", rate=1.5),
    usage("llama", "at 1 tokens", dynamic="length", rate=64),
    by_parts("llama", "scale nothing", ramp=(3000, 4000)),
    by_parts("llama", "scale nothing", ramp=(0.001, 0.01)),
    by_parts("phi3", "yarn"),
    usage("phi3", "linear", "'phi3'", scale=2, method="linear"),
    usage("olmo", "dynamic", "'olmo'", dynamic="length"),
]

LARGE = 10**30


def keys(model: str, *words: str, **changes: Any) -> Conversion:
    """Changes of config.json: None removes a key, and an ellipsis is null."""
    return Conversion(model, words, config(**changes), inspected=True)


def mpt(*words: str, **attention: Any) -> Conversion:
    return keys("mpt", *words, attn_config={"alibi": True, **attention})


CONFIGS = [
    # Families that have no ALiBi, or not the kind that is supported
    mpt("attn_config.alibi is False", alibi=False),
    mpt("'yes'", alibi="yes"),
    mpt("attn_config.prefix_lm is True", prefix_lm=True),
    mpt("multiquery_attention", attn_type="multiquery_attention", kv_n_heads=4),
    mpt("attn_config.kv_n_heads is 2", kv_n_heads=2),
    mpt("attn_config.rope is True", rope=True),
    mpt("sliding_window_size is 128", sliding_window_size=128),
    mpt("alibi_bias_max is -1", alibi_bias_max=-1),
    mpt("softmax_scale is 'big'", softmax_scale="big"),
    keys("mpt", "attn_config is [1]", attn_config=[1]),
    keys("falcon", "rotary", alibi=False),
    keys("falcon", "rotary", alibi=None),
    keys("falcon", "rotary", alibi=None, model_type="RefinedWebModel"),  # falcon-7b's first revision
    *(
        keys("falcon", f"{key} is True", **{key: value})
        for key, value in (("multi_query", True), ("parallel_attn", None), ("new_decoder_architecture", True))
    ),
    keys("bloom", "'gptj'", "rotary", model_type="gptj"),
    keys("bloom", "'gpt2'", "learned positions", model_type="gpt2"),
    # Relatives of the families that cannot be converted
    keys("bloom", "Jais 2", "no ALiBi", model_type="jais2"),
    keys("bloom", "pos_emb is 'alibi'", model_type="gpt_neox", pos_emb="alibi"),
    keys(
        "bloom",
        "GPTNeoXALiBiForCausalLM",
        model_type="gpt_neox",
        architectures=["GPTNeoXALiBiForCausalLM"],
    ),
    keys("bloom", "model_type olmo", model_type="hf_olmo", alibi=False, alibi_bias_max=8.0),
    keys("bloom", "hf_olmo", "alibi is True", model_type="hf_olmo", alibi=True),
    keys("bloom", "learns a scale", model_type="emotion2vec"),
    keys("bloom", "learns a scale", model_type="data2vec2"),
    keys("bloom", "convert a jina-embeddings-v2 model", model_type="jina_clip"),
    keys("mpt", "its language model alone", model_type="llava_mpt"),
    keys("bloom", "bloom, mpt, falcon", model_type="hyena"),
    keys("bloom", "model_type is None", model_type=None),
    keys("bloom", "model_type is ['bloom']", model_type=["bloom"]),
    # Only a conversion with verification finds out that these weights are not quantised.
    Conversion("bloom", "quantised", config(quantization_config={"bits": 4})),
    Conversion("llama", "quantised", config(quantization_config={"bits": 4})),
    keys("bloom", "'BloomForDreaming'", architectures=["BloomForDreaming"]),
    keys("bloom", "'MptForCausalLM'", architectures=["MptForCausalLM"]),
    keys("bloom", "not a list", architectures="BloomForCausalLM"),
    # What would be silently wrong: found by changing each option and comparing with the original code
    keys("bloom", "alibi_scaling", "does not read", alibi_scaling={"factor": 2}),
    keys("jina_bert", "alibi_scaling", "JinaBERT does not", alibi_scaling=4),
    keys("jina_bert", "not JinaBERT's own code", auto_map={"AutoModel": "my_rewrite.JinaBertModel"}),
    keys("jina_bert", "first revision", architectures=["JBertForMaskedLM"]),
    keys("replit", "`overrides` norm_eps=0.3", layer_norm_epsilon=0.3),
    keys("mpt", "residual_coeff is 0.5", residual_coeff=0.5),
    keys("mpt", "attention_bias is True", attention_bias=True),
    keys("jais", "scale_attn_weights is None", scale_attn_weights=...),  # a null that is false
    # Impossible sizes
    keys("bloom", "n_head", n_head=None),
    keys("bloom", "n_head is 4.5", n_head=4.5),
    keys("bloom", f"n_head is {LARGE}", n_head=LARGE),
    keys("bloom", "hidden size 32", "heads, 5", n_head=5),
    keys("bloom", "n_head 4", "num_attention_heads 8", num_attention_heads=8),
    keys("bloom", "1048576 heads", n_head=1 << 20, hidden_size=1 << 20),
    keys("bloom", "1000000 layers", "8192", n_layer=10**6),
    keys("bloom", "channels per head", hidden_size=1 << 20),
    keys("bloom", "num_labels is 16777216", "131072", num_labels=1 << 24),
    *(keys("bloom", "id2label", id2label=value) for value in (5, [1], {"a": "x"})),
    keys("bloom", "architectures", "['BloomForCausalLM']", architectures=[["BloomForCausalLM"]]),
    keys("bloom", "architectures", "{}", architectures=[{}]),
    *(
        keys("llama", f"architectures is {named!r}", "not a list", architectures=named)
        for named in (1.5, {"a": "b"}, [1])
    ),
    keys("mpt", "n_layers", n_layers=None),
    keys("falcon", "hidden_size", hidden_size=None),
    keys("bloom", "'t5'", "relative positions", "not ALiBi", model_type="t5"),
    *(
        keys(family, "config.json", f"{key} is {value!r}", "a small positive number", **{key: value})
        for family, key in (("bloom", "layer_norm_epsilon"), ("llama", "rms_norm_eps"))
        for value in (0, -0.001, "nonsense")
    ),
    # Rotary models
    *(
        keys("llama", repr(name), "cannot be scaled", reason, model_type=name)
        for name, reason in sorted(REFUSED.items())
    ),
    keys("llama", "rope_scaling", "'llama3'", rope_scaling={"rope_type": "llama3", "factor": 8.0}),
    keys("llama", "rope_scaling", "'linear'", rope_scaling={"type": "linear", "factor": 2.0}),
    keys("llama", "rope_parameters", "'yarn'", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
    keys(
        "llama",
        "rope_scaling",
        "scaled already",
        rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]},
    ),
    keys(
        "llama",
        "full_attention",
        "sliding_attention",
        rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}},
    ),
    keys("llama", "rope_scaling", "not an object", rope_scaling="linear"),
    keys(
        "llama",
        "auto_map",
        "modeling_llama.LlamaForCausalLM",
        auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
    ),
    keys("llama", "rope_theta", "contradicts itself", rope_parameters={"rope_theta": 5e5}),
    keys("cohere", "rope_theta", "'cohere'", rope_theta=None),
    keys("llama", "rope_theta is '10000'", rope_theta="10000"),
    keys("llama", "rope_theta", "above 1", rope_theta=1),
    keys("llama", "partial_rotary_factor", "'llama'", partial_rotary_factor=0.5),
    keys("phi", "7 rotary channels", partial_rotary_factor=0.45),
    keys("gemma", "head_dim", head_dim=None),
    keys("llama", "heads, 5", num_attention_heads=5),
    keys("llama", "1000000 layers", num_hidden_layers=1_000_000),
]


def verified(model: str, changes: dict[str, Any], *words: str, **options: Any) -> Conversion:
    return Conversion(model, words, config(**changes), options={"verify": True, **options})


# What the weights contradict, or what the options need: inspect takes it.
CONTRADICTIONS = [
    verified("bloom", {"n_layer": 1}, "config.json says 1 layers", "have 2"),
    verified("bloom", {"model_type": "ntk_bloom"}, "NtkBloomModel"),
    verified("bloom", {}, "cannot read the folder", subfolder="last"),
    verified(
        "bloom",
        {"alibi_scaling": {}, "ntk_convert": {"source": "x/y"}},
        "saved by the stock class",
        "without the scaling",
    ),
    verified("llama", {"ntk_convert": {"source": "x/y"}}, "ntk_convert"),
    *(verified("llama", {"architectures": [name]}, repr(name)) for name in ("MistralForCausalLM", "MyModel")),
    verified("llama", {"num_hidden_layers": 1}, "left over"),
    verified("llama", {"vocab_size": 98}, "has shape"),
    # Options that are needed
    *(
        row._replace(usage=True)
        for row in (
            verified("bloom", {"seq_length": 4096}, "4096", "`train_length`", scale=None, dynamic="length"),
            verified(
                "mpt",
                {"max_seq_len": 777},
                "max_seq_len 777",
                "`train_length`",
                scale=None,
                dynamic="position",
            ),
            verified("mistral", {"sliding_window": 32}, "`train_length`", scale=None, target_length=256),
            verified("stablelm", {"partial_rotary_factor": 0.125}, "`method` linear"),
        )
    ),
]


def into_a_folder(folder: Path) -> None:
    (folder / "last").mkdir()
    (folder / "config.json").rename(folder / "last" / "config.json")


def renamed(old: str, new: str) -> Change:
    return lambda folder: (folder / old).rename(folder / new)


def weights_renamed(name: str) -> Change:
    def change(folder: Path) -> None:
        [weights] = [path for path in folder.glob("*model.*") if path.suffix != ".json"]
        weights.rename(folder / name)

    return change


def shortened(pattern: str) -> Change:
    """The last file of this pattern is cut off."""

    def change(folder: Path) -> None:
        last = max(folder.glob(pattern))
        os.truncate(last, last.stat().st_size - 7)

    return change


def add_to_index(folder: Path) -> None:
    [index] = folder.glob("*.index.json")
    files = json.loads(index.read_text())["weight_map"]
    edit_json(index, {"weight_map": files | {"transformer.ghost": next(iter(files.values()))}})


def many(folder: Path) -> None:
    for number in range(1001):
        (folder / f"{number}.json").write_text("{}")


def add_to_config(text: str) -> Change:
    def add(folder: Path) -> None:
        content = (folder / "config.json").read_text().rstrip()
        (folder / "config.json").write_text(f"{content[:-1]}, {text}}}")

    return add


def as_integers(dtype: torch.dtype, end: str = "") -> Change:
    return tensors(
        lambda tensors: tensors.update(
            {name: tensor.to(dtype) for name, tensor in tensors.items() if name.endswith(end)}
        )
    )


def stub(folder: Path) -> None:
    save_file({"stub": torch.zeros(1)}, folder / "model.safetensors")


class Evil:
    """Unpickled, it would run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def damaged(stored: dict[str, Any], change: Change, *words: str, inspected: bool = False) -> Conversion:
    """What happens to the folder of a tiny BLOOM, which is stored like this."""
    return Conversion("bloom", words, change, stored, inspected=inspected)


def damaged_alike(stored: dict[str, Any], change: Change, *words: str) -> Conversion:
    """The same for what ``inspect`` refuses in the same words."""
    return damaged(stored, change, *words, inspected=True)


FOLDERS = [
    damaged(SAFE, removed("config.json"), "no config.json"),
    damaged(SAFE, into_a_folder, "no config.json", "`subfolder` last"),
    damaged(SAFE, written("config.json", ""), "config.json", "not valid JSON"),
    damaged(SAFE, written("config.json", "[]"), "config.json", "JSON list"),
    damaged(SAFE, renamed("config.json", "adapter_config.json"), "LoRA adapter"),
    damaged(SAFE, renamed("config.json", "config.yaml"), "emotion2vec"),
    damaged(BIN_SHARDS, removed("*-00002-of-*.bin"), "-00002-of-"),
    damaged(SAFE, shortened("*.safetensors"), "model.safetensors"),
    damaged(BIN, shortened("*.bin"), "pytorch_model.bin"),
    damaged(BIN_SHARDS, shortened("*.bin"), "-00004-of-00004.bin"),
    damaged(BIN_SHARDS, add_to_index, "'transformer.ghost'"),
    damaged(BIN_SHARDS, stub, "model.safetensors has 1 tensors", "pytorch_model.bin.index.json"),
    damaged_alike(
        BIN, written("quantize_config.json", "{}"), "quantize_config.json", "convert the unquantised one"
    ),
    damaged_alike(
        BIN, written("quant_config.json", "{}"), "quant_config.json", "convert the unquantised one"
    ),
    damaged_alike(
        SAFE,
        tensors(lambda tensors: tensors.update({"h.0.mlp.qweight": torch.zeros(4, 4).int()})),
        "'h.0.mlp.qweight'",
        "convert the unquantised one",
    ),
    damaged_alike(SAFE, as_integers(torch.int8), "model.safetensors", "dtype I8"),
    damaged_alike(SAFE, as_integers(torch.bool), "model.safetensors", "dtype BOOL"),
    damaged_alike(
        SAFE,
        as_integers(torch.int64, "ln_f.bias"),
        "'transformer.ln_f.bias'",
        "model.safetensors",
        "dtype I64",
    ),
    damaged_alike(BIN, written("pytorch_model.bin", ""), "pytorch_model.bin", "empty", "download it again"),
    damaged_alike(
        SAFE, written("model.safetensors", POINTER), "model.safetensors", "git-lfs pointer", "run git lfs"
    ),
    damaged_alike(BIN, written("pytorch_model.bin", POINTER), "pytorch_model.bin", "git-lfs pointer"),
    damaged_alike(SAFE, written("config.json", POINTER), "config.json", "git-lfs pointer", "run git lfs"),
    damaged_alike(SAFE, add_to_config('"a": 1e999'), "config.json", "'a'", "finite", "correct it there"),
    damaged_alike(SAFE, add_to_config('"a": [[NaN]]'), "config.json", "'a'", "finite", "correct it there"),
    damaged_alike(SAFE, renamed("model.safetensors", "q4.gguf"), "q4.gguf", "GGUF", "original safetensors"),
    # What inspect does not read
    damaged(SHARDS, removed("*.index.json"), "model-00001-of-00004.safetensors"),
    damaged(BIN_SHARDS, removed("*.index.json"), "no pytorch_model.bin.index.json"),
    damaged(SAFE, weights_renamed("consolidated.safetensors"), "consolidated.safetensors", "the whole model"),
    damaged(BIN, weights_renamed("model.pt"), "model.pt", "the whole model"),
    damaged(BIN, weights_renamed("ds_inference_config.json"), "DeepSpeed"),
    damaged(BIN, weights_renamed("training_args.bin"), "no weights"),
    damaged(BIN, as_integers(torch.int8), "dtype I8"),
    damaged(
        BIN,
        tensors(lambda tensors: tensors.update(evil=Evil())),
        "pytorch_model.bin",
        "posix.system",
        "does not run",
    ),
    damaged(SAFE, many, "1004 small files", "'0.json'", "1000"),
    damaged(SAFE, written("tokenizer.json", POINTER), "tokenizer.json", "git-lfs pointer"),
    damaged(SAFE, written("tokenizer_config.json", POINTER), "tokenizer_config.json", "git-lfs pointer"),
]


@pytest.mark.parametrize("row", [*OPTIONS, *CONFIGS, *CONTRADICTIONS, *FOLDERS], ids=lambda row: row.name)
def test_conversions(make_source: MakeSource, refuses: Refuses, row: Conversion) -> None:
    source = make_source(row.model, **row.stored)
    row.change(source)
    error = refuses(source, row.words, **row.options)
    assert isinstance(error, UsageError) == row.usage
    if row.inspected:
        with raises(ConverterError, row.words):
            inspect(source)


# MODEL itself, relative to a folder that has a file and an original in GGUF.
MODELS: list[tuple[str, Words]] = [
    ("./no/such/folder", "no folder ./no/such/folder"),
    ("/no/such/folder", "no folder /no/such/folder"),
    ("a/b/c", "no folder a/b/c"),
    ("", ("folder", "Hub id")),
    ("bad\nname\x1b[2J", r"'bad\nname\x1b[2J'"),
    ("x" * 5000, ("folder", "Hub id")),
    *((name, "") for name in ("a\x00b", "~nobody/x", "~a\x00b", "/dev/null", "a/" * 3000, "http://x/y", "-")),
    ("config.json", "is a file"),
    ("q4.gguf", ("q4.gguf", "GGUF")),
]


@pytest.mark.parametrize(("model", "words"), MODELS)
def test_models(
    model: str, words: Words, refuses: Refuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "q4.gguf"):
        (tmp_path / name).write_text("{}")
    refuses(model, words)


def file_in_out(name: str) -> Change:
    def make(place: Path) -> None:
        (place / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "out" / name).write_text("keep me")

    return make


def weights_elsewhere(place: Path) -> None:
    (place / "store").mkdir()
    (place / "source/model.safetensors").rename(place / "store/blob")
    (place / "source/model.safetensors").symlink_to(place / "store/blob")


def project(place: Path) -> None:
    """A person's own, with a config.json."""
    for name in ("config.json", ".git/HEAD", "thesis.tex"):
        file_in_out(name)(place)


def result_and(name: str) -> Change:
    def make(place: Path) -> None:
        convert(place / "source", place / "out", scale=2, verify=False)
        file_in_out(name)(place)

    return make


# What is there beside "source", the output folder, options, words of the message.
OUTPUTS: list[tuple[Change, str, dict[str, Any], Words]] = [
    (file_in_out("letter.txt"), "out", {}, "`overwrite`"),
    *(
        (make, "out", options, (f"out holds {name!r}", "`overwrite`"))
        for make, name in (
            (file_in_out("letter.txt"), "letter.txt"),
            (file_in_out(".gitkeep"), ".gitkeep"),
            (file_in_out("README.md"), "README.md"),
            (project, "thesis.tex"),
            (result_and("notes.txt"), "notes.txt"),
            (result_and("model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors"),
            (result_and("checkpoint-10/config.json"), "checkpoint-10/config.json"),
        )
        for options in ({}, {"overwrite": True})
    ),
    (result_and("README.md"), "out", {}, ("not empty", "another folder", "`overwrite`")),
    (written("out", "keep me"), "out", {"overwrite": True}, "is a file"),
    (lambda place: (place / "loop").symlink_to("loop"), "loop", {}, "points back to itself"),
    (nothing, "x" * 201, {}, "200 bytes"),
    (nothing, "x" * 256, {}, "255 bytes"),
    (nothing, "x" * 256 + "/out", {}, "255 bytes"),
    (nothing, "x/" * 1750, {}, ("3500", "choose a shorter one")),
    (nothing, "source", {"overwrite": True}, "overlap"),
    (nothing, "source/out", {"overwrite": True}, "overlap"),
    (nothing, ".", {"overwrite": True}, "overlap"),
    (lambda place: os.chdir(place / "empty"), "empty", {}, "current folder"),
    (lambda place: (place / "link").symlink_to("source"), "link", {"overwrite": True}, "overlap"),
    (weights_elsewhere, "store", {"overwrite": True}, "overlap"),
]


@pytest.mark.parametrize(("prepare", "out", "options", "words"), OUTPUTS)
def test_outputs(
    prepare: Change,
    out: str,
    options: dict[str, Any],
    words: Words,
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


# Command lines


class Line(NamedTuple):
    """A command line, the model that it is about, and what is said.

    Names in capitals stand for what is made: SOURCE is the checkpoint with the change, REPOSITORY its
    conversion with the change, and ``FILES`` has the others.
    """

    command: str
    words: Words
    code: int = 1
    model: tuple[str, dict[str, Any]] = ("bloom", {})
    change: Change = nothing
    listed: bool = True
    """Whether the repository's manifest lists what was changed."""


def text(content: str | bytes) -> Change:
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def rows(*rows: object) -> Change:
    return text("\n".join(map(json.dumps, rows)))


def prompts(*lengths: int) -> Change:
    return rows(*({"prompt": "w7", "answer": "w8", "length": length} for length in lengths))


FILES: dict[str, Change] = {
    "TEXT": text_file,
    "WINDOW": lambda path: text_file(path, 100),
    "LEARNED": lambda path: text_file(path, 80 * 96),
    "SHORT": text("a few words"),
    "BINARY": text(bytes(range(128, 256)) * 99),
    "BEIR": beir,
    "PROMPTS": prompts(256, 1024, 256, 1024),
    "ONE": prompts(256, 256, 1024),
    "RESULTS": rows(Results([], {}).to_json()),
    "DAMAGED": rows({"format": 1, "measurements": [{}]}),
    "BROKEN": text("["),
    "results.json": text("["),
    "EMPTY": Path.mkdir,
    "NEW": nothing,
    "NOWHERE": nothing,
}


def in_words(row: Line, pristine: Pristine, folder: Path) -> list[str]:
    """The words of the command line, once what they name is made in the folder."""
    model, options = row.model
    made: set[str] = set()

    def make(name: str) -> None:
        path = folder / name
        if name == "SOURCE":
            shutil.copytree(pristine(model, **options), path)
            row.change(path)
        elif name == "REPOSITORY":
            converted_copy(pristine(model, **options), path)
            row.change(path)
            if row.listed and (path / "config.json").is_file():
                names = manifest.listed(open_folder(path))
                manifest.write(path, [name for name in names if (path / name).is_file()], {})
        else:
            FILES[name](path)

    def word(text: str) -> str:
        name = text.partition("/")[0]
        if name not in {"SOURCE", "REPOSITORY", *FILES}:
            return text
        if name not in made:
            made.add(name)
            make(name)
        return str(folder / text)

    return [word(text) for text in row.command.split()]


ENCODER = ("jina_bert", {"head": "Model"})
JINA: tuple[str, dict[str, Any]] = ("jina_bert", {})
MASKED = ("jina_bert", {"head": "MaskedLM"})
CLASSIFIER = ("bloom", {"head": "SequenceClassification"})
JINA_CLASSIFIER = ("jina_bert", {"head": "SequenceClassification"})
MOSAIC: tuple[str, dict[str, Any]] = ("mosaic_bert", {})
LLAMA: tuple[str, dict[str, Any]] = ("llama", {})
SHORT_ROWS = "--lengths 48 --train-length 24"
TUNE = "tune SOURCE --train-length 24 --target-length 64"
FIT = "fit SOURCE --train-length 24 -q --out NEW --target-length"
LEARN = f"{FIT} 96 --text LEARNED"
PLOT = "plot SOURCE --scales 2 --out NEW"
DRAW = "plot RESULTS --out NEW"
masks = put("tokenizer_config.json", {"mask_token": "w5"})


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


# Eval, tune, fit and plot. They load models and tokenizers with transformers.
MEASURING = [
    Line("eval SOURCE", ("SOURCE", "--lengths", "--train-length"), 2),
    Line("eval SOURCE --prompts PROMPTS --text TEXT", ("--lengths", "--train-length"), 2),
    Line(
        "eval SOURCE --prompts PROMPTS --methods by-parts --scales 2",
        ("--methods by-parts", "SOURCE", "add --train-length N"),
        2,
    ),
    Line("eval SOURCE --tasks perplexity", "--text", 2),
    Line("eval SOURCE --tasks trec", "file", 2),
    Line("eval SOURCE --tasks nonsense", "is not one of", 2),
    Line("eval SOURCE --scales 2,x", "comma-separated list of numbers", 2),
    Line("eval SOURCE --scales 2", "--methods", 2),
    Line("eval SOURCE --lengths 64 --rates 2 --methods none", ("--rates", "--dynamic"), 2),
    Line("eval SOURCE --lengths 100000000000", "out of range", 2),
    Line("eval SOURCE --lengths 1", "--lengths 1 is out of range", 2),
    Line("eval SOURCE --train-length 1", ("trained length 1", "give --lengths from 2"), 2),
    Line("eval SOURCE --items 0 --lengths 64", "--items", 2),
    Line("eval SOURCE --lengths 64 --batch-size 0", "--batch-size", 2),
    Line("eval SOURCE --lengths 8", "does not fit", 2),
    Line("eval SOURCE --lengths 4096", ("words of lines", "give --text", "prompts"), 2),
    Line("eval SOURCE --text SHORT --tasks perplexity --lengths 64", "give more text", 2),
    Line("eval SOURCE --text BINARY --tasks perplexity --lengths 64", "not UTF-8", 2),
    Line("eval NOWHERE", "no folder"),
    Line("eval SOURCE --tasks passkey --lengths 64", "is an encoder", 2, JINA),
    Line("eval SOURCE --lengths 200", "no language model", 1, CLASSIFIER),
    Line("eval SOURCE --lengths 64", "tokenizer", change=no_tokenizer),
    Line(f"eval SOURCE --beir BEIR {SHORT_ROWS}", ("beir is for encoders", "SOURCE"), 2),
    Line(f"eval SOURCE --tasks passkey {SHORT_ROWS}", ("is an encoder", "task"), 2, MOSAIC, masks),
    Line(f"eval SOURCE {SHORT_ROWS}", ("is an encoder", "give --text", "--beir"), 2, MOSAIC, masks),
    Line(f"eval SOURCE {SHORT_ROWS}", "predicts masked tokens", 1, JINA_CLASSIFIER),
    Line(f"eval SOURCE --text TEXT {SHORT_ROWS}", ("SOURCE", "no head", "masked tokens"), 1, ENCODER),
    Line(f"eval SOURCE --tasks beir {SHORT_ROWS}", "--beir", 2, MOSAIC, masks),
    Line("tune SOURCE", "--target-length", 2),
    Line("tune SOURCE --target-length 64", "add --train-length", 2),
    Line("tune SOURCE --target-length 64 --train-length 64", "not above the trained length", 2),
    Line("tune SOURCE --target-length 16777217 --train-length 24", "at most 16777216", 2),
    Line(f"{TUNE} --items 1", "--items 1 is out of range", 2),
    Line(TUNE, ("at least 120", "give --text", "prompts of your own"), 2),
    Line(f"{TUNE} --text WINDOW", "only one window of 64", 2),
    Line("tune SOURCE --target-length 500 --train-length 256 --prompts PROMPTS", "no prompts between", 2),
    Line(
        "tune SOURCE --target-length 500 --train-length 300 --prompts PROMPTS",
        ("256, 1024", "--target-length 1024 or more"),
        2,
    ),
    Line("tune SOURCE --target-length 4096 --train-length 2048 --prompts PROMPTS", "give longer ones", 2),
    Line("tune SOURCE --target-length 1024 --train-length 256 --prompts ONE", "at least two", 2),
    Line("fit SOURCE --target-length 256 --text TEXT --out NEW", "no slopes to fit", 2, LLAMA),
    Line(f"{FIT} 96", ("--text", "--prompts"), 2),
    Line(f"{FIT} 24 --text LEARNED", ("--target-length 24", "trained length 24"), 2),
    Line(f"{FIT} 2304 --text LEARNED", ("--text", "3 windows of 2304 tokens", "16"), 2),
    Line(f"{FIT} 1048576 --text LEARNED", "one window takes 1048576", 2),
    Line(f"{LEARN} --dynamic length", "'length' is not 'position'", 2),
    Line(f"{LEARN} --dynamic position --static", ("--static", "--dynamic"), 2),
    Line(f"{LEARN} --dtype fp16", ("--dtype fp16", "gradients"), 2),
    Line(f"{LEARN} --steps 0", "--steps 0 is out of range", 2),
    Line(f"{LEARN} --minutes nan", "--minutes nan is out of range", 2),
    Line(f"{LEARN} --device auto", ("--device auto", "eval and tune"), 2),
    Line(f"{LEARN} --device cuda", "no CUDA device", 2),
    Line(f"{PLOT} --dynamic length", "--train-length", 2),
    Line(f"{PLOT} --out SOURCE/pictures", "only read"),
    Line(f"{PLOT} --out SOURCE", "not empty"),
    Line(f"{PLOT} --out SOURCE/config.json", "is a file"),
    Line("plot NOWHERE --out NEW", "no folder"),
    Line("plot SOURCE --methods ntk-published --scales 2 --out NEW", "ntk-published", 2, LLAMA),
    Line(f"{DRAW} --scales 2", ("--scales", "pictures of a model"), 2),
    Line(DRAW, "no measurements", 2),
    Line("plot DAMAGED --out NEW", "damaged"),
    Line("plot results.json --out NEW", "not valid JSON"),
    *(
        Line(
            f"plot {file} --out NEW",
            (file.rpartition("/")[2], "not the results", "results.json", "a model's folder"),
            2,
        )
        for file in ("BROKEN", "TEXT", "BINARY", "SOURCE/config.json", "SOURCE/model.safetensors")
    ),
]


def spoil(tensors: Tensors, value: float) -> None:
    tensors["transformer.h.0.mlp.dense_h_to_4h.bias"][3] = value


def as_float64(tensors: Tensors, *names: str) -> None:
    tensors.update({name: tensors[name].double() for name in names or tensors})


def foreign(folder: Path) -> None:
    """A graph of another tool."""
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    values = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph), folder / "model.onnx")


def somebody_s(folder: Path) -> None:
    theirs = folder.parent / "theirs"
    theirs.mkdir()
    (theirs / "model.onnx_data").write_bytes(b"theirs")
    (folder / "onnx").symlink_to(theirs)


def no_pooling_config(folder: Path) -> None:
    (with_modules(folder) / "1_Pooling/config.json").unlink()


def median(folder: Path) -> None:
    with_modules(folder, {"pooling_mode": "median"})


NOT_OURS = "was not written by ntk-convert"
NO_LIST = "modules.json is not a list of modules"
WEIGHT = "transformer.h.1.mlp.dense_h_to_4h.weight"
CONCAVE = {"type": "concave", "dynamic": "position", "power": 8}
EXPORT, POOLED = "export REPOSITORY", "export REPOSITORY --pooled"
CALIBRATE = f"{EXPORT} --onnx-dtype int4 --calibrate"
CONVERT = f"SOURCE --scale 2 --train-length {TRAIN_LENGTH} --out NEW"
OPTIMUM = "optimum-cli export onnx"
OUTSIDE = [
    {"type": "sentence_transformers.Transformer"},
    {"type": "sentence_transformers.Pooling", "path": "../1_Pooling"},
]
# Export, validate, and conversions with --onnx
GRAPHS: dict[str, Line] = {
    "a tensor is missing": Line(
        EXPORT,
        "no tensor 'h.1.mlp.dense_h_to_4h.weight'",
        change=tensors(lambda tensors: tensors.pop(WEIGHT)),
    ),
    "a tensor of another shape": Line(
        EXPORT,
        (repr(WEIGHT), "[127, 32]", "[128, 32]"),
        change=tensors(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].clone()})),
    ),
    "a tensor of float64": Line(
        EXPORT, (repr(WEIGHT), "F64"), change=tensors(lambda tensors: as_float64(tensors, WEIGHT))
    ),
    "weights of float64": Line(EXPORT, "the weights are F64", change=tensors(as_float64)),
    "weights cut off": Line(EXPORT, "model.safetensors", change=shortened("model.safetensors")),
    "no weights": Line(EXPORT, "weights", change=removed("model.safetensors")),
    "pickled weights": Line(EXPORT, "safetensors", change=pickled),
    "a larger vocabulary": Line(EXPORT, ("[97, 32]", "[98, 32]"), change=config(vocab_size=98)),
    "no vocabulary": Line(EXPORT, "vocab_size", change=config(vocab_size=None)),
    "more layers": Line(EXPORT, "no tensor 'h.2.", change=config(n_layer=3)),
    "an activation": Line(EXPORT, ("activation", "'tanh'"), 1, ("falcon", {}), config(activation="tanh")),
    "a steep concave penalty in float16": Line(
        f"{EXPORT} --onnx-dtype fp16",
        ("concave", "give --onnx-dtype bf16 or"),
        change=config(alibi_scaling={**CONCAVE, "train_seq_len": 1 << 22}),
    ),
    "NaN": Line(EXPORT, "model.onnx: prompt", change=tensors(lambda tensors: spoil(tensors, torch.nan))),
    "infinity": Line(
        f"{EXPORT} --onnx-profile portable",
        "model.onnx: prompt",
        change=tensors(lambda tensors: spoil(tensors, torch.inf)),
    ),
    "bytes": Line(EXPORT, NOT_OURS, change=written("model.onnx", "foreign")),
    "another tool's graph": Line(EXPORT, NOT_OURS, change=foreign),
    "a folder of somebody else": Line(
        f"{EXPORT} --onnx-standalone", ("onnx", "a link to another folder"), change=somebody_s
    ),
    "last logits of a backbone": Line(
        f"{EXPORT} --last-logits --onnx-task feature-extraction", ("--last-logits", "NtkBloomModel"), 2
    ),
    "a profile": Line(f"{EXPORT} --onnx-profile openvino", "'openvino'", 2),
    "a dtype": Line(f"{EXPORT} --onnx-dtype fp8", "'fp8'", 2),
    "a provider": Line(f"{EXPORT} --provider tpu", "'tpu'", 2),
    # A head that the checkpoint has no weights for would be random.
    "no head": Line(
        f"{EXPORT} --onnx-task fill-mask", ("NtkJinaBertModel", "choose feature-extraction"), 1, ENCODER
    ),
    "another head": Line(
        f"{EXPORT} --onnx-task text-classification", "choose fill-mask or feature-extraction", 1, MASKED
    ),
    "a head of tokens": Line(
        f"{EXPORT} --onnx-task token-classification",
        ("NtkBloomForCausalLM", "choose text-generation or feature-extraction\n"),
    ),
    "pooling with a head": Line(
        f"{POOLED} --onnx-task fill-mask", "--onnx-task feature-extraction", 2, MASKED, with_modules
    ),
    "no pooling": Line(POOLED, "--pooling mean", 1, ENCODER),
    "pooling and another module": Line(
        POOLED, "Transformer, Pooling, Dense", 1, ENCODER, lambda path: with_modules(path, POOLING, "Dense")
    ),
    "pooling by the median": Line(POOLED, ("median", "cls, max, mean"), 1, ENCODER, median),
    "pooling without the prompt": Line(
        POOLED,
        "leaves out a prompt",
        1,
        ENCODER,
        lambda path: with_modules(path, {**POOLING, "include_prompt": False}),
    ),
    "no settings of the pooling": Line(POOLED, "1_Pooling/config.json", 1, ENCODER, no_pooling_config),
    "modules that are no list": Line(POOLED, NO_LIST, 1, ENCODER, put("modules.json", {})),
    "a module of no class": Line(
        POOLED, "lists a;", 1, ENCODER, put("modules.json", [{"type": "a", "path": ""}])
    ),
    "a module outside the folder": Line(POOLED, NO_LIST, 1, ENCODER, put("modules.json", OUTSIDE)),
    "pooling twice": Line(
        f"{POOLED} --pooling cls", ("modules.json", "mean", "leave it out\n"), 2, ENCODER, with_modules
    ),
    "pooling of nothing": Line(f"{EXPORT} --pooling cls", "drop --pooling", 2, ENCODER),
    "calibrated int8": Line(f"{EXPORT} --onnx-dtype int8 --calibrate SHORT", "give --onnx-dtype int4", 2),
    "a short text": Line(f"{CALIBRATE} SHORT", ("3 tokens", f"takes {TRAIN_LENGTH}", "give more text"), 2),
    "no text": Line(f"{CALIBRATE} NOWHERE", "does not exist", 2),
    **{
        f"{command} {place}": Line(f"{command} {place}", words)
        for command in ("export", "validate")
        for place, words in (
            ("SOURCE", ("not converted", "'bloom'")),
            ("NOWHERE", "is not a folder"),
            ("SOURCE/config.json", "is not a folder"),
            ("EMPTY", "no config.json"),
        )
    },
    # A graph of it would be right about a model that ``validate`` and ``push`` then refuse.
    **{
        f"a {name} that was changed since the conversion": Line(
            EXPORT, (name, "ntk-convert ", "REPOSITORY --out NEW"), change=change, listed=False
        )
        for name, change in (
            ("model.safetensors", tensors(lambda tensors: spoil(tensors, 3.0))),
            ("config.json", config(note="mine")),
            ("ntk_alibi.py", written("ntk_alibi.py", "mine")),
        )
    },
    # Graphs of rotary models are for optimum.
    "an export of a rotary model": Line(EXPORT, OPTIMUM, 1, LLAMA),
    "a rotary model": Line("SOURCE --scale 2 --out NEW --onnx", OPTIMUM, 1, LLAMA),
    "a dynamic rotary model": Line("SOURCE --dynamic length --out NEW --onnx", "with --scale", 1, LLAMA),
    # A conversion, and what it would do
    **{
        f"{option} without --onnx{more}": Line(f"{CONVERT} {option}{more}", "need --onnx", 2)
        for option in ("--onnx-dtype fp16", "--onnx-profile portable", "--onnx-standalone", "--provider cpu")
        for more in ("", " --dry-run")
    },
    **{
        f"a value of --onnx{equals}": Line(
            f"{CONVERT} --onnx{equals}int8", ("--onnx takes no value", "give --onnx-dtype int8"), 2
        )
        for equals in (" ", "=")
    },
    "a word after --onnx": Line(f"{CONVERT} --onnx int9", ("extra argument", "int9"), 2),
    **{
        f"a conversion without padding{more}": Line(
            f"{CONVERT} --onnx{more}",
            "--set pad_token_id=N\n",
            1,
            ("mpt", {"head": "SequenceClassification"}),
            config(pad_token_id=None),
        )
        for more in ("", " --dry-run")
    },
    **{
        f"a conversion with pooling by the median{more}": Line(
            f"{CONVERT} --onnx --pooled{more}", "median", 1, ENCODER, median
        )
        for more in ("", " --dry-run")
    },
}


@pytest.mark.parametrize(
    "row",
    [
        # Eval, tune, fit and plot load models and tokenizers with transformers.
        *(
            pytest.param(row, id=f"{row.model[0]} {row.command}", marks=pytest.mark.version)
            for row in MEASURING
        ),
        *(pytest.param(row, id=name) for name, row in GRAPHS.items()),
    ],
)
def test_command_lines(
    pristine: Pristine, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Line
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused(*in_words(row, pristine, tmp_path), code=row.code)
    says(line, row.words)
    assert "`" not in line


TO_1024 = "--target-length 1024 --train-length"
EARLY = [
    Line("tune SOURCE --target-length 64", "add --train-length", 2),
    Line("tune SOURCE --target-length 64 --train-length 64", "--target-length 64", 2),
    Line("tune SOURCE --target-length 500 --train-length 300 --prompts PROMPTS", "1024 or more", 2),
    Line(f"tune SOURCE {TO_1024} 512", ("is an encoder", "give --text"), 2, MASKED),
    Line(f"tune SOURCE {TO_1024} 512 --beir BEIR", "beir is for encoders", 2),
    Line("eval SOURCE", "--train-length", 2),
    Line("eval SOURCE --methods by-parts --scales 2 --lengths 64", "add --train-length", 2),
    Line("eval SOURCE --lengths 64", ("is an encoder", "give --text"), 2, MASKED),
    Line("eval SOURCE --lengths 64 --prompts PROMPTS", "generates no text", 2, MASKED),
    Line("eval SOURCE --lengths 64", "predicts masked tokens", 1, JINA_CLASSIFIER),
    Line("fit SOURCE --target-length 256 --text TEXT --out NEW", "add --train-length", 2),
    Line("fit SOURCE --target-length 256 --text TEXT --out NEW", "no slopes to fit", 2, LLAMA),
]


@pytest.mark.version
@pytest.mark.parametrize("row", EARLY, ids=lambda row: f"{row.model[0]} {row.command}")
def test_wrong_usage_is_said_before_the_work(
    pristine: Pristine, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Line
) -> None:
    """Before the model is converted and verified, which takes the time."""
    monkeypatch.setattr("converter.evaluation.evaluated_model._convert", Mock(side_effect=AssertionError))
    says(refused(*in_words(row, pristine, tmp_path), code=row.code), row.words)


# What the machine lacks


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("SOURCE --scale 2 --out NEW", "the result needs"),
        (f"{EXPORT} --onnx-standalone", "the graph's own weights need"),
    ],
)
def test_a_full_disk(
    pristine: Pristine,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: str,
) -> None:
    line = in_words(Line(command, words), pristine, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    says(refused(*line), "1.0 kB free", words)


@pytest.mark.parametrize(
    ("command", "finder", "lacking", "remedy"),
    [
        (EXPORT, "importlib.util.find_spec", ("onnx_ir", "onnxruntime"), "pip install onnx-ir onnxruntime "),
        (
            f"{CONVERT} --onnx",
            "importlib.util.find_spec",
            ("onnx_ir", "onnxruntime"),
            "pip install onnx-ir onnxruntime ",
        ),
        pytest.param(
            "eval SOURCE --lengths 200 --device auto",
            "converter.evaluation.runner.find_spec",
            ("accelerate",),
            "pip install accelerate",
            marks=pytest.mark.version,
        ),
    ],
)
def test_missing_packages_are_named_with_their_installation(
    pristine: Pristine,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    finder: str,
    lacking: tuple[str, ...],
    remedy: str,
) -> None:
    line, find = in_words(Line(command, remedy), pristine, tmp_path), importlib.util.find_spec
    monkeypatch.setattr(finder, lambda name, *rest: None if name in lacking else find(name, *rest))
    says(refused(*line), remedy)


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA")
def test_a_provider_that_is_not_there(repository: Make, refused: Refused, run: RunCli) -> None:
    folder = repository()
    says(refused("export", folder, "--provider", "cuda"), "no CUDAExecutionProvider")
    assert run("export", folder, "--provider", "cpu").code == 0
    says(refused("validate", folder, "--provider", "cuda"), "no CUDAExecutionProvider")


def test_a_language_model_whose_config_names_the_backbone(
    make_source: MakeSource, run: RunCli, refused: Refused, tmp_path: Path
) -> None:
    """As TurkuNLP's gpt3-finnish do: transformers' auto class gives them a head, which is tied."""
    source, out = make_source("bloom", head="Model"), tmp_path / "out"
    words = (source, "--scale", 2, "--train-length", TRAIN_LENGTH, "--out", out, "--onnx")
    named = 'architectures=["BloomForCausalLM"]'
    says(refused(*words), "--onnx-task feature-extraction", f"--set '{named}'")
    assert run(*words, "--set", named).code == 0
    assert (out / "model.onnx").is_file()


@pytest.mark.parametrize("change", [written("model.onnx", "foreign"), foreign])
def test_a_graph_of_another_tool(repository: Make, change: Change) -> None:
    folder = repository()
    change(folder)
    with raises(ValidationError, NOT_OURS):
        graphs_report(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (tensors(lambda tensors: None, note="x" * 100), "is not what ntk-convert"),
        (tensors(lambda tensors: tensors.pop(WEIGHT)), "does not belong to this repository"),
        (config(alibi_scaling={"type": "ntk", "factor": 3.0}), ("alibi_scaling", '"factor": 2.0')),
    ],
    ids=["other weights", "no weights", "another scaling"],
)
def test_a_graph_of_something_else(repository: Make, change: Change, words: Words) -> None:
    folder = exported(repository())
    change(folder)
    says(graphs_report(folder).failure, words, "ntk-convert export")


@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (ValueError("two\nlines"), "ValueError"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_bug_or_an_interrupt_is_one_line_and_leaves_nothing(
    repository: Make, run: RunCli, monkeypatch: pytest.MonkeyPatch, failure: BaseException, word: str
) -> None:
    folder = repository()
    before, names = fingerprint(folder), sorted(folder.rglob("*"))

    def broken(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("converter.onnx.reference.Reference.step", broken)
    result = run("export", folder)
    assert (result.code, result.out) == (1, "")
    said = result.err.lstrip("\n")  # after ^C the line begins anew
    assert said.startswith("error: ")
    says(said, word)
    assert said.count("\n") == 1
    assert (fingerprint(folder), sorted(folder.rglob("*"))) == (before, names)


# What is not refused


def move_weights(folder: Path) -> None:
    """As links to another disk, or to a Hub cache that is not the user's."""
    (folder.parent / "store").mkdir()
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.rename(folder.parent / "store" / path.name)
        path.symlink_to(folder.parent / "store" / path.name)


def mask(name: str) -> Change:
    return tensors(lambda tensors: tensors.update({name: torch.full((4, 4), -torch.inf)}))


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
    change: Change,
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
def test_folders_that_are_replaced(prepare: Change, make_source: MakeSource, tmp_path: Path) -> None:
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
