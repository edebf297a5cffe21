# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of an AlBERTurin checkpoint with scaled ALiBi slopes."""

from .ntk_config import NtkConfig


class NtkAlberturinConfig(NtkConfig):
    """The keys of an AlBERTurin config that the model reads, and:

    Args:
        add_pooling_layer: always False; the checkpoints have no pooler.
    """

    model_type = "ntk_alberturin"
    __init__ = NtkConfig.__init__
    defaults = {
        "vocab_size": 32768,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_factor": 3.0,
        "max_position_embeddings": 1024,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
        "classifier_dropout": None,
        "add_pooling_layer": False,
        "tie_word_embeddings": False,
    }
