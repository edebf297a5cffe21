# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Configuration of a JinaBERT checkpoint with scaled ALiBi slopes."""

from typing import Any

from transformers import PretrainedConfig


class NtkJinaBertConfig(PretrainedConfig):
    """The keys of a JinaBERT config, and:

    Args:
        feed_forward_type: ``geglu``, ``reglu`` or ``original`` (no gate, ``hidden_act``).
        emb_pooler: None or ``mean``; the embedding of a text is a mean in both cases.
        qk_post_norm: use the layout of jina-bert-v2-qk-post-norm, which normalises queries and keys and
            arranges the norms and the feed-forward layer differently.
        projection_dim: size of a token's vector in a ColBERT; other models have no projection.
        add_pooling_layer: whether the checkpoint has a pooler; None means that each head decides.
        alibi_scaling: how the slopes are scaled; None keeps the trained slopes. See ``Alibi`` in
            ntk_alibi.py for the keys.
    """

    model_type = "ntk_jina_bert"

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        hidden_act: str = "gelu",
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-12,
        pad_token_id: int | None = 0,
        classifier_dropout: float | None = None,
        feed_forward_type: str = "original",
        emb_pooler: str | None = None,
        qk_post_norm: bool = False,
        projection_dim: int | None = None,
        add_pooling_layer: bool | None = None,
        tie_word_embeddings: bool = True,
        alibi_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        self.classifier_dropout = classifier_dropout
        self.feed_forward_type = feed_forward_type
        self.emb_pooler = emb_pooler
        self.qk_post_norm = qk_post_norm
        self.projection_dim = projection_dim
        self.add_pooling_layer = add_pooling_layer
        self.alibi_scaling = alibi_scaling
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs)


class NtkJinaBertForColBERTConfig(NtkJinaBertConfig):
    """The configuration of a ColBERT, with the same keys.

    transformers 5 remembers which class ``AutoModel`` loads for a config class. Without this class, another
    JinaBERT in a folder of the same name would be loaded as a ColBERT.
    """
