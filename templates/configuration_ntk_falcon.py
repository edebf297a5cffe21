# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a Falcon-RW (Falcon with ALiBi) checkpoint with scaled slopes."""

from typing import Any

from transformers import PretrainedConfig


class NtkFalconConfig(PretrainedConfig):
    """The keys of a Falcon config, and:

    Args:
        alibi_scaling: how the slopes are scaled; None keeps the trained slopes. See ``Alibi`` in
            ntk_alibi.py for the keys.
    """

    model_type = "ntk_falcon"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 65024,
        hidden_size: int = 4544,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 71,
        num_ln_in_parallel_attn: int | None = None,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        num_kv_heads: int | None = None,
        new_decoder_architecture: bool = False,
        multi_query: bool = True,
        parallel_attn: bool = True,
        bias: bool = False,
        ffn_hidden_size: int | None = None,
        activation: str = "gelu",
        bos_token_id: int | None = 11,
        eos_token_id: Any = 11,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        alibi_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = kwargs.pop("n_embed", None) or hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_ln_in_parallel_attn = num_ln_in_parallel_attn
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.hidden_dropout = hidden_dropout
        self.attention_dropout = attention_dropout
        self.num_kv_heads = num_kv_heads or num_attention_heads
        self.new_decoder_architecture = new_decoder_architecture
        self.multi_query = multi_query
        self.parallel_attn = parallel_attn
        self.bias = bias
        self.ffn_hidden_size = ffn_hidden_size or 4 * self.hidden_size
        self.activation = activation
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
        return self.hidden_size // self.num_attention_heads + 8

    @property
    def num_key_value_heads(self) -> int:
        """The number of key and value heads; each is shared by consecutive query heads."""
        if self.new_decoder_architecture:
            return self.num_kv_heads
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism divides the weights.

        The rows of the fused weight are in the order of the heads, if each head has its own key. Otherwise
        what it computes is gathered before the heads are divided.
        """
        own_keys = self.num_key_value_heads == self.num_attention_heads
        return {
            "h.*.self_attention.query_key_value": "colwise" if own_keys else "colwise_rep",
            "h.*.self_attention.dense": "rowwise",
            "h.*.mlp.dense_h_to_4h": "colwise",
            "h.*.mlp.dense_4h_to_h": "rowwise",
        }

    # transformers 5.19 adds an entry for embed_tokens, which this model does not have.
    base_model_tp_plan = base_model_tp_plan.setter(lambda self, _: None)
