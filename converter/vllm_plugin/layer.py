"""The layer and the MLP that families share, under the names of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class Layer(nn.Module):
    """Attention, then MLP: each reads a norm of the hidden states, and is added to them."""

    names: tuple[str, str, str, str]
    """The checkpoint's names of the first norm, attention, the second norm and the MLP."""
    make_norm: Callable[[Any], nn.Module] = staticmethod(layer_norm)

    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        first, attention, second, mlp = self.names
        self.add_module(first, self.make_norm(setup.config))
        self.add_module(attention, self.make_attention(setup, layer, f"{prefix}.{attention}"))
        self.add_module(second, self.make_norm(setup.config))
        self.add_module(mlp, self.make_mlp(setup, f"{prefix}.{mlp}"))

    def make_attention(self, setup: Setup, layer: int, prefix: str) -> SelfAttention:
        raise NotImplementedError

    def make_mlp(self, setup: Setup, prefix: str) -> MLP:
        raise NotImplementedError

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        """From and to [T, hidden]."""
        first, attention, second, mlp = self.names
        attended = getattr(self, attention)(getattr(self, first)(hidden_states), channels)
        hidden_states = hidden_states + attended
        return hidden_states + getattr(self, mlp)(getattr(self, second)(hidden_states))


class MLP(nn.Module):
    """``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))``.

    ``up``, ``down`` and ``gate`` are the stored names of the projections, and ``width`` is between them.
    """

    def __init__(
        self,
        setup: Setup,
        prefix: str,
        up: str,
        down: str,
        width: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        bias: bool,
        gate: str | None = None,
    ):
        super().__init__()
        self.up, self.down, self.gate, self.activation = up, down, gate, activation
        sizes = {up: (setup.config.hidden_size, width), down: (width, setup.config.hidden_size)}
        if gate is not None:
            sizes[gate] = sizes[up]
        for name, size in sizes.items():
            layer = RowParallelLinear if name == down else ColumnParallelLinear
            quant = setup.quant_config
            self.add_module(name, layer(*size, bias=bias, quant_config=quant, prefix=f"{prefix}.{name}"))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From and to [T, hidden]."""
        inner, _ = getattr(self, self.up)(hidden_states)
        if self.gate is None:
            inner = self.activation(inner)
        else:
            gate, _ = getattr(self, self.gate)(hidden_states)
            inner = self.activation(gate) * inner
        output, _ = getattr(self, self.down)(inner)
        return output


def gelu(states: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, 0.5 x (1 + tanh(u)), of any shape and dtype."""
    if not torch.compiler.is_compiling():
        return F.gelu(states, approximate="tanh")
    # The same function, x * sigmoid(2u). On a CPU, a compiled tanh takes three times as long.
    return states * torch.sigmoid(1.5957691216057308 * (states + 0.044715 * states**3))
