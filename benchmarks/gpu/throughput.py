"""New tokens per second for many prompts: padded, in transformers' continuous batches, and in vLLM."""

from __future__ import annotations

import os
import time

import measuring
import report
import torch
import vllm_speed
from measuring import STOCK, Setup, fresh
from report import Document, number, ratio
from vllm_speed import ENVIRONMENT, Prompts, Side

from gpu.part import BLOOM_1B7, Settings, repositories, shared

TITLE = "throughput of many prompts"
RIGHT = 0.5
"""At least this share of the first new tokens must be the likeliest one; random logits have near ties."""
REQUIRED = 3
"""The first sides, without which the part has failed."""
SIDES = (
    Side("stock, generate", "generate", STOCK),
    Side("sdpa, generate", "generate", "none", "sdpa"),
    Side("sdpa, generate_batch", "generate_batch", "none", "sdpa"),
    Side("flash_attention_2, generate_batch", "generate_batch", "none", "flash_attention_2"),
    Side("sdpa, ntk by position, generate_batch", "generate_batch", "position", "sdpa"),
    Side("vLLM, static, slopes, FLASH_ATTN", "vllm", "static", "FLASH_ATTN"),
    Side("vLLM, by position, folded, FLASH_ATTN", "vllm", "position", "FLASH_ATTN"),
)
INTRO = f"""\
{{sizes}}, random weights. {{count}} prompts of {{shortest}} to {{longest}} tokens, {{new}} new tokens each,
greedy. `generate` gets {vllm_speed.ROWS["cuda"]} rows of similar length at a time, padded on the left; the
others get all of them. Factors are to the first line. *First right*: prompts whose first new token is the
likeliest one of transformers' model in float32, in the same folder."""
HEAD = ["side", "s", "new tokens / s", "factor", "first right"]


def run(settings: Settings, document: Document) -> None:
    count, longest, new = settings.size((64, 2048, 128), (6, 24, 4))
    random = torch.Generator().manual_seed(0)
    # Many are short and few are long.
    shares = torch.rand(count, generator=random) ** 2
    lengths = (longest * shares).long().clamp(min=max(1, longest // 32)).tolist()
    setup = settings.setup("throughput", BLOOM_1B7, longest + new)
    prompts = vllm_speed.make_prompts(setup.vocabulary, lengths)
    words = {"sizes": setup.said(), "shortest": min(lengths), "longest": max(lengths), "new": new}
    document.intro = INTRO.format(count=count, **words)
    os.environ |= ENVIRONMENT
    rows: list[list[str]] = []
    base = None
    with repositories(setup, *vllm_speed.CONVERSIONS):
        expected = fresh(vllm_speed.first_tokens, setup, prompts)
        for (number_, side), until in shared(list(enumerate(SIDES)), settings.until):
            if side.lacking:
                document.skip(side.name, f"{side.lacking} is not installed")
                continue
            if time.monotonic() > until:
                document.skip(side.name, "no time")
                continue
            try:
                taken, found = fresh(measure, setup, side, prompts, new)
            except Exception as error:  # the other sides can still be measured
                lacking = number_ >= REQUIRED and isinstance(error, (ImportError, ValueError))
                (document.skip if lacking else document.fail)(side.name, error)
                continue
            right = sum(row[0] == token for row, token in zip(found, expected[side.folder], strict=True))
            if {len(row) for row in found} != {new} or right < RIGHT * count:
                document.fail(side.name, f"{right} of {count} first tokens are right, or tokens are missing")
            base = base or taken
            row = [side.name, number(taken), number(count * new / taken), ratio(base, taken)]
            rows.append([*row, f"{right} of {count}"])
            document.put("Throughput", report.table(HEAD, rows))


def measure(setup: Setup, side: Side, prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
    """The seconds of all prompts after two that warm up, and the new tokens; needs a fresh process."""
    generate = side.load(setup)
    generate(prompts[:2], new)
    return measuring.timed(setup.device, lambda: generate(prompts, new))
