"""The backbone and the language model of a converted decoder; each family adds its layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from converter.vllm_plugin.attention import Setup
from converter.vllm_plugin.checks import check_scaling
from converter.vllm_plugin.layer import Layer
from converter.vllm_plugin.model import FAMILY, Model
from converter.vllm_plugin.templates.ntk_concave import check_float16

TOKENS = ("input_ids", "positions", "intermediate_tensors", "inputs_embeds")
compiled = support_torch_compile(dynamic_arg_dims=dict.fromkeys(TOKENS, 0))
"""Decorates a backbone: vLLM compiles its ``forward`` for any number of tokens."""


class Decoder(nn.Module):
    """The backbone. A family's subclass names its parts, and is decorated with ``compiled``."""

    family: str
    """Name of the family, whose ``Family`` has the names of the tensors."""
    layer_class: type[Layer]
    norm_name = "ln_f"
    alibi_values: torch.Tensor
    """Slopes, exponents and temperatures, from ``Alibi.on``."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config, family = vllm_config.model_config.hf_config, FAMILY[self.family]
        check_scaling(config)
        self.setup = Setup.of(vllm_config, family, config.head_dim - config.folded_channels)
        if self.setup.alibi.power is not None and torch.get_default_dtype() == torch.float16:
            check_float16(self.setup.alibi, vllm_config.model_config.max_model_len, config.score_scale)
        # A buffer, since a compiled graph cannot copy them to its device.
        values = self.setup.alibi.on(torch.get_default_device())
        self.register_buffer("alibi_values", values, persistent=False)
        self.embeddings = family.embeddings.removesuffix(".weight")
        self.layers_name = family.layers
        self.add_module(self.embeddings, VocabParallelEmbedding(config.vocab_size, config.hidden_size))
        self.start_layer, self.end_layer, layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: self.layer_class(self.setup, int(prefix.rpartition(".")[2]), prefix),
            prefix=f"{prefix}.{family.layers}",
        )
        self.add_module(family.layers, layers)
        self.add_module(self.norm_name, self.final_norm(config))
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def final_norm(self, config: Any) -> nn.Module:
        return self.layer_class.make_norm(config)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.embeddings)(input_ids)

    def prepare_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The first layer's input from the token embeddings, both [T, hidden]."""
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if get_pp_group().is_first_rank:
            if inputs_embeds is None:
                assert input_ids is not None
                inputs_embeds = self.embed_input_ids(input_ids)
            hidden_states = self.prepare_embeddings(inputs_embeds)
        else:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
        channels = self.setup.channels(self.alibi_values, positions, hidden_states.dtype)
        for layer in islice(getattr(self, self.layers_name), self.start_layer, self.end_layer):
            hidden_states = layer(hidden_states, channels)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states})
        return getattr(self, self.norm_name)(hidden_states)


class DecoderModel(Model, SupportsLoRA, SupportsPP):
    """A decoder with a head. A family's subclass has the language modeling head; heads.py has the others."""

    by_head: ClassVar[str | None] = None
    """Name of a fused projection that is stored with query, key and value of each head together."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.make_empty_intermediate_tensors = self.backbone.make_empty_intermediate_tensors

    def unpack(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if self.by_head is not None and self.by_head in name and not self.backbone.setup.as_stored:
            tensor = queries_first(tensor, self.config.num_attention_heads)
        yield name, tensor

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states [T, hidden] of the tokens of all requests, from their ids and positions [T]."""
        return self.backbone(input_ids, positions, intermediate_tensors, inputs_embeds)


class CausalLM(DecoderModel):
    """A decoder with a language modeling head."""

    def add_head(self, vllm_config: VllmConfig, prefix: str) -> None:
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(getattr(self.backbone, self.backbone.embeddings))
        self.logits_processor = LogitsProcessor(self.config.vocab_size, scale=self.logit_scale(self.config))

    @staticmethod
    def logit_scale(config: Any) -> float:  # noqa: ARG004 -- most families have none
        """A factor on the logits."""
        return 1.0

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)


def queries_first(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """All queries, keys, values, from a fused weight [heads * 3 * head size, ...] or bias, stored by head."""
    return tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def named_scale(scale: float | str | None, width: int) -> float:
    """The factor on the logits of MosaicML's models, from ``logit_scale`` in their config."""
    if scale is None:
        return 1.0
    return float(width**-0.5) if scale == "inv_sqrt_d_model" else float(scale)
