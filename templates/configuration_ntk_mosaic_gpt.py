# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a MosaicGPT checkpoint with scaled ALiBi slopes."""

from typing import Any

from transformers import PretrainedConfig


class NtkMosaicGptConfig(PretrainedConfig):
    """The keys of a MosaicGPT config, and:

    Args:
        alibi_scaling: how the slopes are scaled; None keeps the trained slopes. See ``Alibi`` in
            ntk_alibi.py for the keys.
    """

    model_type = "ntk_mosaic_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    # Wqkv has all queries before all keys, so what it computes is gathered before the heads are divided.
    base_model_tp_plan = {
        "blocks.*.attn.Wqkv": "colwise_rep",
        "blocks.*.attn.out_proj": "rowwise",
        "blocks.*.mlp.mlp_up": "colwise",
        "blocks.*.mlp.mlp_down": "rowwise",
    }

    def __init__(
        self,
        d_model: int = 2048,
        n_heads: int = 16,
        n_layers: int = 24,
        mlp_ratio: int = 4,
        max_seq_len: int = 2048,
        vocab_size: int = 50368,
        attn_pdrop: float = 0.0,
        resid_pdrop: float = 0.0,
        emb_pdrop: float = 0.0,
        attn_qk_ln: bool = False,
        attn_clip_qkv: float | None = None,
        softmax_scale: float | None = None,
        alibi_bias_max: float = 8,
        logit_scale: float | str | None = None,
        no_bias: bool = False,
        use_cache: bool = False,
        initializer_range: float = 0.02,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        alibi_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_layers = n_layers
        self.mlp_ratio = mlp_ratio
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.attn_pdrop = attn_pdrop
        self.resid_pdrop = resid_pdrop
        self.emb_pdrop = emb_pdrop
        self.attn_qk_ln = attn_qk_ln
        self.attn_clip_qkv = attn_clip_qkv
        self.softmax_scale = softmax_scale
        self.alibi_bias_max = alibi_bias_max
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
        """Each query head has its own key and value head."""
        return self.n_heads
