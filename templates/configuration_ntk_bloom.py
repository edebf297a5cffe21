# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a BLOOM checkpoint with scaled ALiBi slopes."""

from .ntk_config import NtkDecoderConfig, plan_name


class NtkBloomConfig(NtkDecoderConfig):
    """The keys of a BLOOM config."""

    model_type = "ntk_bloom"
    __init__ = NtkDecoderConfig.__init__
    attribute_map = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    # The rows of the fused weight are in the order of the heads.
    base_model_tp_plan = {
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        plan_name("h.*.mlp.dense_h_to_4h"): "colwise",
        plan_name("h.*.mlp.dense_4h_to_h"): "rowwise",
    }
    defaults = {
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
    }
