"""What a converted config asks of vLLM: the size of its heads in the cache, and what is refused as wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform

HONOUR_SLOPES = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "ROCM_ATTN", "ROCM_AITER_FA")
"""Backends whose kernels add the slopes: the first one by test, the others by reading vLLM 0.32.

FLASHINFER takes slopes and never uses them, and nothing in vLLM says so."""


def check_architectures(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError for a class that has no model here.

    Another model's, such as BloomForCausalLM, would ignore the scaling. vLLM has no head for others, such as
    those of question answering.
    """
    for name in names:
        if name not in known:
            raise ValueError(
                f"vLLM cannot serve this converted model as {name}; the plugin of ntk-convert has "
                f"{', '.join(known)}. If --hf-overrides names architectures, drop that: the class of another "
                "model would ignore the ALiBi scaling"
            )


def check_scaling(config: Any) -> None:
    """Raises ValueError for length-dynamic scaling.

    There, every token's hidden state depends on the tokens after it, so no key can stay in a cache.
    """
    scaling = config.alibi_scaling
    if scaling is not None and "factor" not in scaling and scaling.get("dynamic", "length") == "length":
        raise ValueError(
            "vLLM cannot serve length-dynamic scaling, where every new token changes the keys of all tokens "
            "before it; convert the model with --dynamic position, or with --scale"
        )


def check_whole_texts(vllm_config: Any) -> None:
    """Raises ValueError for options that would give an encoder a part of a text.

    vLLM switches them off for encoders, and only warns if they are asked for.
    """
    for where, name in (("scheduler", "enable_chunked_prefill"), ("cache", "enable_prefix_caching")):
        if getattr(getattr(vllm_config, f"{where}_config"), name):
            raise ValueError(
                f"an encoder needs whole texts; drop --{name.replace('_', '-')}, which would cut them"
            )


def check_backend(name: str, folded: bool) -> None:
    """Raises ValueError for a backend that might ignore the slopes."""
    if not folded and name not in HONOUR_SLOPES:
        raise ValueError(
            f"the attention backend {name} is not known to honour ALiBi slopes; serve with "
            "--attention-backend TRITON_ATTN or FLASH_ATTN, or convert the model with --dynamic position"
        )


def check_cache(dtype: str, folded: bool) -> None:
    """Raises ValueError for a quantised cache, which would round the positions in the keys."""
    if folded and dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise ValueError(
            f"a cache of type {dtype} would round the positions that position-dynamic scaling keeps in the "
            "keys; drop --kv-cache-dtype, or convert the model with --scale"
        )


def check_weights(config: Any) -> None:
    """Raises ValueError for weights that are stored quantised.

    Some families' weights are put in another order, turned or padded when they are loaded. What each way of
    quantising stores beside them would have to follow.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "vLLM cannot load a converted model whose weights are stored quantised; serve the model as it "
            "was converted, with --quantization fp8_per_channel to quantise it when it is loaded"
        )


def is_folded(config: Any) -> bool:
    """Whether slopes and positions are channels of the heads, because the slopes depend on the position."""
    return (config.alibi_scaling or {}).get("dynamic") == "position"


def head_size(config: Any) -> int:
    """The size of a head with its channels, padded to one that the platform's backends take.

    On the CPU there is one backend, which lists its sizes. On GPUs, FlashAttention takes multiples of 8 up
    to 256, and Triton's kernels every size from 32.
    """
    needed: int = config.head_dim
    if not is_folded(config):
        needed -= config.folded_channels
    if not current_platform.is_cpu():
        return max(32, -(-needed // 8) * 8)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return min(size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= needed)
