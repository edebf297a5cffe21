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
from dataclasses import dataclass
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
PROMPT, WARM_UP_TOKENS = 64, 8
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
    eager: float
    """Seconds of the processor, over the cache that grows."""
    compiled: float | None
    """The same in one graph, over a static cache; None if it does not compile."""
    reason: str = ""
    """Why it does not."""


class Operations(TorchDispatchMode):
    """Counts those that compute something."""

    count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = operation._schema.name.partition("::")[2]
        self.count += name not in VIEWS
        return operation(*args, **(kwargs or {}))


def measure(setup: Setup, side: str, tokens: int, turns: int) -> Found:
    """Measures one side; call it in a fresh process."""
    from transformers import CompileConfig, DynamicCache

    torch.set_num_threads(1)
    model = measuring.load(setup, side)
    ids = measuring.tokens(setup, PROMPT)
    in_one_graph = CompileConfig(fullgraph=True, mode="default")
    in_one_graph._compile_all_devices = True

    def seconds(**options: Any) -> float:
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        started = time.process_time()
        model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **options)
        return (time.process_time() - started) / tokens

    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        measuring.decode(model, ids[:, :1], PROMPT, cache)
        with Operations() as counted:
            measuring.decode(model, ids[:, :1], PROMPT + 1, cache)
    seconds()
    eager = statistics.median(seconds() for _ in range(turns))
    static = {"cache_implementation": "static", "compile_config": in_one_graph}
    try:
        seconds(**static)
    except Exception as error:
        return Found(counted.count, eager, None, type(error).__name__)
    return Found(counted.count, eager, statistics.median(seconds(**static) for _ in range(turns)))


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
        found = {side: fresh(measure, setup, side, tokens, repeats) for side in (STOCK, *CONVERSIONS)}
    rows = []
    for side, cell in found.items():
        compiled = cell.reason if cell.compiled is None else number(1000 * cell.compiled)
        rows.append(
            [
                side,
                str(cell.operations),
                number(1000 * cell.eager),
                ratio(cell.eager, found[STOCK].eager),
                compiled,
                ratio(cell.compiled, found[STOCK].eager),
            ]
        )
    sections = [
        f"{family}, {setup.layers} layers, {setup.heads} heads x {setup.head_dim}, a row of {PROMPT} tokens "
        f"and {tokens} new ones, one CPU thread. *Operations* are those of a pass for one token that compute "
        "something. Times are milliseconds of the processor for each token of `generate`, medians of "
        f"{repeats}; *x* compares with stock's first.",
        report.table(["side", "operations", "ms", "x", "one graph, ms", "x"], rows),
    ]
    title = f"What a processor does for a token: {family}"
    report.finish(f"decoding_steps-{family}", title, sections, before, write=write)


if __name__ == "__main__":
    main()
