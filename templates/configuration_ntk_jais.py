# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a JAIS or BTLM checkpoint with scaled ALiBi slopes."""

from typing import Any

from transformers import PretrainedConfig


class NtkJaisConfig(PretrainedConfig):
    """JAIS' own keys, and:

    Args:
        n_inner: width of the MLP; None for 4 * ``n_embd``.
        mup_embeddings_scale: factor on the token embeddings.
        mup_output_alpha, mup_width_scale: their product is the factor on the logits.
        mup_scale_qk_dot_by_d: divide q.k by the head size instead of its square root.
        alibi_slopes: the slopes that the checkpoint stores, one a head; None for those of the formula.
        alibi_scaling: how the slopes are scaled; None keeps the trained slopes. See ``Alibi`` in
            ntk_alibi.py for the keys.
    """

    model_type = "ntk_jais"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    # No plan for tensor parallelism: transformers cannot divide weights that are stored as [inputs, outputs].

    def __init__(
        self,
        vocab_size: int = 50257,
        n_positions: int = 1024,
        n_embd: int = 768,
        n_layer: int = 12,
        n_head: int = 12,
        n_inner: int | None = None,
        resid_pdrop: float = 0.1,
        embd_pdrop: float = 0.1,
        attn_pdrop: float = 0.1,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        bos_token_id: int | None = 50256,
        eos_token_id: int | list[int] | None = 50256,
        pad_token_id: int | None = None,
        mup_width_scale: float = 1.0,
        mup_embeddings_scale: float = 1.0,
        mup_output_alpha: float = 1.0,
        mup_scale_qk_dot_by_d: bool = False,
        tie_word_embeddings: bool = True,
        alibi_slopes: list[float] | None = None,
        alibi_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.n_positions = n_positions
        self.n_embd = n_embd
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_inner = n_inner
        self.resid_pdrop = resid_pdrop
        self.embd_pdrop = embd_pdrop
        self.attn_pdrop = attn_pdrop
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.mup_width_scale = mup_width_scale
        self.mup_embeddings_scale = mup_embeddings_scale
        self.mup_output_alpha = mup_output_alpha
        self.mup_scale_qk_dot_by_d = mup_scale_qk_dot_by_d
        self.alibi_slopes = alibi_slopes
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
        return self.n_embd // self.n_head + 8

    @property
    def num_key_value_heads(self) -> int:
        """Each query head has its own key and value head."""
        return self.n_head
