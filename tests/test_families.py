"""What families say of configs: which they accept, which they reject and why, and the lengths they know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from converter import convert
from converter.errors import SourceError, Undecided, UnsupportedModel
from converter.families import FAMILIES, Family, recognise
from converter.families.refusals import check_source
from tests import tiny
from tests.patched import config_of
from tests.tiny import jina_bert, mosaic_bert, mosaic_gpt, replit
from tests.tiny.layout import merged

Changes = dict[str, Any]

BAICHUAN_13B = {
    "architectures": ["BaichuanForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 13696,
    "model_max_length": 4096,
    "model_type": "baichuan",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "vocab_size": 64000,
}
BAICHUAN2_13B = {**BAICHUAN_13B, "gradient_checkpointing": False, "vocab_size": 125696}
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
JAIS = {
    "model_type": "jais",
    "architectures": ["JAISLMHeadModel"],
    "activation_function": "swiglu",
    "position_embedding_type": "alibi",
    "embeddings_scale": 14.6,
    "width_scale": 0.111,
    "scale_qk_dot_by_d": True,
    "n_embd": 5120,
    "n_head": 40,
    "n_inner": 13653,
    "n_layer": 40,
    "n_positions": 2048,
    "vocab_size": 84992,
}
GPT_JX = {**JAIS, "model_type": "gpt_jx", "architectures": ["GPTJXForCausalLM"]}
REFACT = {
    "architectures": ["GPTRefactForCausalLM"],
    "model_type": "gpt_refact",
    "multi_query": True,
    "n_embd": 2048,
    "n_head": 32,
    "n_inner": None,
    "n_layer": 32,
    "n_positions": 4096,
    "vocab_size": 49216,
}
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
    ("BAICHUAN_13B", {}, "baichuan"),
    ("BAICHUAN2_13B", {}, "baichuan"),
    ("JAIS", {}, "jais"),
    ("JAIS", {"model_type": "btlm", "architectures": ["BTLMLMHeadModel"]}, "jais"),
    ("JAIS", {"reorder_and_upcast_attn": True, "add_cross_attention": None}, "jais"),
    ("JAIS", {"alibi_scaling": {"type": "linear", "factor": 2.0}}, "jais"),
    ("GPT_JX", {}, "jais"),
    ("REFACT", {}, "refact"),
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


ROTARY = r"has rotary positions, not ALiBi .* rope_scaling"
CODE = "not MosaicBERT's own code"
SIX = {"type": "linear", "factor": 2}
REFUSED: list[tuple[str, Changes, type[Exception], str]] = [
    # Baichuan's rotary models, and configs that do not say whether they are.
    ("BAICHUAN_7B", {}, UnsupportedModel, ROTARY),
    ("BAICHUAN2_7B", {}, UnsupportedModel, ROTARY),
    ("BAICHUAN_7B", {"architectures": ["BaichuanForCausalLM"]}, UnsupportedModel, ROTARY),
    ("BAICHUAN2_7B", {"max_position_embeddings": ...}, UnsupportedModel, ROTARY),
    ("BAICHUAN2_7B", {"hidden_size": 2048, "num_attention_heads": 16}, UnsupportedModel, ROTARY),
    (
        "BAICHUAN_7B",
        {"max_position_embeddings": ..., "hidden_size": 2048, "model_max_length": 4096},
        UnsupportedModel,
        ROTARY,
    ),
    ("BAICHUAN2_13B", {"hidden_size": 2560, "rope_theta": 10000.0}, UnsupportedModel, ROTARY),
    (
        "BAICHUAN_13B",
        {"max_position_embeddings": 4096},
        UnsupportedModel,
        "ambiguous.*max_position_embeddings",
    ),
    ("BAICHUAN2_13B", {"rope_scaling": SIX}, UnsupportedModel, "ambiguous.*it has rope_scaling.*restore"),
    ("BAICHUAN_13B", {"architectures": ["BaiChuanForCausalLM"]}, UnsupportedModel, "its class is BaiChuan"),
    ("BAICHUAN_13B", {"model_max_length": ...}, UnsupportedModel, "neither model_max_length.*restore"),
    # Which head it has is never guessed.
    ("BAICHUAN_13B", {"vocab_size": 64016}, Undecided, r"which head .* `overrides` norm_head=true"),
    ("BAICHUAN_13B", {"z_loss_weight": 0}, Undecided, r"which head .* `overrides` norm_head=true"),
    ("BAICHUAN_13B", {"vocab_size": None}, Undecided, r"which head .* `overrides` norm_head=true"),
    ("BAICHUAN2_13B", {"hidden_act": "gelu"}, UnsupportedModel, "hidden_act is 'gelu'"),
    ("BAICHUAN2_13B", {"tie_word_embeddings": True}, UnsupportedModel, "tie_word_embeddings"),
    ("BAICHUAN2_13B", {"quantization_config": {"load_in_4bit": True}}, UnsupportedModel, "quantised"),
    ("BAICHUAN2_13B", {"architectures": ["BaichuanForX"]}, UnsupportedModel, "architectures names"),
    ("BAICHUAN2_13B", {"norm_head": "yes"}, SourceError, "norm_head"),
    ("BAICHUAN2_13B", {"z_loss_weight": "high"}, SourceError, "z_loss_weight"),
    ("BAICHUAN2_13B", {"z_loss_weight": -1}, SourceError, "z_loss_weight"),
    ("JAIS", {"position_embedding_type": "learned"}, UnsupportedModel, "Cerebras-GPT"),
    ("JAIS", {"position_embedding_type": ...}, UnsupportedModel, "'learned'"),
    ("JAIS", {"activation_function": "gelu"}, UnsupportedModel, "activation_function is 'gelu'"),
    ("JAIS", {"activation_function": ...}, UnsupportedModel, "'gelu_new'"),
    ("JAIS", {"scale_attn_weights": False}, UnsupportedModel, "scale_attn_weights is False"),
    ("JAIS", {"scale_attn_by_inverse_layer_idx": True}, UnsupportedModel, "inverse_layer_idx is True"),
    ("JAIS", {"add_cross_attention": True}, UnsupportedModel, "add_cross_attention is True"),
    ("JAIS", {"n_head": 16}, UnsupportedModel, "n_embd / n_head is 320"),
    ("JAIS", {"alibi_scaling": {"type": "ntk", "factor": 2.0}}, UnsupportedModel, "'ntk'"),
    ("JAIS", {"alibi_scaling": {"type": "linear"}}, UnsupportedModel, "alibi_scaling"),
    ("JAIS", {"alibi_scaling": {"type": "linear", "factor": 0.5}}, UnsupportedModel, "0.5"),
    ("JAIS", {"alibi_scaling": {"type": "linear", "train_seq_len": 2048.0}}, UnsupportedModel, "2048.0"),
    ("JAIS", {"alibi_scaling": {**SIX, "train_seq_len": 2048}}, UnsupportedModel, "2048"),
    ("JAIS", {"alibi_scaling": "linear"}, UnsupportedModel, "'linear'"),
    ("JAIS", {"architectures": ["JAISDoubleHeadsModel"]}, UnsupportedModel, "JAISLMHeadModel"),
    (
        "JAIS",
        {"architectures": ["JAISLMHeadModel", "JAISModel"]},
        Undecided,
        "give that one, e.g. `overrides`",
    ),
    ("JAIS", {"mup_embeddings_scale": 1.0}, SourceError, "embeddings_scale 14.6"),
    ("JAIS", {"mup_scale_qk_dot_by_d": False}, SourceError, "scale_qk_dot_by_d True"),
    ("JAIS", {"mup_width_scale": 0.111, "mup_output_alpha": 2.0}, SourceError, "width_scale 0.111"),
    ("JAIS", {"embeddings_scale": "14.6"}, SourceError, "expected a number"),
    ("JAIS", {"scale_qk_dot_by_d": 1}, SourceError, "expected true or false"),
    ("REFACT", {"multi_query": False}, UnsupportedModel, "multi_query is False"),
    ("REFACT", {"packed_projections": "no"}, SourceError, "packed_projections is 'no'"),
    ("REFACT", {"n_inner": -1}, SourceError, "n_inner"),
    # StarCoder.
    *(
        (
            "REFACT",
            {"model_type": "gpt_bigcode", "architectures": named},
            UnsupportedModel,
            "learned positions",
        )
        for named in (["GPTBigCodeForCausalLM"], None, "GPTRefactForCausalLM")
    ),
    # Another BERT.
    ("JINA", {"architectures": ["BertModel"], "auto_map": None}, UnsupportedModel, "learned positions"),
    (
        "JINA",
        {
            "architectures": ["XModel"],
            "auto_map": {**dict.fromkeys(JINA["auto_map"], ...), "AutoModel": "a/b--c.XModel"},
        },
        UnsupportedModel,
        "learned positions",
    ),
    (
        "JINA",
        {"position_embedding_type": "absolute"},
        UnsupportedModel,
        "position_embedding_type is 'absolute'",
    ),
    ("JINA", {"feed_forward_type": "swiglu"}, UnsupportedModel, "feed_forward_type is 'swiglu'"),
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
        UnsupportedModel,
        "packed otherwise .* convert a jina-embeddings-v2",
    ),
    ("JINA", {"emb_pooler": "cls"}, UnsupportedModel, "emb_pooler is 'cls'"),
    ("JINA", {"hidden_act": "tanh"}, UnsupportedModel, "hidden_act is 'tanh'"),
    ("JINA", {"is_decoder": True}, UnsupportedModel, "is_decoder is True"),
    ("JINA", {"add_cross_attention": True}, UnsupportedModel, "add_cross_attention is True"),
    ("JINA", {"pruned_heads": {"0": [1]}}, UnsupportedModel, "pruned_heads"),
    ("JINA", {"architectures": ["JinaBertForPreTraining"]}, UnsupportedModel, "JinaBertForPreTraining"),
    ("MOSAIC_BERT", {"alibi_starting_size": ...}, UnsupportedModel, "learned positions"),
    ("MOSAIC_BERT", {"alibi_starting_size": ..., "model_type": ...}, SourceError, "model_type"),
    ("MOSAIC_BERT", {"auto_map": {"AutoModel": "rotary_layers.BertModel"}}, UnsupportedModel, CODE),
    ("MOSAIC_BERT", {"auto_map": {"AutoModel": "bert_layers.RotaryBertModel"}}, UnsupportedModel, CODE),
    ("MOSAIC_BERT", {"rotary_emb_fraction": 1.0}, UnsupportedModel, "rotary_emb_fraction is 1.0"),
    ("MOSAIC_BERT", {"use_rope": True}, UnsupportedModel, "use_rope is True"),
    ("MOSAIC_BERT", {"rope_theta": 10000.0}, UnsupportedModel, "rope_theta"),
    ("MOSAIC_BERT", {"attention_layer": "rope"}, UnsupportedModel, "attention_layer is 'rope'"),
    ("MOSAIC_BERT", {"position_embedding_type": "rotary"}, UnsupportedModel, "embedding_type is 'rotary'"),
    ("MOSAIC_BERT", {"is_decoder": True}, UnsupportedModel, "is_decoder is True"),
    ("MOSAIC_BERT", {"hidden_act": "tanh"}, UnsupportedModel, "hidden_act is 'tanh'"),
    ("MOSAIC_BERT", {"architectures": ["FlexBertForMaskedLM"]}, UnsupportedModel, "FlexBertForMaskedLM"),
    ("MOSAIC_GPT", {"alibi": ...}, UnsupportedModel, "alibi is False"),
    ("MOSAIC_GPT", {"alibi": False}, UnsupportedModel, "alibi is False"),
    ("MOSAIC_GPT", {"alibi": None}, UnsupportedModel, "alibi is None"),
    ("MOSAIC_GPT", {"alibi": "yes"}, UnsupportedModel, "alibi is 'yes'"),
    ("MOSAIC_GPT", {"prefix_lm": True}, UnsupportedModel, "prefix_lm is True"),
    ("MOSAIC_GPT", {"norm_type": "layernorm"}, UnsupportedModel, "norm_type is 'layernorm'"),
    ("MOSAIC_GPT", {"multiquery_attention": True}, UnsupportedModel, "multiquery_attention is True"),
    ("MOSAIC_GPT", {"tie_word_embeddings": False}, UnsupportedModel, "tie_word_embeddings is False"),
    ("MOSAIC_GPT", {"softmax_scale": 1e-6}, UnsupportedModel, "softmax_scale is 1e-06"),
    ("MOSAIC_GPT", {"architectures": ["MosaicGPTForX"]}, UnsupportedModel, "'MosaicGPTForX'"),
    ("MOSAIC_GPT", {"alibi_bias_max": 0}, SourceError, "alibi_bias_max is 0"),
    ("MOSAIC_GPT", {"attn_clip_qkv": "6"}, SourceError, "attn_clip_qkv is '6'"),
    ("MOSAIC_GPT", {"logit_scale": "sqrt"}, SourceError, "logit_scale is 'sqrt'"),
    ("MOSAIC_GPT", {"mlp_ratio": 2.5}, SourceError, "mlp_ratio is 2.5"),
    ("MOSAIC_GPT", {"n_heads": 5}, SourceError, "not a multiple of the number of heads, 5"),
    ("MPT", attention(alibi=...), Undecided, r"attn_config\.alibi is False"),
    ("KRUTRIM", {}, Undecided, r"`overrides` ffn_config\.ffn_act_fn\.name=relu or "),
    ("MPT", attention(attn_type="multiquery_attention"), UnsupportedModel, "kv_n_heads is 8, but attn_type"),
    ("MPT", attention(attn_type="multihead_attention"), UnsupportedModel, "kv_n_heads is 8, but attn_type"),
    ("MPT", attention(attn_type="flash"), UnsupportedModel, "attn_type is 'flash'"),
    ("MPT", attention(qk_gn=True), UnsupportedModel, "qk_gn is True"),
    ("MPT", attention(fused_qkv=False), UnsupportedModel, "fused_qkv is False"),
    ("MPT", attention(kv_dim=16), UnsupportedModel, "kv_dim is 16"),
    ("MPT", attention(nope=True), UnsupportedModel, "nope is True"),
    ("MPT", attention(reuse_kv_layer_idx=-1), UnsupportedModel, "reuse_kv_layer_idx is -1"),
    ("MPT", attention(attn_logit_softcapping=50.0), UnsupportedModel, "attn_logit_softcapping is 50.0"),
    ("MPT", attention(norm_type="rmsnorm"), UnsupportedModel, "attn_config.norm_type is 'rmsnorm'"),
    ("MPT", attention(norm_eps=1e-6), UnsupportedModel, "attn_config.norm_eps is 1e-06"),
    ("MPT", attention(attn_temperature_tuning={"attn_scale": 0.1}), UnsupportedModel, "temperature_tuning"),
    (
        "MPT",
        {**attention(qk_ln=True), "norm_eps": 1e-6},
        UnsupportedModel,
        "qk_ln is set and the norms have epsilon 1e-06",
    ),
    ("MPT", {"norm_type": "triton_rmsnorm"}, UnsupportedModel, "norm_type is 'triton_rmsnorm'"),
    ("MPT", {"norm_type": "rmsnorm", "fc_type": None}, Undecided, "norm_type is 'rmsnorm' without fc_type"),
    ("MPT", {"fc_type": "te"}, UnsupportedModel, "fc_type is 'te'"),
    ("MPT", {"fc_type": {"name": "te"}}, UnsupportedModel, "fc_type is 'te'"),
    ("MPT", {"ffn_config": {"fc_type": {"name": "te"}}}, UnsupportedModel, "ffn_config.fc_type is 'te'"),
    ("MPT", {"ffn_config": {"ffn_type": "mptgeglu"}}, UnsupportedModel, "ffn_type is 'mptgeglu'"),
    ("MPT", {"ffn_config": {"ffn_type": "mb_dmoe"}}, UnsupportedModel, "ffn_type is 'mb_dmoe'"),
    ("MPT", {"ffn_config": {"ffn_act_fn": {"name": "tanh"}}}, UnsupportedModel, "ffn_act_fn is"),
    (
        "MPT",
        {"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}},
        UnsupportedModel,
        "ffn_act_fn is",
    ),
    ("MPT", {"block_overrides": {"order": []}}, UnsupportedModel, "block_overrides is"),
    ("MPT", {"fuse_norm_attn_norm": True}, UnsupportedModel, "fuse_norm_attn_norm is True"),
    ("MPT", {"final_logit_softcapping": 30.0}, UnsupportedModel, "final_logit_softcapping is 30.0"),
    ("MPT", attention(kv_n_heads=None), SourceError, "no kv_n_heads"),
    ("MPT", attention(kv_n_heads=5), SourceError, "kv_n_heads 5 does not divide 24 heads"),
    ("MPT", attention(kv_n_heads=48), SourceError, "kv_n_heads 48 does not divide 24 heads"),
    ("MPT", {"norm_eps": 1e-6, "layer_norm_epsilon": 1e-5}, SourceError, "norm_eps 1e-06 and layer_norm_eps"),
    ("MPT", {"norm_eps": "small"}, SourceError, "norm_eps is 'small'"),
    ("MPT", {"ffn_config": {"ffn_hidden_size": 0}}, SourceError, "ffn_hidden_size is 0"),
    ("MPT", {"ffn_config": [1]}, SourceError, r"ffn_config is \[1\]"),
]


@pytest.mark.parametrize(("name", "changes", "kind", "words"), REFUSED, ids=str)
def test_rejected_with_an_error(name: str, changes: Changes, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
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


def test_other_models_are_not_taken() -> None:
    assert not any(each.recognises({"model_type": "jais2"}) for each in FAMILIES)
    assert recognise({"model_type": "mpt"}).name == "mpt"


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
    result = of.normalise(config)
    assert {key: result.get(key, ...) for key in written} == written
    assert of.normalise(result) == result
