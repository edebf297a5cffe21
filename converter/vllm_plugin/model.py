"""What all models share: a backbone and a head, under the names of the checkpoint.

vLLM asks for the names ``embed_input_ids`` and ``load_weights``, and for ``pooler`` or ``compute_logits``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix

from converter.families import FAMILIES
from converter.families.family import IGNORED_TENSORS
from converter.vllm_plugin.checks import check_weights

FAMILY = {family.name: family for family in FAMILIES}
HEADS = ("lm_head.", "score.", "classifier.", "qa_outputs.", "cls.", "linear.")
"""What the names of the tensors of heads begin with."""


class Model(nn.Module, SupportsQuant):
    """A backbone with a head, which a subclass adds."""

    backbone_class: Any
    """A family's ``Decoder`` or ``Encoder``, which has the name of the family."""
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    """Name of a fused projection -> the stored ones that it is made of, which is how adapters name them.

    Without an entry, vLLM leaves an adapter of the projection out, and only warns.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        check_weights(self.config)
        self.family = FAMILY[self.backbone_class.family]
        backbone = self.backbone_class(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, self.family.base_prefix)
        )
        self.add_module(self.family.base_prefix, backbone)
        self.add_head(vllm_config, prefix)

    def add_head(self, vllm_config: VllmConfig, prefix: str) -> None:
        """Adds the head, and what vLLM asks of it."""
        raise NotImplementedError

    def unpack(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors that vLLM's layers want for one that the checkpoint stores.

        Fused projections must be all queries, all keys, all values. A part of one is marked by
        ``part``.
        """
        yield name, tensor

    @property
    def backbone(self) -> Any:
        return getattr(self, self.family.base_prefix)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.backbone.embed_input_ids(input_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint, whose tensors may lack the backbone's prefix, and may have other heads too."""
        return AutoWeightsLoader(self).load_weights(
            part
            for name, tensor in weights
            if not self.ignored_tensors.search(name) and self.has(self.full_name(name))
            for part in self.unpack(self.full_name(name), tensor)
        )

    @property
    def ignored_tensors(self) -> re.Pattern[str]:
        """Names of stored buffers that no computation uses."""
        return re.compile("|".join((IGNORED_TENSORS, *self.family.ignored_tensors)))

    def full_name(self, name: str) -> str:
        """A tensor's name with the backbone's prefix."""
        prefix = f"{self.family.base_prefix}."
        return name if name.startswith((prefix, *HEADS)) else prefix + name

    def has(self, name: str) -> bool:
        """Whether a tensor is of the backbone, or of the head that this model has."""
        return not name.startswith(HEADS) or hasattr(self, name.partition(".")[0])


def part(tensor: torch.Tensor, shard: str) -> torch.Tensor:
    """The tensor, marked for vLLM as one part of a fused weight: "q", "k" or "v"."""
    tensor = tensor.detach()  # the mark is the tensor's own
    tensor.shard_id = shard  # type: ignore[attr-defined]
    return tensor
