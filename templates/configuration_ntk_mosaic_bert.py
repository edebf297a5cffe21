# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a MosaicBERT (or DNABERT-2) checkpoint with scaled ALiBi slopes."""

from .ntk_config import NtkConfig


class NtkMosaicBertConfig(NtkConfig):
    """The keys of a MosaicBERT config, and:

    Args:
        add_pooling_layer: whether the checkpoint has a pooler; None means that each head decides.
    """

    model_type = "ntk_mosaic_bert"
    __init__ = NtkConfig.__init__
    defaults = {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "classifier_dropout": None,
        "add_pooling_layer": None,
        "tie_word_embeddings": True,
    }
