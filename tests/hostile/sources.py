"""The hostile sources: each is a valid source of a few bytes that an example or chance has changed."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "corpus").glob("*.json"))
}
"""Family -> a config.json with the keys of real checkpoints."""
CARD = b"---\nlicense: mit\nlanguage:\n- en\nbase_model: a/b\n---\n# Tiny\n"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
SETTINGS: dict[str, Any] = {
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64},
    "tokenizer.json": {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {}}},
    "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "max_length": 20},
    "modules.json": MODULES,
    "special_tokens_map.json": {"pad_token": "<pad>"},
}
# Code that no run may execute.
CODE = "import sys\nsys.audit('hostile.executed')\nopen('../outside/ran', 'w')\nclass Model: pass\n"
CODE_FILES = ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py", "evil.py", "setup.py")
WEIGHTS = "model.safetensors"
NAME = "wte.weight"
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    NAME: {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "h.0.ln.weight": {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]},
    "ln_f.bias": {"dtype": "F32", "shape": [2], "data_offsets": [40, 48]},
}
GOOD, BYTES = json.dumps(HEADER).encode(), 48

Made = list[str] | None
"""All words of a command line; None for a usual one."""
Make = Callable[[Path], Made]
Vary = Callable[[Path, Random], Made]


@dataclass(frozen=True)
class Kind:
    """One kind of hostile input, and both ways of making one."""

    examples: Sequence[Make]
    vary: Vary
    verify: bool = False
    """Whether results are verified, which builds and runs the model."""


def build(kind: str, number: int, folder: Path) -> Made:
    """Makes a case's source in ``folder``; returns its command line."""
    write(folder)
    made, examples = KINDS[kind], KINDS[kind].examples
    if number < len(examples):
        return examples[number](folder)
    return made.vary(folder, Random(f"{kind}/{number}"))


def write(folder: Path, family: str = "bloom") -> None:
    """Writes a valid source with one weight file, and code files that a hostile one would contain."""
    folder.mkdir(parents=True)
    files = {"config.json": CONFIGS[family], **SETTINGS}
    del files["modules.json"], files["special_tokens_map.json"]
    for name, value in files.items():
        put(name, value)(folder)
    for name in CODE_FILES:
        put(name, CODE.encode())(folder)
    put("README.md", CARD)(folder)
    put("LICENSE", b"MIT")(folder)
    put(WEIGHTS, framed(GOOD))(folder)


def put(name: str, content: object) -> Make:
    """A file of bytes, or of JSON in Python's lenient form, with NaN and lone surrogates."""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    return make


def long(name: str, start: bytes, repeated: bytes, times: int, end: bytes = b"") -> Make:
    """A file that is made only when it is needed; one of weights gets the length of its header."""

    def make(folder: Path) -> None:
        content = start + repeated * times + end
        put(name, framed(content, 0) if name == WEIGHTS else content)(folder)

    return make


def framed(raw: bytes, size: int = BYTES, length: int | None = None) -> bytes:
    """A safetensors file of raw header bytes and ``size`` zeros; ``length`` overrides the header's length."""
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(size)


# Random changes

NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**299
NASTY: tuple[Any, ...] = (
    *("", "x", "0", "\x00", "\n\x1b[2Jerror: forged", "\ud800", "é" * 300, "x" * 100_000, "%s%n", "{{ 1 }}"),
    *("../../outside/secret.json", "/etc/passwd", "nobody/nothing--module.Class", "module.Class"),
    *(0, -1, 1, 3, 7, 1 << 16, 1 << 24, 1 << 31, 1 << 63, 10**30, HUGE, -HUGE),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, NAN, INFINITY, -INFINITY, None, True, False),
    *([], {}, [[]], [None], [{}], {"": None}, {"type": []}, [0] * 5000, ["x"] * 5000),
    json.loads("[" * 60 + "]" * 60),
)
TOKENS = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800", b"\x00", b"\xff"),
    *(b"\n", b"\r"),
    *(b"\xed\xa0\x80", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"[" * 70, b'{"a":' * 70, b"null"),
)
Pool = Sequence[tuple[str, Any]]


def worse(value: Any, rng: Random, pool: Pool = ()) -> Any:
    """A copy of a JSON value with one to four changes; ``pool`` has meaningful keys and values to insert."""
    result = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        parent, key, inner = None, None, result
        while isinstance(inner, (dict, list)) and inner and (parent is None or rng.random() < 0.6):
            parent = inner
            key = rng.choice(sorted(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
            inner = parent[key]
        if parent is None:
            return nasty(rng)
        choice = rng.random()
        if isinstance(parent, dict) and choice < 0.15:
            del parent[key]
        elif isinstance(parent, dict) and choice < 0.45 and pool:
            name, other = rng.choice(pool)
            parent[name] = copy.deepcopy(other) if choice < 0.35 else nasty(rng)
        elif isinstance(inner, (int, float)) and choice < 0.6:
            parent[key] = rng.choice((-inner, inner + 1, inner * 2, float(min(inner, 1e300)), str(inner)))
        else:
            parent[key] = [inner] if choice < 0.65 else nasty(rng)
    return result


def nasty(rng: Random) -> Any:
    """A value that code rarely expects."""
    return copy.deepcopy(rng.choice(NASTY))


def worse_bytes(content: bytes, rng: Random) -> bytes:
    """``content`` with one to four changes: cut, removed, inserted, repeated or with a flipped bit."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(result) + 1)
        end = min(len(result), at + rng.choice((1, 1, 2, 8, 64)))
        choice = rng.randrange(5)
        if choice == 0:
            del result[at:]
        elif choice == 1:
            del result[at:end]
        elif choice == 2:
            result[at:at] = rng.choice(TOKENS)
        elif choice == 3:
            result[at:at] = result[at:end] * rng.choice((1, 2, 100))
        elif at < len(result):
            result[at] ^= 1 << rng.randrange(8)
    return bytes(result)


def worse_json(value: Any, rng: Random, pool: Pool = ()) -> bytes:
    """JSON whose values, or sometimes whose bytes, are damaged."""
    if rng.random() < 0.8:
        return json.dumps(worse(value, rng, pool)).encode()
    return worse_bytes(json.dumps(value).encode(), rng)


# Headers of safetensors files


def entry(**changes: Any) -> Make:
    """The first tensor's entry with some values changed."""
    return put(WEIGHTS, framed(json.dumps({**HEADER, NAME: {**HEADER[NAME], **changes}}).encode()))


def sparse(dtype: str, name: str, size: int, family: str) -> Make:
    """A sparse file with one tensor of this many bytes."""

    def make(folder: Path) -> None:
        put("config.json", CONFIGS[family])(folder)
        shape = [size // (2 if dtype == "F16" else 1)]
        header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
        put(WEIGHTS, framed(json.dumps(header).encode(), 0))(folder)
        os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + size)

    return make


NASTY_NAMES = ("a\nerror: forged", "\x1b[2J\x07", "\ud800", "a\x00b", "x" * (1 << 20), "", "../../outside/x")
MANY = b"{" + b",".join(b'"a%d":{}' % number for number in range(300_000))
# What test_stored_tensors.py does not have: more than the memory or the disk holds, names, and other formats.
HEADERS: list[Make] = [
    *(put(WEIGHTS, raw) for raw in (b"", bytes(8), b"\x80\x02cos\nsystem\n(S'touch ran'\ntR.")),
    *(put(WEIGHTS, framed(GOOD, length=length)) for length in (1 << 20, (1 << 64) - 1, len(GOOD) + 1)),
    *(put(WEIGHTS, framed(raw, 0)) for raw in (b"{}", b'{"__metadata__":{"format":"pt"}}', MANY + b"}")),
    put(WEIGHTS, framed(b" \n" + GOOD + b"   ")),
    long(WEIGHTS, b"{", b" ", 40 << 20, b"}"),
    long(WEIGHTS, b'{"a":[', b"[],", 8 << 20, b"[]]}"),
    long(WEIGHTS, b"", b'{"a":', 100_000),
    long(WEIGHTS, b'{"a":{"shape":[', b"9", 100_000, b"]}}"),
    entry(shape=[(1 << 63) - 1] * 300_000),
    *(put(WEIGHTS, framed(json.dumps({name: HEADER[NAME]}).encode(), 32)) for name in NASTY_NAMES),
    sparse("U8", NAME, 1 << 43, "bloom"),
    sparse("F16", "transformer.relative_pe.slopes", 1 << 31, "jais"),
]


def vary_header(folder: Path, rng: Random) -> None:
    if rng.random() < 0.5:
        content = framed(json.dumps(worse(HEADER, rng)).encode())
    else:
        content = worse_bytes(framed(GOOD), rng)
    put(WEIGHTS, content)(folder)


# config.json


def config(family: str, **changes: Any) -> Make:
    return put("config.json", CONFIGS[family] | changes)


CONFIG_POOL: Pool = [
    *sorted(
        (pair for values in CONFIGS.values() for pair in values.items()),
        key=lambda pair: (pair[0], repr(pair[1])),
    ),
    *(("quantization_config", {}), ("norm_head", True), ("alibi_slopes", [0.5, 0.25]), ("num_labels", 3)),
    *(("rope_scaling", {"type": "linear", "factor": 2.0}), ("id2label", {"0": "x"}), ("head_dim", 8)),
    *(("sliding_window", 4), ("_name_or_path", "mosaicml/mpt-7b"), ("torch_dtype", "float16")),
    *(("z_loss_weight", 0.1), ("norm_eps", 1e-5), ("compression_config", None)),
]
CHANGES: list[tuple[str, dict[str, Any]]] = [
    *(("bloom", {"model_type": name}) for name in ("bloom\nerror: forged\x1b[2J", "\ud800", {})),
    ("bloom", {"architectures": ["BloomForCausalLM", "BloomModel"]}),
    ("bloom", {"note": "\ud800\udfff\x00\x1b"}),
    *(("bloom", {"num_attention_heads": heads, "n_embed": heads}) for heads in (HUGE, 1 << 24)),
    *(("bloom", {"n_layer": layers}) for layers in (10**9, 1 << 24, NAN)),
    *(("bloom", {"architectures": named}) for named in ([["BloomForCausalLM"]], [{}], ["x"] * 20_000)),
    *(("bloom", {key: HUGE}) for key in ("vocab_size", "seq_length")),
    *(("llama", {key: 1 << 24}) for key in ("head_dim", "num_attention_heads", "num_hidden_layers")),
    *(("llama", {"rope_theta": theta}) for theta in (HUGE, 1e308, INFINITY)),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "nobody/evil--evil.Model"}}),
    ("gpt_neox", {"rotary_pct": 1e-320, "rope_parameters": None}),
    *(("mpt", {"max_seq_len": length}) for length in (HUGE, [1])),
    *(("mpt", {"attn_config": {"alibi": True, key: HUGE}}) for key in ("softmax_scale", "alibi_bias_max")),
    ("jais", {"width_scale": 1e308, "mup_width_scale": 1e308, "mup_output_alpha": 1e308}),
    *(("baichuan", change) for change in ({"z_loss_weight": HUGE}, {"architectures": 5})),
    ("mosaic_bert", {"auto_map": {"AutoModel": {}}}),
    ("converted_rotary", {"ntk_convert": {"rotary": {"scaling": None, "source_config": {"model_type": []}}}}),
    ("converted_rotary", {"ntk_convert": {"source": "\n\x1b[2J", "alibi_scaling": {}}}),
    ("converted", {"alibi_scaling": {"type": "ntk", "factor": HUGE}}),
    ("converted", {"alibi_scaling": {"type": "ntk", "train_seq_len": 64, "dynamic": "length", "rate": HUGE}}),
    ("converted", {"model_type": "ntk_jais", "n_embd": 8, "alibi_slopes": [HUGE, 1]}),
]
CONFIG_EXAMPLES: list[Make] = [
    *(put("config.json", values) for values in CONFIGS.values()),
    *(put("config.json", raw) for raw in (b"", b"\xef\xbb\xbf{}", b'{"model_type":"bloom","n_head":1e999}')),
    long("config.json", b"", b'{"a":', 1_000_000),
    long("config.json", b'{"n_head":', b"9", 1_000_000, b"}"),
    long("config.json", b'{"model_type":"', b"x", 40 << 20, b'"}'),
    long("config.json", b'{"model_type":["', b"[],", 5 << 20, b"0]}"),
    *(config(family, **changes) for family, changes in CHANGES),
]


def vary_config(folder: Path, rng: Random) -> None:
    family = rng.choice(sorted(CONFIGS))
    put("config.json", worse_json(CONFIGS[family], rng, CONFIG_POOL))(folder)


# The other JSON files, and chat templates


def module(path: object, linked: str = "", target: str = "") -> Make:
    """A sentence encoder whose second module is in this folder; ``linked`` is a link in its place."""

    def make(folder: Path) -> None:
        (folder / "1_Pooling").mkdir()
        put("1_Pooling/config.json", {})(folder)
        put("modules.json", [MODULES[0], {**MODULES[1], "path": path}])(folder)
        if linked:
            link(linked, target)(folder)

    return make


def crowd(folder: Path) -> None:
    """A module's folder that contains very many files."""
    module("1_Pooling")(folder)
    for number in range(3000):
        (folder / f"1_Pooling/{number}.bin").touch()


def chat_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name in ("evil.jinja", "a\nb.jinja", "-rf.jinja", "..jinja"):
        put(f"additional_chat_templates/{name}", b"{{ self.__init__.__globals__ }}")(folder)
    put("chat_template.jinja", b"{% for i in range(10**9) %}x{% endfor %}")(folder)


def baichuan(folder: Path) -> None:
    """A tokenizer that our own code replaces, whose vocabulary is not a sentencepiece model."""
    config("baichuan")(folder)
    put("tokenizer_config.json", {"tokenizer_class": "BaichuanTokenizer"})(folder)
    put("tokenizer.model", b"\xff" * 100)(folder)


SETTING_POOL: Pool = [
    ("auto_map", {"AutoTokenizer": ["tokenization_evil.Model", None]}),
    ("auto_map", {"AutoTokenizer": "nobody/evil--tokenization_evil.Model"}),
    ("auto_map", ["tokenization_evil.Model", None]),
    ("tokenizer_class", "BaichuanTokenizer"),
    ("chat_template", "{{ ''.__class__.__mro__ }}"),
    *(("custom_generate", "evil"), ("type", "evil.Model"), ("path", "../outside"), ("path", "/etc")),
]
READ_BY_TRANSFORMERS = (
    *("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "feature_extractor_config.json", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "image_processor_config.json"),
)
"""Files in which transformers looks for code, or may."""


def named_code(name: str, start: str) -> Make:
    """Code for every purpose, of another repository or of this one's; no result may name it."""

    def make(folder: Path) -> None:
        old = json.loads((folder / name).read_bytes()) if (folder / name).is_file() else {}
        classes = {
            "AutoProcessor": f"{start}evil.Model",
            "AutoImageProcessor": f"{start}evil.Model",
            "AutoTokenizer": [f"{start}tokenization_evil.Model", None],
        }
        pipes = {"text-generation": {"impl": f"{start}evil.Model", "pt": ["AutoModelForCausalLM"]}}
        put(name, {**old, "auto_map": classes, "custom_pipelines": pipes})(folder)

    return make


SETTING_EXAMPLES: list[Make] = [
    *(put(name, content) for name in SETTINGS for content in (b"", b"[" * 100_000)),
    long("tokenizer_config.json", b'{"a":"', b"x", 40 << 20, b'"}'),
    long("modules.json", b"[", b"{},", 5 << 20, b"{}]"),
    *(
        put("tokenizer_config.json", {"auto_map": {"AutoTokenizer": named}})
        for named in ("tokenization_evil.Model", ["nobody/evil\n--x\x1b.Model", None])
    ),
    put("tokenizer_config.json", {"tokenizer_class": ["x"], "auto_map": [[]]}),
    *(put(name, {"bits": 4}) for name in ("quantize_config.json", "quant_config.json")),
    *(named_code(name, start) for name in READ_BY_TRANSFORMERS for start in ("nobody/evil--", "")),
    *(module(path) for path in ("../outside", "/etc", 1, ".", "..", "a\x00b", "a\nb")),
    module("1_Pooling", "1_Pooling/config.json", "../../outside/secret.json"),
    module("2_Evil", "2_Evil", "../outside"),
    put("modules.json", [{**MODULES[1], "type": "evil.Model\n\x1b[2J"}]),
    put("modules.json", [{"path": f"{number}", "type": "x"} for number in range(50_000)]),
    *(baichuan, crowd, chat_templates),
]


def vary_settings(folder: Path, rng: Random) -> None:
    module("1_Pooling")(folder)
    config(rng.choice(("bloom", "baichuan", "llama", "jina_bert")))(folder)
    put("tokenizer.model", rng.randbytes(8))(folder)
    for name in rng.sample(sorted(SETTINGS), 2):
        put(name, worse_json(SETTINGS[name], rng, SETTING_POOL))(folder)


# Links, pipes and folders in place of files

TARGETS = (
    *("../outside/secret.json", "/etc/passwd", "/proc/self/environ", "/proc/self/mem"),
    *("/dev/zero", "/dev/stdin", "/dev/full", "/nowhere", "..", ".", "evil.py", "../outside"),
)
SIX = ("config.json", "model.safetensors", "README.md", "tokenizer_config.json", "tokenizer.json", "LICENSE")
PLACES = (
    *SIX,
    *("modules.json", "generation_config.json", "vocab.txt", "1_Pooling", "additional_chat_templates"),
)


def instead(name: str, make: Callable[[Path], object]) -> Make:
    """Something else in place of a file."""

    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return replace


def link(name: str, target: str) -> Make:
    return instead(name, lambda path: path.symlink_to(target))


PLACE_EXAMPLES: list[Make] = [
    *(link(name, target) for name in SIX for target in TARGETS),
    *(link(name, name) for name in PLACES),
    *(instead(name, make) for make in (os.mkfifo, Path.mkdir) for name in PLACES),
    *(lambda folder, name=name: (folder / name).chmod(0) for name in SIX),
    *(lambda folder, name=name: os.truncate(folder / name, 1 << 43) for name in SIX),  # 8 TB without data
]


def vary_place(folder: Path, rng: Random) -> None:
    for name in rng.sample(PLACES, rng.choice((1, 1, 2, 3))):
        make = rng.choice((os.mkfifo, Path.mkdir, None))
        (link(name, rng.choice(TARGETS)) if make is None else instead(name, make))(folder)


# Options

UNPRINTABLE = ("a\nerror: forged", "\x1b[2J\x07", "caf\udce9", "\u202egnp", "out\n")
TEXTS = (
    *("--out={}", "--base-model={}", "--set={}", "--set=note={}", "--slopes={}", "--revision={}"),
    *("--subfolder={}", "--dtype={}", "--scale={}", "--target-length={}", "--rate={}"),
)


def options(*words: str, text: str = "") -> Make:
    """A conversion with these options, in which braces stand for a text."""

    def make(folder: Path) -> list[str]:
        given = [word.format(text) for word in words]
        return ["convert", str(folder), "--out=out", "--no-verify", *given]

    return make


OPTIONS: list[Make] = [
    *(options("--scale=2", word) for word in ("--set=n_head=2", "--set=vocab_size=7", "--set=n_layer=1")),
    *(options("--scale=2", word, text=text) for word in TEXTS for text in UNPRINTABLE),
]


def vary_options(folder: Path, rng: Random) -> Made:
    start = "".join(rng.choices("ab./\\-~ %'\"$`*?[]{}=0123456789", k=rng.randrange(20)))
    return options("--scale=2", rng.choice(TEXTS), text=start + rng.choice(UNPRINTABLE))(folder)


# Configs whose results are verified, so transformers builds and runs the model


def run_config(folder: Path) -> dict[str, Any]:
    """Replaces the source by a BLOOM that loads; returns its config."""
    from tests import tiny

    for name in ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    tiny.FACTORIES["bloom"](folder, 2)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def verified(key: str, value: object) -> Make:
    return lambda folder: put("config.json", {**run_config(folder), key: value})(folder)


RUN_POOL: Pool = [
    *(("_attn_implementation", "nobody/evil-kernel"), ("num_labels", 1 << 24)),
    ("auto_map", {"AutoModelForCausalLM": "modeling_evil.Model", "AutoConfig": "nobody/evil--evil.Model"}),
    *(("attn_implementation", "nobody/evil-kernel"), ("_attn_implementation_internal", "nobody/evil-kernel")),
    *(("experts_implementation", "nobody/evil-kernel"), ("dtype", "nn.Module"), ("torch_dtype", "save")),
    *(("transformers_weights", "../../outside/secret.json"), ("transformers_version", "\n\x1b[2J")),
    ("custom_pipelines", {"text-generation": {"impl": "evil.Model"}}),
    *(("tie_word_embeddings", "x"), ("torchscript", True), ("pruned_heads", {"0": [0]}), ("id2label", [1])),
    *(("hidden_dropout", 1e308), ("attention_dropout", -1), ("layer_norm_epsilon", 1e308)),
    *(("layer_norm_epsilon", "x"), ("slow_but_exact", True), ("vocab_size", 1 << 24), ("use_cache", [])),
    *(("base_model_tp_plan", {"x": "y"}), ("problem_type", "evil"), ("is_encoder_decoder", True)),
    *(("pad_token_id", 1 << 40), ("sub_configs", {"a": {}}), ("text_config", {"model_type": "evil"})),
    ("quantization_config", {"quant_method": "evil"}),
]


def vary_run(folder: Path, rng: Random) -> None:
    put("config.json", worse(run_config(folder), rng, RUN_POOL))(folder)


KINDS: dict[str, Kind] = {
    "headers": Kind(HEADERS, vary_header),
    "configs": Kind(CONFIG_EXAMPLES, vary_config),
    "settings": Kind(SETTING_EXAMPLES, vary_settings),
    "options": Kind(OPTIONS, vary_options),
    "places": Kind(PLACE_EXAMPLES, vary_place),
    "verified": Kind([verified(*pair) for pair in RUN_POOL], vary_run, verify=True),
}
