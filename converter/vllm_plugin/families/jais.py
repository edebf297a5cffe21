"""JAIS and BTLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled
from converter.vllm_plugin.mlp import MLP
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


def inner_width(config: Any) -> int:
    """The MLP's width, rounded up to a multiple of the processes: that of jais-13b is odd."""
    width, processes = config.n_inner or 4 * config.n_embd, get_tensor_model_parallel_world_size()
    return int(-(-width // processes) * processes)


class JaisLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.ln_1 = layer_norm(setup.config)
        self.attn = SelfAttention(setup, layer, f"{prefix}.attn", "c_attn", "c_proj", bias=True)
        self.ln_2 = layer_norm(setup.config)
        width = inner_width(setup.config)
        self.mlp = MLP(setup, f"{prefix}.mlp", "c_fc", "c_proj", width, F.silu, bias=True, gate="c_fc2")

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), channels)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


@compiled
class JaisModel(Decoder):
    family = "jais"
    layer_class = JaisLayer
    norm_name = "ln_f"
    make_norm = staticmethod(layer_norm)

    @staticmethod
    def alibi(config: Any) -> Alibi:
        slopes = stock_slopes(config.n_head) if config.alibi_slopes is None else config.alibi_slopes
        return Alibi(slopes, config.alibi_scaling, config.num_hidden_layers)

    def prepare_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings * self.setup.config.mup_embeddings_scale


class NtkJaisForCausalLM(CausalLM):
    trunk_class = JaisModel
    packed_modules_mapping = {"c_attn": ["c_attn"]}

    @staticmethod
    def logit_scale(config: Any) -> float:
        return float(config.mup_output_alpha * config.mup_width_scale)

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if ".c_" in name and name.endswith("weight"):
            tensor = tensor.t()  # stored as [inputs, outputs]
        missing = inner_width(self.config) - (self.config.n_inner or 4 * self.config.n_embd)
        if missing and ".mlp.c_fc" in name:
            tensor = F.pad(tensor, (0, 0, 0, missing) if tensor.dim() == 2 else (0, missing))
        elif missing and name.endswith(".mlp.c_proj.weight"):
            tensor = F.pad(tensor, (0, missing))
        yield name, tensor
