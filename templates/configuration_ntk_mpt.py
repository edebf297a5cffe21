# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of an MPT checkpoint with scaled ALiBi slopes."""

from .ntk_config import NtkDecoderConfig


class NtkMptConfig(NtkDecoderConfig):
    """The keys of a MPT config, and:

    Args:
        attn_config: MPT's attention options. ``attn_type``, ``kv_n_heads``, ``alibi_bias_max``,
            ``softmax_scale``, ``clip_qkv``, ``qk_ln`` and ``attn_pdrop`` are used.
        ffn_config: MPT's feed-forward options. ``ffn_type`` ("mptmlp" or "mptglu"), ``ffn_hidden_size``
            and ``ffn_act_fn`` ("gelu", "relu" or "silu") are used.
    """

    model_type = "ntk_mpt"
    __init__ = NtkDecoderConfig.__init__
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    defaults = {
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "expansion_ratio": 4,
        "max_seq_len": 2048,
        "vocab_size": 50368,
        "resid_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5,
        "emb_pdrop": 0.0,
        "attn_config": {"alibi": True},
        "ffn_config": {"ffn_type": "mptmlp"},
        "norm_type": "low_precision_layernorm",
        "logit_scale": None,
        "no_bias": True,
        "use_cache": True,
        "initializer_range": 0.02,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }

    @property
    def score_scale(self) -> float:
        """The factor on q.k: ``attn_config.softmax_scale``, or 1 / sqrt(head size)."""
        given = self.attn_config.get("softmax_scale")
        return (self.d_model // self.n_heads) ** -0.5 if given is None else float(given)

    @property
    def num_key_value_heads(self) -> int:
        kind = self.attn_config.get("attn_type")
        if kind == "grouped_query_attention":
            return self.attn_config["kv_n_heads"]
        return 1 if kind == "multiquery_attention" else self.n_heads

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism divides the weights.

        Wqkv has all queries before all keys, so what it computes is gathered before the heads are divided.
        """
        plan = {
            "blocks.*.attn.Wqkv": "colwise_rep",
            "blocks.*.attn.out_proj": "rowwise",
            "blocks.*.ffn.up_proj": "colwise",
            "blocks.*.ffn.down_proj": "rowwise",
        }
        if self.ffn_config.get("ffn_type") == "mptglu":
            plan["blocks.*.ffn.gate_proj"] = "colwise"
        return plan

    # transformers 5.19 adds an entry for embed_tokens, which this model does not have.
    base_model_tp_plan = base_model_tp_plan.setter(lambda self, _: None)
