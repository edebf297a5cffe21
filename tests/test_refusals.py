"""Everything that is refused: one clear line, the right exit code, nothing written or changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converter import convert
from tests import tiny
from tests.conftest import Run, edit_json

SCALE = ("--scale", "2")
LARGE = 10**30


def mpt(**attention: Any) -> dict[str, Any]:
    return {"attn_config": {"alibi": True, **attention}}


# name: (family, changes to config.json with None removing a key, arguments, exit code, words of the line)
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int, str]] = {
    # Options
    "no strength": ("bloom", {}, ("--method", "linear"), 2, "--scale, --target-length or --dynamic"),
    "no trained length": ("bloom", {}, (), 2, "--dynamic, the default, needs the trained length"),
    "scale and dynamic": (
        "bloom",
        {},
        (*SCALE, "--dynamic", "length"),
        2,
        "--scale and --dynamic cannot be combined",
    ),
    "scale and target": ("bloom", {}, (*SCALE, "--target-length", "64"), 2, "--scale and --target-length"),
    "by parts without a trained length": (
        "bloom",
        {},
        (*SCALE, "--method", "by-parts"),
        2,
        "--method by-parts needs the trained length",
    ),
    "by parts of nothing": (
        "bloom",
        {},
        (*SCALE, "--method", "by-parts", "--train-length", "2048", "--ramp", "1", "2"),
        2,
        "--method by-parts would scale no head: the longest span is 1280 tokens, and the ramp starts at 2048",
    ),
    **{
        f"a layout of Falcon: {key}": ("falcon", {key: value}, SCALE, 1, f"{key} is True; only a Falcon")
        for key, value in (("multi_query", True), ("parallel_attn", None), ("new_decoder_architecture", True))
    },
    "by parts of nothing in Falcon": (
        "falcon",
        {},
        (*SCALE, "--method", "by-parts", "--train-length", "2048", "--ramp", "2", "4"),
        2,
        "the longest span is 3620 tokens, and the ramp starts at 4096",
    ),
    "ramp of ntk": ("bloom", {}, (*SCALE, "--ramp", "0.1", "0.5"), 2, "--ramp needs --method by-parts"),
    "ramp upside down": (
        "bloom",
        {},
        (*SCALE, "--method", "by-parts", "--ramp", "0.5", "0.1"),
        2,
        "--ramp 0.5 0.1 is not a ramp",
    ),
    "scale below 1": ("bloom", {}, ("--scale", "0.5"), 2, "0.5"),
    "scale nan": ("bloom", {}, ("--scale", "nan"), 2, "nan"),
    "scale inf": ("bloom", {}, ("--scale", "inf"), 2, "inf"),
    "scale no number": ("bloom", {}, ("--scale", "two"), 2, "'two'"),
    "none with scale": ("bloom", {}, ("--method", "none", *SCALE), 2, "none"),
    "none with dynamic": ("bloom", {}, ("--method", "none", "--dynamic", "length"), 2, "none"),
    "unknown method": ("bloom", {}, ("--method", "yarn", *SCALE), 2, "'yarn'"),
    "rate alone": ("bloom", {}, (*SCALE, "--rate", "2"), 2, "--rate"),
    "rate 0": ("bloom", {}, ("--dynamic", "length", "--train-length", "64", "--rate", "0"), 2, "--rate 0"),
    "target below": ("bloom", {}, ("--target-length", "32", "--train-length", "64"), 2, "32"),
    "unknown option": ("bloom", {}, (*SCALE, "--frobnicate"), 2, "--frobnicate"),
    "revision of a folder": ("bloom", {}, (*SCALE, "--revision", "main"), 2, "local folder"),
    "train length bloom": ("bloom", {}, ("--target-length", "64"), 2, "--train-length"),
    "train length hint": ("bloom", {"seq_length": 4096}, ("--dynamic", "length"), 2, "4096"),
    "train length mpt": ("mpt", {"max_seq_len": 777}, ("--dynamic", "position"), 2, "max_seq_len 777"),
    "train length falcon": ("falcon", {}, ("--target-length", "64"), 2, "--train-length"),
    # Families that have no ALiBi, or not the kind that is supported
    "mpt without alibi": ("mpt", mpt(alibi=False), SCALE, 1, "attn_config.alibi is False"),
    "mpt alibi no bool": ("mpt", mpt(alibi="yes"), SCALE, 1, "'yes'"),
    "mpt prefix lm": ("mpt", mpt(prefix_lm=True), SCALE, 1, "attn_config.prefix_lm is True"),
    "mpt multi-query": (
        "mpt",
        mpt(attn_type="multiquery_attention", kv_n_heads=4),
        SCALE,
        1,
        "attn_type 'multiquery_attention' means 1",
    ),
    "mpt grouped": ("mpt", mpt(attn_type="grouped_query_attention"), SCALE, 1, "no kv_n_heads"),
    "mpt kv heads": ("mpt", mpt(kv_n_heads=2), SCALE, 1, "attn_config.kv_n_heads is 2"),
    "mpt rope": ("mpt", mpt(rope=True), SCALE, 1, "attn_config.rope is True"),
    "mpt window": ("mpt", mpt(sliding_window_size=128), SCALE, 1, "sliding_window_size is 128"),
    "mpt rmsnorm": ("mpt", {"norm_type": "rmsnorm"}, SCALE, 1, "norm_type is 'rmsnorm'"),
    "mpt feed-forward": ("mpt", {"ffn_config": {"ffn_type": "mb_moe"}}, SCALE, 1, "ffn_type is 'mb_moe'"),
    "mpt bias max": ("mpt", mpt(alibi_bias_max=-1), SCALE, 1, "alibi_bias_max is -1"),
    "mpt softmax scale": ("mpt", mpt(softmax_scale="big"), SCALE, 1, "softmax_scale is 'big'"),
    "mpt attn_config": ("mpt", {"attn_config": [1]}, SCALE, 1, "attn_config is [1]"),
    "falcon rotary": ("falcon", {"alibi": False}, SCALE, 1, "rotary"),
    "falcon rotary by default": ("falcon", {"alibi": None}, SCALE, 1, "rotary"),
    "falcon-7b, first revision": (
        "falcon",
        {"alibi": None, "model_type": "RefinedWebModel"},
        SCALE,
        1,
        "rotary",
    ),
    "gptj": ("bloom", {"model_type": "gptj"}, SCALE, 1, "'gptj' has rotary positions that cannot be scaled"),
    "gpt2": ("bloom", {"model_type": "gpt2"}, SCALE, 1, "'gpt2' has learned positions"),
    "opt": ("bloom", {"model_type": "opt"}, SCALE, 1, "learned positions"),
    # Relatives of the families that cannot be converted
    "jais 2": ("bloom", {"model_type": "jais2"}, SCALE, 1, "unlike the first Jais, Jais 2 has no ALiBi"),
    "gpt_neox with alibi": (
        "bloom",
        {"model_type": "gpt_neox", "pos_emb": "alibi"},
        SCALE,
        1,
        "this gpt_neox was trained with ALiBi (pos_emb is 'alibi')",
    ),
    "gpt_neox with an alibi class": (
        "bloom",
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXALiBiForCausalLM"]},
        SCALE,
        1,
        "was trained with ALiBi (its class is GPTNeoXALiBiForCausalLM)",
    ),
    "the first olmo": (
        "bloom",
        {"model_type": "hf_olmo", "alibi": False, "alibi_bias_max": 8.0},
        SCALE,
        1,
        "convert the same model in transformers' layout (model_type olmo",
    ),
    "the first olmo with alibi": (
        "bloom",
        {"model_type": "hf_olmo", "alibi": True},
        SCALE,
        1,
        "this hf_olmo was trained with ALiBi (alibi is True)",
    ),
    "emotion2vec": ("bloom", {"model_type": "emotion2vec"}, SCALE, 1, "learns a scale for its ALiBi bias"),
    "data2vec 2": ("bloom", {"model_type": "data2vec2"}, SCALE, 1, "learns a scale for its ALiBi bias"),
    "data2vec 2 by its keys": (
        "bloom",
        {"model_type": "speech", "modalities": {"audio": {"learned_alibi_scale_per_head": True}}},
        SCALE,
        1,
        "'speech' cannot be converted: it learns a scale",
    ),
    "jina clip": ("bloom", {"model_type": "jina_clip"}, SCALE, 1, "convert a jina-embeddings-v2 model"),
    "llava mpt": ("mpt", {"model_type": "llava_mpt"}, SCALE, 1, "to convert its language model alone"),
    "unknown type": ("bloom", {"model_type": "hyena"}, SCALE, 1, "bloom, mpt, falcon"),
    "no type": ("bloom", {"model_type": None}, SCALE, 1, "model_type is None"),
    "type no text": ("bloom", {"model_type": ["bloom"]}, SCALE, 1, "model_type is ['bloom']"),
    "converted": ("bloom", {"model_type": "ntk_bloom"}, SCALE, 1, "already converted"),
    "converted, by its keys": (
        "bloom",
        {"alibi_scaling": {}, "ntk_convert": {"source": "x/y"}},
        SCALE,
        1,
        "already converted (model_type 'bloom'); convert its original 'x/y'",
    ),
    "quantised": ("bloom", {"quantization_config": {"bits": 4}}, SCALE, 1, "quantised"),
    "other head": ("bloom", {"architectures": ["BloomForDreaming"]}, SCALE, 1, "'BloomForDreaming'"),
    "other family's head": ("bloom", {"architectures": ["MptForCausalLM"]}, SCALE, 1, "'MptForCausalLM'"),
    "heads no list": ("bloom", {"architectures": "BloomForCausalLM"}, SCALE, 1, "not a list"),
    # Impossible sizes
    "no heads": ("bloom", {"n_head": None}, SCALE, 1, "n_head"),
    "zero heads": ("bloom", {"n_head": 0}, SCALE, 1, "n_head is 0"),
    "negative heads": ("bloom", {"n_head": -4}, SCALE, 1, "n_head is -4"),
    "broken heads": ("bloom", {"n_head": 4.5}, SCALE, 1, "n_head is 4.5"),
    "heads as text": ("bloom", {"n_head": "4"}, SCALE, 1, "n_head is '4'"),
    "heads as bool": ("bloom", {"n_head": True}, SCALE, 1, "n_head is True"),
    "too many heads": ("bloom", {"n_head": LARGE}, SCALE, 1, f"n_head is {LARGE}"),
    "uneven heads": (
        "bloom",
        {"n_head": 5},
        SCALE,
        1,
        "hidden size 32 is not a multiple of the number of heads, 5",
    ),
    "two head counts": ("bloom", {"num_attention_heads": 8}, SCALE, 1, "n_head 4 and num_attention_heads 8"),
    "no layers": ("mpt", {"n_layers": None}, SCALE, 1, "n_layers"),
    "no width": ("falcon", {"hidden_size": None}, SCALE, 1, "hidden_size"),
}


@pytest.fixture
def refused(refused: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """``refused(source, *arguments, code=1)``: the error of a conversion that changes nothing."""

    def call(source: Path, *arguments: object, code: int = 1, out: Path | None = None) -> str:
        return refused(source, "--out", out or tmp_path / "out", *arguments, code=code)

    return call


@pytest.mark.parametrize("case", CASES)
def test_options_and_configs(
    case: str, make_source: Callable[..., Path], refused: Callable[..., str]
) -> None:
    family, changes, arguments, code, words = CASES[case]
    line = refused(make_source(family, changes), *arguments, code=code)
    assert words in line


def test_a_model_of_funasr(make_source: Callable[..., Path], refused: Callable[..., str]) -> None:
    """emotion2vec as published."""
    source = make_source()
    (source / "config.json").rename(source / "config.yaml")
    assert "such as emotion2vec (config.yaml) cannot be converted" in refused(source, *SCALE)


# inspect shows converted repositories instead.
@pytest.mark.parametrize(
    "case", [case for case, entry in CASES.items() if entry[3] == 1 and "converted" not in case]
)
def test_inspect_refuses_the_same_configs(
    case: str, make_source: Callable[..., Path], run: Callable[..., Run]
) -> None:
    family, changes, _, _, words = CASES[case]
    result = run("inspect", make_source(family, changes))
    assert result.code == 1
    assert words in result.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[]", "JSON list"),
        (b'"bloom"', "JSON str"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"n_head": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"model_type": "bloom", "model_type": "mpt"}', "occurs twice"),
    ],
)
def test_unreadable_config(
    content: bytes | None, words: str, make_source: Callable[..., Path], refused: Callable[..., str]
) -> None:
    source = make_source()
    (source / "config.json").unlink()
    if content is not None:
        (source / "config.json").write_bytes(content)
    assert words in refused(source, *SCALE)


def test_an_adapter_is_named_as_such(make_source: Callable[..., Path], refused: Callable[..., str]) -> None:
    source = make_source()
    (source / "config.json").rename(source / "adapter_config.json")
    assert "LoRA adapter" in refused(source, *SCALE)


def test_no_weights(make_source: Callable[..., Path], refused: Callable[..., str]) -> None:
    source = make_source()
    (source / "model.safetensors").unlink()
    assert "no weights" in refused(source, *SCALE)


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_missing_shard(fmt: str, make_source: Callable[..., Path], refused: Callable[..., str]) -> None:
    source = make_source(fmt=fmt, sharded=True)
    gone = min(source.glob(f"*-00002-of-*.{fmt}"))
    gone.unlink()
    line = refused(source, *SCALE)
    assert gone.name in line
    assert "missing" in line


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize("sharded", [False, True])
def test_truncated_weights(
    fmt: str, sharded: bool, make_source: Callable[..., Path], refused: Callable[..., str]
) -> None:
    source = make_source(fmt=fmt, sharded=sharded)
    last = max(source.glob(f"*.{fmt}"))
    os.truncate(last, last.stat().st_size - 7)
    assert last.name in refused(source, *SCALE)


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_tensor_in_the_index_but_in_no_file(
    fmt: str, make_source: Callable[..., Path], refused: Callable[..., str]
) -> None:
    source = make_source(fmt=fmt, sharded=True)
    index = next(source.glob("*.index.json"))
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, {"weight_map": weight_map | {"transformer.ghost": next(iter(weight_map.values()))}})
    assert "'transformer.ghost'" in refused(source, *SCALE)


def test_a_layer_that_the_config_lacks_fails_verification(
    make_source: Callable[..., Path], refused: Callable[..., str]
) -> None:
    source = make_source("bloom", {"n_layer": 1})
    assert "config.json says 1 layers, but the weights have 2" in refused(source, *SCALE)


def test_out_is_not_empty(
    make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    source = make_source()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letter.txt").write_text("keep me")
    assert "--overwrite" in refused(source, *SCALE)


def test_out_is_a_file(make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path) -> None:
    source = make_source()
    (tmp_path / "out").write_text("keep me")
    assert "is a file" in refused(source, *SCALE, "--overwrite")


def test_out_leads_nowhere(
    make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    source = make_source()
    (tmp_path / "loop").symlink_to("loop")
    assert "points back to itself" in refused(source, *SCALE, out=tmp_path / "loop")
    assert "longer than 200 bytes" in refused(source, *SCALE, out=tmp_path / ("x" * 201))


def test_an_error_is_one_line_of_bounded_length(
    make_source: Callable[..., Path], refused: Callable[..., str]
) -> None:
    source = make_source("bloom", {"n_layer": "x" * 100_000})
    assert len(refused(source, *SCALE)) < 1100


def test_out_has_no_parent(
    make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    assert "does not exist" in refused(make_source(), *SCALE, out=tmp_path / "no/such/folder")


@pytest.mark.parametrize("place", ["source", "source/out", ".", "link"])
def test_out_and_source_overlap(
    place: str, make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    source = make_source()
    (tmp_path / "link").symlink_to(source)
    assert "overlap" in refused(source, *SCALE, "--overwrite", out=tmp_path / place)


def test_out_holds_the_source_s_files(
    make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    source, store = make_source(), tmp_path / "store"
    store.mkdir()
    (source / "model.safetensors").rename(store / "blob")
    (source / "model.safetensors").symlink_to(store / "blob")
    assert "overlap" in refused(source, *SCALE, "--overwrite", out=store)


def test_out_is_the_current_folder(
    make_source: Callable[..., Path],
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_source()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "current folder" in refused(source, *SCALE, out=Path())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./no/such/folder", "no folder ./no/such/folder"),
        ("/no/such/folder", "no folder /no/such/folder"),
        ("a/b/c", "no folder a/b/c"),
        ("", "neither a folder nor a Hub id"),
        ("bad\nname\x1b[2J", r"'bad\nname\x1b[2J'"),
        ("x" * 5000, "neither a folder nor a Hub id"),
    ],
)
def test_models_that_cannot_be(model: str, words: str, refused: Callable[..., str]) -> None:
    assert words in refused(model, *SCALE)


def test_model_is_a_file(make_source: Callable[..., Path], refused: Callable[..., str]) -> None:
    assert "is a file" in refused(make_source() / "config.json", *SCALE)


@pytest.mark.parametrize("command", [["convert", "--scale", "2", "--out", "out"], ["inspect"]])
@pytest.mark.parametrize("model", ["nobody/no-such-model", "no-such-model"])
def test_model_not_found_offline(model: str, command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    result = subprocess.run(
        [sys.executable, "-m", "converter", command[0], model, *command[1:]],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {model} is not a local folder, and the Hub cannot be reached")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("token", ["hf_ secret", "hf_sécret", "hf_secret\n"])
def test_a_token_that_cannot_be_one_is_not_shown(token: str, run: Callable[..., Run], tmp_path: Path) -> None:
    result = run("nobody/no-such-model", *SCALE, "--out", tmp_path / "out", "--token", token)
    assert result.code == 2
    assert "--token is not an access token" in result.err
    assert "cret" not in result.err


def test_overwrite_replaces_model_folders_only(
    make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    source = make_source()
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "letter.txt").write_text("dear")
    assert "holds no config.json" in refused(source, *SCALE, "--overwrite", out=tmp_path / "documents")
    assert (tmp_path / "documents" / "letter.txt").read_text() == "dear"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(make_source: Callable[..., Path], refused: Callable[..., str], tmp_path: Path) -> None:
    source = make_source()
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "permission" in refused(source, *SCALE, out=tmp_path / "locked/out")


def test_disk_full(
    make_source: Callable[..., Path], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    source = make_source()
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "GB free" in refused(source, *SCALE)


def test_disk_fills_while_writing(
    make_source: Callable[..., Path], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = make_source()
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    monkeypatch.setattr(os, "write", full)
    assert "No space left on device; free some space" in refused(source, *SCALE, "--no-verify")


# Found by changing each option of the original configs and comparing with the original code.
SILENT = {
    "a scaling that the code does not read": ("bloom", {"alibi_scaling": {"factor": 2}}, "does not read"),
    "a scaling of a rewritten JinaBERT": ("jina_bert", {"alibi_scaling": 4}, "which JinaBERT does not"),
    "another JinaBERT": (
        "jina_bert",
        {"auto_map": {"AutoModel": "my_rewrite.JinaBertModel"}},
        "not JinaBERT's own code",
    ),
    "the first JinaBERT": ("jina_bert", {"architectures": ["JBertForMaskedLM"]}, "first revision"),
    "an epsilon that llm-foundry ignores": ("replit", {"layer_norm_epsilon": 0.3}, "--set norm_eps=0.3"),
    "a residual of newer llm-foundry": ("mpt", {"residual_coeff": 0.5}, "residual_coeff is 0.5"),
    "biases of newer llm-foundry": ("mpt", {"attention_bias": True}, "attention_bias is True"),
    "a null that is false": ("jais", {"scale_attn_weights": ...}, "scale_attn_weights is None"),
}


@pytest.mark.parametrize("case", SILENT)
def test_what_would_be_silently_wrong_is_refused(
    refused: Callable[..., str], tmp_path: Path, case: str
) -> None:
    family, changes, message = SILENT[case]
    source = {**tiny.FACTORIES, **tiny.ENCODERS}[family](tmp_path / "source", 4)
    path = source / "config.json"
    changes = {key: None if value is ... else value for key, value in changes.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert message in refused(source, *SCALE, "--out", tmp_path / "out")


def test_options_that_the_originals_ignore_change_nothing(tmp_path: Path) -> None:
    for family, factory in (("mosaic_gpt", tiny.FACTORIES), ("mosaic_bert", tiny.ENCODERS)):
        source = factory[family](tmp_path / family, 4, tie_word_embeddings=None)
        convert(source, tmp_path / f"{family}-out", scale=2)
        config = json.loads((tmp_path / f"{family}-out" / "config.json").read_text())
        assert config["tie_word_embeddings"] is True


def test_a_scale_that_the_stock_class_ignores_is_named(tmp_path: Path) -> None:
    result = convert(
        tiny.FACTORIES["mpt"](tmp_path / "source", 4, logit_scale=0.5), tmp_path / "out", scale=2
    )
    assert any("logit_scale 0.5 is honoured" in note for note in result.notes)
