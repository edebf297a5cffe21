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

from .ntk_alibi import fold, sdpa_kernels
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

        In tensor parallelism, a process may have computed all heads or only its own; it goes on with its own.

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
        row = self.layer_idx if len(plan.query_channels) > 1 else 0
        channels = plan.query_channels[row]
        factors = None if plan.query_factors is None else plan.query_factors[row]
        if (mesh := plan.processes) is not None:
            channels = own_heads(channels, mesh)
            factors = None if factors is None else own_heads(factors, mesh)
            if query.shape[1] == self.num_heads:
                query, key, value = (own_heads(shared(part, mesh), mesh) for part in (query, key, value))
        if factors is not None:
            query = (query * factors[..., None]).to(query.dtype)  # rounded once
        if not plan.fold_cached:
            # Attention functions want one head size for all three, so the value is padded too.
            key, value = fold(key, plan.key_channels), F.pad(value, (0, plan.key_channels.shape[-1]))
        if past_key_values is not None:
            places = {"cache_kwargs": {"cache_position": plan.slots}} if TAKES_SLOTS else {}
            key, value = past_key_values.update(key, value, self.layer_idx, **places)
            key, value = key[:, :, : plan.key_length], value[:, :, : plan.key_length]
        keywords = dict(plan.keywords)
        if UPDATES_PAGED and (paged := keywords.pop("cache", None)) is not None:
            key, value = paged.update(key, value, self.layer_idx, keywords)  # changes the keywords too
        if plan.fold_cached:
            key, value = fold(key, plan.key_channels), F.pad(value, (0, plan.key_channels.shape[-1]))

        query = fold(query, channels)
        if key.shape[-1] > query.shape[-1]:  # this pass leaves the curve's channels out, see ntk_plan.py
            key, value = key[..., : query.shape[-1]], value[..., : query.shape[-1]]

        groups = query.shape[1] // key.shape[1]
        # On the CPU, the kernel for shared heads sums a group's gradients in half precision.
        if groups > 1 and key.device.type == "cpu" and (key.requires_grad or not CPU_KERNEL_TAKES_GROUPS):
            key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
            groups = 1
        if self.num_key_value_groups != groups:
            self.num_key_value_groups = groups  # attention functions read it here
        name = plan.implementation
        with sdpa_kernels(query):
            output, weights = (eager_attention if name == "eager" else FUNCTIONS[name])(
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
    key, value = (
        states.repeat_interleave(groups, dim=1) if groups > 1 else states for states in (key, value)
    )
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


def own_heads(states: torch.Tensor, mesh: Any) -> torch.Tensor:
    """This process's part of states [B, heads, ...]. With fewer heads than processes, some have the same."""
    heads, rank, size = states.shape[1], mesh.get_local_rank(), mesh.size()
    first = rank * heads // size
    return states[:, first : max((rank + 1) * heads // size, first + 1)]


def shared(states: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The same states; each process will use some of their heads, so their gradients are added up."""
    if not states.requires_grad:
        return states
    from torch.distributed.tensor import DTensor, Partial, Replicate

    states = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
    return states.to_local(grad_placements=[Partial()])
