"""Tokenizers of converted repositories, and the files in folders that they need.

The expected ids are computed here with sentencepiece alone: its model encodes the text between special
tokens, and special tokens follow the rules of the sources' own classes under transformers 4.33 (those classes
do not run on later versions).
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from converter import ConversionResult, convert
from converter.source.sentence_transformers import nested_files
from converter.source.source import Source
from converter.source.tokenizer import KNOWN, TEMPLATE
from tests import tiny
from tests.conftest import MakeSource, RunCli, edit_json
from tests.messages import says

ROOT = Path(__file__).parent.parent
CORPUS = [
    *Path(__file__).read_text(encoding="utf-8").splitlines(),
    *["Grüße aus Köln, façade naïve", "白日依山尽。黄河入海流。", "Привет, мир! 0123456789"] * 20,
]
TEXTS = [
    "a word",
    "def f(x):\n    return x  # twice\n\n\n\tend",
    "  two  spaces   at both ends  ",
    " ",
    "\n",
    "",
    "Grüße, 黄河入海流。 Привет",
    "☃ 🙂👩‍🚀 ﬁ ① \u200b\u00a0\u3000.",
    "1234567890 3.14",
]


@dataclass(frozen=True)
class Kind:
    """One of the known tokenizers, with the files of its repositories."""

    original: str
    module: str
    family: str
    model: str
    settings: dict[str, Any]
    special: dict[str, str]
    training: dict[str, Any]
    strips: bool


def added(content: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": True}
    return {"__type": "AddedToken", "content": content, **flags}


BAICHUAN_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>"}
REPLIT_SPECIAL = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
KINDS = {
    "baichuan": Kind(
        original="BaichuanTokenizer",
        module="tokenization_baichuan",
        family="baichuan",
        model="tokenizer.model",
        settings={
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "sp_model_kwargs": {},
            **{name: added(content) for name, content in BAICHUAN_SPECIAL.items()},
        },
        special=BAICHUAN_SPECIAL,
        training={
            "vocab_size": 600,
            "model_type": "bpe",
            "byte_fallback": True,
            "bos_id": 1,
            "eos_id": 2,
            "user_defined_symbols": ["<reserved_106>"],
            "character_coverage": 0.99,
        },
        strips=False,
    ),
    "replit": Kind(
        original="ReplitLMTokenizer",
        module="replit_lm_tokenizer",
        family="mpt",
        model="spiece.model",
        settings={
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "padding_side": "right",
            "sep_token": None,
            "sp_model_kwargs": {},
            **REPLIT_SPECIAL,
        },
        special=REPLIT_SPECIAL,
        training={
            "vocab_size": 300,
            "model_type": "unigram",
            "bos_id": -1,
            "eos_id": 1,
            "pad_id": 2,
            "unk_piece": "<|unk|>",
            "eos_piece": "<|endoftext|>",
            "pad_piece": "<|pad|>",
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["\n", "\t"],
        },
        strips=True,
    ),
}


def train(**options: Any) -> bytes:
    """The bytes of a small sentencepiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
        **options,
    )
    return model.getvalue()


def give(source: Path, name: str, model: bytes, settings: dict[str, Any] | None = None) -> None:
    """Puts such a tokenizer in place of a source's own."""
    kind = KINDS[name]
    (source / "tokenizer.json").unlink()
    (source / kind.model).write_bytes(model)
    (source / f"{kind.module}.py").write_text("raise SystemExit('the original must never run')")
    original = {
        "auto_map": {"AutoTokenizer": [f"{kind.module}.{kind.original}", None]},
        "tokenizer_class": kind.original,
    }
    values = kind.settings | original | (settings or {})
    (source / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture(scope="session")
def models() -> dict[str, bytes]:
    return {name: train(**kind.training) for name, kind in KINDS.items()}


MakeTokenizer = Callable[..., Path]


@pytest.fixture
def make_tokenizer(make_source: MakeSource, models: dict[str, bytes]) -> MakeTokenizer:
    """``make_tokenizer(kind, settings, model=None)``: a source with such a tokenizer and changed options."""

    def make(name: str, settings: dict[str, Any] | None = None, model: bytes | None = None) -> Path:
        kind = KINDS[name]
        # Baichuan's config.json names the class too.
        source = make_source(kind.family, {"tokenizer_class": kind.original} if name == "baichuan" else None)
        give(source, name, model or models[name], settings)
        return source

    return make


@pytest.fixture
def load(make_tokenizer: MakeTokenizer, tmp_path: Path) -> Callable[..., Any]:
    """``load(kind, settings, model=None)``: the tokenizer after such a source was converted."""

    def make(name: str, settings: dict[str, Any] | None = None, model: bytes | None = None) -> Any:
        quick(make_tokenizer(name, settings, model), tmp_path / "out")
        return AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)

    return make


def quick(source: Path, out: Path, **options: Any) -> ConversionResult:
    return convert(source, out, scale=2, verify=False, **options)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def processor(name: str, models: dict[str, bytes]) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=models[name])


def expected(name: str, models: dict[str, bytes], text: str) -> list[int]:
    """The expected ids: special tokens are split off first, with the white space that they strip."""
    kind, model = KINDS[name], processor(name, models)
    special = "|".join(re.escape(token) for token in sorted(set(kind.special.values())))
    ids = []
    parts = re.split(f"({special})", text)
    for place, part in enumerate(parts):
        if place % 2:
            ids.append(model.piece_to_id(part))
        elif kind.strips and len(parts) > 1:
            left, right = place > 0, place < len(parts) - 1
            part = part.lstrip() if left else part
            ids += model.encode(part.rstrip() if right else part)
        else:
            ids += model.encode(part)
    return ids


# Ids and texts


@pytest.mark.parametrize("name", KINDS)
def test_ids_and_decoding_are_those_of_sentencepiece(
    name: str, load: Callable[..., Any], models: dict[str, bytes]
) -> None:
    tokenizer, model = load(name), processor(name, models)
    assert not tokenizer.is_fast
    assert (tokenizer.vocab_size, len(tokenizer)) == (len(model), len(model))
    assert tokenizer.get_vocab() == {model.id_to_piece(index): index for index in range(len(model))}
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == model.encode(text), text
        assert tokenizer.tokenize(text) == model.encode(text, out_type=str), text
        assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(text)) == model.decode(
            model.encode(text, out_type=str)
        )
        if not set(model.encode(text)) & set(tokenizer.all_special_ids):
            assert tokenizer.decode(model.encode(text)) == model.decode(model.encode(text)), text
    if name == "baichuan":  # characters without a piece become bytes
        assert tokenizer.decode(tokenizer("☃🙂 naïve")["input_ids"]) == "☃🙂 naïve"
    else:
        assert tokenizer.decode(tokenizer("a  b\n\n\tc")["input_ids"]) == "a  b\n\n\tc"


@pytest.mark.parametrize("name", KINDS)
def test_special_tokens_in_a_text(name: str, load: Callable[..., Any], models: dict[str, bytes]) -> None:
    """They are found inside words too: the original tokenizers ignored ``single_word``."""
    tokenizer = load(name)
    for special in sorted(set(KINDS[name].special.values())):
        for text in (
            special,
            f"word{special}word",
            f"a {special} b",
            f"{special}{special}  \n{special}",
            f" {special}\n x",
        ):
            assert tokenizer(text)["input_ids"] == expected(name, models, text), text
    assert expected(name, models, "a <|endoftext|> b") != expected(name, models, "a <s> b")


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ((False, False), [], []),
        ((True, False), [1], []),
        ((False, True), [], [2]),
        ((True, True), [1], [2]),
        ((None, None), [1], []),  # the original's defaults
    ],
)
def test_baichuan_starts_and_ends_as_asked(
    load: Callable[..., Any], models: dict[str, bytes], tmp_path: Path, asked: Any, start: Any, end: Any
) -> None:
    """Also after it was changed and saved."""
    settings = {"add_bos_token": asked[0], "add_eos_token": asked[1]}
    tokenizer = load("baichuan", settings)
    model = processor("baichuan", models)

    def whole(text: str) -> list[int]:
        return [*start, *model.encode(text), *end]

    assert tokenizer("a word")["input_ids"] == whole("a word")
    assert tokenizer("a word", add_special_tokens=False)["input_ids"] == model.encode("a word")
    pair = tokenizer("a word", "another", return_special_tokens_mask=True, return_token_type_ids=True)
    assert pair["input_ids"] == whole("a word") + whole("another")
    assert pair["special_tokens_mask"] == [int(token in (1, 2)) for token in pair["input_ids"]]
    assert pair["token_type_ids"] == [0] * len(whole("a word")) + [1] * len(whole("another"))
    assert tokenizer.num_special_tokens_to_add() == len(start) + len(end)
    short = tokenizer("a few words more", truncation=True, max_length=4)["input_ids"]
    assert short == [*start, *model.encode("a few words more")[: 4 - len(start) - len(end)], *end]

    tokenizer.add_bos_token, tokenizer.add_eos_token = not start, not end
    tokenizer.save_pretrained(tmp_path / "saved")
    again = type(tokenizer).from_pretrained(tmp_path / "saved")
    assert again("a word")["input_ids"] == tokenizer("a word")["input_ids"] != whole("a word")
    other = type(tokenizer).from_pretrained(tmp_path / "saved", add_bos_token=bool(start))
    assert other.add_bos_token is bool(start)


@pytest.mark.parametrize("name", KINDS)
def test_round_trips(name: str, load: Callable[..., Any], tmp_path: Path) -> None:
    """The tokenizer stays the same when it is saved and loaded, pickled or copied."""
    tokenizer = load(name)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "out/config.json", tmp_path / "saved")
    for file in (tmp_path / "out").glob("*.py"):
        if not (tmp_path / "saved" / file.name).exists():
            shutil.copy(file, tmp_path / "saved")
    assert (tmp_path / "saved" / TEMPLATE).is_file()
    model = KINDS[name].model
    assert (tmp_path / "saved" / model).read_bytes() == (tmp_path / "out" / model).read_bytes()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(loaded).__name__ == KNOWN[KINDS[name].original].ours
    special = [f" {token} x" for token in KINDS[name].special.values()]
    for again in (loaded, pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert again.get_vocab() == tokenizer.get_vocab()
        assert again.special_tokens_map == tokenizer.special_tokens_map
        for text in [*TEXTS, *special, "a <new> b<new>", "".join(special)]:
            ids = tokenizer(text)["input_ids"]
            assert again(text)["input_ids"] == ids, text
            assert again.decode(ids) == tokenizer.decode(ids), text
    # The file may be gone when the tokenizer is saved again.
    (tmp_path / "saved" / model).unlink()
    loaded.save_pretrained(tmp_path / "again")
    assert len(sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "again" / model))) > 0


# What the conversion writes


@pytest.mark.parametrize(("name", "prefix"), [("baichuan", ""), ("replit", "org/model--")])
def test_only_the_class_and_the_limit_are_rewritten(
    name: str, prefix: str, make_tokenizer: MakeTokenizer, run: RunCli, tmp_path: Path
) -> None:
    kind = KINDS[name]
    mapped = {"AutoTokenizer": [f"{prefix}{kind.module}.{kind.original}", None]}
    source = make_tokenizer(name, {"auto_map": mapped})
    done = run(source, "--scale", "2", "--out", tmp_path / "out", "--no-verify")
    assert done.code == 0, done.err
    ours = KNOWN[kind.original].ours
    before, after = (read(folder / "tokenizer_config.json") for folder in (source, tmp_path / "out"))
    assert after == before | {
        "auto_map": {"AutoTokenizer": [f"{TEMPLATE.removesuffix('.py')}.{ours}", None]},
        "tokenizer_class": ours,
        "model_max_length": 2 * before["model_max_length"],
    }
    assert read(tmp_path / "out/config.json")["tokenizer_class"] == ours
    assert (tmp_path / "out" / TEMPLATE).read_bytes() == (ROOT / "templates" / TEMPLATE).read_bytes()
    assert (tmp_path / "out" / kind.model).read_bytes() == (source / kind.model).read_bytes()
    assert not (tmp_path / "out" / f"{kind.module}.py").exists()
    for said in (done.err, (tmp_path / "out/README.md").read_text(encoding="utf-8")):
        assert ours in said
        assert "sentencepiece package" in said
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert type(AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)).__name__ == ours


def test_the_class_may_be_named_by_config_json(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    source = make_tokenizer("replit")
    (source / "tokenizer_config.json").unlink()
    edit_json(source / "config.json", {"auto_map": {"AutoTokenizer": ["x.ReplitLMTokenizer", None]}})
    quick(source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert (type(tokenizer).__name__, tokenizer.eos_token) == ("NtkReplitTokenizer", "<|endoftext|>")


THEIRS = "remote code of the source"


@pytest.mark.parametrize(
    ("family", "where", "code", "parts"),
    [
        *(
            ("mpt", where, ["mine.My](http://x)Tokenizer", None], [THEIRS, "My__http_//x_Tokenizer"])
            for where in ("tokenizer_config.json", "config.json")
        ),
        # A rotary result holds no code, so also no tokenizer that we know.
        ("llama", "tokenizer_config.json", ["x.BaichuanTokenizer", None], [THEIRS]),
        # The repository of the code, or the file that a known class lacks.
        ("mpt", "tokenizer_config.json", [None, "org/other--mine.FastOne"], ["FastOne", "org/other"]),
        ("mpt", "tokenizer_config.json", ["x.ReplitLMTokenizer", None], ["no spiece.model"]),
    ],
)
def test_a_class_that_stays_with_its_source(
    family: str,
    where: str,
    code: Any,
    parts: list[str],
    make_source: MakeSource,
    models: dict[str, bytes],
    run: RunCli,
    tmp_path: Path,
) -> None:
    source = make_source(family)
    if family == "llama":
        (source / "tokenizer.model").write_bytes(models["baichuan"])
    edit_json(source / "tokenizer_config.json", {"tokenizer_class": None, "note": "kept"})
    edit_json(source / where, {"auto_map": {"AutoTokenizer": code}})
    words = (source, "--scale", "2", "--out", tmp_path / "out", "--no-verify")
    planned, done = run(*words, "--dry-run"), run(*words)
    assert done.code == 0, done.err
    assert "tokenizer_class" not in read(tmp_path / "out/config.json")
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    for said in (planned.out, done.err, card):
        assert all(part in said for part in parts)
    # Without its class, transformers would read its files in another way.
    assert not list((tmp_path / "out").glob("tokeniz*"))
    assert family != "llama" or not list((tmp_path / "out").glob("*.py"))
    if THEIRS in parts:
        assert "load it from source " in card
        assert 'AutoTokenizer.from_pretrained("source", trust_remote_code=True)' in card
    else:
        assert "AutoTokenizer" not in card


@pytest.mark.parametrize("family", ["mosaic_bert", "bloom"])
def test_no_tokenizer_stays_no_tokenizer(family: str, make_source: MakeSource, tmp_path: Path) -> None:
    """MosaicBERT's repositories have none; with a class name, transformers would make an empty one."""
    source = make_source(family)
    for file in source.glob("tokenizer*"):
        file.unlink()
    (source / "README.md").write_text("---\nlicense: mit\n---\n")  # without a card there would be a note
    result = quick(source, tmp_path / "out")
    [note] = result.to_json()["notes"]
    says(note, "no tokenizer files")
    limit = f"model_max_length={result.input_limit}"  # that of a tokenizer for BERT would be 512
    assert (limit in note) == (family == "mosaic_bert")
    assert "tokenizer_class" not in read(tmp_path / "out/config.json")
    with pytest.raises((ValueError, OSError)):
        AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)


# Files in folders


def module(path: str, kind: str = "sentence_transformers.models.Pooling") -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": kind}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def local(folder: Path) -> Source:
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return Source(folder.name, folder, files)


def test_what_sentence_transformers_needs_is_copied(make_source: MakeSource, tmp_path: Path) -> None:
    """What it lacks afterwards is said: code of its own, pickled weights, and what is not there."""
    source = make_source("bloom")
    named = [module(path) for path in ("1_Pooling", "2_Dense", "3_Gone", "4_Pickled")]
    files = {
        "modules.json": json.dumps([module("", "sentence_transformers.models.Transformer"), *named]),
        "config_sentence_transformers.json": "{}",
        "sentence_bert_config.json": "{}",
        "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
        "2_Dense/config.json": "{}",
        "2_Dense/model.safetensors": "weights",
        "4_Pickled/config.json": "{}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
        "chat_template.jinja": "{{ messages }}",
    }
    left = {
        "2_Dense/pytorch_model.bin": "the same weights",
        "4_Pickled/pytorch_model.bin": "weights",
        "additional_chat_templates/notes.md": "x",
        "5_Unnamed/config.json": "{}",
        "onnx/model.onnx": "x",
    }
    write(source, files | left)
    planned = quick(source, tmp_path / "out", dry_run=True)
    result = quick(source, tmp_path / "out")
    assert planned.files.keys() == result.files.keys()
    assert all(size in (None, result.files[name]) for name, size in planned.files.items())
    for name, content in files.items():
        assert (tmp_path / "out" / name).read_text(encoding="utf-8") == content
    assert not any((tmp_path / "out" / name).exists() for name in left)
    assert "2_Dense" not in " ".join(result.notes)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert tokenizer.chat_template == {"default": "{{ messages }}", "tools": "{{ tools }}"}

    write(source, {"modules.json": json.dumps([module("", "custom_st.Transformer"), *named])})
    result = quick(source, tmp_path / "other")
    for said in (" ".join(result.notes), (tmp_path / "other/README.md").read_text(encoding="utf-8")):
        for part in ("custom_st.Transformer", "4_Pickled/pytorch_model.bin", "3_Gone"):
            assert part in said


OUTSIDE = ("..", "../beside", ".", "1_Pooling/..", "/etc", ".git", "a/b", "a\\b", "~", "", "link", "1\n2")


@pytest.mark.parametrize(
    ("content", "found", "note"),
    [
        *((json.dumps([module(path)]), {}, "") for path in (*OUTSIDE, 5, ["a"])),
        *((content, {}, "modules.json") for content in ("{}", "[1]", "no JSON")),
        # A link out of the checkpoint is ignored; one into the store of the Hub's cache counts as a file.
        (json.dumps([module("1_Pooling"), module("2_Other")]), {"1_Pooling/config.json": 2}, "2_Other"),
    ],
)
def test_no_path_leads_out(content: str, found: dict[str, int], note: str, tmp_path: Path) -> None:
    root, beside = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/snapshots/beside"
    write(beside, {"config.json": "secret"})
    write(tmp_path, {"models--a--b/blobs/1": "{}"})
    write(root, {"modules.json": content, ".git/config.json": "x", "a/b/config.json": "x"})
    (root / "link").symlink_to(beside)
    blob, secret = tmp_path / "models--a--b/blobs/1", beside / "config.json"
    for folder, target in (("1_Pooling", blob), ("2_Other", secret)):
        (root / folder).mkdir()
        (root / folder / "config.json").symlink_to(target)
    made = nested_files(local(root))
    assert made.files == found
    assert note in " ".join(made.notes)
    outside = ("../beside/config.json", "/etc/config.json", "a/b/config.json", "a/../config.json")
    source = local(root)
    listed = Source(source.name, source.folder, source.files, nested=dict.fromkeys(outside, 1))
    assert nested_files(listed).files == {}


# Files that one version of transformers saved

SAVED = {"backend": "tokenizers", "is_local": True, "local_files_only": False}
GENERIC = {**SAVED, "tokenizer_class": "TokenizersBackend", "model_input_names": None}
INPUTS = ["input_ids", "attention_mask"]
# What tokenizer_config.json has (None: not), and what that of the result has. All other keys stay.
BY_NEWER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the generic class": (
        GENERIC,
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": INPUTS},
    ),
    "its own inputs": (
        {**GENERIC, "model_input_names": ["input_ids"]},
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids"]},
    ),
    "a list of special tokens": (
        {**GENERIC, "extra_special_tokens": ["w30", "w31"]},
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": INPUTS,
            "extra_special_tokens": None,
            "additional_special_tokens": ["w30", "w31"],
        },
    ),
    "both lists": (
        {"extra_special_tokens": ["w30", "w31"], "additional_special_tokens": ["w31", "w32"]},
        {"extra_special_tokens": None, "additional_special_tokens": ["w31", "w32", "w30"]},
    ),
    "none, as 4.57 saves it": (
        {"extra_special_tokens": {}, "additional_special_tokens": ["w30"]},
        {"extra_special_tokens": None},
    ),
    "none at all": ({"extra_special_tokens": {}}, {}),
    "named special tokens": ({"extra_special_tokens": {"image_token": "w30"}}, {}),
    "another class": ({**SAVED, "tokenizer_class": "BloomTokenizerFast"}, {}),
}


@pytest.mark.parametrize("kind", BY_NEWER)
def test_what_one_transformers_saved_loads_on_every_version(
    make_source: MakeSource, tmp_path: Path, kind: str
) -> None:
    settings, changed = BY_NEWER[kind]
    source = make_source("bloom", {"tokenizer_class": settings.get("tokenizer_class")})
    edit_json(source / "tokenizer_config.json", settings)
    (source / "special_tokens_map.json").unlink(missing_ok=True)
    quick(source, tmp_path / "out")
    before, after = (read(place / "tokenizer_config.json") for place in (source, tmp_path / "out"))
    expected = {**before, **changed}
    assert after == {key: value for key, value in expected.items() if value is not None}
    named = read(tmp_path / "out/config.json")["tokenizer_class"]
    assert named == (changed.get("tokenizer_class") or settings.get("tokenizer_class") or named)
    assert named != "TokenizersBackend"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    found = tokenizer("w20 w30 w32")
    assert found["input_ids"] == [tiny.START, 20, 30, 32]
    if kind != "named special tokens":
        assert {*found} <= {*(after.get("model_input_names") or INPUTS)}
    for token in after.get("additional_special_tokens", ()):
        assert tokenizer.convert_tokens_to_ids(token) in tokenizer.all_special_ids


@pytest.mark.parametrize("name", KINDS)
def test_lists_of_special_tokens_for_our_own_classes(name: str, load: Callable[..., Any]) -> None:
    """Converted again, after transformers 5 saved it."""
    word = {"baichuan": "<reserved_106>", "replit": "\\n"}[name]
    tokenizer = load(name, {"extra_special_tokens": [word]})
    assert tokenizer.convert_tokens_to_ids(word) in tokenizer.all_special_ids


@pytest.mark.parametrize("auto_map", ["code.Thing", ["code.Thing"]], ids=str)
def test_an_auto_map_that_is_no_object_leaves_the_tokenizer_there(
    make_source: MakeSource, tmp_path: Path, auto_map: Any
) -> None:
    source = make_source("bloom", {"auto_map": auto_map})
    result = quick(source, tmp_path / "out")
    assert "tokenizer_config.json" in result.files
    assert not any("tokenizer class" in note for note in result.notes)


@pytest.mark.parametrize("name", [*KINDS, "generic"])
def test_the_limit_of_eight_and_then_two_is_that_of_two(
    make_source: MakeSource, make_tokenizer: MakeTokenizer, tmp_path: Path, name: str
) -> None:
    """Also where tokenizer_config.json is written anew."""
    if name == "generic":
        source = make_source("bloom")
        edit_json(source / "tokenizer_config.json", {**GENERIC, "model_max_length": 64})
    else:
        source = make_tokenizer(name, {"model_max_length": 64})
    options = {"verify": False, "train_length": 64}
    convert(source, tmp_path / "eight", scale=8, **options)
    convert(tmp_path / "eight", tmp_path / "two", scale=2, **options)
    limits = [
        read(tmp_path / place / "tokenizer_config.json")["model_max_length"] for place in ("eight", "two")
    ]
    assert limits == [512, 128]


@pytest.mark.parametrize("content", ['{"model": {', '{"model": {"type": "Unknown"}}'])
def test_a_tokenizer_that_does_not_load(make_source: MakeSource, tmp_path: Path, content: str) -> None:
    """It is copied; the card says that the source's does not load. A result's that alone fails is refused."""
    source = make_source("bloom")
    (source / "tokenizer.json").write_text(content, encoding="utf-8")
    convert(source, tmp_path / "out", scale=2)
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    says(card, "token ids not compared", "source's tokenizer does not load")
