"""The slopes that the running code applies, measured from its attention weights.

In a model whose parameters are all zero, queries and keys are zero and attention weights depend on
the bias alone: the logarithm of the ratio of two neighbouring weights is the slope. Nothing of the
code that computes slopes is read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from converter.errors import VerificationError
from converter.families.base import Family
from converter.scaling import Scaling
from converter.verification.check import Check
from converter.verification.patched import PROBE_HEAD_DIM, Patched, build

# Keys apart, to measure a slope over: a bias of at most 40 nats, well inside float32's exponents.
SPAN = 40
# Relative; and in nats over the span, float32's own rounding of the weights that are measured.
TOLERANCE, ROUNDING = 1e-3, 2e-6
# Keys that a probe has at most, which bounds the memory: in a decoder's cache, or in the square of an
# encoder's attention weights.
LONGEST = {"decoder": 1 << 17, "encoder": 256}


def check(patched: Patched, family: Family) -> Check:
    """Compares measured slopes with ``converter.slopes``, at one context length or, dynamic, two.

    Raises:
        VerificationError: names the head, the measured and the expected slope.
    """
    scaling = Scaling.from_json(patched.config["alibi_scaling"])
    stock = family.stock_slopes(patched.config)
    lengths = [2 * SPAN]
    rate, train_length = scaling.rate, scaling.train_length
    if rate is not None and train_length is not None:
        # The factor depends on rate * tokens / train_length alone, so a long train_length may be shorter.
        train_length = max(1, min(train_length, int(LONGEST[family.kind] * min(1.0, rate / 2))))
        scaling = replace(scaling, train_length=train_length)
        # Where the factor is 2 (or the whole rate, if that is more).
        lengths.append(max(2 * SPAN, math.ceil(train_length * max(1.0, 2 / rate))))
    model = build(patched.trunk, patched.probe_config(alibi_scaling=scaling.to_json()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    worst = 0.0
    for tokens in lengths:
        found = (measure if family.kind == "decoder" else measure_both_sides)(model, tokens)
        measured = found / family.bias_scale(PROBE_HEAD_DIM)
        expected = np.tile(scaling.slopes(stock, tokens), len(measured) // len(stock))
        differences = np.abs(measured - expected)
        wrong = ~((differences < TOLERANCE * expected) | (differences * SPAN < ROUNDING))
        first = int(wrong.argmax())
        if wrong[first]:
            raise VerificationError(
                f"head {first % len(stock)} runs with slope {measured[first]:.6g} at {tokens} tokens, "
                f"not {expected[first]:.6g}"
            )
        worst = max(worst, float((differences / expected).max()))
    where = " and ".join(str(tokens) for tokens in lengths)
    return Check(
        "slopes",
        f"{len(stock)} slopes measured from attention weights at {where} tokens; "
        f"largest relative deviation {worst:.1e}",
    )


@torch.no_grad()
def measure(model: Any, tokens: int) -> np.ndarray:
    """The slopes, float64 [num_heads], that the last of ``tokens`` tokens sees in an all-zero model.

    The earlier tokens' keys and values are zero, so the cache is filled without computing them.
    """
    token = torch.zeros(1, 1, dtype=torch.long)
    first = model(token, use_cache=True).past_key_values
    states = first.layers[0].keys
    zeros = torch.zeros(1, 1, 1, 1).expand(1, states.shape[1], tokens - 1, states.shape[3])
    cache = DynamicCache()
    for layer in range(model.config.num_hidden_layers):
        cache.update(zeros, zeros, layer)
    output = model(token, past_key_values=cache, output_attentions=True)
    logs: np.ndarray = output.attentions[0][0, :, 0].double().log().numpy()  # [num_heads, tokens]
    slopes: np.ndarray = (logs[:, -1] - logs[:, -1 - SPAN]) / SPAN
    return slopes


@torch.no_grad()
def measure_both_sides(model: Any, tokens: int) -> np.ndarray:
    """The slopes of an all-zero encoder to the left of a token and, after them, to its right.

    Returns:
        float64 [2 * num_heads]. A length-dynamic scaling has the factor of rows of ``tokens`` tokens,
        a position-dynamic one that of the last of so many: the row is longer to give it a right side.
    """
    scaling = model.config.alibi_scaling or {}
    side = SPAN // 2
    own = scaling.get("dynamic") == "position"
    at, length = (tokens - 1, tokens + side) if own else (tokens // 2, tokens + 1)
    mask = torch.ones(1, length, dtype=torch.long)
    if not own:
        mask[:, tokens:] = 0  # so that the length is the mask's and not the tensor's
    output = model(torch.zeros_like(mask), attention_mask=mask, output_attentions=True)
    logs: np.ndarray = output.attentions[0][0, :, at].double().log().numpy()  # [num_heads, length]
    return np.concatenate([(logs[:, at] - logs[:, at + step]) / side for step in (-side, side)])
