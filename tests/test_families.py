"""What families say of configs: which they accept, which they reject and why, and the lengths they know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from converter import convert
from converter.errors import SourceError, Undecided, UnsupportedModel
from converter.families import FAMILIES, Family
from converter.families.checks import check_source
from tests import tiny
from tests.messages import Words, raises
from tests.patched import config_of
from tests.tiny import jina_bert, mosaic_bert, mosaic_gpt, replit
from tests.tiny.layout import merged
from tests.true_geometry import PUBLISHED

Changes = dict[str, Any]


def published(family: str, name: str) -> dict[str, Any]:
    """The config.json of a published checkpoint."""
    [config] = [entry["config"] for entry in PUBLISHED[family] if entry["id"] == name]
    return dict(config)


BAICHUAN_13B = published("baichuan", "baichuan-inc/Baichuan-13B-Chat")
BAICHUAN2_13B = published("baichuan", "baichuan-inc/Baichuan2-13B-Chat")
BAICHUAN2_7B = {
    **BAICHUAN2_13B,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "z_loss_weight": 0,
}
BAICHUAN_7B = {**BAICHUAN2_7B, "architectures": ["BaiChuanForCausalLM"], "vocab_size": 64000}
del BAICHUAN_7B["model_max_length"], BAICHUAN_7B["z_loss_weight"]
JAIS = {**published("jais", "core42/jais-13b"), "width_scale": 0.111}
GPT_JX = published("jais", "KnutJaegersberg/GPT-JX-3b")
REFACT = published("refact", "smallcloudai/Refact-1_6B-fim")
JINA = {**jina_bert.config(12), "architectures": ["JinaBertForMaskedLM"]}
QK = jina_bert.code(jina_bert.QK_CODE)
MOSAIC_BERT = {**mosaic_bert.config(12), "architectures": ["BertForMaskedLM"]}
DNABERT_2 = {
    **MOSAIC_BERT,
    "auto_map": {
        "AutoConfig": "configuration_bert.BertConfig",
        "AutoModel": "bert_layers.BertModel",
        "AutoModelForMaskedLM": "bert_layers.BertForMaskedLM",
        "AutoModelForSequenceClassification": "bert_layers.BertForSequenceClassification",
    },
}
for key in ("model_type", "architectures", "pad_token_id"):
    del DNABERT_2[key]
MOSAIC_GPT = mosaic_gpt.config(4)
MPT = replit.config(24)
KRUTRIM = merged(MPT, {"d_model": 4608, "n_heads": 48, "attn_config": {"clip_qkv": 6}})
MULTIHEAD = {"attn_type": "multihead_attention", "kv_n_heads": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "BAICHUAN_13B": BAICHUAN_13B,
    "BAICHUAN2_13B": BAICHUAN2_13B,
    "BAICHUAN_7B": BAICHUAN_7B,
    "BAICHUAN2_7B": BAICHUAN2_7B,
    "JAIS": JAIS,
    "GPT_JX": GPT_JX,
    "REFACT": REFACT,
    "JINA": JINA,
    "MOSAIC_BERT": MOSAIC_BERT,
    "DNABERT_2": DNABERT_2,
    "MOSAIC_GPT": MOSAIC_GPT,
    "MPT": MPT,
    "KRUTRIM": KRUTRIM,
}
"""Configs as they are on the Hub, or nearly."""


def changed(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """One of them with changes; ... removes a key, also in an object."""

    def cleaned(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: cleaned(value) if isinstance(value, dict) else value
            for key, value in values.items()
            if value is not ...
        }

    return cleaned(merged(CONFIGS[name], changes))


def family(name: str) -> Family:
    return next(each for each in FAMILIES if each.name == name)


def attention(**options: Any) -> Changes:
    return {"attn_config": options}


ACCEPTED: list[tuple[str, Changes, str]] = [
    ("JAIS", {"model_type": "btlm", "architectures": ["BTLMLMHeadModel"]}, "jais"),
    ("JAIS", {"reorder_and_upcast_attn": True, "add_cross_attention": None}, "jais"),
    ("JAIS", {"alibi_scaling": {"type": "linear", "factor": 2.0}}, "jais"),
    ("GPT_JX", {}, "jais"),
    ("REFACT", {"model_type": "gpt_bigcode"}, "refact"),
    ("JINA", {}, "jina_bert"),
    ("JINA", QK, "jina_bert"),
    ("JINA", {"architectures": ["JinaBertModel"], "auto_map": None}, "jina_bert"),
    ("JINA", {"architectures": None}, "jina_bert"),
    (
        "JINA",
        {"architectures": ["JinaBertModel"], **jina_bert.code("aari1995/German_Semantic_V3b")},
        "jina_bert",
    ),
    ("MOSAIC_BERT", {}, "mosaic_bert"),
    ("MOSAIC_BERT", {"auto_map": None}, "mosaic_bert"),
    ("MOSAIC_BERT", {"auto_map": {"AutoModel": "mosaicml/x--bert_layers.BertForMaskedLM"}}, "mosaic_bert"),
    ("MOSAIC_BERT", {"auto_map": {"AutoModel": "bert_layers_mosa.BertModel"}}, "mosaic_bert"),
    ("MOSAIC_BERT", {"auto_map": {"AutoModel": "rotary/x--bert_layers.BertModel"}}, "mosaic_bert"),
    (
        "MOSAIC_BERT",
        {
            "auto_map": {"AutoModel": "automodel.MosaicBertForEmbeddingGeneration"},
            "architectures": ["MosaicBertForEmbeddingGeneration"],
        },
        "mosaic_bert",
    ),
    ("DNABERT_2", {}, "mosaic_bert"),
    ("MOSAIC_GPT", {}, "mosaic_gpt"),
    ("MOSAIC_GPT", {"model_type": "replit_lm", "architectures": ["ReplitLM"]}, "mosaic_gpt"),
    ("MPT", {}, "mpt"),
    ("MPT", {**attention(alibi=...), "architectures": ["MptForCausalLM"]}, "mpt"),
    ("KRUTRIM", {"ffn_config": {"ffn_act_fn": {"name": "relu"}}}, "mpt"),
    ("KRUTRIM", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "mpt"),
    # What changes no real token.
    ("MPT", {"learned_pos_emb": True}, "mpt"),
    ("MPT", {"embedding_fraction": 0.1}, "mpt"),
    ("MPT", {"use_pad_tok_in_ffn": False}, "mpt"),
    ("MPT", attention(attn_uses_sequence_id=True, attn_impl="flash"), "mpt"),
    ("MPT", attention(attn_temperature_tuning={"floor_scale": 8192, "attn_scale": 0.0}), "mpt"),
    (
        "MPT",
        {"fc_type": {"name": "torch", "bias": False}, "ffn_config": {"fc_type": {"name": "torch"}}},
        "mpt",
    ),
    ("MPT", {"block_overrides": None, "final_logit_softcapping": None}, "mpt"),
]


@pytest.mark.parametrize(("name", "changes", "taken"), ACCEPTED, ids=str)
def test_accepted(name: str, changes: Changes, taken: str) -> None:
    config = changed(name, changes)
    assert check_source(config) is family(taken)
    assert sum(each.recognises(config) for each in FAMILIES) == 1


ROTARY = ("rotary positions, not ALiBi", "rope_scaling")
CODE = "not MosaicBERT's own code"
SIX = {"type": "linear", "factor": 2}


def named(name: str, inside: str = "", /, **options: Any) -> list[tuple[str, Changes, Words]]:
    """Each option alone is refused, by its name and value."""
    return [
        (name, {inside: {key: value}}, f"{inside}.{key} is {value!r}")
        if inside
        else (name, {key: value}, f"{key} is {value!r}")
        for key, value in options.items()
    ]


UNSUPPORTED: list[tuple[str, Changes, Words]] = [
    # Baichuan's rotary models, and configs that do not say whether they are.
    ("BAICHUAN_7B", {}, ROTARY),
    ("BAICHUAN2_7B", {}, ROTARY),
    ("BAICHUAN_7B", {"architectures": ["BaichuanForCausalLM"]}, ROTARY),
    ("BAICHUAN2_7B", {"max_position_embeddings": ...}, ROTARY),
    ("BAICHUAN2_7B", {"hidden_size": 2048, "num_attention_heads": 16}, ROTARY),
    ("BAICHUAN_7B", {"max_position_embeddings": ..., "hidden_size": 2048, "model_max_length": 4096}, ROTARY),
    ("BAICHUAN2_13B", {"hidden_size": 2560, "rope_theta": 10000.0}, ROTARY),
    ("BAICHUAN_13B", {"max_position_embeddings": 4096}, ("ambiguous", "max_position_embeddings")),
    ("BAICHUAN2_13B", {"rope_scaling": SIX}, ("ambiguous", "rope_scaling", "restore")),
    ("BAICHUAN_13B", {"architectures": ["BaiChuanForCausalLM"]}, "BaiChuan"),
    ("BAICHUAN_13B", {"model_max_length": ...}, ("model_max_length", "restore")),
    ("BAICHUAN2_13B", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("BAICHUAN2_13B", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("BAICHUAN2_13B", {"quantization_config": {"load_in_4bit": True}}, "quantised"),
    ("BAICHUAN2_13B", {"architectures": ["BaichuanForX"]}, "architectures names"),
    ("JAIS", {"position_embedding_type": "learned"}, "Cerebras-GPT"),
    ("JAIS", {"position_embedding_type": ...}, "'learned'"),
    ("JAIS", {"activation_function": ...}, "'gelu_new'"),
    ("JAIS", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
    ("JAIS", {"n_head": 16}, "n_embd / n_head is 320"),
    ("JAIS", {"alibi_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk'"),
    ("JAIS", {"alibi_scaling": {"type": "linear"}}, "alibi_scaling"),
    ("JAIS", {"alibi_scaling": {**SIX, "train_seq_len": 2048}}, "2048"),
    ("JAIS", {"alibi_scaling": "linear"}, "'linear'"),
    ("JAIS", {"architectures": ["JAISDoubleHeadsModel"]}, "JAISLMHeadModel"),
    ("REFACT", {"multi_query": False}, "multi_query is False"),
    *named("JAIS", scale_attn_weights=False, add_cross_attention=True, activation_function="gelu"),
    *named("JINA", position_embedding_type="absolute", feed_forward_type="swiglu", emb_pooler="cls"),
    *named("JINA", hidden_act="tanh", is_decoder=True, add_cross_attention=True),
    *named("MOSAIC_BERT", rotary_emb_fraction=1.0, use_rope=True, attention_layer="rope"),
    *named("MOSAIC_BERT", position_embedding_type="rotary", is_decoder=True, hidden_act="tanh"),
    *named("MOSAIC_GPT", alibi=False, prefix_lm=True, norm_type="layernorm", multiquery_attention=True),
    *named("MOSAIC_GPT", tie_word_embeddings=False, softmax_scale=1e-6),
    *named("MPT", fuse_norm_attn_norm=True, final_logit_softcapping=30.0, norm_type="triton_rmsnorm"),
    *named("MPT", fc_type="te"),
    *named("MPT", "attn_config", attn_type="flash", qk_gn=True, fused_qkv=False, kv_dim=16, nope=True),
    *named("MPT", "attn_config", reuse_kv_layer_idx=-1, attn_logit_softcapping=50.0, norm_type="rmsnorm"),
    *named("MPT", "attn_config", norm_eps=1e-6),
    # StarCoder.
    *(
        ("REFACT", {"model_type": "gpt_bigcode", "architectures": named}, "learned positions")
        for named in (["GPTBigCodeForCausalLM"], None, "GPTRefactForCausalLM")
    ),
    # Another BERT.
    ("JINA", {"architectures": ["BertModel"], "auto_map": None}, "learned positions"),
    (
        "JINA",
        {
            "architectures": ["XModel"],
            "auto_map": {**dict.fromkeys(JINA["auto_map"], ...), "AutoModel": "a/b--c.XModel"},
        },
        "learned positions",
    ),
    (
        "JINA",
        {
            "architectures": None,
            "position_embedding_type": None,
            "auto_map": {
                "AutoConfig": "jinaai/jina-bert-flash-implementation--configuration_bert.JinaBertConfig",
                "AutoModel": "jinaai/jina-bert-flash-implementation--modeling_bert.BertModel",
            },
        },
        ("packed otherwise", "jina-embeddings-v2"),
    ),
    ("JINA", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ("JINA", {"architectures": ["JinaBertForPreTraining"]}, "JinaBertForPreTraining"),
    ("MOSAIC_BERT", {"alibi_starting_size": ...}, "learned positions"),
    ("MOSAIC_BERT", {"auto_map": {"AutoModel": "rotary_layers.BertModel"}}, CODE),
    ("MOSAIC_BERT", {"auto_map": {"AutoModel": "bert_layers.RotaryBertModel"}}, CODE),
    ("MOSAIC_BERT", {"rope_theta": 10000.0}, "rope_theta"),
    ("MOSAIC_BERT", {"architectures": ["FlexBertForMaskedLM"]}, "FlexBertForMaskedLM"),
    ("MOSAIC_GPT", {"alibi": ...}, "alibi is False"),
    ("MOSAIC_GPT", {"alibi": None}, "alibi is None"),
    ("MOSAIC_GPT", {"alibi": "yes"}, "alibi is 'yes'"),
    ("MOSAIC_GPT", {"architectures": ["MosaicGPTForX"]}, "'MosaicGPTForX'"),
    ("MPT", attention(attn_type="multiquery_attention"), ("kv_n_heads is 8", "attn_type")),
    ("MPT", attention(attn_type="multihead_attention"), ("kv_n_heads is 8", "attn_type")),
    ("MPT", attention(attn_temperature_tuning={"attn_scale": 0.1}), "temperature_tuning"),
    ("MPT", {**attention(qk_ln=True), "norm_eps": 1e-6}, ("qk_ln", "1e-06")),
    ("MPT", {"fc_type": {"name": "te"}}, "fc_type is 'te'"),
    ("MPT", {"ffn_config": {"fc_type": {"name": "te"}}}, "ffn_config.fc_type is 'te'"),
    ("MPT", {"ffn_config": {"ffn_type": "mptgeglu"}}, "ffn_type is 'mptgeglu'"),
    ("MPT", {"ffn_config": {"ffn_type": "mb_dmoe"}}, "ffn_type is 'mb_dmoe'"),
    ("MPT", {"ffn_config": {"ffn_act_fn": {"name": "tanh"}}}, "ffn_act_fn is"),
    ("MPT", {"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}}, "ffn_act_fn is"),
    ("MPT", {"block_overrides": {"order": []}}, "block_overrides is"),
]
IMPOSSIBLE: list[tuple[str, Changes, Words]] = [
    ("BAICHUAN2_13B", {"norm_head": "yes"}, "norm_head"),
    ("BAICHUAN2_13B", {"z_loss_weight": "high"}, "z_loss_weight"),
    ("BAICHUAN2_13B", {"z_loss_weight": -1}, "z_loss_weight"),
    ("JAIS", {"mup_embeddings_scale": 1.0}, "embeddings_scale 14.6"),
    ("JAIS", {"mup_scale_qk_dot_by_d": False}, "scale_qk_dot_by_d True"),
    ("JAIS", {"mup_width_scale": 0.111, "mup_output_alpha": 2.0}, "width_scale 0.111"),
    ("JAIS", {"embeddings_scale": "14.6"}, "expected a number"),
    ("JAIS", {"scale_qk_dot_by_d": 1}, "expected true or false"),
    ("REFACT", {"packed_projections": "no"}, "packed_projections is 'no'"),
    ("REFACT", {"n_inner": -1}, "n_inner"),
    *named("MOSAIC_GPT", alibi_bias_max=0, attn_clip_qkv="6", logit_scale="sqrt", mlp_ratio=2.5),
    ("MOSAIC_BERT", {"alibi_starting_size": ..., "model_type": ...}, "model_type"),
    ("MOSAIC_GPT", {"n_heads": 5}, "heads, 5"),
    ("MPT", attention(kv_n_heads=None), "no kv_n_heads"),
    ("MPT", attention(kv_n_heads=5), ("kv_n_heads 5", "24 heads")),
    ("MPT", {"norm_eps": 1e-6, "layer_norm_epsilon": 1e-5}, ("norm_eps 1e-06", "layer_norm_epsilon 1e-05")),
    ("MPT", {"norm_eps": "small"}, "norm_eps is 'small'"),
    ("MPT", {"ffn_config": {"ffn_hidden_size": 0}}, "ffn_hidden_size is 0"),
    ("MPT", {"ffn_config": [1]}, "ffn_config is [1]"),
]
UNDECIDED: list[tuple[str, Changes, Words]] = [
    # Which head it has is never guessed.
    ("BAICHUAN_13B", {"vocab_size": 64016}, ("which head", "`overrides` norm_head=true")),
    ("BAICHUAN_13B", {"z_loss_weight": 0}, ("which head", "`overrides` norm_head=true")),
    ("BAICHUAN_13B", {"vocab_size": None}, ("which head", "`overrides` norm_head=true")),
    ("JAIS", {"architectures": ["JAISLMHeadModel", "JAISModel"]}, "e.g. `overrides`"),
    ("MPT", attention(alibi=...), "attn_config.alibi is False"),
    ("KRUTRIM", {}, "`overrides` ffn_config.ffn_act_fn.name=relu or "),
    ("MPT", {"norm_type": "rmsnorm", "fc_type": None}, ("norm_type is 'rmsnorm'", "fc_type")),
]


@pytest.mark.parametrize(
    ("kind", "name", "changes", "words"),
    [
        (kind, *row)
        for kind, rows in ((UnsupportedModel, UNSUPPORTED), (SourceError, IMPOSSIBLE), (Undecided, UNDECIDED))
        for row in rows
    ],
    ids=str,
)
def test_rejected_with_an_error(kind: type[Exception], name: str, changes: Changes, words: Words) -> None:
    with raises(kind, words):
        check_source(changed(name, changes))


@pytest.mark.parametrize(
    ("name", "named", "ours"),
    [
        ("BAICHUAN_13B", "BaichuanForCausalLM", "NtkBaichuanForCausalLM"),
        ("JAIS", "JAISLMHeadModel", "NtkJaisForCausalLM"),
        ("JAIS", "BTLMLMHeadModel", "NtkJaisForCausalLM"),
        ("JAIS", "BTLMModel", "NtkJaisModel"),
        ("MOSAIC_GPT", "MosaicGPT", "NtkMosaicGptForCausalLM"),
        ("MOSAIC_GPT", "ReplitLM", "NtkMosaicGptForCausalLM"),
        ("REFACT", "GPTRefactForCausalLM", "NtkRefactForCausalLM"),
    ],
)
def test_classes(name: str, named: str, ours: str) -> None:
    config = changed(name, {"architectures": [named]})
    assert check_source(config).architectures(config) == [ours]


# family -> the key of its limit
LIMITS = {
    "baichuan": "model_max_length",
    "jais": "n_positions",
    "jina_bert": "max_position_embeddings",
    "mosaic_bert": "max_position_embeddings",
    "mosaic_gpt": "max_seq_len",
    "mpt": "max_seq_len",
    "refact": "n_positions",
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_raised(name: str, tmp_path: Path) -> None:
    """Tools that read it truncate or refuse longer inputs."""
    write: Callable[..., Path] = {**tiny.FACTORIES, **tiny.ENCODERS}[name]
    source = write(tmp_path / "source", 4, **{LIMITS[name]: 64})
    convert(source, tmp_path / "out", scale=4, train_length=64, verify=False)
    assert config_of(tmp_path / "out")[LIMITS[name]] == 256


@pytest.mark.parametrize(
    ("name", "changes", "sizes"),
    [
        ("BAICHUAN_13B", {}, (40, 40, 128)),
        ("JAIS", {}, (40, 40, 128)),
        ("JAIS", {"n_head": 56, "n_embd": 7168}, (56, 56, 128)),
        ("JAIS", {"n_head": 32, "n_embd": 2560}, (32, 32, 80)),
        ("REFACT", {}, (32, 1, 64)),
        ("MPT", {}, (24, 8, 8)),
        ("MPT", attention(kv_n_heads=24), (24, 24, 8)),
        ("MPT", attention(kv_n_heads=1), (24, 1, 8)),
        ("MPT", attention(attn_type="multiquery_attention", kv_n_heads=None), (24, 1, 8)),
        ("MPT", attention(**MULTIHEAD), (24, 24, 8)),
        ("MPT", attention(attn_type="multihead_attention", kv_n_heads=24), (24, 24, 8)),
    ],
    ids=str,
)
def test_sizes(name: str, changes: Changes, sizes: tuple[int, int, int]) -> None:
    config = changed(name, changes)
    geometry = check_source(config).geometry(config)
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim) == sizes


WRITTEN: list[tuple[str, Changes, Changes]] = [
    # Baichuan's head, by its vocabulary, by a key of the second generation, or as given.
    ("BAICHUAN_13B", {}, {"norm_head": False}),
    ("BAICHUAN2_13B", {}, {"norm_head": True}),
    ("BAICHUAN_13B", {"vocab_size": 125700, "z_loss_weight": 0}, {"norm_head": True}),
    ("BAICHUAN_13B", {"vocab_size": 125696, "z_loss_weight": 2e-4}, {"norm_head": True}),
    ("BAICHUAN_13B", {"vocab_size": 64016, "norm_head": False}, {"norm_head": False}),
    ("BAICHUAN_13B", {"vocab_size": 125700, "norm_head": True}, {"norm_head": True}),
    ("BAICHUAN_13B", {"norm_head": True}, {"norm_head": True}),
    ("BAICHUAN_13B", {"vocab_size": 125696, "z_loss_weight": 0, "norm_head": False}, {"norm_head": False}),
    # Its config class wraps a key once more each time.
    *(
        ("BAICHUAN_13B", {"gradient_checkpointing": stored}, {"gradient_checkpointing": meant})
        for stored, meant in (
            (False, False),
            ([False], False),
            ([[False]], False),
            ([True], True),
            ([], False),
        )
    ),
    ("BAICHUAN_13B", {}, {"gradient_checkpointing": ...}),
    # The old names of the muP factors, and the current ones.
    (
        "JAIS",
        {},
        {
            "mup_embeddings_scale": 14.6,
            "mup_width_scale": 0.111,
            "mup_output_alpha": 1.0,
            "mup_scale_qk_dot_by_d": True,
            **dict.fromkeys(("embeddings_scale", "width_scale", "scale_qk_dot_by_d"), ...),
        },
    ),
    (
        "JAIS",
        dict.fromkeys(("embeddings_scale", "width_scale", "scale_qk_dot_by_d"), ...),
        {"mup_embeddings_scale": 1.0, "mup_width_scale": 1.0, "mup_scale_qk_dot_by_d": False},
    ),
    (
        "JAIS",
        {"mup_embeddings_scale": 14.6, "mup_output_alpha": 2.0, "mup_width_scale": 0.0555},
        {"mup_embeddings_scale": 14.6, "mup_output_alpha": 1.0, "mup_width_scale": 0.111},
    ),
    # JinaBERT's layout.
    ("JINA", {}, {"qk_post_norm": False, "feed_forward_type": "geglu"}),
    ("JINA", {"feed_forward_type": None}, {"qk_post_norm": False, "feed_forward_type": "original"}),
    ("JINA", QK, {"qk_post_norm": True, "feed_forward_type": "geglu"}),
    ("JINA", {**QK, "feed_forward_type": None}, {"qk_post_norm": True, "feed_forward_type": "geglu"}),
    ("JINA", {"_name_or_path": jina_bert.QK_CODE, "auto_map": None}, {"qk_post_norm": True}),
    ("JINA", {"qk_post_norm": True}, {"qk_post_norm": True, "feed_forward_type": "geglu"}),
    # The defaults are those of the code that wrote the config.
    ("MPT", {"no_bias": ...}, {"no_bias": False}),
    ("MPT", {"no_bias": ..., "architectures": ["MptForCausalLM"]}, {"no_bias": ...}),
    ("REFACT", {}, {"packed_projections": True, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("name", "changes", "written"), WRITTEN, ids=str)
def test_what_a_converted_config_says(name: str, changes: Changes, written: Changes) -> None:
    config = changed(name, changes)
    of = check_source(config)
    result = of.template_config(config)
    assert {key: result.get(key, ...) for key in written} == written
    assert of.template_config(result) == result
