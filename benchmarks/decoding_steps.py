"""What a processor does for each token that a decoder writes: operations that it starts, and their time.

    python benchmarks/decoding_steps.py
    python benchmarks/decoding_steps.py --family falcon --layers 24

The models are as deep as real ones and very narrow, so the time is that of starting operations. On a GPU, a
narrow model and a wide one take as long where the processor cannot start operations fast enough. Tokens come
from ``generate``, with the cache that it takes by itself, and with ``cache_implementation="static"``, which
compiles decoding into one graph. ``generate`` does so on GPUs only, unless it is told, as here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import measuring
import report
import torch
from measuring import STOCK, Setup, fresh
from report import number, ratio
from torch.utils._python_dispatch import TorchDispatchMode

CONVERSIONS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "static": {"method": "ntk", "scale": 4},
    "by-parts, by position": {},
    "concave": {"method": "concave"},
}
"""Side -> how it is converted, beside the trained length."""
PROMPT = 64
VIEWS = (
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute"),
    *(
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    ),
)
"""Operations that compute nothing."""


@dataclass
class Found:
    """What one side does for a token."""

    operations: int
    eager: list[float] = field(default_factory=list)
    """Seconds of the processor in each turn, over the cache that grows."""
    compiled: list[float] = field(default_factory=list)
    """The same in one graph, over a static cache."""
    reason: str = ""
    """Why there is no graph."""


class Operations(TorchDispatchMode):
    """Counts those that compute something."""

    count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = operation._schema.name.partition("::")[2]
        self.count += name not in VIEWS
        return operation(*args, **(kwargs or {}))


def measure(setup: Setup, tokens: int, turns: int) -> dict[str, Found]:
    """Measures all sides, which take turns; call it in a fresh process."""
    torch.set_num_threads(1)
    ids = measuring.tokens(setup, PROMPT)
    models = {side: measuring.load(setup, side) for side in (STOCK, *CONVERSIONS)}
    found = {side: Found(count_operations(model, ids)) for side, model in models.items()}
    for side, model in models.items():
        seconds(model, ids, tokens)
        try:
            seconds(model, ids, tokens, **in_one_graph())
        except Exception as error:
            found[side].reason = type(error).__name__
    for _ in range(turns):
        for side, model in models.items():
            found[side].eager.append(seconds(model, ids, tokens))
            if not found[side].reason:
                found[side].compiled.append(seconds(model, ids, tokens, **in_one_graph()))
    return found


def count_operations(model: Any, ids: torch.Tensor) -> int:
    """How many operations of a pass for one token compute something."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        measuring.decode(model, ids[:, :1], PROMPT, cache)
        with Operations() as counted:
            measuring.decode(model, ids[:, :1], PROMPT + 1, cache)
    return counted.count


def in_one_graph() -> dict[str, Any]:
    """What makes ``generate`` compile, on a CPU too."""
    from transformers import CompileConfig

    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def seconds(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> float:
    """The processor's time for each token."""
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "use_cache": True}
    started = time.process_time()
    model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **options)
    return (time.process_time() - started) / tokens


@click.command(help=__doc__)
@click.option("--family", type=click.Choice(["bloom", "mpt", "falcon"]), default="bloom", show_default=True)
@report.numbers(layers=12, heads=4, head_dim=16, tokens=64, repeats=5)
@report.common(layers=1, heads=2, head_dim=8, tokens=4, repeats=1)
def main(family: str, tokens: int, repeats: int, write: bool, **sizes: Any) -> None:
    before = report.load()
    with measuring.workplace() as folder:
        setup = Setup(Path(folder), family=family, longest=PROMPT + tokens, **sizes)
        length = {"train_length": PROMPT}
        fresh(measuring.make_repositories, setup, {side: length | how for side, how in CONVERSIONS.items()})
        found = fresh(measure, setup, tokens, repeats)
    rows = []
    stock = statistics.median(found[STOCK].eager)
    for side, cell in found.items():
        eager = statistics.median(cell.eager)
        row = [side, str(cell.operations), number(1000 * eager), ratio(eager, stock)]
        if cell.compiled:
            compiled = statistics.median(cell.compiled)
            row += [number(1000 * compiled), ratio(compiled, stock)]
        else:
            row += [cell.reason, "-"]
        rows.append(row)
    sections = [
        f"{family}, {setup.layers} layers, {setup.heads} heads x {setup.head_dim}, a row of {PROMPT} tokens "
        f"and {tokens} new ones, one CPU thread. *Operations* are those of a pass for one token that compute "
        "something. Times are milliseconds of the processor for each token of `generate`, the prompt "
        f"included, medians of {repeats} turns; *x* compares with stock's first.",
        report.table(["side", "operations", "ms", "x", "one graph, ms", "x"], rows),
    ]
    title = f"What a processor does for a token: {family}"
    report.finish(f"decoding_steps-{family}", title, sections, before, write=write)


if __name__ == "__main__":
    main()
