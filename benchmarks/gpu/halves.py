"""Attention of an encoder from two causal halves, beside what converted encoders compute: errors and time.

No kernel of torch adds -slope * |i - j|. Causal attention with folded channels adds slope * (j - i) for the
keys before a query, and with the channels of -slope for those after it. Both together, less the query's own
key, which is in both, are the whole:

    e^t = e^a + e^b - e^s        output = e^(a-t) before + e^(b-t) after - e^(s-t) value

where a and b are the halves' log-sum-exp of scores, and s is the score of the query's own key. The templates
do not use this: it was not yet measured on a GPU whether it is worth it.

Shapes below: N tokens in all texts, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import measuring
import report
import torch
import torch.nn.functional as F
from report import Document, number

from gpu.part import Settings, shared
from templates import ntk_texts
from templates.ntk_alibi import fold, key_channels, query_channels, stock_slopes
from templates.ntk_config import FOLDED_CHANNELS
from templates.ntk_texts import Texts

TITLE = "an encoder's attention from two causal halves"
HEADS, SIZE, TOKENS, TURNS = 12, 64, 65536, 5
LARGEST_COMPARED = 2048
"""Tokens of the longest text that is compared with float64, whose scores are stored."""
HEAD = ["tokens", "dtype", "side", "ms", "error"]
SIDES = ("blocks with a bias", "two causal halves", "flash_attention_2")
INTRO = f"""\
{HEADS} heads x {SIZE}, random inputs, texts of one length, {{tokens}} tokens in all or one text. *Blocks with
a bias* is what converted encoders compute here, the first pass with the biases that the others keep. *Error*:
of the output from float64, relative to its norm, for texts of up to {LARGEST_COMPARED} tokens."""

Half = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Query, key, value [N, H, D + 8], texts, the factor on q.k, the window -> output, and log-sum-exp [N, H]."""


def run(settings: Settings, document: Document) -> None:
    tokens = settings.size(TOKENS, 96)
    document.intro = INTRO.format(tokens=tokens)
    lengths = settings.size((512, 2048, 8192, 32768), (16, 48))
    rows: list[list[str]] = []
    for dtype, until in shared(settings.size(("bfloat16", "float16"), ("bfloat16",)), settings.until):
        for length, _ in shared(lengths, until):
            texts = texts_of(length, max(1, tokens // length), settings.device)
            states = random_states(texts, getattr(torch, dtype))
            for side in SIDES:
                row = [str(length), dtype, side]
                try:
                    call = partial(attend, side, states, texts, settings)
                    output = call()
                    seconds = [measuring.timed(settings.device, call)[0] for _ in range(TURNS)]
                except ImportError as error:
                    document.skip(f"{side}, {length} tokens, {dtype}", error)
                    continue
                except Exception as error:  # the other sides can still be measured
                    document.fail(f"{side}, {length} tokens, {dtype}", error)
                    continue
                gap = "-"
                if length <= settings.size(LARGEST_COMPARED, 48):
                    gap = f"{error_of(output, states, length):.0e}"
                rows.append([*row, number(1000 * sorted(seconds)[TURNS // 2]), gap])
                document.put(
                    "Attention", report.table(["tokens", "dtype", "side", "ms", "error"], rows, texts=3)
                )


def attend(side: str, states: tuple[torch.Tensor, ...], texts: Texts, settings: Settings) -> torch.Tensor:
    """The outputs [1, H, N, D] of query, key and value of this shape."""
    slopes = torch.tensor(stock_slopes(HEADS), device=states[0].device)[None, :, None]
    scale = SIZE**-0.5
    with torch.no_grad():
        if side == "two causal halves":
            return two_halves(*states, slopes, scale, texts, plain_half if settings.trial else varlen_half)
        if side == "flash_attention_2":
            return ntk_texts.flash_attention(side, *states, slopes, scale, 0.0, texts)
        return ntk_texts.in_padded_rows(*states, slopes, scale, 0.0, texts, BIASES)


BIASES: dict[int, torch.Tensor] = {}


def two_halves(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    texts: Texts,
    half: Half,
) -> torch.Tensor:
    """The formula above, for slopes float32 [1, H, 1]; ``half`` computes one of the two."""
    keys = fold(key, key_channels(texts.positions[None], None))
    values = F.pad(value, (0, FOLDED_CHANNELS))
    outputs, sums = [], []
    for sign, window in ((1, (-1, 0)), (-1, (0, -1))):
        channels = query_channels(sign * slopes, scale).to(query.dtype)
        states = (fold(query, channels), keys, values)
        output, total = half(*(rows(state) for state in states), texts, scale, window)
        # The slope as the channels hold it, or the two halves would not fit.
        held = (channels[..., 0].float() + channels[..., 3].float()) * (scale / 256)
        outputs.append(output[..., :SIZE].float())
        sums.append(total - held[0, :, 0] * texts.positions[:, None])
    own = (rows(query).float() * rows(key).float()).sum(-1) * scale
    total = torch.logaddexp(*sums)
    total = total + torch.log1p(-(own - total).exp())
    weights = [(part - total).exp()[..., None] for part in (*sums, own)]
    merged = weights[0] * outputs[0] + weights[1] * outputs[1] - weights[2] * rows(value).float()
    return merged.transpose(0, 1)[None].to(query.dtype)


def rows(states: torch.Tensor) -> torch.Tensor:
    """[1, H, N, D] to [N, H, D]."""
    return states[0].transpose(0, 1)


def varlen_half(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, texts: Texts, scale: float, window: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    bounds = (texts.bounds, texts.bounds, texts.longest, texts.longest)
    options = {"scale": scale, "window_size": window, "return_aux": AuxRequest(lse=True)}
    output, total = varlen_attn(query.contiguous(), key.contiguous(), value.contiguous(), *bounds, **options)
    return output, total


def plain_half(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, texts: Texts, scale: float, window: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without a kernel, for a trial on the CPU."""
    places = torch.arange(len(query), device=query.device)
    after = places[None, :] - places[:, None]
    seen = (texts.numbers[:, None] == texts.numbers) & (after <= 0 if window == (-1, 0) else after >= 0)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.float()).to(query.dtype)
    return output, scores.logsumexp(-1).T


def texts_of(length: int, count: int, device: str) -> Texts:
    found = ntk_texts.find_texts(torch.ones(count, length, dtype=torch.bool, device=device), None)
    if found is None:
        raise ValueError("rows without padding are texts")
    return found


def random_states(texts: Texts, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    device = texts.slots.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, HEADS, len(texts.slots), SIZE)
    BIASES.clear()
    return tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3))


def error_of(output: torch.Tensor, states: tuple[torch.Tensor, ...], length: int) -> float:
    """Of the first text, from float64."""
    query, key, value = (state[0, :, :length].double() for state in states)
    places = torch.arange(length, device=query.device)
    slopes = torch.tensor(stock_slopes(HEADS), dtype=torch.float64, device=query.device)
    scores = query @ key.transpose(1, 2) * SIZE**-0.5
    scores = scores - slopes[:, None, None] * (places[:, None] - places).abs()
    right = scores.softmax(-1) @ value
    return float((output[0, :, :length] - right).norm() / right.norm())
