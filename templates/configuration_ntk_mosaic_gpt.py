# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a MosaicGPT checkpoint with scaled ALiBi slopes."""

from .ntk_config import NtkDecoderConfig


class NtkMosaicGptConfig(NtkDecoderConfig):
    """The keys of a MosaicGPT config."""

    model_type = "ntk_mosaic_gpt"
    __init__ = NtkDecoderConfig.__init__
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
    defaults = {
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "mlp_ratio": 4,
        "max_seq_len": 2048,
        "vocab_size": 50368,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "emb_pdrop": 0.0,
        "attn_qk_ln": False,
        "attn_clip_qkv": None,
        "softmax_scale": None,
        "alibi_bias_max": 8,
        "logit_scale": None,
        "no_bias": False,
        "use_cache": False,
        "initializer_range": 0.02,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }

    @property
    def score_scale(self) -> float:
        """The factor on q.k: ``softmax_scale``, or 1 / sqrt(head size)."""
        given = self.softmax_scale
        return (self.d_model // self.n_heads) ** -0.5 if given is None else float(given)
