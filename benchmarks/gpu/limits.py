"""Attention alone: plain heads, which are the limit, and what folded heads and biases take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import measuring
import report
import torch
import torch.nn.functional as F
from report import Document, number, ratio
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.part import Settings
from templates.ntk_alibi import CHANNELS
from templates.ntk_symmetric import BLOCK, blockwise_attention

TITLE = "attention alone, beside its limit"
HEADS, SIZES, RUNS = 16, (128, 64), 10
BIASED = 8192
"""Most tokens for which there is a whole bias: 2 GB."""
BACKENDS = {
    "folded, flash": SDPBackend.FLASH_ATTENTION,
    "folded, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "folded, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
INTRO = f"""\
One row, {HEADS} heads, bfloat16, random numbers; the median of {RUNS} calls that wait in line. *Plain* is
torch's scaled_dot_product_attention without a bias, with the kernel that it chooses: the limit, and 1.00x.
*Folded* heads have {CHANNELS} channels more; flash, cuDNN and memory-efficient are then the only kernel that
is allowed. *Bias*: plain heads and a mask [heads, queries, keys], which is there already. A prompt is causal.
Decoding is one query. An encoder is not causal; its bias is made in blocks of so many queries, {BLOCK} in the
templates."""
HEAD = ["tokens", "head size", "what", "side", "ms", "x"]

States = Sequence[torch.Tensor]
"""Query, key and value, [1, HEADS, tokens, size]."""


def run(settings: Settings, document: Document) -> None:
    width, count = settings.size((8192, 2**30), (64, 2**10))
    square, source = random(settings, width, width), random(settings, count)
    rate = 2 * width**3 / median(settings, partial(torch.matmul, square, square)) / 1e12
    speed = 2 * source.nbytes / median(settings, source.clone) / 1e12
    del square, source
    device = f"A product of matrices does {rate:.0f} TFLOP/s; a copy reads and writes {speed:.2f} TB/s."
    document.intro = f"{INTRO}\n\n{device}"
    rows: list[list[str]] = []
    for length in settings.size((8192, 2048, 32768), (48,)):
        for size in SIZES:
            states = [random(settings, 1, HEADS, length, size) for _ in range(3)]
            for what in ("prompt", "decoding", "encoder"):
                base = None
                for name, call in sides(states, what).items():
                    measuring.release()
                    try:
                        taken, failure = median(settings, call), None
                    except Exception as error:  # no memory, or no such kernel for this size
                        taken = None
                        failure = measuring.NO_MEMORY if measuring.lacks_memory(error) else "no kernel"
                    base = base or taken
                    row = [str(length), str(size), what, name, failure or number(taken, 1000)]
                    rows.append([*row, ratio(taken, base)])
                    document.put("Times", report.table(HEAD, rows, texts=4))


def sides(states: States, what: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> what is timed."""
    length, size = states[0].shape[2:]
    queries = 1 if what == "decoding" else length
    found = {"plain": partial(attend, states, queries, what == "prompt")}
    if what == "encoder":
        slopes = torch.rand(1, HEADS, 1, device=states[0].device)
        for block in (BLOCK, 4 * BLOCK):
            options = (slopes, size**-0.5, 0.0, block)
            found[f"blocks of {block}"] = partial(blockwise_attention, *states, *options)
        return found
    folded = [F.pad(each, (0, CHANNELS)) for each in states]
    for name, backend in {"folded": None, **BACKENDS}.items():
        found[name] = partial(attend, folded, queries, what == "prompt", backend)
    if what == "prompt" and length <= BIASED:
        bias = states[0].new_zeros(1, HEADS, length, length)
        found["bias"] = partial(attend, states, queries, False, None, bias)
    return found


def attend(
    states: States,
    queries: int,
    causal: bool,
    backend: SDPBackend | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last queries; by one kernel only, if it is named."""
    query, key, value = states
    with sdpa_kernel(backend) if backend else nullcontext():
        return F.scaled_dot_product_attention(
            query[:, :, -queries:], key, value, attn_mask=bias, is_causal=causal
        )


def random(settings: Settings, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=settings.device, dtype=torch.bfloat16)


def median(settings: Settings, call: Callable[[], torch.Tensor]) -> float:
    """Seconds of a call; on a GPU without the time to start it, because calls wait for each other."""
    for _ in range(2):
        call()
    if settings.trial:
        return statistics.median(measuring.timed("cpu", call)[0] for _ in range(RUNS))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) for first, second in pairwise(events)) / 1000
