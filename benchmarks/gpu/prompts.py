"""The prompts that continuous batching and vLLM get, so that their throughputs can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu.settings import Geometry, Settings

Prompts = Sequence[list[int]]


def asked(settings: Settings, geometry: Geometry) -> tuple[Prompts, int]:
    """The prompts, and how many new tokens each gets."""
    count, longest, new = settings.size((64, 2048, 128), (6, 24, 4))
    random = torch.Generator().manual_seed(0)
    # Many are short and few are long.
    lengths = (longest * torch.rand(count, generator=random) ** 2).long().clamp(min=max(1, longest // 32))
    return [
        torch.randint(1, geometry.vocabulary, (length,), generator=random).tolist()
        for length in lengths.tolist()
    ], new


def said(prompts: Prompts, new: int) -> str:
    """Both in words, for the introduction of a document."""
    lengths = [len(prompt) for prompt in prompts]
    return (
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens ({sum(lengths)} in all), {new} "
        "new tokens each, greedy."
    )
