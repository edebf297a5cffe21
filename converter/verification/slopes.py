"""Measures the slopes that the running code applies, from its attention weights.

In a model whose parameters are all zero, queries and keys are zero, so attention weights depend on the bias
alone: the logarithm of the ratio of two neighbouring weights is the slope. The measurement uses none of the
code that computes slopes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from converter.errors import VerificationError
from converter.scaling.scaling import Dynamic, rows
from converter.verification.check import Check, Context
from converter.verification.patched import PROBE_HEAD_DIM, Patched, build

NAME = "slopes"

# Distance in keys over which a slope is measured: the bias is at most 40 nats, well inside float32's range.
SPAN = 40
# TOLERANCE is relative. ROUNDING, in nats over the span, is float32's rounding of the measured weights.
TOLERANCE, ROUNDING = 1e-3, 2e-6
# Of a steep head, only the nearest keys have weights that float32 can hold: within so many nats.
DEEPEST = 80.0
# Most keys in a probe, in all layers of a decoder together. This bounds the memory: of a decoder's cache, or
# of an encoder's attention weights, which grow with the square.
LONGEST = {"decoder": 1 << 17, "encoder": 256}
# Tokens with which a decoder's cache is filled at a time. This bounds the memory of their hidden states.
CHUNK = 4096


def check(patched: Patched, context: Context) -> Check:  # noqa: ARG001 -- every check takes it
    """Compares measured slopes with ``converter.scaling.slopes``: at one length, or two if dynamic.

    Where the layers' slopes differ, every layer is measured; else one is enough, since all share them.

    Raises:
        VerificationError: a slope differs; the message names the head and both values.
    """
    family = patched.family
    scaling = patched.repository.scaling
    stock = family.stock_slopes(patched.config)
    layers = rows(scaling)
    lengths = [2 * SPAN]
    if isinstance(scaling, Dynamic):
        # The factor depends only on rate * tokens / train_length, so a shorter train_length tests the same.
        room = LONGEST[family.kind] // (layers if family.kind == "decoder" else 1)
        longest = int(room * min(1.0, scaling.rate / 2))
        scaling = replace(scaling, train_length=max(1, min(scaling.train_length, longest)))
        # The length at which the factor is 2 (or the rate, if that is larger).
        lengths.append(max(2 * SPAN, math.ceil(scaling.train_length * max(1.0, 2 / scaling.rate))))
    model = build(patched.trunk, patched.probe_config(scaling, layers))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    worst = 0.0
    for tokens in lengths:
        found = (measure if family.kind == "decoder" else measure_both_sides)(model, tokens)
        measured = found / family.bias_scale(PROBE_HEAD_DIM)
        scaled = [patched.repository.recipe.scaled(stock, scaling, tokens, layer) for layer in range(layers)]
        expected = np.tile(scaled, measured.shape[-1] // len(stock))
        differences = np.abs(measured - expected)
        wrong = ~((differences < TOLERANCE * expected) | (differences * SPAN < ROUNDING))
        layer, head = np.unravel_index(wrong.argmax(), wrong.shape)
        if wrong[layer, head]:
            where = f"head {head % len(stock)}" + (f" of layer {layer}" if layers > 1 else "")
            raise VerificationError(
                f"{where} runs with slope {measured[layer, head]:.6g} at {tokens} tokens, "
                f"not {expected[layer, head]:.6g}"
            )
        worst = max(worst, float((differences / expected).max()))
    where = " and ".join(str(tokens) for tokens in lengths)
    each = f" in each of {layers} layers" if layers > 1 else ""
    return Check(
        NAME,
        f"{len(stock)} slopes{each} measured from attention weights at {where} tokens; "
        f"largest relative deviation {worst:.1e}",
    )


@torch.no_grad()
def measure(model: Any, tokens: int) -> np.ndarray:
    """The slopes that the last of ``tokens`` tokens sees in an all-zero model, float64 [layers, num_heads].

    The cache is filled without computing attention: the output of all-zero values is zero.
    """
    cache = DynamicCache()
    with without_attention(model):
        for start in range(0, tokens - 1, CHUNK):
            chunk = torch.zeros(1, min(CHUNK, tokens - 1 - start), dtype=torch.long)
            model(chunk, past_key_values=cache, use_cache=True)
    output = model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, output_attentions=True)
    return np.stack([slopes_of(weights[0, :, 0], tokens - 1, -1, SPAN) for weights in output.attentions])


def slopes_of(weights: torch.Tensor, at: int, side: int, span: int) -> np.ndarray:
    """The slopes that a query's attention weights show, float64 [num_heads].

    Args:
        weights: the query's weights of all keys, [num_heads, keys].
        at: the key from which distances are measured.
        side: 1 to measure among the keys after it, -1 among those before it.
        span: the distance in keys; for steep heads it is as much shorter as float32 asks for.
    """
    logs: np.ndarray = weights.double().log().numpy()
    with np.errstate(invalid="ignore"):  # wrong code may give keys no weight; their slopes are not numbers
        nearest = np.nan_to_num(logs[:, at] - logs[:, at + side])
        spans = np.clip(DEEPEST // np.maximum(nearest, 1e-9), 1, span).astype(int)
        slopes: np.ndarray = (logs[:, at] - logs[np.arange(len(logs)), at + side * spans]) / spans
    return slopes


@contextlib.contextmanager
def without_attention(model: Any) -> Iterator[None]:
    """In this context, the outputs of the model's attention are zero."""

    def zero(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:  # noqa: ARG001
        return torch.zeros_like(query).transpose(1, 2), None

    before = model.config._attn_implementation
    AttentionInterface.register("ntk_convert_zero", zero)
    model.config._attn_implementation = "ntk_convert_zero"
    try:
        yield
    finally:
        model.config._attn_implementation = before


@torch.no_grad()
def measure_both_sides(model: Any, tokens: int) -> np.ndarray:
    """The slopes of an all-zero encoder to the left of a token, followed by those to its right.

    Returns:
        Slopes, float64 [layers, 2 * num_heads]. For a length-dynamic scaling, the factor is that of a row of
        ``tokens`` tokens. For a position-dynamic one, it is that of the last of ``tokens`` tokens; the row is
        longer, so that this token has a right side.
    """
    scaling = model.config.alibi_scaling or {}
    side = SPAN // 2
    own = scaling.get("dynamic") == "position"
    at, length = (tokens - 1, tokens + side) if own else (tokens // 2, tokens + 1)
    mask = torch.ones(1, length, dtype=torch.long)
    if not own:
        mask[:, tokens:] = 0  # tests that the length comes from the mask, not from the tensor's shape
    output = model(torch.zeros_like(mask), attention_mask=mask, output_attentions=True)
    return np.stack(
        [
            np.concatenate([slopes_of(weights[0, :, at], at, sign, side) for sign in (-1, 1)])
            for weights in output.attentions
        ]
    )
