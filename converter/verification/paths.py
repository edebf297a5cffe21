"""Checks that fused prefill, padded prefill, chunked prefill and decoding agree with plain attention."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from converter.errors import VerificationError
from converter.verification.check import Check
from converter.verification.imported import PROBE_VOCABULARY, ImportedRepository, build

NAME = "paths"

TOKENS, ENCODER_TOKENS, PADDING = 64, 300, 9
# Shorter than the probe, so a dynamic scaling takes effect in it.
TRAIN_LENGTH = 24
# Where the steps over a cache end. Single tokens begin with an empty cache, pass the trained length, and end
# far beyond it; in between, longer steps save time.
CHUNKS = (24, 48, TOKENS)
SINGLE = (1, 2, 3, *range(18, 31), *range(58, TOKENS + 1))
# Blocks of keys in a row.
TILES = 16
TOLERANCE = 1e-4


@torch.no_grad()
def check_paths(imported: ImportedRepository) -> Check:
    """Runs a small random model with this repository's heads and scaling along every path.

    Plain attention computes each row alone, without padding. A decoder has three other paths: one pass,
    chunks over a cache, and single tokens over a cache. An encoder has one pass, in inference and in
    training, over rows longer than the block of queries that it computes at once, and a pass in tiles, as in
    long rows. ``VerificationError`` names a path that differs, and by how much.
    """
    family = imported.model.family
    scaling = imported.model.scaling
    if scaling.dynamic:
        scaling = replace(scaling, train_length=TRAIN_LENGTH)
    model = build(imported.backbone, imported.probe_config(scaling))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Larger than a usual initialisation, so attention is far from uniform.
        parameter.normal_(0, 0.2, generator=generator).add_(parameter.dim() == 1)
    length = TOKENS if family.kind == "decoder" else ENCODER_TOKENS
    tokens = torch.randint(PROBE_VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    if family.kind == "decoder":
        mask[1, :PADDING] = 0
    else:  # whose inference leaves out padding at the ends of rows
        mask[1, -PADDING:] = 0

    plain = torch.cat(
        [
            model(row[real][None], output_attentions=True).last_hidden_state[0]
            for row, real in zip(tokens, mask.bool(), strict=True)
        ]
    )
    steps = {
        "fused": model(tokens, attention_mask=mask).last_hidden_state,
        "padded": model(tokens, attention_mask=mask, output_attentions=True).last_hidden_state,
    }
    if family.kind == "encoder":
        with small_tiles(imported, length // TILES):
            steps["tiled"] = model(tokens, attention_mask=mask).last_hidden_state
        # Inference leaves the padding out. Training masks it, as compiled models do.
        with torch.enable_grad():
            steps["training"] = model(tokens, attention_mask=mask).last_hidden_state.detach()
    by_length = scaling.dynamic == "length"
    # A length-dynamic scaling depends on the row's length. Earlier chunks saw a shorter row, so their
    # results rightly differ.
    if family.kind == "decoder" and not by_length:
        steps["chunked"] = in_steps(model, tokens, mask, CHUNKS)
        steps["decoding"] = in_steps(model, tokens, mask, SINGLE)
    worst = 0.0
    for name, states in steps.items():
        difference = float((states[mask.bool()] - plain).abs().max() / plain.abs().max())
        if not difference < TOLERANCE:
            raise VerificationError(
                f"{name} attention differs from plain attention by {difference:.2e} (relative)"
            )
        worst = max(worst, difference)
    same = f"{', '.join(steps)}: the same result as plain attention"
    return Check(NAME, f"{same}; largest relative difference {worst:.1e}")


@contextlib.contextmanager
def small_tiles(imported: ImportedRepository, keys: int) -> Iterator[None]:
    """All heads are computed in tiles, with blocks of so many keys, which are otherwise for long rows."""
    module = sys.modules[f"{imported.modeling.__package__}.ntk_tiles"]
    small = {
        "SHORTEST": 1,
        "MOST_THREADS": math.inf,
        "TILE_KEYS": keys,
        "TILE_QUERIES": module.BLOCKS * keys,
        "LARGEST_SHARE": math.inf,
    }
    usual = {name: getattr(module, name) for name in small}
    vars(module).update(small)
    try:
        yield
    finally:
        vars(module).update(usual)


def in_steps(model: Any, tokens: torch.Tensor, mask: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Hidden states of the whole sequence, computed over a cache in steps that end at ``ends``."""
    cache, states = DynamicCache(), []
    for start, end in pairwise((0, *ends)):
        output = model(
            tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
        )
        states.append(output.last_hidden_state)
    return torch.cat(states, dim=1)
