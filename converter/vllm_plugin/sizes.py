"""How large the heads of a model are in vLLM's cache."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from converter.vllm_plugin.templates.ntk_alibi import CHANNELS


def is_folded(config: Any) -> bool:
    """Whether slopes and positions are channels of the heads, because the slopes depend on the position."""
    return (config.alibi_scaling or {}).get("dynamic") == "position"


def head_size(config: Any) -> int:
    """The size of a head with its channels, padded to one that the platform's backends take.

    On the CPU there is one backend, which lists its sizes. On GPUs, FlashAttention takes multiples of 8 up
    to 256, and Triton's kernels every size from 32.
    """
    needed: int = config.head_dim - (0 if is_folded(config) else CHANNELS)
    if not current_platform.is_cpu():
        return max(32, -(-needed // 8) * 8)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return min(size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= needed)
