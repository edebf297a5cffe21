"""Heads whose results vLLM's poolers give: embeddings, and classes of texts and of tokens."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.seqwise import (
    EmbeddingPoolerHead,
    SequencePooler,
    get_seq_pooling_method,
    pooler_for_classify,
)
from vllm.model_executor.layers.pooler.tokwise import pooler_for_token_classify
from vllm.model_executor.models.interfaces import SupportsCrossEncoding

from converter.vllm_plugin.model import Model


class Embedding(Model):
    """Vectors of texts and tokens, pooled as modules.json or the user says."""

    is_pooling_model = True

    def add_head(self, vllm_config: VllmConfig, prefix: str) -> None:  # noqa: ARG002
        self.pooler = DispatchPooler.for_embedding(vllm_config.model_config.pooler_config)


class TokenClassifier(Model):
    is_pooling_model = True

    def add_head(self, vllm_config: VllmConfig, prefix: str) -> None:  # noqa: ARG002
        model_config, sizes = vllm_config.model_config, (self.config.hidden_size, self.config.num_labels)
        self.classifier = nn.Linear(*sizes, dtype=model_config.head_dtype)
        self.pooler = pooler_for_token_classify(model_config.pooler_config, classifier=self.classifier)


class LastTokenClassifier(Model, SupportsCrossEncoding):
    """Classes of texts, from their last token, and scores of pairs: the head of decoders."""

    is_pooling_model = True

    def add_head(self, vllm_config: VllmConfig, prefix: str) -> None:  # noqa: ARG002
        sizes = self.config.hidden_size, self.config.num_labels
        self.score = nn.Linear(*sizes, bias=False, dtype=vllm_config.model_config.head_dtype)
        self.pooler = classes(vllm_config, get_seq_pooling_method("LAST"), self.score)


class FirstTokenClassifier(Model, SupportsCrossEncoding):
    """Classes of texts, from their pooled first token, and scores of pairs: the head of encoders."""

    is_pooling_model = True

    def add_head(self, vllm_config: VllmConfig, prefix: str) -> None:  # noqa: ARG002
        width, dtype = self.config.hidden_size, vllm_config.model_config.head_dtype
        self.backbone.pooler = PoolerLayer(width, dtype)
        self.classifier = nn.Linear(width, self.config.num_labels, dtype=dtype)
        head = EmbeddingPoolerHead(self.backbone.pooler, dtype)
        pooled = SequencePooler(get_seq_pooling_method("CLS"), head)
        self.pooler = classes(vllm_config, pooled, self.classifier)


class PoolerLayer(nn.Module):
    """tanh of a projection of each text's first token [texts, hidden], under BERT's name."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.dense = nn.Linear(width, width, dtype=dtype)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(first))


def classes(vllm_config: VllmConfig, pooling: nn.Module, classifier: nn.Module) -> DispatchPooler:
    """A pooler of classes only: this classifier cannot read tokens that were not pooled."""
    config = vllm_config.model_config.pooler_config
    return DispatchPooler({"classify": pooler_for_classify(config, pooling=pooling, classifier=classifier)})


def without_logits(language_model: type[Model]) -> tuple[type, type, type]:
    """The other classes of a decoder's family: embeddings, and classes of texts and of tokens."""
    name = language_model.__name__.removesuffix("ForCausalLM")
    heads = {
        "Model": Embedding,
        "ForSequenceClassification": LastTokenClassifier,
        "ForTokenClassification": TokenClassifier,
    }
    # vLLM takes a class with this method for one that generates text.
    members = {"compute_logits": None, "__module__": language_model.__module__}
    first, second, third = (type(name + end, (head, language_model), members) for end, head in heads.items())
    return first, second, third
