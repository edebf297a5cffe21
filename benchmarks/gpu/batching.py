"""Throughput of many prompts, padded by ``generate`` or in transformers' continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import report
import torch
import torch_speed
from torch_speed import factor, number

from gpu.document import Document
from gpu.models import STOCK, Side, available, load, repositories
from gpu.prompts import Prompts, asked, said
from gpu.settings import BLOOM, Settings, shared

TITLE = "throughput of generation, padded and in continuous batches"
ROWS = 16
"""Rows that ``generate`` gets at once, and prompts that are compared in float32."""
EQUAL = 0.9
"""In float32, at least this share of the new tokens must be those of stock; random logits have near ties."""


@dataclass(frozen=True)
class Way(Side):
    """One way to generate."""

    continuous: bool = False


WAYS = (
    Way(f"{STOCK}, generate", STOCK, None, required=True, exact=True),
    Way("sdpa, generate", "none", "sdpa", required=True, exact=True),
    Way("sdpa, generate_batch", "none", "sdpa", required=True, exact=True, continuous=True),
    Way("flash_attention_2, generate_batch", "none", "flash_attention_2", continuous=True),
    Way("flash_attention_3, generate_batch", "none", "flash_attention_3", continuous=True),
    Way("sdpa, ntk by position, generate_batch", "position", "sdpa", exact=True, continuous=True),
)
INTRO = """\
{geometry}, bfloat16, random weights. {prompts} `generate` gets {rows} rows at a time, in the given order and
padded on the left; `generate_batch` gets all of them. Factors are to the first line. *Same in float32*: for
{rows} prompts, the share of the new tokens that are those of the first line."""
HEAD = ["way", "s", "new tokens / s", "all tokens / s", "factor", "same in float32"]


def run(settings: Settings, document: Document) -> None:
    geometry = settings.geometry(BLOOM)
    prompts, new = asked(settings, geometry)
    answered, read = len(prompts) * new, sum(map(len, prompts))
    document.intro = INTRO.format(
        geometry=geometry.said(), prompts=said(prompts, new), rows=min(ROWS, len(prompts))
    )
    table: list[list[str]] = []
    expected: list[list[int]] = []
    first: float | None = None
    with repositories(settings, geometry, max(map(len, prompts)) + new) as setup:
        for way, until in shared(available(document, setup, WAYS), settings.until):
            try:
                model = load(setup, way)
                same = "-"
                if way.exact:
                    found = generated(setup, model.float(), way, prompts[:ROWS], new)
                    expected = expected or found
                    share = equal(expected, found)
                    same = f"{share:.0%}"
                    if share < EQUAL:
                        document.fail(way.name, f"only {same} of the tokens in float32 are those of {STOCK}")
                    model.to(torch.bfloat16)
                if time.monotonic() > until:
                    document.skip(way.name, "no time")
                    continue
                taken = timed(setup, model, way, prompts, new)
            except Exception as error:  # the other ways can still be measured
                document.fail(way.name, error)
                continue
            finally:
                model = None
                torch_speed.release()
            first = first or taken
            speeds = [number(answered / taken), number((read + answered) / taken)]
            table.append([way.name, number(taken), *speeds, factor(first, taken) if table else "-", same])
            document.put("Throughput", report.table(HEAD, table))


def timed(setup: torch_speed.Setup, model: Any, way: Way, prompts: Prompts, new: int) -> float:
    """The seconds of all prompts, after two that warm up."""
    generated(setup, model, way, prompts[:2], new)
    if setup.device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    generated(setup, model, way, prompts, new)
    return time.perf_counter() - started


def generated(setup: torch_speed.Setup, model: Any, way: Way, prompts: Prompts, new: int) -> list[list[int]]:
    """The new tokens of each prompt.

    Raises:
        RuntimeError: continuous batching failed, which it only logs, or gave fewer tokens.
    """
    rows = continuous(setup, model, prompts, new) if way.continuous else padded(model, prompts, new)
    if [len(row) for row in rows] != [new] * len(prompts):
        raise RuntimeError(f"{sum(map(len, rows))} tokens came back instead of {new * len(prompts)}")
    return rows


def padded(model: Any, prompts: Prompts, new: int) -> list[list[int]]:
    """With ``generate``, some rows at a time."""
    found: list[list[int]] = []
    for start in range(0, len(prompts), ROWS):
        rows = prompts[start : start + ROWS]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
        output = model.generate(ids, attention_mask=(ids != 0).long(), generation_config=config(new))
        found += output[:, width:].tolist()
    return found


def continuous(setup: torch_speed.Setup, model: Any, prompts: Prompts, new: int) -> list[list[int]]:
    """With ``generate_batch``."""
    options = batching_options(setup)
    outputs = model.generate_batch(inputs=list(prompts), generation_config=config(new), **options).values()
    if error := next((output.error for output in outputs if output.error), None):
        raise RuntimeError(error)
    return [output.generated_tokens for output in outputs]


def batching_options(setup: torch_speed.Setup) -> dict[str, Any]:
    """The settings of continuous batching, in releases of transformers that have them.

    By default, sdpa would become flash attention where that is installed, and a trial on the CPU would take
    all memory for its cache.
    """
    import transformers

    kind = getattr(transformers, "ContinuousBatchingConfig", None)
    if kind is None:
        return {}
    wanted: dict[str, Any] = {"auto_switch_to_flash": False}
    if setup.device == "cpu":
        wanted |= {"num_blocks": 16, "max_batch_tokens": 64}
    known = {field.name for field in fields(kind)}
    return {"continuous_batching_config": kind(**{key: wanted[key] for key in wanted.keys() & known})}


def config(new: int) -> Any:
    """Greedy, and no token ends a row."""
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)


def equal(expected: Sequence[list[int]], found: Sequence[list[int]]) -> float:
    """The share of tokens that are as expected."""
    pairs = [pair for rows in zip(expected, found, strict=True) for pair in zip(*rows, strict=True)]
    return sum(one == other for one, other in pairs) / max(1, len(pairs))
