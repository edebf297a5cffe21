"""What a repository tells the libraries that load it: read another file, load otherwise, run other code.

Such keys and files are refused, or left out of the result with a note, and no command runs other code.
"""

from __future__ import annotations

import importlib.util
import json
import py_compile
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from converter import ConverterError, convert, inspect
from converter.config import IMPLEMENTATION, without_implementation
from converter.errors import UnsupportedModel
from converter.families import FAMILIES
from converter.onnx.export import export
from converter.onnx.options import OnnxOptions
from converter.publish.contents import read_contents
from converter.result import manifest
from converter.source.keys import check_vectors
from converter.source.library_files import SENTENCE_CONFIGS
from converter.source.open import open_folder
from converter.source.remote_code import NOT_COPIED
from converter.source.source import QUANTISED_BY
from tests import forks, tiny
from tests.changes import Change, all_of, config, copied, pickled, put, tensors
from tests.conftest import MakeSource, Refused, Refuses, RunCli, edit_json
from tests.hub_server import HubServer
from tests.keys import config_keys, unknown
from tests.messages import Words, raises, says
from tests.onnx_graphs import Make
from tests.patched import config_of
from tests.tiny import rotary
from tests.tiny.layout import Tensors

SENTENCES = SENTENCE_CONFIGS[0]
PARTS = "sentence_transformers.models."
CONFIGS, TOKENIZERS = ["config.4.0.0.json"], ["tokenizer.4.0.0.json"]
REDIRECTED = config(configuration_files=CONFIGS)
VERSIONED = put("tokenizer_config.json", {"fast_tokenizer_files": TOKENIZERS})


def modules(kind: str = f"{PARTS}Transformer", path: str = "") -> list[dict[str, str]]:
    """A modules.json with one module."""
    return [{"name": "0", "path": path, "type": kind}]


def eight_bits(tensors: Tensors) -> None:
    """One weight is stored as bitsandbytes stores them."""
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name] = tensors[name].to(torch.int8)


# Keys and files that are refused


class Instruction(NamedTuple):
    """A change of a tiny checkpoint, and what is said of it."""

    family: str
    change: Change
    words: Words
    inspected: bool = True
    """Whether ``inspect`` refuses it, too; it reads config.json and the weights' headers only."""


REFUSED: dict[str, Instruction] = {
    "another config": Instruction(
        "bloom",
        all_of(copied("config.json", *CONFIGS, layer_norm_epsilon=0.1), REDIRECTED),
        ("configuration_files", *CONFIGS, "keep the right one as config.json", "remove the key"),
    ),
    "a config that is not there": Instruction("llama", REDIRECTED, ("configuration_files", *CONFIGS)),
    "a config elsewhere": Instruction(
        "bloom", config(configuration_files=["config.4/../../x.json"]), ("configuration_files", "../x.json")
    ),
    "other weights": Instruction(
        "bloom",
        all_of(
            copied("model.safetensors", "other.safetensors"), config(transformers_weights="other.safetensors")
        ),
        ("transformers_weights", "other.safetensors"),
    ),
    "weights elsewhere": Instruction(
        "llama", config(transformers_weights="../x.safetensors"), ("transformers_weights", "../x.safetensors")
    ),
    "attention in both directions": Instruction(
        "bloom", config(is_causal=False), ("is_causal is False", "directions")
    ),
    "a window": Instruction("mpt", config(sliding_window=8), "sliding_window is 8"),
    "types of layers": Instruction(
        "bloom", config(layer_types=["sliding_attention"] * 2), ("layer_types", "sliding_attention")
    ),
    "chunks": Instruction("falcon", config(attention_chunk_size=8), "attention_chunk_size is 8"),
    "a config within the config": Instruction(
        "bloom", config(text_config={"vocab_size": 9}), ("text_config", "vocab_size")
    ),
    "an encoder and a decoder": Instruction(
        "bloom", config(is_encoder_decoder=True), "is_encoder_decoder is True"
    ),
    "shared keys": Instruction("bloom", config(kv_sharing_modes=["reuse"]), ("kv_sharing_modes", "reuse")),
    "replaced layers": Instruction(
        "bloom", config(fusion_config={"a": True}), ("fusion_config", "{'a': True}")
    ),
    "removed heads": Instruction("bloom", config(pruned_heads={"0": [1]}), ("pruned_heads", "{'0': [1]}")),
    "a quantisation of pickles": Instruction(
        "bloom",
        all_of(config(quantization_config={}), pickled),
        ("quantization_config", "convert the unquantised one", "if a merge left it, remove"),
    ),
    "quantised weights": Instruction(
        "bloom",
        all_of(config(compression_config={}), tensors(eight_bits)),
        ("quantised", "compression_config"),
    ),
    "the same, rotary": Instruction(
        "llama",
        all_of(put("quantize_config.json", {}), tensors(eight_bits)),
        ("quantised", "quantize_config.json"),
    ),
    "an adapter": Instruction(
        "bloom",
        all_of(put("adapter_config.json", {}), put("adapter_model.safetensors", {})),
        ("adapter_config.json", "model.merge_and_unload()"),
    ),
    "another tokenizer": Instruction(
        "bloom",
        all_of(copied("tokenizer.json", *TOKENIZERS, version="2.0"), VERSIONED),
        ("fast_tokenizer_files", *TOKENIZERS),
        inspected=False,
    ),
    "a tokenizer that is not there": Instruction(
        "llama", VERSIONED, ("fast_tokenizer_files", *TOKENIZERS), inspected=False
    ),
    "arguments of a tokenizer": Instruction(
        "bloom",
        put("tokenizer_config.json", {"init_inputs": ["x"]}),
        ("init_inputs", "['x']", "remove the key"),
        inspected=False,
    ),
    "code in a tokenizer": Instruction(
        "bloom",
        put("tokenizer.json", {"auto_map": {"AutoTokenizer": "evil/x--code.Thing"}}),
        ("tokenizer.json", "auto_map", "evil/x--code.Thing"),
        inspected=False,
    ),
    "a model in a folder": Instruction(
        "jina_bert",
        all_of(
            put("modules.json", modules(path="0_Transformer")),
            put("0_Transformer/config.json", {"model_type": "bert"}),
        ),
        ("modules.json", "0_Transformer"),
        inspected=False,
    ),
    **{
        f"{name} in place of a Transformer": Instruction(
            "jina_bert",
            put("modules.json", modules(f"{PARTS}{name}", path)),
            ("modules.json", f"{PARTS}{name}"),
            inspected=False,
        )
        for name, path in {"Router": "", "CLIPModel": "0_CLIPModel", "StaticEmbedding": ""}.items()
    },
    **{
        f"{key} of {name}": Instruction(
            family, put(name, {key: value}), (name, key, repr(value)), inspected=False
        )
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
    "a limit by task": Instruction(
        "jina_bert", put(SENTENCES, {"query_length": 8}), (SENTENCES, "query_length is 8"), inspected=False
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(make_source: MakeSource, refuses: Refuses, case: str) -> None:
    row = REFUSED[case]
    source = make_source(row.family)
    row.change(source)
    refuses(source, row.words)
    if row.inspected:
        with raises(ConverterError, row.words):
            inspect(source)


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
    put(name, content)(tmp_path)
    with raises(UnsupportedModel, name, *content, "remove it there"):
        check_vectors(open_folder(tmp_path))
    put(name, dict.fromkeys(content, ...))(tmp_path)
    check_vectors(open_folder(tmp_path))


# Keys and files that the result does not have


class LeftOut(NamedTuple):
    """A change of a tiny checkpoint, the words of its one note, and the keys that the result's files lack."""

    family: str
    change: Change
    words: Words
    gone: dict[str, list[str]]


LEFT_OUT: dict[str, LeftOut] = {
    "the same config": LeftOut(
        "bloom",
        all_of(copied("config.json", *CONFIGS), REDIRECTED),
        "configuration_files of config.json",
        {"config.json": ["configuration_files"]},
    ),
    "the same config, rotary": LeftOut(
        "llama",
        all_of(copied("config.json", *CONFIGS), REDIRECTED),
        "configuration_files of config.json",
        {"config.json": ["configuration_files"]},
    ),
    "these weights": LeftOut(
        "bloom",
        config(transformers_weights="model.safetensors"),
        "transformers_weights of config.json",
        {"config.json": ["transformers_weights"]},
    ),
    "the same tokenizer": LeftOut(
        "bloom",
        all_of(copied("tokenizer.json", *TOKENIZERS), VERSIONED),
        "fast_tokenizer_files of tokenizer_config.json",
        {"tokenizer_config.json": ["fast_tokenizer_files"]},
    ),
    **{
        key: LeftOut(
            "bloom",
            config(**{key: {"layers.*": "rowwise"}}),
            f"{key} of config.json",
            {"config.json": [key]},
        )
        for key in ("base_model_tp_plan", "base_model_pp_plan", "base_model_fsdp_plan", "distributed_config")
    },
    **{
        f"what a merge left, {what}": LeftOut(
            family, change, what, {"config.json": ["quantization_config", "quantization_bit"]}
        )
        for what, family, change in (
            (
                "quantization_config of config.json",
                "bloom",
                config(quantization_config={"load_in_4bit": True}),
            ),
            ("quantization_bit of config.json", "mosaic_bert", config(quantization_bit=4)),
            ("quantize_config.json", "bloom", put("quantize_config.json", {"bits": 4})),
            (
                "quantization_config of config.json and quant_config.json",
                "llama",
                all_of(config(quantization_config={}), put("quant_config.json", {})),
            ),
        )
    },
    "a path of another machine": LeftOut(
        "bloom",
        put("tokenizer_config.json", {"tokenizer_file": "/home/ada/tokenizer.json"}),
        "tokenizer_file of tokenizer_config.json",
        {"tokenizer_config.json": ["tokenizer_file"]},
    ),
    "code that generates": LeftOut(
        "bloom", put("custom_generate/generate.py", {}), ("custom_generate", "was not copied"), {}
    ),
}
HARMLESS: dict[str, tuple[str, Change]] = {
    "nulls": (
        "bloom",
        config(
            **dict.fromkeys(
                ("sliding_window", "layer_types", "quantization_config", "transformers_weights"), ...
            ),
            is_causal=True,
            quantization_bit=0,
        ),
    ),
    "an adapter's config alone": ("bloom", put("adapter_config.json", {})),
    "harmless arguments": ("llama", put(SENTENCES, {"model_kwargs": {"dtype": "float32"}})),
}
"""What says nothing else than what is done: there is no note."""


def more_notes(source: Path, change: Change, folder: Path) -> list[str]:
    """Converts to ``folder / "out"``, and returns the notes that are there because of the change."""
    plain = convert(source, folder / "plain", scale=2)
    change(source)
    result = convert(source, folder / "out", scale=2)
    assert result.checks
    names = {path.name for path in (folder / "out").iterdir()}
    assert not {*CONFIGS, *TOKENIZERS, *QUANTISED_BY} & names
    return [note for note in result.notes if note not in plain.notes]


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_is_left_out_with_a_note(make_source: MakeSource, tmp_path: Path, case: str) -> None:
    row = LEFT_OUT[case]
    [note] = more_notes(make_source(row.family), row.change, tmp_path)
    says(note, row.words)
    for file, keys in row.gone.items():
        assert not {*keys} & json.loads((tmp_path / "out" / file).read_text(encoding="utf-8")).keys()


@pytest.mark.parametrize("case", HARMLESS)
def test_what_needs_no_note(make_source: MakeSource, tmp_path: Path, case: str) -> None:
    family, change = HARMLESS[case]
    assert more_notes(make_source(family), change, tmp_path) == []


@pytest.mark.parametrize("name", SENTENCE_CONFIGS)
def test_the_limit_in_every_file_that_sentence_transformers_reads(
    make_source: MakeSource, tmp_path: Path, name: str
) -> None:
    source = make_source("jina_bert")
    put(name, {"max_seq_length": 100})(source)
    limit = convert(source, tmp_path / "out", scale=2, train_length=5000, verify=False).input_limit
    assert json.loads((tmp_path / "out" / name).read_text(encoding="utf-8")) == {"max_seq_length": limit}


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


# References to other code

EVIL = "evil/repo"
KEPT: dict[str, Any] = {"kept": [1, {"type": "linear"}]}
REFERENCES: dict[str, tuple[str, Any, Any, str]] = {
    "a pipeline": (
        "config.json",
        {"custom_pipelines": {"evil": {"impl": f"{EVIL}--code.Thing", "pt": ["AutoModel"], "type": "text"}}},
        {},
        f"custom_pipelines: {EVIL}--code.Thing",
    ),
    "a class below another key of the config": (
        "config.json",
        {"part": {**KEPT, "auto_map": {"AutoModel": f"{EVIL}--code.Thing"}}},
        {"part": KEPT},
        f"auto_map: {EVIL}--code.Thing",
    ),
    "a processor's class that the tokenizer names": (
        "tokenizer_config.json",
        {"auto_map": {"AutoProcessor": f"{EVIL}--code.Thing"}},
        {},
        f"auto_map: {EVIL}--code.Thing",
    ),
    "a processor": (
        "processor_config.json",
        {"auto_map": {"AutoProcessor": f"{EVIL}--code.Thing"}, **KEPT},
        KEPT,
        f"auto_map: {EVIL}--code.Thing",
    ),
    "an image processor in a processor": (
        "processor_config.json",
        {"image_processor": {"auto_map": {"AutoImageProcessor": [f"{EVIL}--code.Thing", None]}, **KEPT}},
        {"image_processor": KEPT},
        f"auto_map: {EVIL}--code.Thing",
    ),
    "an audio tokenizer": (
        "processor_config.json",
        {"audio_tokenizer": {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": EVIL}},
        {"audio_tokenizer": {"audio_tokenizer_class": "AutoModel"}},
        f"audio_tokenizer_name_or_path: {EVIL}",
    ),
    "an image processor": (
        "preprocessor_config.json",
        {"auto_map": {"AutoImageProcessor": f"{EVIL}--code.Thing"}, **KEPT},
        KEPT,
        f"auto_map: {EVIL}--code.Thing",
    ),
    "code of the source": (
        "preprocessor_config.json",
        {"auto_map": {"AutoFeatureExtractor": "mine.Thing"}, **KEPT},
        KEPT,
        "auto_map: mine.Thing",
    ),
    "a module": ("modules.json", modules(f"{EVIL}--code.Thing"), modules(NOT_COPIED), f"type: {EVIL}--code"),
    "a module of a package": ("modules.json", modules("os.path"), modules(NOT_COPIED), "type: os.path"),
    "modules of a router": (
        "router_config.json",
        {"types": {"a": f"{EVIL}--code.Thing"}, **KEPT},
        {"types": NOT_COPIED, **KEPT},
        f"types: {EVIL}--code.Thing",
    ),
    "an activation": (
        "1_Dense/config.json",
        {"activation_function": "os.abort", "in_features": 32},
        {"activation_function": NOT_COPIED, "in_features": 32},
        "activation_function: os.abort",
    ),
    "arguments of sentence-transformers": (
        "sentence_bert_config.json",
        {
            "max_seq_length": 1 << 20,
            "tokenizer_name_or_path": EVIL,
            "model_args": {"trust_remote_code": True, "code_revision": "refs/pr/1", "dtype": "float16"},
            "config_args": {"attn_implementation": "evil/kernel", "use_kernels": True},
        },
        {"max_seq_length": 1 << 20, "model_args": {"dtype": "float16"}, "config_args": {}},
        f"tokenizer_name_or_path: {EVIL}, trust_remote_code: True, code_revision: refs/pr/1, "
        "attn_implementation: evil/kernel, use_kernels: True",
    ),
}
"""What it is: the file, what the source's has, what the result's has instead, and what the note says."""


def refer(folder: Path, name: str, content: Any) -> None:
    """Puts the content into a file, and lists the module whose folder this is."""
    part = Path(name).parent.name
    if part:
        put("modules.json", modules(f"{PARTS}Dense", part))(folder)
    put(name, content)(folder)


@pytest.mark.parametrize("family", ["bloom", "llama"])
@pytest.mark.parametrize("kind", REFERENCES)
def test_a_result_names_no_other_code(
    make_source: MakeSource, tmp_path: Path, kind: str, family: str
) -> None:
    name, content, left, note = REFERENCES[kind]
    source = make_source(family)
    refer(source, name, content)
    result = convert(source, tmp_path / "out", scale=2, verify=False)
    text = (tmp_path / "out" / name).read_text(encoding="utf-8")
    assert "evil" not in text
    found = json.loads(text)
    if isinstance(left, dict):
        found = {key: found[key] for key in {**content, **left} if key in found and key != "auto_map"}
    assert found == left
    removed = [line for line in result.notes if line.startswith("references to code")]
    assert len(removed) == 1
    says(removed[0], f"{name} ({note}")
    assert removed[0][1:] in (tmp_path / "out/README.md").read_text(encoding="utf-8")
    read_contents(tmp_path / "out")  # nothing is left that push refuses


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_repository_that_names_other_code(
    make_source: MakeSource, refused: Refused, tmp_path: Path, kind: str
) -> None:
    name, content, _, note = REFERENCES[kind]
    folder = convert(make_source(), tmp_path / "out", scale=2, verify=False).path
    refer(folder, name, content)
    manifest.write(folder, [path.relative_to(folder).as_posix() for path in folder.rglob("*.*")], {})
    for words in (("push", folder, "ada/x"), ("export", folder)):
        key, _, named = note.partition(": ")
        says(
            refused(*words), name, key, named.partition(",")[0], "remove the key", "convert the source again"
        )


SCRIPT = """
import sys, transformers
from urllib.request import urlopen
from huggingface_hub.constants import ENDPOINT
transformers.logging.set_verbosity_error()
def attempt(load, *words, **options):
    try:
        load(*words, trust_remote_code=True, **options)
    except Exception as error:
        print(load.__name__, repr(error)[:300])
def load(folder):
    if group != "transformers":
        from sentence_transformers import SentenceTransformer
        return attempt(SentenceTransformer, folder, device="cpu")
    attempt(transformers.pipeline, "evil", folder)
    for auto in ("Tokenizer", "Processor", "ImageProcessor", "FeatureExtractor", "ModelForCausalLM"):
        attempt(getattr(transformers, "Auto" + auto).from_pretrained, folder)
group = sys.argv[1]
for folder in sys.argv[2:]:
    load(folder)
    try: urlopen(ENDPOINT + "/loaded/" + folder.rpartition("/")[2])
    except OSError: pass
"""
LOADED: dict[str, list[tuple[str, Any]]] = {
    "transformers": [
        *(REFERENCES[kind][:2] for kind in ("a pipeline", "a processor", "an image processor")),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [f"{EVIL}--code.Thing", None]}}),
    ],
    "a module": [REFERENCES["a module"][:2]],
    "an argument": [
        ("modules.json", modules()),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": EVIL}),
    ],
}


@pytest.mark.parametrize("group", LOADED)
def test_loading_a_result_asks_for_no_other_code(
    make_source: MakeSource, hub: HubServer, environment: dict[str, str], tmp_path: Path, group: str
) -> None:
    """While loading its source does, in the same process."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/code.py").write_text("class Thing: ...")
    hub.commit(EVIL, tmp_path / "evil")
    source = make_source()
    for name, content in LOADED[group]:
        refer(source, name, content)
    out = convert(source, tmp_path / "out", scale=2, verify=False).path
    words = [sys.executable, "-c", SCRIPT, group, str(out), str(source)]
    done = forks.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    paths = [request.path for request in hub.requests]
    after = paths.index("/loaded/out")
    assert not [path for path in paths[:after] if "evil" in path], done.stdout
    assert [path for path in paths[after:] if "evil" in path], done.stdout


# Other code in a converted repository

MODELING, ALIBI = "modeling_ntk_bloom.py", "ntk_alibi.py"

Plant = Callable[[Path, str], object]


def mapped(folder: Path, reference: str) -> None:
    edit_json(folder / "config.json", {"auto_map": {"AutoModelForCausalLM": reference}})


def line_more(folder: Path, code: str) -> None:
    with (folder / MODELING).open("a") as file:
        file.write(f"\n{code}\n")


def module_more(folder: Path, code: str) -> None:
    (folder / "modeling_more.py").write_text(code)
    mapped(folder, "modeling_more.Model")


def module_linked(folder: Path, code: str) -> None:
    (folder.parent / "elsewhere.py").write_text(code)
    (folder / ALIBI).unlink()
    (folder / ALIBI).symlink_to(folder.parent / "elsewhere.py")


def tokenizer(folder: Path, code: str) -> None:
    (folder / "tokenization_ntk_sentencepiece.py").write_text(code)


PLANTED: dict[str, tuple[Plant, str]] = {
    "a line more": (line_more, MODELING),
    "a module more": (module_more, "auto_map"),
    "a module that is a link": (module_linked, ALIBI),
    "a module of another repository": (lambda folder, _: mapped(folder, "eve/code--m.Model"), "auto_map"),
    "a tokenizer": (tokenizer, "tokenization_ntk_sentencepiece.py"),
    "a module less": (lambda folder, _: (folder / ALIBI).unlink(), ALIBI),
    "a kernel": (
        lambda folder, _: edit_json(folder / "config.json", {"attn_implementation": "eve/code"}),
        "attn_implementation",
    ),
}


def bytecode(folder: Path, code: str) -> None:
    """Which Python prefers to the file, and does not compare with it when it says so."""
    text = folder.parent / "text.py"
    text.write_text(code)
    place = importlib.util.cache_from_source(str(folder / MODELING))
    py_compile.compile(
        str(text), place, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )


def package(folder: Path, code: str) -> None:
    """Which Python prefers to a file of its name."""
    (folder / "ntk_alibi").mkdir()
    (folder / "ntk_alibi/__init__.py").write_text(code)


UNSEEN: dict[str, Plant] = {"bytecode": bytecode, "a package": package}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Exists once planted code was run."""
    return tmp_path / "ran"


@pytest.fixture
def folder(repository: Make) -> Path:
    """A converted repository with a graph."""
    made = repository()
    export(made, OnnxOptions(validate=False))
    return made


@pytest.mark.parametrize("kind", PLANTED)
def test_other_code_is_refused_and_not_run(
    folder: Path, run: RunCli, refused: Refused, trace: Path, tmp_path: Path, kind: str
) -> None:
    plant, part = PLANTED[kind]
    plant(folder, f"open({str(trace)!r}, 'w')")
    for words in (("export", folder), ("push", folder, "ada/bloom-ntk")):
        says(refused(*words), part)
    checked = run("validate", folder)
    assert (checked.code, part in checked.out) == (1, True)
    assert run("inspect", folder).code == 0
    (tmp_path / "text").write_text("w5 w6 " * 100)
    measured = ("eval", folder, "--text", tmp_path / "text", "--lengths", 32)
    for words in (measured, (folder, "--out", tmp_path / "new")):
        done = run(*words)  # with this version's code
        assert done.code == 0 or "is a link that leads out" in done.err
    assert not trace.exists()


def test_an_adapter_has_to_be_merged_for_every_command(
    folder: Path, refused: Refused, tmp_path: Path
) -> None:
    """Some of them would apply it, under the name of the model without it."""
    (folder / "adapter_config.json").write_text("{}")
    (tmp_path / "text").write_text("w5 w6")
    text = ("--text", tmp_path / "text")
    for words in (
        *(("export", folder), ("validate", folder), ("push", folder, "ada/x")),
        (folder, "--out", tmp_path / "new"),
        *(("eval", folder, "--lengths", 64, *text), ("tune", folder, "--target-length", 128, *text)),
        *(("inspect", folder), ("plot", folder, "--out", tmp_path / "x.png")),
    ):
        says(refused(*words), "adapter_config.json", "model.merge_and_unload()")


@pytest.mark.parametrize("kind", UNSEEN)
def test_code_that_takes_the_place_of_a_file_is_not_run(
    folder: Path, run: RunCli, trace: Path, kind: str
) -> None:
    UNSEEN[kind](folder, f"open({str(trace)!r}, 'w')")
    for command in ("export", "validate", "inspect"):
        result = run(command, folder)
        assert result.code == 0, result.err
    assert not trace.exists()
