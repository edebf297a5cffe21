"""``--set KEY=VALUE``: what a source's config.json does not say, or says wrongly."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from converter import UnsupportedModel, convert, inspect
from converter.errors import Undecided
from converter.families.checks import check_source
from converter.model.overrides import with_overrides
from tests import tiny
from tests.conftest import MakeSource, Refused, RunCli, edit_json, fingerprint
from tests.messages import Words, raises, says
from tests.patched import config_of, load
from tests.tiny import baichuan as baichuan_tiny
from tests.tiny import bloom, replit, rotary
from tests.tiny.layout import change_tensors, merged

SCALE = ("--scale", "2")
# A fine-tuned Baichuan with another vocabulary: nothing says which head it has.
BAICHUAN = {"vocab_size": tiny.VOCAB_SIZE, "z_loss_weight": None, "norm_head": None}

# transformers' class then leaves out biases.
EXACT = {"slow_but_exact": True, "pretraining_tp": 2}


@pytest.fixture
def undecided(make_source: MakeSource) -> Path:
    """A Baichuan whose config does not say which head it has."""
    return make_source("baichuan", BAICHUAN)


def test_an_answer_is_used_and_recorded(undecided: Path, run: RunCli, tmp_path: Path) -> None:
    before = fingerprint(undecided)
    set_words = (undecided, *SCALE, "--set", "norm_head=true", "--set", "rms_norm_eps=1e-5", "--out")
    shown = run(*set_words, tmp_path / "out", "--dry-run")
    assert "+ norm_head: true\n" in shown.out
    assert '"set": {"norm_head": true, "rms_norm_eps": 1e-05}' in shown.out
    says(shown.out, "note: ", "config.json", "--set norm_head=true --set")
    assert not (tmp_path / "out").exists()

    given = {"norm_head": True, "rms_norm_eps": 1e-5}
    result = run(*set_words, tmp_path / "out", "--json").json
    config = config_of(tmp_path / "out")
    assert result["set"] == config["ntk_convert"]["set"] == given
    assert {key: config[key] for key in given} == given
    assert result["config_changes"]["rms_norm_eps"] == {"before": 1e-6, "after": 1e-5}
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "--set norm_head=true --set rms_norm_eps=1e-05" in card
    [command] = [line for line in card.splitlines() if line.startswith("ntk-convert ")]
    assert fingerprint(undecided) == before

    # The command in the card gives the same repository.
    again = [word.replace("./source", str(undecided)) for word in shlex.split(command)[1:]]
    again[again.index("--out") + 1] = str(tmp_path / "again")
    assert run(*again).code == 0
    assert config_of(tmp_path / "again") == config


def test_inspect_and_plot_take_it(undecided: Path, run: RunCli, tmp_path: Path) -> None:
    assert "which head" in run("inspect", undecided).err
    found = run("inspect", undecided, "--set", "norm_head=false")
    assert "\nset             norm_head=false\n" in found.out
    assert inspect(undecided, overrides={"norm_head": False}).to_json()["set"] == {"norm_head": False}
    set_words = (undecided, "--set", "norm_head=false", "--out", tmp_path / "pictures")
    found = run("plot", *set_words, "--json").json["files"]
    assert sorted(found) == sorted(map(str, (tmp_path / "pictures").iterdir()))


def test_eval_takes_it(undecided: Path, run: RunCli, tmp_path: Path) -> None:
    """Beside a converted repository too, if that was made with the same values."""
    convert(undecided, tmp_path / "made", scale=2.0, overrides={"norm_head": True}, verify=False)
    more = ("--lengths", "64", "--items", "1", "--tasks", "passkey", "--json")
    for name in ("norm_head=true", "norm_head=false"):
        result = run("eval", undecided, tmp_path / "made", *more, "--set", name)
        if name == "norm_head=true":
            assert result.json["models"]["source"]["set"] == {"norm_head": True}
        else:
            assert "is converted" in result.err


def test_none_removes_a_key(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source("bloom", {"num_attention_heads": 8})  # beside n_head 4
    with raises(Exception, "n_head 4", "num_attention_heads 8"):
        convert(source, tmp_path / "out", scale=2.0, dry_run=True)
    overrides = {"num_attention_heads": None}
    result = convert(source, tmp_path / "out", scale=2.0, dry_run=True, overrides=overrides)
    assert result.config_changes["num_attention_heads"] == (8, None)


def test_biases_that_the_source_s_class_leaves_out(make_source: MakeSource, tmp_path: Path) -> None:
    """The result, unscaled, computes what the class does that has them."""
    source, out = make_source("bloom", EXACT), tmp_path / "out"
    convert(source, out, method="none", overrides={"slow_but_exact": False})
    ids = torch.arange(20)[None]
    results = [load(folder)(ids).logits for folder in (source, out)]
    edit_json(source / "config.json", {"slow_but_exact": False})
    torch.testing.assert_close(results[1], load(source)(ids).logits)
    assert not torch.allclose(*results, atol=0.01)


def test_a_rotary_model(tmp_path: Path) -> None:
    source = rotary.rotary(tmp_path / "source", "llama")
    convert(source, tmp_path / "out", scale=2.0, overrides={"max_position_embeddings": 128})
    config = config_of(tmp_path / "out")
    assert config["ntk_convert"]["train_length"] == 128
    assert config["ntk_convert"]["set"] == {"max_position_embeddings": 128}
    assert inspect(tmp_path / "out").train_length == 128


# Family, changes to its config, what is set, the exit code, and words of the line.
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...], int, Words]] = [
    ("bloom", {}, ("norm_head",), 2, ("--set 'norm_head'", "KEY=VALUE")),
    ("bloom", {}, ("a..b=1",), 2, ("a..b", "KEY=VALUE")),
    ("bloom", {}, ("n_head=4", "n_head=8"), 2, ("--set n_head", "twice")),
    ("mpt", {}, ("d_model.x=1",), 2, ("--set d_model.x", "d_model is 32")),
    ("bloom", {}, ("model_type=mpt",), 2, ("--set model_type", "what the checkpoint is")),
    (
        "bloom",
        {"quantization_config": {"bits": 4}},
        ("quantization_config=null",),
        2,
        ("--set quantization_config", "what the checkpoint is"),
    ),
    ("bloom", {}, ("n_head=NaN",), 2, ("--set n_head", "nan")),
    ("bloom", {}, ("n_head=1e999",), 2, ("--set n_head", "inf")),
    ("bloom", {"n_head": None}, ("n_head=4.5",), 1, "n_head is 4.5"),
    ("bloom", {"n_head": None}, ("n_head=four",), 1, "n_head is 'four'"),
    # The weights have the sizes that the config states.
    *(
        (family, {}, values, 2, (stated, "--set cannot change a size"))
        for family, values, stated in (
            ("bloom", ("n_head=2",), "n_head 4"),
            ("bloom", ("num_attention_heads=2", "n_head=null"), "n_head 4"),
            ("bloom", ("n_layer=1",), "n_layer 2"),
            ("bloom", ("vocab_size=50",), "vocab_size 97"),
            ("mpt", ("d_model=16",), "d_model 32"),
            ("replit", ("attn_config.kv_n_heads=2",), "attn_config.kv_n_heads 1"),
            ("falcon", ("num_attention_heads=8",), "num_attention_heads 4"),
            ("llama", ("num_key_value_heads=1",), "num_key_value_heads 2"),
        )
    ),
    ("mpt", {}, ("attn_config.prefix_lm=true",), 1, "attn_config.prefix_lm is True"),
    # A refusal stands.
    ("falcon", {"alibi": None}, ("alibi=true",), 1, "--set cannot change that"),
    ("mpt", {"attn_config": {"alibi": False}}, ("attn_config.alibi=true",), 1, "attn_config.alibi is False"),
    (
        "mpt",
        {"attn_config": {"alibi": True, "rope": True}},
        ('attn_config={"alibi": true}',),
        2,
        "--set attn_config.KEY=VALUE",
    ),
    (
        "mpt",
        {"attn_config": {"alibi": True, "qk_ln": True}, "layer_norm_epsilon": 1e-06},
        ("attn_config.qk_ln=false", "layer_norm_epsilon=1e-5"),
        1,
        ("attn_config.qk_ln", "1e-06"),
    ),
    # A refusal stands behind an open question, beside another one, and behind an impossible value.
    (
        "replit",
        {"attn_config": {"rope": True, "attn_type": "multihead_attention"}},
        ("attn_config.alibi=true", "attn_config.rope=false"),
        1,
        "attn_config.rope is True",
    ),
    (
        "mpt",
        {"attn_config": {"alibi": True, "rope": True}, "norm_type": "triton"},
        ("attn_config.rope=false", "norm_type=layernorm"),
        1,
        "cannot change that",
    ),
    (
        "falcon",
        {"alibi": False, "num_attention_heads": "four"},
        ("num_attention_heads=4", "alibi=true"),
        1,
        "alibi is False",
    ),
]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: Any, make_source: MakeSource, refused: Refused, tmp_path: Path) -> None:
    family, changes, values, code, words = case
    source = make_source(family, changes)
    given = [word for value in values for word in ("--set", value)]
    says(refused(source, *SCALE, *given, "--out", tmp_path / "out", code=code), words)


def test_a_converted_repository_has_its_values(
    undecided: Path, refused: Refused, run: RunCli, tmp_path: Path
) -> None:
    convert(undecided, tmp_path / "out", scale=2.0, overrides={"norm_head": True}, verify=False)
    assert run("inspect", tmp_path / "out", "--set", "norm_head=true").code == 0
    line = refused("inspect", tmp_path / "out", "--set", "norm_head=false", code=2)
    says(line, "--set norm_head", "is converted")
    edit_json(tmp_path / "out/config.json", {"ntk_convert": {"source": None, "set": [1]}})
    says(refused("inspect", tmp_path / "out"), "ntk_convert has set [1]")


def open_questions() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Configs that leave something open -> an answer."""
    foundry = replit.config(4)
    foundry["attn_config"] = {key: value for key, value in foundry["attn_config"].items() if key != "alibi"}
    return {
        "baichuan": ({**baichuan_tiny.config(4), **BAICHUAN}, {"norm_head": False}),
        "bloom": ({"model_type": "bloom", **bloom.sizes(4), **EXACT}, {"slow_but_exact": False}),
        "mpt alibi": (foundry, {"attn_config.alibi": True}),
        "mpt rmsnorm": (
            merged(replit.config(4), {"norm_type": "rmsnorm", "fc_type": None}),
            {"fc_type": "torch"},
        ),
        "mpt epsilon": (merged(replit.config(4), {"layer_norm_epsilon": 0.3}), {"norm_eps": 0.3}),
        "krutrim": (
            merged(replit.config(48), {"d_model": 4608, "attn_config": {"kv_n_heads": 8}}),
            {"ffn_config.ffn_act_fn.name": "relu"},
        ),
    }


@pytest.mark.parametrize("case", open_questions())
def test_a_question_that_a_value_answers(case: str) -> None:
    config, answer = open_questions()[case]
    with pytest.raises(Undecided, match="`overrides` "):
        check_source(config)
    before = json.dumps(config)
    changed = with_overrides(config, answer)
    check_source(changed)
    assert json.dumps(config) == before


def test_values_that_need_each_other() -> None:
    """Each alone would contradict the config."""
    config = merged(replit.config(4), {"attn_config": {"attn_type": None, "kv_n_heads": None}})
    values = {"attn_config.attn_type": "grouped_query_attention", "attn_config.kv_n_heads": 2}
    with raises(UnsupportedModel, "kv_n_heads is 2", "attn_type"):
        with_overrides(config, {"attn_config.kv_n_heads": 2})
    assert with_overrides(config, values)["attn_config"]["kv_n_heads"] == 2


def test_the_tensors_decide(make_source: MakeSource, tmp_path: Path) -> None:
    """The config of an MPT with learned positions that lost its attn_config."""
    source = make_source("replit")
    options = {"attn_type": "grouped_query_attention", "kv_n_heads": 1}
    edit_json(source / "config.json", {"attn_config": options})
    positions = {"transformer.wpe.weight": torch.zeros(16, 32)}
    change_tensors(source, lambda tensors: tensors.update(positions))
    for overrides in ({"attn_config.alibi": True}, {"architectures": ["MptForCausalLM"]}):
        with pytest.raises(UnsupportedModel, match="has learned positions"):
            convert(source, tmp_path / "out", scale=2.0, overrides=overrides)
