# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a Baichuan-13B checkpoint with scaled ALiBi slopes."""

from .ntk_config import NtkDecoderConfig


class NtkBaichuanConfig(NtkDecoderConfig):
    """The keys of a Baichuan config, and:

    Args:
        norm_head: whether logits are computed with lm_head's rows at unit length, as in Baichuan2.
    """

    model_type = "ntk_baichuan"
    __init__ = NtkDecoderConfig.__init__
    # W_pack has all queries before all keys, so what it computes is gathered before the heads are divided.
    base_model_tp_plan = {
        "layers.*.self_attn.W_pack": "colwise_rep",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    defaults = {
        "vocab_size": 64000,
        "hidden_size": 5120,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "model_max_length": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "z_loss_weight": 0.0,
        "norm_head": False,
    }
