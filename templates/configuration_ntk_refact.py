# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a Refact-1.6B checkpoint with scaled ALiBi slopes."""

from typing import Any

from transformers import PretrainedConfig


class NtkRefactConfig(PretrainedConfig):
    """The keys of a Refact config, and:

    Args:
        packed_projections: whether key and value share one tensor, and gate and up another, as in the
            checkpoint's current revision. In its first revision they are four tensors.
        final_norm_bias: whether ``ln_f`` has a bias, as in the first revision.
        alibi_scaling: how the slopes are scaled; None keeps the trained slopes. See ``Alibi`` in
            ntk_alibi.py for the keys.
    """

    model_type = "ntk_refact"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    def __init__(
        self,
        vocab_size: int = 49216,
        n_positions: int = 4096,
        n_embd: int = 2048,
        n_layer: int = 32,
        n_head: int = 32,
        n_inner: int | None = None,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = False,
        packed_projections: bool = True,
        final_norm_bias: bool = False,
        alibi_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.n_positions = n_positions
        self.n_embd = n_embd
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_inner = n_inner
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.packed_projections = packed_projections
        self.final_norm_bias = final_norm_bias
        self.alibi_scaling = alibi_scaling
        for computed in ("head_dim", "num_key_value_heads"):  # see below
            kwargs.pop(computed, None)
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs)

    @property
    def head_dim(self) -> int:
        """The size of a head in the cache: folded keys have 8 channels more."""
        return self.n_embd // self.n_head + 8

    @property
    def num_key_value_heads(self) -> int:
        """All query heads share one key and one value head."""
        return 1

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism divides the weights.

        Every process has the one key and value head. The gate and the other half of the MLP share a tensor
        in one of the two layouts, so what they compute is gathered.
        """
        halves = ("gate_up_proj",) if self.packed_projections else ("linear_1", "linear_3")
        return {
            "h.*.attn.q": "colwise_rep",
            "h.*.attn.c_proj": "rowwise",
            **{f"h.*.mlp.{half}": "colwise_rep" for half in halves},
            "h.*.mlp.c_proj": "rowwise_rep",
        }

    # transformers 5.19 adds an entry for embed_tokens, which this model does not have.
    base_model_tp_plan = base_model_tp_plan.setter(lambda self, _: None)
