"""Measures the slopes and temperatures that the running code applies, from its attention weights.

In a model whose parameters are all zero, queries and keys are zero, so attention weights depend on the bias
alone: the logarithm of the ratio of two neighbouring weights is the slope. The measurement uses none of the
code that computes slopes.

For temperatures, the attention of the same model is given queries and keys. What its weights then show beside
the slope is the query's content times ``a ** u``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from converter.errors import VerificationError
from converter.families.family import Kind
from converter.scaling.scaling import query_factors, rows
from converter.scaling.slopes import SEEN, longest_row, span_of
from converter.verification.check import Check
from converter.verification.patched import PROBE_HEAD_DIM, Patched, build

NAME = "slopes"

# Keys in the shortest row; it is longer for flat slopes.
SHORTEST = 80
# TOLERANCE is relative. ROUNDING, in nats over the span, is float32's rounding of the measured weights; it is
# for slopes that are too flat in the stock model, since no scaling makes them so.
TOLERANCE, ROUNDING = 1e-3, 2e-6
# The score that a query is given for its own key, in nats. It is below 0, because the slope works against it:
# in every head, the weights of this key and its neighbour are then within float32's range.
CONTENT = -40.0
# Of a steep head, only the nearest keys have weights that float32 can hold: within so many nats.
DEEPEST = 40.0
# Most keys in a probe if no slope asks for more (``ROW``), in all layers of a decoder together.
MOST_TOKENS = {"decoder": 1 << 17, "encoder": 256}
# Tokens with which a decoder's cache is filled at a time. This bounds the memory of their hidden states.
CHUNK = 4096


def check(patched: Patched) -> Check:
    """Compares what is measured with ``converter.scaling``: at one length, or two if dynamic.

    Where the layers' slopes differ, every layer is measured; else one is enough, since all share them.
    ``VerificationError`` names the head whose slope or temperature differs, and both values.
    """
    family = patched.model.family
    scaling = patched.model.scaling
    stock = patched.model.stock({})
    tempered = scaling.temperatures is not None
    layers = rows(scaling)
    longest = longest_row(family.kind, layers)
    flattest = SEEN / span_of(longest) / family.bias_scale(PROBE_HEAD_DIM)

    def row(tokens: int) -> int:
        """The length of a row in which the slopes for ``tokens`` tokens can be seen."""
        least = min(min(patched.model.scaled(stock, scaling, tokens, n)) for n in range(layers))
        return min(longest, max(SHORTEST, math.ceil(longest * flattest / least)))

    if scaling.dynamic:
        # The factor depends only on rate * tokens / train_length, so another train_length tests the same.
        part = min(1.0, scaling.rate / 2)
        room = MOST_TOKENS[family.kind] // (layers if family.kind == "decoder" else 1)
        usual = min(scaling.train_length, int(room * part))
        # The length at which the factor is 2 (or the rate, if that is larger).
        seen_in = row(math.ceil(scaling.train_length / part))
        scaling = replace(scaling, train_length=max(1, usual, int(seen_in * part)))
        lengths = [row(SHORTEST), max(SHORTEST, math.ceil(scaling.train_length / part))]
    else:
        lengths = [row(SHORTEST)]
    model = build(patched.backbone, patched.probe_config(scaling, layers))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    worst = 0.0
    for tokens in lengths:
        measured = measure(model, family.kind, tokens) / family.bias_scale(PROBE_HEAD_DIM)
        scaled = [patched.model.scaled(stock, scaling, tokens, layer) for layer in range(layers)]
        expected = np.tile(scaled, measured.shape[-1] // len(stock))
        differences = np.abs(measured - expected)
        exempt = np.tile(np.array(stock) < flattest, measured.shape[-1] // len(stock))
        rounded = exempt & (differences * span_of(longest) * family.bias_scale(PROBE_HEAD_DIM) < ROUNDING)
        wrong = ~((differences < TOLERANCE * expected) | rounded)
        refuse(wrong, measured, expected, f"slope {{}} at {tokens} tokens, not {{}}", len(stock))
        worst = max(worst, float((differences / expected)[:, ~exempt].max(initial=0.0)))
        if not tempered:
            continue
        expected = np.array([query_factors(scaling, len(stock), tokens, layer) for layer in range(layers)])
        measured = measure_query_factors(model, family.kind, tokens, expected)
        differences = np.abs(measured / expected - 1)
        told = f"queries {{}} times as large at {tokens} tokens, not {{}}"
        refuse(~(differences < TOLERANCE), measured, expected, told, len(stock))
        worst = max(worst, float(differences.max()))
    where = " and ".join(str(tokens) for tokens in lengths)
    each = f" in each of {layers} layers" if layers > 1 else ""
    and_temperatures = " and temperatures" if tempered else ""
    return Check(
        NAME,
        f"{len(stock)} slopes{and_temperatures}{each} measured in trial texts of {where} tokens; "
        f"largest relative deviation {worst:.1e}",
    )


def refuse(wrong: np.ndarray, measured: np.ndarray, expected: np.ndarray, told: str, heads: int) -> None:
    """Raises ``VerificationError`` for the first wrong value of [layers, heads or a multiple]."""
    layer, head = np.unravel_index(wrong.argmax(), wrong.shape)
    if wrong[layer, head]:
        where = f"head {head % heads}" + (f" of layer {layer}" if len(wrong) > 1 else "")
        both = (f"{values[layer, head]:.6g}" for values in (measured, expected))
        raise VerificationError(f"{where} runs with {told.format(*both)}")


def measure(model: Any, kind: Kind, tokens: int) -> np.ndarray:
    """The slopes of an all-zero model, float64 [layers, heads]; an encoder's to the left, then to the right.

    By length, the factor is that of a row of ``tokens`` tokens; by position, that of the last of them. There,
    an encoder's row is longer, so that this token has a right side.
    """
    sides, span = ((-1,) if kind == "decoder" else (-1, 1)), span_of(tokens)
    at, layers = seen(model, kind, tokens)
    return np.stack(
        [np.concatenate([slopes_of(weights, at, side, span) for side in sides]) for weights in layers]
    )


def seen(
    model: Any, kind: Kind, tokens: int, scores: np.ndarray | None = None
) -> tuple[int, list[torch.Tensor]]:
    """The token of an all-zero model that is looked at, and its attention weights, [heads, keys] each."""
    if kind == "decoder":
        return tokens - 1, last_weights(model, tokens, scores)
    return middle_weights(model, tokens, scores)


@torch.no_grad()
def last_weights(model: Any, tokens: int, scores: np.ndarray | None = None) -> list[torch.Tensor]:
    """The attention weights of the last of ``tokens`` tokens in an all-zero decoder, [heads, tokens] each.

    The cache is filled without computing attention: the output of all-zero values is zero. For ``scores``
    [layers, heads], see ``content``.
    """
    cache = DynamicCache()
    with without_attention(model):
        for start in range(0, tokens - 1, CHUNK):
            chunk = torch.zeros(1, min(CHUNK, tokens - 1 - start), dtype=torch.long)
            model(chunk, past_key_values=cache, use_cache=True)
    with content(model, scores, at=0):
        output = model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, output_attentions=True)
    return [weights[0, :, 0] for weights in output.attentions]


def slopes_of(weights: torch.Tensor, at: int, side: int, span: int) -> np.ndarray:
    """The slopes that a query's attention weights of all keys [num_heads, keys] show, float64 [num_heads].

    They are measured from the key ``at`` to those after it (``side`` is 1) or before it (-1), over ``span``
    keys; for steep heads it is as much shorter as float32 asks for.
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
def middle_weights(
    model: Any, tokens: int, scores: np.ndarray | None = None
) -> tuple[int, list[torch.Tensor]]:
    """A token of an all-zero encoder that has both sides, and its weights [heads, keys] in each layer."""
    scaling = model.config.alibi_scaling or {}
    side = span_of(tokens)
    own = scaling.get("dynamic") == "position"
    at, length = (tokens - 1, tokens + side) if own else (tokens // 2, tokens + 1)
    mask = torch.ones(1, length, dtype=torch.long)
    if not own:
        mask[:, tokens:] = 0  # tests that the length comes from the mask, not from the tensor's shape
    with content(model, scores, at):
        output = model(torch.zeros_like(mask), attention_mask=mask, output_attentions=True)
    return at, [weights[0, :, at] for weights in output.attentions]


def measure_query_factors(model: Any, kind: Kind, tokens: int, expected: np.ndarray) -> np.ndarray:
    """What the code of an all-zero model multiplies queries by, float64 [layers, heads].

    If that is what is expected, [layers, heads], the scores are ``CONTENT``.
    """
    found = []
    for scores in (None, CONTENT / expected):
        at, layers = seen(model, kind, tokens, scores)
        logs = [weights[:, at - 1 : at + 1].double().log().numpy() for weights in layers]
        found.append(np.stack([of_layer[:, 1] - of_layer[:, 0] for of_layer in logs]))
    with np.errstate(invalid="ignore"):  # wrong code may give keys no weight
        factors: np.ndarray = (found[1] - found[0]) / (CONTENT / expected)
    return factors


@contextlib.contextmanager
def content(model: Any, scores: np.ndarray | None, at: int) -> Iterator[None]:
    """In this context, all queries of an all-zero model have content for the new key ``at``, and no other.

    The scores [layers, heads] are q.k times the softmax's scale, without temperatures; None for no content.
    """

    def attend(
        module: Any, score: np.ndarray, query: torch.Tensor, key: torch.Tensor, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key = torch.zeros_like(query), torch.zeros_like(key)
        scale = getattr(module, "scaling", query.shape[-1] ** -0.5)
        query[..., 0] = torch.from_numpy(score / scale)[:, None]
        key[:, :, at, 0] = 1.0
        outputs: tuple[torch.Tensor, torch.Tensor | None] = type(module).attend(module, query, key, *more)
        return outputs

    modules = [] if scores is None else [each for each in model.modules() if hasattr(each, "attend")]
    for module, score in zip(modules, () if scores is None else scores, strict=True):
        module.attend = partial(attend, module, score)
    try:
        yield
    finally:
        for module in modules:
            del module.attend
