"""Fused prefill, chunked prefill and decoding give what plain attention gives."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from converter.errors import VerificationError
from converter.families.base import Family
from converter.verification.check import Check
from converter.verification.patched import PROBE_VOCABULARY, Patched, build

TOKENS, ENCODER_TOKENS, CHUNK, PADDING = 64, 700, 24, 9
# A trained length inside the probe, so that a dynamic scaling is at work there.
TRAIN_LENGTH = 24
TOLERANCE = 1e-4


@torch.no_grad()
def check(patched: Patched, family: Family) -> Check:
    """Runs a small random model with this repository's heads and scaling along every path.

    A decoder's are one pass, chunks and single tokens over a cache; an encoder's is one pass, over rows
    that are longer than what it computes at once.

    Raises:
        VerificationError: names the path and the difference.
    """
    scaling = patched.config["alibi_scaling"]
    dynamic = scaling is not None and "train_seq_len" in scaling
    if dynamic:
        scaling = {**scaling, "train_seq_len": TRAIN_LENGTH}
    model = build(patched.trunk, patched.probe_config(alibi_scaling=scaling))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Larger than an initialisation, so that attention is far from uniform.
        parameter.normal_(0, 0.2, generator=generator).add_(parameter.dim() == 1)
    length = TOKENS if family.kind == "decoder" else ENCODER_TOKENS
    tokens = torch.randint(PROBE_VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :PADDING] = 0

    plain = model(tokens, attention_mask=mask, output_attentions=True).last_hidden_state
    steps = {"fused": model(tokens, attention_mask=mask).last_hidden_state}
    # A length-dynamic scaling is defined by the row's length, so that earlier chunks, which saw a
    # shorter row, rightly differ.
    if family.kind == "decoder" and (not dynamic or scaling["dynamic"] == "position"):
        steps["chunked"] = in_steps(model, tokens, mask, CHUNK)
        steps["decoding"] = in_steps(model, tokens, mask, 1)
    worst = 0.0
    for name, states in steps.items():
        difference = float((states - plain)[mask.bool()].abs().max() / plain[mask.bool()].abs().max())
        if not difference < TOLERANCE:
            raise VerificationError(
                f"{name} attention differs from plain attention by {difference:.2e} (relative)"
            )
        worst = max(worst, difference)
    return Check(
        "paths",
        f"{', '.join(steps)}: attention gives what its plain form gives; "
        f"largest relative difference {worst:.1e}",
    )


def in_steps(model: Any, tokens: torch.Tensor, mask: torch.Tensor, step: int) -> torch.Tensor:
    """Hidden states of the whole sequence, computed ``step`` tokens at a time over a cache."""
    cache, states = DynamicCache(), []
    for start in range(0, tokens.shape[1], step):
        end = start + step
        output = model(
            tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
        )
        states.append(output.last_hidden_state)
    return torch.cat(states, dim=1)
