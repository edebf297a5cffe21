"""JAIS and BTLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from vllm.distributed import get_tensor_model_parallel_world_size

from converter.vllm_plugin.attention import SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled
from converter.vllm_plugin.heads import without_logits
from converter.vllm_plugin.layer import MLP, Layer


def inner_width(config: Any) -> int:
    """The MLP's width, rounded up to a multiple of the processes: that of jais-13b is odd."""
    width, processes = config.n_inner or 4 * config.n_embd, get_tensor_model_parallel_world_size()
    return int(-(-width // processes) * processes)


class JaisLayer(Layer):
    names = ("ln_1", "attn", "ln_2", "mlp")

    def make_attention(self, setup: Setup, layer: int, prefix: str) -> SelfAttention:
        return SelfAttention(setup, layer, prefix, "c_attn", "c_proj", bias=True)

    def make_mlp(self, setup: Setup, prefix: str) -> MLP:
        width = inner_width(setup.config)
        return MLP(setup, prefix, "c_fc", "c_proj", width, F.silu, bias=True, gate="c_fc2")


@compiled
class JaisModel(Decoder):
    family = "jais"
    layer_class = JaisLayer

    def prepare_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings * self.setup.config.mup_embeddings_scale


class NtkJaisForCausalLM(CausalLM):
    backbone_class = JaisModel
    packed_modules_mapping = {"c_attn": ["c_attn"]}

    @staticmethod
    def logit_scale(config: Any) -> float:
        return float(config.mup_output_alpha * config.mup_width_scale)

    def unpack(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if ".c_" in name and name.endswith("weight"):
            tensor = tensor.t()  # stored as [inputs, outputs]
        missing = inner_width(self.config) - (self.config.n_inner or 4 * self.config.n_embd)
        if missing and ".mlp.c_fc" in name:
            tensor = F.pad(tensor, (0, 0, 0, missing) if tensor.dim() == 2 else (0, missing))
        elif missing and name.endswith(".mlp.c_proj.weight"):
            tensor = F.pad(tensor, (0, missing))
        yield name, tensor


NtkJaisModel, NtkJaisForSequenceClassification, NtkJaisForTokenClassification = without_logits(
    NtkJaisForCausalLM
)
