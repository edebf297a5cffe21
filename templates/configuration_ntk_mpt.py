# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of an MPT checkpoint with scaled ALiBi slopes."""

from typing import Any

from transformers import PretrainedConfig


class NtkMptConfig(PretrainedConfig):
    """The keys of a MPT config, and:

    Args:
        attn_config: MPT's attention options. ``attn_type``, ``kv_n_heads``, ``alibi_bias_max``,
            ``softmax_scale``, ``clip_qkv``, ``qk_ln`` and ``attn_pdrop`` are used.
        ffn_config: MPT's feed-forward options. ``ffn_type`` ("mptmlp" or "mptglu"), ``ffn_hidden_size``
            and ``ffn_act_fn`` ("gelu", "relu" or "silu") are used.
        alibi_scaling: how the slopes are scaled; None keeps the trained slopes. See ``Alibi`` in
            ntk_alibi.py for the keys.
    """

    model_type = "ntk_mpt"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }

    def __init__(
        self,
        d_model: int = 2048,
        n_heads: int = 16,
        n_layers: int = 24,
        expansion_ratio: float = 4,
        max_seq_len: int = 2048,
        vocab_size: int = 50368,
        resid_pdrop: float = 0.0,
        layer_norm_epsilon: float = 1e-5,
        emb_pdrop: float = 0.0,
        attn_config: dict[str, Any] | None = None,
        ffn_config: dict[str, Any] | None = None,
        norm_type: str = "low_precision_layernorm",
        logit_scale: float | str | None = None,
        no_bias: bool = True,
        use_cache: bool = True,
        initializer_range: float = 0.02,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        alibi_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_layers = n_layers
        self.expansion_ratio = expansion_ratio
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.resid_pdrop = resid_pdrop
        self.layer_norm_epsilon = layer_norm_epsilon
        self.emb_pdrop = emb_pdrop
        self.attn_config = {"alibi": True} if attn_config is None else attn_config
        self.ffn_config = {"ffn_type": "mptmlp"} if ffn_config is None else ffn_config
        self.norm_type = norm_type
        self.logit_scale = logit_scale
        self.no_bias = no_bias
        self.use_cache = use_cache
        self.initializer_range = initializer_range
        self.alibi_scaling = alibi_scaling
        for computed in ("head_dim", "num_key_value_heads"):  # see below
            kwargs.pop(computed, None)
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs)

    @property
    def head_dim(self) -> int:
        """The size of a head in the cache: folded keys have 8 channels more."""
        return self.d_model // self.n_heads + 8

    @property
    def num_key_value_heads(self) -> int:
        """The number of key and value heads; each is shared by consecutive query heads."""
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
