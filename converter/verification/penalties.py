"""Measures the penalties and temperatures that the running code applies, from its attention weights.

In a model whose parameters are all zero, queries and keys are zero, so attention weights depend on the bias
alone: the logarithm of the ratio of two keys' weights is the difference of their penalties. The measurement
uses none of the code that computes penalties.

For temperatures, the attention of the same model is given queries and keys. What its weights then show beside
the penalty is the query's content times ``a ** u``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from converter.errors import VerificationError
from converter.families.family import Kind
from converter.model.alibi import AlibiModel
from converter.scaling.penalty import Penalty
from converter.scaling.scaling import Scaling, query_factors, rows
from converter.scaling.slopes import SEEN, longest_row, span_of
from converter.verification.check import Check
from converter.verification.imported import PROBE_HEAD_DIM, ImportedRepository, build

NAME = "slopes"

# Keys in the shortest row; it is longer for flat slopes.
SHORTEST = 80
# The largest deviation, relative to the head's penalty at the farthest key that is measured; and in nats, as
# float32 rounds the weights, for heads that are too flat in the stock model, since no scaling makes them so.
TOLERANCE, ROUNDING = 1e-3, 2e-6
# The distances at which a penalty is measured, as parts of that of the farthest key.
PARTS = (1 / 8, 1 / 4, 1 / 2, 1)
# How many times the trained length a query sees whose concave penalty is measured. Up to its power, it has a
# line and a curve; beyond that, the curve alone.
CONCAVE_MULTIPLES = (2, 5, 20)
# The score that a query is given for its own key, in nats. It is below 0, because the penalty works against
# it: in every head, the weights of this key and its neighbour are then within float32's range.
CONTENT = -40.0
# Of a steep head, only the nearest keys have weights that float32 can hold: within so many nats.
DEEPEST = 40.0
# Most keys in a probe if no slope asks for more (``ROW``), in all layers of a decoder together.
MOST_TOKENS = {"decoder": 1 << 17, "encoder": 256}
# Tokens with which a decoder's cache is filled at a time. This bounds the memory of their hidden states.
CHUNK = 4096


def check_penalties(imported: ImportedRepository) -> Check:
    """Compares what is measured with ``converter.scaling``: at one length, or at several if dynamic.

    Where the layers' slopes differ, every layer is measured; else one is enough, since all share them.
    ``VerificationError`` names the head whose penalty or temperature differs, and both values.
    """
    model = imported.model
    layers, heads = rows(model.scaling), len(model.stock({}))
    scaling, lengths = lengths_to_measure(model)
    probe = build(imported.backbone, imported.probe_config(scaling, layers))
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.zero_()
    worst = 0.0
    for tokens in lengths:
        worst = max(worst, check_row(model, scaling, probe, tokens))
        if scaling.temperatures is not None:
            worst = max(worst, check_row_temperatures(model, scaling, probe, tokens))
    what = "slopes" if scaling.power is None else "concave penalties"
    and_temperatures = "" if scaling.temperatures is None else " and temperatures"
    in_each_layer = f" in each of {layers} layers" if layers > 1 else ""
    *first, last = map(str, lengths)
    where = f"{', '.join(first)} and {last}" if first else last
    return Check(
        NAME,
        f"{heads} {what}{and_temperatures}{in_each_layer} measured in trial texts of {where} tokens; "
        f"largest relative deviation {worst:.1e}",
    )


def lengths_to_measure(model: AlibiModel) -> tuple[Scaling, list[int]]:
    """The model's scaling, with a trained length short enough to be measured, and the lengths of rows."""
    scaling, kind = model.scaling, model.family.kind
    stock, layers = model.stock({}), rows(scaling)
    longest, flattest = longest_row(kind, layers), flattest_measured(model)

    def row(tokens: int) -> int:
        """The length of a row in which the penalties for ``tokens`` tokens can be seen."""
        found = [model.penalties(stock, scaling, tokens, layer) for layer in range(layers)]
        least = min(penalty.at(tokens) / tokens for of_layer in found for penalty in of_layer)
        return min(longest, max(SHORTEST, math.ceil(longest * flattest / least)))

    if not scaling.dynamic:
        return scaling, [row(SHORTEST)]
    room = MOST_TOKENS[kind] // (layers if kind == "decoder" else 1)
    # What a scaling does depends only on tokens / train_length, so another train_length tests the same.
    if scaling.power is not None:
        shortest = row(CONCAVE_MULTIPLES[0] * scaling.train_length)
        trained = min(scaling.train_length, room // CONCAVE_MULTIPLES[-1])
        trained = max(trained, shortest // CONCAVE_MULTIPLES[0])
        scaling = replace(scaling, train_length=trained)
        return scaling, [row(SHORTEST), *(multiple * trained for multiple in CONCAVE_MULTIPLES)]
    # The part of a row at which the factor starts to grow: it is 2 at the end, or the rate if that is larger.
    part = min(1.0, scaling.rate / 2)
    usual = min(scaling.train_length, int(room * part))
    seen_in = row(math.ceil(scaling.train_length / part))
    scaling = replace(scaling, train_length=max(1, usual, int(seen_in * part)))
    return scaling, [row(SHORTEST), max(SHORTEST, math.ceil(scaling.train_length / part))]


def flattest_measured(model: AlibiModel) -> float:
    """The penalty per token, in nats, that the longest row still shows within ``TOLERANCE``."""
    longest = longest_row(model.family.kind, rows(model.scaling))
    return SEEN / span_of(longest) * model.bias_scale / model.family.bias_scale(PROBE_HEAD_DIM)


def check_row(model: AlibiModel, scaling: Scaling, probe: Any, tokens: int) -> float:
    """The largest deviation that was measured, relative to the head's penalty at its farthest key."""
    stock, flattest = model.stock({}), flattest_measured(model)
    # Where the bias depends on the head size, that of the probe's heads is another.
    unit = model.family.bias_scale(PROBE_HEAD_DIM) / model.bias_scale
    at, weights = seen(probe, model.family.kind, tokens)
    worst = 0.0
    for layer, of_layer in enumerate(weights):
        logs: np.ndarray = of_layer.double().log().numpy()
        for head, penalty in enumerate(model.penalties(stock, scaling, tokens, layer)):
            where = f"head {head}"
            if len(weights) > 1:
                where += f" of layer {layer}"
            rounding = ROUNDING if stock[head] * model.bias_scale < flattest else 0.0
            for side, farthest in sides(model.family.kind, at, tokens):
                distances = distances_of(penalty, farthest, unit)
                keys = [at + side * distance for distance in distances]
                with np.errstate(invalid="ignore"):  # wrong code may give keys no weight
                    measured = (logs[head, at] - logs[head, keys]) / unit
                deviation = compare(measured, penalty, distances, rounding / unit, where, tokens)
                if not rounding:
                    worst = max(worst, deviation)
    return worst


def compare(
    measured: np.ndarray,
    penalty: Penalty,
    distances: Sequence[int],
    rounding: float,
    where: str,
    tokens: int,
) -> float:
    """The largest deviation of a head's penalties, relative to the one at the farthest of these distances.

    ``VerificationError`` names the first one that deviates by more than ``TOLERANCE`` and ``rounding`` nats.
    """
    expected = np.array([penalty.at(distance) for distance in distances])
    deviations = np.abs(measured - expected)
    allowed = max(TOLERANCE * expected[-1], rounding)
    for distance, found, wanted, deviation in zip(distances, measured, expected, deviations, strict=True):
        if not deviation < allowed:  # so that a NaN is refused, too
            raise VerificationError(
                f"{where} runs with a penalty of {found:.6g} nats at a distance of {distance} in {tokens} "
                f"tokens, not {wanted:.6g}"
            )
    return float(deviations.max() / expected[-1])


def sides(kind: Kind, at: int, tokens: int) -> list[tuple[int, int]]:
    """The sides of the token ``at`` on which it sees keys, -1 or 1, and the farthest distance on each."""
    if kind == "decoder":
        return [(-1, at)]
    return [(-1, span_of(tokens)), (1, span_of(tokens))]


def distances_of(penalty: Penalty, farthest: int, unit: float) -> list[int]:
    """The distances at which a penalty is measured, the farthest last.

    Its farthest key is that with the largest penalty up to ``DEEPEST``.
    """
    near, far = 1, farthest
    while near < far:
        middle = (near + far + 1) // 2
        if unit * penalty.at(middle) <= DEEPEST:
            near = middle
        else:
            far = middle - 1
    return [max(1, int(near * part)) for part in PARTS]


def check_row_temperatures(model: AlibiModel, scaling: Scaling, probe: Any, tokens: int) -> float:
    """The largest relative deviation of what queries are multiplied by."""
    heads = len(model.stock({}))
    expected = np.array([query_factors(scaling, heads, tokens, layer) for layer in range(rows(scaling))])
    measured = measure_query_factors(probe, model.family.kind, tokens, expected)
    deviation = np.abs(measured / expected - 1)
    wrong = ~(deviation < TOLERANCE)
    layer, head = np.unravel_index(wrong.argmax(), wrong.shape)
    if wrong[layer, head]:
        where = f"head {head}" + (f" of layer {layer}" if len(wrong) > 1 else "")
        raise VerificationError(
            f"{where} runs with queries {measured[layer, head]:.6g} times as large at {tokens} tokens, not "
            f"{expected[layer, head]:.6g}"
        )
    return float(deviation.max())


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
