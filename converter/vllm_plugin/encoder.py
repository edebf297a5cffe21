"""The backbone of a converted encoder, its layers and its heads; each family says which layers it has.

It is BERT's skeleton, as in templates/ntk_encoder.py. Texts stand one after another, without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import get_activation
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.sequence import IntermediateTensors

from converter.vllm_plugin.attention import Setup, normed
from converter.vllm_plugin.checks import check_whole_texts
from converter.vllm_plugin.model import FAMILY, Model
from converter.vllm_plugin.symmetric import EncoderAttention
from converter.vllm_plugin.templates.ntk_encoder import layer_norm

SHIFT = 30
"""The bit of a token id that says its type, where vLLM's own encoders have it too.

What goes into a compiled backbone must stay in its place, and ids are there already."""
compiled = support_torch_compile(dynamic_arg_dims={"input_ids": 0, "inputs_embeds": 0})
"""Decorates a backbone: vLLM compiles its ``forward`` for any number of tokens."""


class Embeddings(nn.Module):
    """Word and token type embeddings, normalised; attention adds the positions."""

    def __init__(self, config: Any):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = layer_norm(config)

    def forward(self, words: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """The first layer's input [T, hidden] from word embeddings [T, hidden] and types [T] or None."""
        table = self.token_type_embeddings
        return self.LayerNorm(words + (table.weight[0] if types is None else table(types)))


class Output(nn.Module):
    """A projection, the residual, and the norm after both."""

    def __init__(self, setup: Setup, inputs: int, prefix: str):
        super().__init__()
        self.dense = RowParallelLinear(
            inputs, setup.config.hidden_size, quant_config=setup.quant_config, prefix=f"{prefix}.dense"
        )
        self.LayerNorm = layer_norm(setup.config)

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        output, _ = self.dense(states)
        return self.LayerNorm(output + residual)


class SelfAttention(nn.Module):
    """Queries, keys and values of this process's heads, and their attention.

    ``fused`` names the projection, as stored or as ``Model.unpack`` does. With ``norms``, queries and keys
    are normalised over the whole width, before the split into heads.
    """

    def __init__(self, setup: Setup, layer: int, fused: str, prefix: str, *, norms: bool = False):
        super().__init__()
        width, heads = setup.config.hidden_size, setup.config.num_attention_heads
        self.fused = fused
        projection = QKVParallelLinear(
            width, width // heads, heads, quant_config=setup.quant_config, prefix=f"{prefix}.{fused}"
        )
        self.add_module(fused, projection)
        if norms:
            self.layer_norm_q, self.layer_norm_k = layer_norm(setup.config), layer_norm(setup.config)
        self.attention = EncoderAttention(setup, layer, projection.num_heads, prefix)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From [T, hidden] to [T, this process's part]."""
        fused, _ = getattr(self, self.fused)(hidden_states)
        query, key, value = fused.chunk(3, dim=-1)
        if hasattr(self, "layer_norm_q"):
            query, key = normed(self.layer_norm_q, query, 1), normed(self.layer_norm_k, key, 1)
        return self.attention(query, key, value)


class AttentionBlock(nn.Module):
    """Attention with its output projection and norm, under BERT's names."""

    def __init__(self, setup: Setup, layer: int, fused: str, prefix: str, *, norms: bool = False):
        super().__init__()
        self.self = SelfAttention(setup, layer, fused, f"{prefix}.self", norms=norms)
        self.output = Output(setup, setup.config.hidden_size, f"{prefix}.output")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output(self.self(hidden_states), hidden_states)


class GatedMLP(nn.Module):
    """wo(act(first half of gated_layers) * second half), the residual, and the norm after both."""

    def __init__(self, setup: Setup, activation: str, prefix: str):
        super().__init__()
        self.gated_layers = gated(setup, f"{prefix}.gated_layers")
        self.act = get_activation(activation)
        self.wo = RowParallelLinear(
            setup.config.intermediate_size,
            setup.config.hidden_size,
            quant_config=setup.quant_config,
            prefix=f"{prefix}.wo",
        )
        self.layernorm = layer_norm(setup.config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        fused, _ = self.gated_layers(hidden_states)
        gate, up = fused.chunk(2, dim=-1)
        output, _ = self.wo(self.act(gate) * up)
        return self.layernorm(output + hidden_states)


def gated(setup: Setup, prefix: str) -> MergedColumnParallelLinear:
    """A projection to two halves of which each process has its part; stored as one weight."""
    width, inner = setup.config.hidden_size, setup.config.intermediate_size
    return MergedColumnParallelLinear(
        width, [inner, inner], bias=False, quant_config=setup.quant_config, prefix=prefix
    )


def projection(setup: Setup, prefix: str, *, bias: bool) -> ColumnParallelLinear:
    """The first projection of a feed-forward layer without a gate."""
    width, inner = setup.config.hidden_size, setup.config.intermediate_size
    return ColumnParallelLinear(width, inner, bias=bias, quant_config=setup.quant_config, prefix=prefix)


class Layers(nn.Module):
    """The stack, under BERT's name for it."""

    def __init__(self, setup: Setup, make_layer: Callable[[Setup, int, str], nn.Module], prefix: str):
        super().__init__()
        count = setup.config.num_hidden_layers
        self.layer = nn.ModuleList([make_layer(setup, n, f"{prefix}.layer.{n}") for n in range(count)])


class Encoder(nn.Module):
    """The backbone. A family's subclass names its parts, and is decorated with ``compiled``."""

    family: str
    """Name of the family, whose ``Family`` has the slopes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        check_whole_texts(vllm_config)
        config = vllm_config.model_config.hf_config
        head_size = config.hidden_size // config.num_attention_heads
        self.setup = Setup.of(vllm_config, FAMILY[self.family], head_size)
        self.embeddings = Embeddings(config)
        self.encoder = Layers(self.setup, self.make_layer, f"{prefix}.encoder")

    def make_layer(self, setup: Setup, layer: int, prefix: str) -> nn.Module:
        """A layer, from and to hidden states [T, hidden]."""
        raise NotImplementedError

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embeddings.word_embeddings(input_ids)

    def forward(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        types = None
        if inputs_embeds is None:
            assert input_ids is not None
            types = input_ids >> SHIFT & 1
            inputs_embeds = self.embed_input_ids(input_ids & ~(1 << SHIFT))
        hidden_states = self.embeddings(inputs_embeds, types)
        for layer in self.encoder.layer:
            hidden_states = layer(hidden_states)
        return hidden_states


class EncoderModel(Model):
    """An encoder with a head, which heads.py adds."""

    attn_type = "encoder_only"
    default_seq_pooling_type = "MEAN"

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,  # noqa: ARG002 -- vLLM passes both
        intermediate_tensors: IntermediateTensors | None = None,  # noqa: ARG002
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of all texts, from their ids [T], and from types if they are pairs."""
        if token_type_ids is not None:
            assert input_ids is not None
            input_ids[: len(token_type_ids)].bitwise_or_(token_type_ids << SHIFT)
        return self.backbone(input_ids, inputs_embeds)

    def has(self, name: str) -> bool:
        return super().has(name) and (".pooler." not in name or hasattr(self.backbone, "pooler"))
