"""Keys that transformers or sentence-transformers read: refused, or left out of the result with a note."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from converter import ConverterError, convert, inspect
from converter.config import IMPLEMENTATION, without_implementation
from converter.errors import UnsupportedModel
from converter.families import FAMILIES
from converter.source.keys import check_vectors
from converter.source.library_files import SENTENCE_CONFIGS
from converter.source.open import open_folder
from converter.source.source import QUANTISED_BY
from tests import tiny
from tests.conftest import MakeSource, Refuses, edit_json
from tests.keys import config_keys, unknown
from tests.patched import config_of
from tests.tiny import rotary

Change = Callable[[Path], object]
SENTENCES = SENTENCE_CONFIGS[0]


def put(name: str, **content: Any) -> Change:
    """Adds keys to a JSON file, or makes it."""

    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_file():
            path.write_text("{}", encoding="utf-8")
        edit_json(path, content)

    return change


def config(**content: Any) -> Change:
    return put("config.json", **content)


def beside(name: str, copy: str, **content: Any) -> Change:
    """A copy of a JSON file, with other values of some keys."""

    def change(folder: Path) -> None:
        shutil.copy(folder / name, folder / copy)
        if content:
            edit_json(folder / copy, content)

    return change


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes] and None


def nested(folder: Path) -> None:
    kind = "sentence_transformers.models.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": kind}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    put("0_Transformer/config.json", model_type="bert")(folder)


def begins(name: str, path: str) -> Change:
    """modules.json begins with this class of sentence-transformers."""

    def change(folder: Path) -> None:
        modules = [{"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{name}"}]
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")

    return change


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_bytes(folder: Path) -> None:
    """One weight is of 8 bits, as bitsandbytes stores them."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


CONFIGS, TOKENIZERS = ["config.4.0.0.json"], ["tokenizer.4.0.0.json"]
REDIRECTED = config(configuration_files=CONFIGS)
VERSIONED = put("tokenizer_config.json", fast_tokenizer_files=TOKENIZERS)
# What the key is, a tiny checkpoint, the change, words of the message. ``inspect`` reads config.json only.
REFUSED: dict[str, tuple[str, Change, str]] = {
    "another config": (
        "bloom",
        both(beside("config.json", *CONFIGS, layer_norm_epsilon=0.1), REDIRECTED),
        "configuration_files is ['config.4.0.0.json'], so transformers reads another config than "
        "config.json; keep the right one as config.json, and remove the key",
    ),
    "a config that is not there": ("llama", REDIRECTED, "so transformers reads another config"),
    "a config elsewhere": ("bloom", config(configuration_files=["config.4/../../x.json"]), "another config"),
    "other weights": (
        "bloom",
        both(
            lambda folder: shutil.copy(folder / "model.safetensors", folder / "other.safetensors"),
            config(transformers_weights="other.safetensors"),
        ),
        "transformers_weights is 'other.safetensors', so transformers loads other weights than those",
    ),
    "weights elsewhere": ("llama", config(transformers_weights="../x.safetensors"), "loads other weights"),
    "attention in both directions": (
        "bloom",
        config(is_causal=False),
        "is_causal is False, so attention reads in both directions",
    ),
    "a window": ("mpt", config(sliding_window=8), "sliding_window is 8, which gives generate a cache with a"),
    "types of layers": ("bloom", config(layer_types=["sliding_attention"] * 2), "layer_types is ['sliding_"),
    "chunks": ("falcon", config(attention_chunk_size=8), "attention_chunk_size is 8, which gives generate"),
    "a config within the config": ("bloom", config(text_config={"vocab_size": 9}), "text_config is {'vocab"),
    "an encoder and a decoder": ("bloom", config(is_encoder_decoder=True), "is_encoder_decoder is True"),
    "shared keys": (
        "bloom",
        config(kv_sharing_modes=["reuse"]),
        "kv_sharing_modes is ['reuse'], and the new",
    ),
    "replaced layers": ("bloom", config(fusion_config={"a": True}), "fusion_config is {'a': True}"),
    "removed heads": ("bloom", config(pruned_heads={"0": [1]}), "pruned_heads is {'0': [1]}"),
    "a quantisation of pickles": (
        "bloom",
        both(config(quantization_config={}), pickled),
        "quantised (quantization_config is set); convert the unquantised one; if a merge left it, remove",
    ),
    "quantised weights": (
        "bloom",
        both(config(compression_config={}), with_bytes),
        "quantised (compression_config is set)",
    ),
    "the same, rotary": ("llama", both(put("quantize_config.json"), with_bytes), "(it has quantize_config"),
    "an adapter": (
        "bloom",
        both(put("adapter_config.json"), put("adapter_model.safetensors")),
        "has an adapter beside its weights (adapter_config.json), which transformers applies where peft is "
        "installed; merge it and save that: model.merge_and_unload().save_pretrained(DIR)",
    ),
}
# The same for files that only a conversion reads.
OTHER_FILES: dict[str, tuple[str, Change, str]] = {
    "another tokenizer": (
        "bloom",
        both(beside("tokenizer.json", *TOKENIZERS, version="2.0"), VERSIONED),
        "fast_tokenizer_files is ['tokenizer.4.0.0.json'], so transformers reads another tokenizer than",
    ),
    "a tokenizer that is not there": ("llama", VERSIONED, "so transformers reads another tokenizer"),
    "arguments of a tokenizer": (
        "bloom",
        put("tokenizer_config.json", init_inputs=["x"]),
        "init_inputs is ['x'], which the tokenizer's class gets before its files; remove the key",
    ),
    "code in a tokenizer": (
        "bloom",
        put("tokenizer.json", auto_map={"AutoTokenizer": "evil/x--code.Thing"}),
        "tokenizer.json has auto_map evil/x--code.Thing",
    ),
    "a model in a folder": (
        "jina_bert",
        nested,
        "modules.json places the model in 0_Transformer, so sentence-transformers loads that one",
    ),
    **{
        f"{name} in place of a Transformer": (
            "jina_bert",
            begins(name, path),
            f"modules.json begins with sentence_transformers.models.{name}, so sentence-transformers reads",
        )
        for name, path in {"Router": "", "CLIPModel": "0_CLIPModel", "StaticEmbedding": ""}.items()
    },
    **{
        f"{key} of {name}": (family, put(name, **{key: value}), f"{name}: {key} is {value!r}, with which")
        for family, name in zip(
            ["jina_bert", "bloom", "llama", "mosaic_bert"], SENTENCE_CONFIGS, strict=False
        )
        for key, value in {
            "config_args": {"alibi_scaling": None},
            "config_kwargs": {"num_hidden_layers": 1},
            "model_args": {"variant": "fp16"},
            "model_kwargs": {"variant": "fp16"},
            "tokenizer_args": {"do_lower_case": True},
            "processor_kwargs": {"model_max_length": 8},
            "processing_kwargs": {"text": {"max_length": 8}},
        }.items()
    },
    "a limit by task": ("jina_bert", put(SENTENCES, query_length=8), "query_length is 8, which makes"),
}
# The same for what is not refused: words of its note, or none, and the keys that the result does not have.
KEPT: dict[str, tuple[str, Change, str | None, dict[str, list[str]]]] = {
    "the same config": (
        "bloom",
        both(beside("config.json", *CONFIGS), REDIRECTED),
        "configuration_files of config.json was left out: it names nothing else than what is converted",
        {"config.json": ["configuration_files"]},
    ),
    "the same config, rotary": (
        "llama",
        both(beside("config.json", *CONFIGS), REDIRECTED),
        "configuration_files of config.json was left out",
        {"config.json": ["configuration_files"]},
    ),
    "these weights": (
        "bloom",
        config(transformers_weights="model.safetensors"),
        "transformers_weights of config.json was left out",
        {"config.json": ["transformers_weights"]},
    ),
    "the same tokenizer": (
        "bloom",
        both(beside("tokenizer.json", *TOKENIZERS), VERSIONED),
        "fast_tokenizer_files of tokenizer_config.json was left out",
        {"tokenizer_config.json": ["fast_tokenizer_files"]},
    ),
    **{
        key: (
            "bloom",
            config(**{key: {"layers.*": "rowwise"}}),
            f"{key} of config.json was left out: the new code has its own",
            {"config.json": [key]},
        )
        for key in ("base_model_tp_plan", "base_model_pp_plan", "base_model_fsdp_plan", "distributed_config")
    },
    **{
        f"what a merge left, {what}": (
            family,
            change,
            f"{what} was left out: all weights are floating point",
            {"config.json": ["quantization_config", "quantization_bit"]},
        )
        for what, family, change in (
            (
                "quantization_config of config.json",
                "bloom",
                config(quantization_config={"load_in_4bit": True}),
            ),
            ("quantization_bit of config.json", "mosaic_bert", config(quantization_bit=4)),
            ("quantize_config.json", "bloom", put("quantize_config.json", bits=4)),
            (
                "quantization_config of config.json and quant_config.json",
                "llama",
                both(config(quantization_config={}), put("quant_config.json")),
            ),
        )
    },
    "a path of another machine": (
        "bloom",
        put("tokenizer_config.json", tokenizer_file="/home/ada/tokenizer.json"),
        "tokenizer_file of tokenizer_config.json was left out: the repository's own file is read",
        {"tokenizer_config.json": ["tokenizer_file"]},
    ),
    "code that generates": (
        "bloom",
        put("custom_generate/generate.py"),
        "custom_generate, code of the source that replaces generate, was not copied",
        {},
    ),
    "nulls": (
        "bloom",
        config(
            **dict.fromkeys(
                ("sliding_window", "layer_types", "quantization_config", "transformers_weights"), ...
            ),
            is_causal=True,
            quantization_bit=0,
        ),
        None,
        {},
    ),
    "an adapter's config alone": ("bloom", put("adapter_config.json"), None, {}),
    "harmless arguments": ("llama", put(SENTENCES, model_kwargs={"dtype": "float32"}), None, {}),
}


@pytest.mark.parametrize("case", {**REFUSED, **OTHER_FILES})
def test_refused(make_source: MakeSource, refuses: Refuses, case: str) -> None:
    name, change, words = {**REFUSED, **OTHER_FILES}[case]
    source = make_source(name)
    change(source)
    refuses(source, words)
    if case in REFUSED:
        with pytest.raises(ConverterError, match=re.escape(words)):
            inspect(source)


@pytest.mark.parametrize("case", KEPT)
def test_kept(make_source: MakeSource, tmp_path: Path, case: str) -> None:
    name, change, words, gone = KEPT[case]
    source = make_source(name)
    plain = convert(source, tmp_path / "plain", scale=2)
    change(source)
    result = convert(source, tmp_path / "out", scale=2)
    assert result.checks
    more = [note for note in result.notes if note not in plain.notes]
    assert len(more) == (words is not None)
    assert all(note.startswith(str(words)) for note in more)
    for file, keys in gone.items():
        assert not {*keys} & json.loads((tmp_path / "out" / file).read_text(encoding="utf-8")).keys()
    assert not {*CONFIGS, *TOKENIZERS, *QUANTISED_BY} & {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("name", SENTENCE_CONFIGS)
def test_the_limit_in_every_file_that_sentence_transformers_reads(
    make_source: MakeSource, tmp_path: Path, name: str
) -> None:
    source = make_source("jina_bert")
    put(name, max_seq_length=100)(source)
    limit = convert(source, tmp_path / "out", scale=2, train_length=5000, verify=False).input_limit
    assert json.loads((tmp_path / "out" / name).read_text(encoding="utf-8")) == {"max_seq_length": limit}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config_sentence_transformers.json", {"truncate_dim": 8}),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
        (SENTENCE_CONFIGS[-1], {"do_lower_case": True}),
        (SENTENCES, {"transformer_task": "fill-mask"}),
        (SENTENCES, {"module_output_name": "sentence_embedding"}),
        (SENTENCES, {"modality_config": {"text": {"method": "encode", "method_output_name": "x"}}}),
    ],
)
def test_vectors_that_a_graph_makes_otherwise(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    put(name, **content)(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{name}: {next(iter(content))} is .*; remove it there"):
        check_vectors(open_folder(tmp_path))
    put(name, **dict.fromkeys(content, ...))(tmp_path)
    check_vectors(open_folder(tmp_path))


@pytest.mark.parametrize("content", ['{"model": {', '{"model": {"type": "Unknown"}}'])
def test_a_tokenizer_that_does_not_load(make_source: MakeSource, tmp_path: Path, content: str) -> None:
    """It is copied; the card says that the source's does not load. A result's that alone fails is refused."""
    source = make_source("bloom")
    (source / "tokenizer.json").write_text(content, encoding="utf-8")
    convert(source, tmp_path / "out", scale=2)
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "token ids not compared: the source's tokenizer does not load" in card


# Keys that only choose an implementation: never a reason to refuse, and dropped

IMPLEMENTING: dict[str, Any] = {
    "attn_implementation": "nobody/kernel",
    "_attn_implementation": {"": "nobody/kernel"},
    "_attn_implementation_internal": "flash_attention_2",
    "_attn_implementation_autoset": True,
    "experts_implementation": "nobody/kernel",
    "attn_impl": "triton",
    "use_flash_attn": True,
    "use_flash_attention": "yes",
    "use_flash_attention_2": True,
    "flash_attention": True,
    "_flash_attn_2_enabled": True,
    "use_memory_efficient_attention": True,
    "use_xformers": 1,
    "fused_mlp": True,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "use_fused_rms_norm": True,
}
SOURCES = {**tiny.FACTORIES, **tiny.ENCODERS, "rotary": lambda folder: rotary.rotary(folder, "llama")}


@pytest.mark.parametrize("family", SOURCES)
def test_they_are_dropped(tmp_path: Path, family: str) -> None:
    source = tmp_path / "source"
    SOURCES[family](source)
    path = source / "config.json"
    nested = (
        {"attn_config": {**config_of(source).get("attn_config", {}), **IMPLEMENTING}}
        if family == "mpt"
        else {}
    )
    edit_json(path, {**IMPLEMENTING, **nested})
    before = path.read_bytes()
    result = convert(source, tmp_path / "out", scale=2.0, dry_run=True)
    assert {key: result.config_changes[key] for key in IMPLEMENTING} == {
        key: (IMPLEMENTING[key], None) for key in IMPLEMENTING
    }
    if nested:
        assert not IMPLEMENTING.keys() & result.config_changes["attn_config"][1].keys()
    assert path.read_bytes() == before


def test_the_result_is_the_same_without_them(tmp_path: Path) -> None:
    """It is also verified and loaded, and would run the kernel of another repository."""
    source = tiny.FACTORIES["bloom"](tmp_path / "source")
    convert(source, tmp_path / "plain", scale=2.0)
    edit_json(source / "config.json", IMPLEMENTING)
    convert(source, tmp_path / "out", scale=2.0)
    assert config_of(tmp_path / "out") == config_of(tmp_path / "plain")


def test_no_key_that_matters_is_dropped() -> None:
    for family in FAMILIES:
        assert not any(IMPLEMENTATION.fullmatch(key) for key in config_keys(family))
    published = json.loads((Path(__file__).parent / "published/mpt.json").read_text(encoding="utf-8"))
    kept = without_implementation({**published[0]["config"], "attn_config": {"fused_qkv": False}})
    assert kept["attn_config"] == {"fused_qkv": False}


@pytest.mark.skipif(transformers.__version__ < "5", reason="older versions read no more than newer ones")
def test_libraries_read_no_key_or_file_that_is_not_known() -> None:
    assert unknown() == {}
