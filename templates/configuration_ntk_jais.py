# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a JAIS or BTLM checkpoint with scaled ALiBi slopes."""

from .ntk_config import NtkDecoderConfig


class NtkJaisConfig(NtkDecoderConfig):
    """JAIS' own keys, and:

    Args:
        n_inner: width of the MLP; None for 4 * ``n_embd``.
        mup_embeddings_scale: factor on the token embeddings.
        mup_output_alpha, mup_width_scale: their product is the factor on the logits.
        mup_scale_qk_dot_by_d: divide q.k by the head size instead of its square root.
        alibi_slopes: the slopes that the checkpoint stores, one a head; None for those of the formula.
    """

    model_type = "ntk_jais"
    __init__ = NtkDecoderConfig.__init__
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    # No plan for tensor parallelism: transformers cannot divide weights that are stored as [inputs, outputs].

    defaults = {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "pad_token_id": None,
        "mup_width_scale": 1.0,
        "mup_embeddings_scale": 1.0,
        "mup_output_alpha": 1.0,
        "mup_scale_qk_dot_by_d": False,
        "tie_word_embeddings": True,
        "alibi_slopes": None,
    }

    @property
    def score_scale(self) -> float:
        """The factor on q.k: 1 / head size under muP, else 1 / sqrt(head size)."""
        return (self.n_embd // self.n_head) ** (-1.0 if self.mup_scale_qk_dot_by_d else -0.5)
