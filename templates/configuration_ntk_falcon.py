# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a Falcon-RW (Falcon with ALiBi) checkpoint with scaled slopes."""

from .ntk_config import NtkDecoderConfig, plan_name


class NtkFalconConfig(NtkDecoderConfig):
    """The keys of a Falcon config."""

    model_type = "ntk_falcon"
    __init__ = NtkDecoderConfig.__init__
    # The rows of the fused weight are in the order of the heads.
    base_model_tp_plan = {
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        plan_name("h.*.mlp.dense_h_to_4h"): "colwise",
        plan_name("h.*.mlp.dense_4h_to_h"): "rowwise",
    }
    defaults = {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "use_cache": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias": False,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "bos_token_id": 11,
        "eos_token_id": 11,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }
