# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Causal attention with ALiBi, through transformers' interface for attention functions.

Queries and keys are folded (see ntk_alibi.py), keys before they enter the cache. What is left is plain
causal attention with heads that are a few channels larger, so every attention function computes it, without a
padding mask, since a channel marks padded keys.

Shapes below: B rows, H heads, Q new tokens (queries), K keys (cached and new), D head size,
C folded channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .ntk_alibi import fold
from .ntk_cache import TAKES_SLOTS, UPDATES_PAGED
from .ntk_modes import FUNCTIONS
from .ntk_plan import AttentionPlan

# Older releases of torch have no fused kernel on the CPU for key heads that several query heads share.
CPU_KERNEL_TAKES_GROUPS = torch.__version__ >= "2.13"


class AlibiAttention(nn.Module):
    """Causal attention with ALiBi; each family adds its projections.

    Args:
        config: the model's config, which attention functions may read.
        num_heads: H, the query heads.
        scaling: the factor on q.k.
        dropout: probability of dropping an attention weight while training.
        layer_idx: index of the layer, which is also its index in the cache.
    """

    is_causal = True

    def __init__(self, config: Any, num_heads: int, scaling: float, dropout: float, layer_idx: int):
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.num_key_value_groups = num_heads // getattr(config, "num_key_value_heads", num_heads)
        self.scaling = scaling
        self.dropout = dropout
        self.layer_idx = layer_idx

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: AttentionPlan,
        past_key_values: Any | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal ALiBi attention of the new tokens over all tokens.

        Args:
            query: [B, H, Q, D].
            key, value: [B, H or fewer (grouped), Q, D], of the new tokens.
            plan: from ``plan_attention``.
            past_key_values: cache to update and read, or None. It holds heads of size D + C.

        Returns:
            The heads' outputs [B, Q, H * D], and what else the attention function returns: the eager one
            returns the attention weights [B, H, Q, K].
        """
        size = query.shape[-1]
        channels, factors = self.layer_channels(plan)
        if plan.processes is not None:
            query, key, value = self.divide_heads(query, key, value, plan.processes)
        if factors is not None:
            query = (query * factors[..., None]).to(query.dtype)  # rounded once
        query = fold(query, channels)
        key, value = self.folded_keys(key, value, plan, past_key_values)

        keywords = dict(plan.keywords)
        if UPDATES_PAGED and "cache" in keywords:  # continuous batching
            paged_cache = keywords.pop("cache")
            key, value = paged_cache.update(key, value, self.layer_idx, keywords)  # changes the keywords too
        if key.shape[-1] > query.shape[-1]:  # this pass leaves the curve's channels out, see ntk_plan.py
            key, value = key[..., : query.shape[-1]], value[..., : query.shape[-1]]
        key, value = self.grouped_keys(query, key, value)

        attention_function = eager_attention
        if plan.implementation != "eager":
            attention_function = FUNCTIONS[plan.implementation]
        output, weights = attention_function(
            self,
            query,
            key,
            value,
            plan.mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            **keywords,
        )
        return output[..., :size].flatten(2), weights

    def layer_channels(self, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This layer's channels of queries, and what to multiply its queries by; see ``AttentionPlan``."""
        row = self.layer_idx
        if len(plan.query_channels) == 1:  # one for all layers
            row = 0
        channels = plan.query_channels[row]
        factors = None
        if plan.query_factors is not None:
            factors = plan.query_factors[row]
        if plan.processes is not None:
            channels = local_heads(channels, plan.processes)
            if factors is not None:
                factors = local_heads(factors, plan.processes)
        return channels, factors

    def divide_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mesh: Any
    ) -> tuple[torch.Tensor, ...]:
        """This process's heads in tensor parallelism. Its projections computed all heads, or only these."""
        if query.shape[1] != self.num_heads:
            return query, key, value
        return tuple(local_heads(sum_gradients(states, mesh), mesh) for states in (query, key, value))

    def folded_keys(
        self, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, past_key_values: Any | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Folded keys and padded values of all tokens [B, heads, K, D + C]; the cache gets the new ones."""
        if past_key_values is None:
            return fold_keys(key, value, plan)
        if plan.fold_cached:
            key, value = self.update_cache(key, value, plan, past_key_values)
            return fold_keys(key, value, plan)
        key, value = fold_keys(key, value, plan)
        return self.update_cache(key, value, plan, past_key_values)

    def update_cache(
        self, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, past_key_values: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the new keys and values to the cache; returns those of all tokens so far."""
        if TAKES_SLOTS:
            places = {"cache_position": plan.slots}
            key, value = past_key_values.update(key, value, self.layer_idx, cache_kwargs=places)
        else:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # A static cache returns all that it can hold.
        return key[:, :, : plan.key_length], value[:, :, : plan.key_length]

    def grouped_keys(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in as many heads as the attention function takes.

        On the CPU, the kernel for shared heads sums a group's gradients in half precision.
        """
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and key.device.type == "cpu" and (key.requires_grad or not CPU_KERNEL_TAKES_GROUPS):
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
            groups = 1
        if self.num_key_value_groups != groups:
            self.num_key_value_groups = groups  # attention functions read it here
        return key, value


def fold_keys(
    key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with their channels, and values with as many zeros: attention functions want one size for both.

    A cache that grows in place has these zeros already.
    """
    if not plan.cache_has_zeros:
        value = F.pad(value, (0, plan.key_channels.shape[-1]))
    return fold(key, plan.key_channels), value


def eager_attention(
    module: AlibiAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its weights, as transformers' interface wants it.

    Scores are summed in float32, as in fused kernels: half precision cannot hold slope * position.

    Args:
        query: [B, H, Q, D + C].
        key, value: [B, H or fewer (grouped), K, D + C].
        attention_mask: [B or 1, 1, Q, K], True where a query sees a key, or float, to add to the scores.

    Returns:
        Outputs [B, Q, H, D + C] and weights [B, H, Q, K].
    """
    groups = module.num_key_value_groups
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(scores.softmax(dim=-1), p=dropout).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2), weights


def head_processes(layer: nn.Module) -> Any | None:
    """The processes that share the heads in tensor parallelism, a ``DeviceMesh``; None if all are here.

    It is read from the output projection. Its weight is divided by its inputs, which are the heads' outputs.

    Args:
        layer: any layer of the model.

    Raises:
        ValueError: the heads cannot be divided among so many processes.
    """
    attention = next((module for module in layer.modules() if isinstance(module, AlibiAttention)), layer)
    for projection in attention.children():
        weight = getattr(projection, "weight", None)
        if any(placement.is_shard(1) for placement in getattr(weight, "placements", ())):
            processes, heads = weight.device_mesh.size(), attention.num_heads
            groups = getattr(attention.config, "num_key_value_heads", heads)
            if heads % processes or (groups % processes and processes % groups):
                raise ValueError(
                    f"the {heads} attention heads ({groups} key heads) cannot be divided evenly among "
                    f"{processes} processes; use another number of processes"
                )
            return weight.device_mesh
    return None


def local_heads(states: torch.Tensor, mesh: Any) -> torch.Tensor:
    """This process's part of states [B, heads, ...]. With fewer heads than processes, some have the same."""
    heads, rank, processes = states.shape[1], mesh.get_local_rank(), mesh.size()
    first = rank * heads // processes
    last = max((rank + 1) * heads // processes, first + 1)
    return states[:, first:last]


def sum_gradients(states: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The same states, whose gradients are added up over the processes: each will use some of their heads."""
    if not states.requires_grad:
        return states
    from torch.distributed.tensor import DTensor, Partial, Replicate

    states = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
    return states.to_local(grad_placements=[Partial()])
