"""Milliseconds a token, one operation after another and as one graph, beside reading the weights once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import measuring
import report
import torch
from measuring import STOCK
from report import Document, number

from gpu.part import BLOOM_1B7, BLOOM_560M, Settings, Side, load, repositories, shared

TITLE = "decoding"
MODELS = {"BLOOM-1b7": BLOOM_1B7, "BLOOM-560m": BLOOM_560M}
SIDES = (Side(STOCK, STOCK, None), Side("converted", "none", "sdpa"), Side("by position", "position", "sdpa"))
TOKENS = 20
INTRO = f"""\
What ``generate`` takes for each of {TOKENS} tokens after a prompt, on CUDA's clock: the time for
{TOKENS + 1} tokens less that for one. *One graph* is `cache_implementation="static"`. *Weights* is what
reading all weights once takes, at the speed at which a copy on this card reads and writes. Kernels are those
of one token."""
HEAD = ["prompt", "side", "ms", "kernels", "one graph, ms", "kernels", "weights, ms"]


def run(settings: Settings, document: Document) -> None:
    document.intro = INTRO
    lengths = settings.size((2048, 8192, 32768), (24,))
    for (name, geometry), until in shared(list(MODELS.items()), settings.until):
        setup = settings.setup(name, geometry, lengths[-1])
        rows: list[list[str]] = []
        with repositories(setup, "none", "position"):
            for side, _ in shared(SIDES, until):
                try:
                    model = load(setup, side)
                    floor = 1000 * bytes_of(model) / bandwidth(settings)
                    for length in lengths:
                        ids = measuring.tokens(setup, length)
                        row = [str(length), side.name]
                        for options in ({}, {"cache_implementation": "static"}):
                            row += cells(settings, model, ids, options)
                        rows.append([*row, number(floor)])
                        document.put(name, f"{setup.said()}:\n\n{report.table(HEAD, rows, texts=2)}")
                    del model
                except Exception as error:  # the other sides can still be measured
                    document.fail(f"{name}, {side.name}", error)
                measuring.release()


def cells(settings: Settings, model: Any, ids: torch.Tensor, options: dict[str, Any]) -> list[str]:
    """Milliseconds and kernels of a token; or why there are none."""

    def generate(tokens: int) -> Callable[[], Any]:
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "use_cache": True}
        mask = torch.ones_like(ids)
        return lambda: model.generate(ids, attention_mask=mask, **lengths, **options)

    try:
        generate(TOKENS + 1)()  # compiles, and takes memory
        many, one = (measuring.timed(settings.device, generate(count))[0] for count in (TOKENS + 1, 1))
        kernels = (launches(generate(count)) for count in (TOKENS + 1, 1))
        difference = next(kernels) - next(kernels)
    except Exception as error:
        return [type(error).__name__, "-"]
    return [number(1000 * (many - one) / TOKENS), str(round(difference / TOKENS))]


def launches(call: Callable[[], Any]) -> int:
    """The number of kernels that run on the device; of a CPU, the operations."""
    with torch.profiler.profile() as found:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    kind = "CUDA" if torch.cuda.is_available() else "CPU"
    return sum(str(event.device_type).endswith(kind) for event in found.events())


def bytes_of(model: Any) -> int:
    """What a token reads of the weights: all but the embeddings, which are also the head."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def bandwidth(settings: Settings) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(settings.size(2**30, 2**20), dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = measuring.timed(settings.device, lambda: target.copy_(source))[0]
    return 2 * source.numel() / seconds
