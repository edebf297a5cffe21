# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a BLOOM checkpoint with scaled ALiBi slopes."""

from typing import Any

from transformers import PretrainedConfig


class NtkBloomConfig(PretrainedConfig):
    """The keys of a BLOOM config, and:

    Args:
        alibi_scaling: how the slopes are scaled; None keeps the trained slopes. See ``Alibi`` in
            ntk_alibi.py for the keys.
    """

    model_type = "ntk_bloom"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    # The rows of the fused weight are in the order of the heads.
    base_model_tp_plan = {
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }

    def __init__(
        self,
        vocab_size: int = 250880,
        hidden_size: int = 64,
        n_layer: int = 2,
        n_head: int = 8,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        bos_token_id: int | None = 1,
        eos_token_id: Any = 2,
        pad_token_id: int | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        tie_word_embeddings: bool = True,
        alibi_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = kwargs.pop("n_embed", None) or hidden_size
        self.n_layer = n_layer
        self.n_head = n_head
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.hidden_dropout = hidden_dropout
        self.attention_dropout = attention_dropout
        self.alibi_scaling = alibi_scaling
        for computed in ("head_dim", "num_key_value_heads"):  # see below
            kwargs.pop(computed, None)
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    @property
    def head_dim(self) -> int:
        """The size of a head in the cache: folded keys have 8 channels more."""
        return self.hidden_size // self.n_head + 8

    @property
    def num_key_value_heads(self) -> int:
        """Each query head has its own key and value head."""
        return self.n_head
