"""The backbone and the language model of a converted decoder; each family adds its layers.

Tensors have the names of the checkpoint. vLLM asks for the names ``embed_input_ids``, ``compute_logits`` and
``load_weights``.
"""

from __future__ import annotations

import re
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
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP, SupportsQuant
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from converter.families import FAMILIES
from converter.families.family import UNREAD
from converter.vllm_plugin.attention import Setup
from converter.vllm_plugin.checks import check_weights
from converter.vllm_plugin.layer import Layer
from converter.vllm_plugin.templates.ntk_alibi import CHANNELS, Alibi

FAMILY = {family.name: family for family in FAMILIES}
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
        scale = family.bias_scale(config.head_dim - CHANNELS)
        slopes = [scale * slope for slope in family.stock_slopes(config.to_dict())]
        self.setup = Setup(vllm_config, Alibi(slopes, config.alibi_scaling, config.num_hidden_layers))
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


class CausalLM(nn.Module, SupportsLoRA, SupportsPP, SupportsQuant):
    """A backbone with a language modeling head."""

    backbone_class: type[Decoder]
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    """Name of a fused projection -> the stored ones that it is made of, which is how adapters name them.

    Without an entry, vLLM leaves an adapter of the projection out, and only warns.
    """
    by_head: ClassVar[str | None] = None
    """Name of a fused projection that is stored with query, key and value of each head together."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        check_weights(self.config)
        self.family = FAMILY[self.backbone_class.family]
        backbone = self.backbone_class(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, self.family.base_prefix)
        )
        self.add_module(self.family.base_prefix, backbone)
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(getattr(backbone, backbone.embeddings))
        self.logits_processor = LogitsProcessor(self.config.vocab_size, scale=self.logit_scale(self.config))
        self.make_empty_intermediate_tensors = backbone.make_empty_intermediate_tensors

    @staticmethod
    def logit_scale(config: Any) -> float:  # noqa: ARG004 -- most families have none
        """A factor on the logits."""
        return 1.0

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors that vLLM's layers want for one that the checkpoint stores.

        Fused projections must be all queries, all keys, all values. A part of one is marked by
        ``part``.
        """
        if self.by_head is not None and self.by_head in name and not self.backbone.setup.as_stored:
            tensor = queries_first(tensor, self.config.num_attention_heads)
        yield name, tensor

    @property
    def backbone(self) -> Decoder:
        backbone: Decoder = getattr(self, self.family.base_prefix)
        return backbone

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.backbone.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states [T, hidden] of the tokens of all requests, from their ids and positions [T]."""
        return self.backbone(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint, whose tensors may lack the backbone's prefix."""
        return AutoWeightsLoader(self).load_weights(
            part
            for name, tensor in weights
            if not self.unread.search(name)
            for part in self.stored(self.full_name(name), tensor)
        )

    @property
    def unread(self) -> re.Pattern[str]:
        """Names of stored buffers that no computation uses."""
        return re.compile("|".join((UNREAD, *self.family.unread)))

    def full_name(self, name: str) -> str:
        """A tensor's name with the backbone's prefix."""
        prefix = f"{self.family.base_prefix}."
        return name if name.startswith((prefix, "lm_head.")) else prefix + name


def queries_first(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """All queries, all keys, all values, from a fused weight or bias with the three of each head together.

    Args:
        tensor: [heads * 3 * head size, ...].
        heads: number of heads.
    """
    return tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def part(tensor: torch.Tensor, shard: str) -> torch.Tensor:
    """The tensor, marked for vLLM as one part of a fused weight: "q", "k" or "v"."""
    tensor = tensor.detach()  # the mark is the tensor's own
    tensor.shard_id = shard  # type: ignore[attr-defined]
    return tensor


def named_scale(scale: float | str | None, width: int) -> float:
    """The factor on the logits of MosaicML's models, from ``logit_scale`` in their config."""
    if scale is None:
        return 1.0
    return float(width**-0.5) if scale == "inv_sqrt_d_model" else float(scale)
