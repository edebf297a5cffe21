"""ALiBi on vLLM's attention, and the self-attention that all families share.

Static slopes are the kernel's ``alibi_slopes``, where the backend honours them. Slopes that depend on the
position are folded into the query, and positions into the key, as in templates/ntk_alibi.py; to a backend
that is plain causal attention with larger heads.

Shapes below: T tokens of all requests together, H this process's query heads, D head size, C folded channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.v1.attention.selector import get_attn_backend

from converter.families.family import Family
from converter.vllm_plugin.checks import check_backend, check_cache, head_size, is_folded
from converter.vllm_plugin.templates.ntk_alibi import Alibi, key_channels, query_channels
from converter.vllm_plugin.templates.ntk_concave import concave_key_channels, concave_query_channels


class Channels(NamedTuple):
    """What a forward pass appends to queries and keys in every layer, and multiplies queries by."""

    queries: tuple[torch.Tensor, ...] | None
    """The slopes, [T, H, C]: one for all layers or one each; None if the kernel has them."""
    keys: torch.Tensor | None
    """The positions, [T, 1, C]; None if the kernel has the slopes."""
    factors: tuple[torch.Tensor, ...] | None
    """float32 [T or 1, H, 1], like the slopes; None without temperatures."""


@dataclass(frozen=True)
class Setup:
    """What the layers of a model are built from."""

    vllm_config: VllmConfig
    alibi: Alibi

    @classmethod
    def of(cls, vllm_config: VllmConfig, family: Family, head_size: int) -> Setup:
        """The slopes of a converted config, scaled as it says."""
        config, scale = vllm_config.model_config.hf_config, family.bias_scale(head_size)
        slopes = [scale * slope for slope in family.stock_slopes(config.to_dict())]
        return cls(vllm_config, Alibi(slopes, config.alibi_scaling, config.num_hidden_layers))

    @property
    def config(self) -> Any:
        return self.vllm_config.model_config.hf_config

    @property
    def quant_config(self) -> Any:
        return self.vllm_config.quant_config

    @property
    def as_stored(self) -> bool:
        """Whether fused projections keep the checkpoint's order, which is that of adapters.

        Without adapters, all queries come first, then all keys, all values: nothing is copied to attend.
        """
        return self.vllm_config.lora_config is not None

    @property
    def own_heads(self) -> slice:
        """This process's query heads; vLLM has checked that they can be divided."""
        heads = self.config.num_attention_heads // get_tensor_model_parallel_world_size()
        return slice(get_tensor_model_parallel_rank() * heads, (get_tensor_model_parallel_rank() + 1) * heads)

    def channels(self, values: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Channels:
        """The channels of tokens at these positions, int64 [T]; ``values`` are from ``Alibi.on``."""
        factors = self.alibi.query_factors(positions[None], values=values)
        if factors is not None:
            factors = factors[..., self.own_heads, :][:, 0].transpose(1, 2)[..., None].unbind()
        if not is_folded(self.config):
            return Channels(None, None, factors)
        scale = self.config.score_scale
        if self.alibi.power is None:
            queries = query_channels(self.alibi.slopes_at(positions[None], values=values), scale)
            keys = key_channels(positions[None], None)
        else:
            queries = concave_query_channels(self.alibi, positions[None], scale, dtype, values)
            keys = concave_key_channels(self.alibi, positions[None], None, dtype)
        queries = queries[:, 0, self.own_heads].transpose(1, 2)
        return Channels(queries.to(dtype).unbind(), keys[0].transpose(0, 1).to(dtype), factors)


class AlibiAttention(nn.Module):
    """Causal attention with ALiBi over vLLM's cache, of this process's query heads and key heads."""

    def __init__(self, setup: Setup, layer: int, heads: int, kv_heads: int, prefix: str):
        super().__init__()
        cache_config = setup.vllm_config.cache_config
        dtype = cache_config.cache_dtype if cache_config is not None else "auto"
        self.heads, self.kv_heads = heads, kv_heads
        self.row = layer if len(setup.alibi.slopes) > 1 else 0
        self.size = setup.config.head_dim - setup.config.folded_channels
        self.folded = is_folded(setup.config)
        self.padded = head_size(setup.config)
        backend = get_attn_backend(self.padded, torch.get_default_dtype(), dtype)
        check_backend(backend.get_name(), self.folded)
        self.attn = Attention(
            heads,
            self.padded,
            setup.config.score_scale,
            num_kv_heads=kv_heads,
            alibi_slopes=None if self.folded else setup.alibi.slopes[self.row][setup.own_heads],
            cache_config=cache_config,
            quant_config=setup.quant_config,
            prefix=f"{prefix}.attn",
            attn_backend=backend,
        )
        check_cache(self.attn.kv_cache_dtype, self.folded)  # a quantised checkpoint can choose it too

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, channels: Channels
    ) -> torch.Tensor:
        """The heads' outputs, [T, H * D], as the query; key and value may have fewer heads (grouped)."""
        if channels.factors is not None:
            states = query.unflatten(-1, (self.heads, self.size)) * channels.factors[self.row]
            query = states.to(query.dtype).flatten(-2)
        if self.padded == self.size:
            output: torch.Tensor = self.attn(query, key, value)
            return output
        query = self.pad(query, self.heads, None if channels.queries is None else channels.queries[self.row])
        key = self.pad(key, self.kv_heads, channels.keys)
        output = self.attn(query, key, self.pad(value, self.kv_heads, None))
        return output.unflatten(-1, (self.heads, self.padded))[..., : self.size].flatten(-2)

    def pad(self, states: torch.Tensor, heads: int, channels: torch.Tensor | None) -> torch.Tensor:
        """Appends channels [T, heads or 1, C], and zeros up to the backend's head size."""
        states = states.unflatten(-1, (heads, self.size))
        if channels is not None:
            states = torch.cat([states, channels.expand(-1, heads, -1)], dim=-1)
        return F.pad(states, (0, self.padded - states.shape[-1])).flatten(-2)


class SelfAttention(nn.Module):
    """The projections around ``AlibiAttention``.

    Each process has its heads of the fused projection. Its outputs are all queries, all keys, all values, or
    else query, key and value of each head together (``by_head``). ``fused`` and ``output`` are the stored
    names of the projections, ``norms`` are over all queries and over all keys, stored as ``q_ln`` and
    ``k_ln``, and ``clip`` bounds queries, keys and values.
    """

    def __init__(
        self,
        setup: Setup,
        layer: int,
        prefix: str,
        fused: str,
        output: str,
        *,
        bias: bool,
        by_head: bool = False,
        norms: tuple[nn.Module, nn.Module] | None = None,
        clip: float | None = None,
    ):
        super().__init__()
        config = setup.config
        size = config.head_dim - config.folded_channels
        self.fused, self.output, self.by_head, self.clip = fused, output, by_head, clip
        options = {"bias": bias, "quant_config": setup.quant_config, "prefix": f"{prefix}.{fused}"}
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if by_head:
            projection = ColumnParallelLinear(config.hidden_size, 3 * heads * size, **options)
            own = own_kv = heads // get_tensor_model_parallel_world_size()
        else:
            projection = QKVParallelLinear(config.hidden_size, size, heads, kv_heads, **options)
            own, own_kv = projection.num_heads, projection.num_kv_heads
            self.key_replicas = projection.num_kv_head_replicas
        self.add_module(fused, projection)
        self.add_module(
            output,
            RowParallelLinear(
                heads * size,
                config.hidden_size,
                bias=bias,
                quant_config=setup.quant_config,
                prefix=f"{prefix}.{output}",
            ),
        )
        if norms is not None:
            self.q_ln, self.k_ln = norms
        self.widths = [own * size, own_kv * size, own_kv * size]
        self.attention = AlibiAttention(setup, layer, own, own_kv, prefix)

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        """Attention of hidden states [T, hidden]."""
        fused, _ = getattr(self, self.fused)(hidden_states)
        if self.clip:
            fused = fused.clamp(min=-self.clip, max=self.clip)
        if self.by_head:
            parts = fused.unflatten(-1, (self.attention.heads, 3, -1)).unbind(-2)
            query, key, value = (part.flatten(-2) for part in parts)
        else:
            query, key, value = fused.split(self.widths, dim=-1)
        if hasattr(self, "q_ln"):
            query, key = normed(self.q_ln, query, 1), normed(self.k_ln, key, self.key_replicas)
        output, _ = getattr(self, self.output)(self.attention(query, key, value, channels))
        return output


def normed(norm: nn.Module, states: torch.Tensor, replicas: int) -> torch.Tensor:
    """This process's part of the norm over the states of all processes, of which this one has [T, width].

    ``replicas``: how many processes in a row have the same heads.
    """
    processes = get_tensor_model_parallel_world_size()
    width, rank = states.shape[-1], get_tensor_model_parallel_rank()
    if processes > 1:
        gathered = tensor_model_parallel_all_gather(states.contiguous())
        states = gathered.unflatten(-1, (processes, width))[..., ::replicas, :].flatten(-2)
    first = rank // replicas * width
    return norm(states).to(states.dtype)[..., first : first + width]
