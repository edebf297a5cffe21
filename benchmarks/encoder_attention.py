"""Compares ways to compute bidirectional ALiBi attention exactly, for the attention of one layer.

    python benchmarks/encoder_attention.py --write
    python benchmarks/encoder_attention.py --lengths 512,2048 --dtypes float32     # two minutes

Each way runs in a separate process, on the same random queries, keys and values; the fastest run counts. The
ways that converted models use are in ``templates/ntk_symmetric.py``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import report
import torch
import torch.nn.functional as F

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query, key, value [1, H, L, D], slopes [1, H, 1]) -> [1, H, L, D]."""


class Measured(NamedTuple):
    milliseconds: float
    extra: int
    """Bytes at the peak beyond those in use before."""
    error: float
    """Error of some rows, relative to float64."""
    first: float
    """Milliseconds of the first run, including compilation."""


def no_bias(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def whole_bias(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    slots = torch.arange(query.shape[2])
    bias = slopes[..., None] * -(slots[:, None] - slots[None, :]).abs()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))


def blocks(rows: int) -> Attend:
    from templates.ntk_symmetric import blockwise_attention

    return lambda query, key, value, slopes: blockwise_attention(
        query, key, value, slopes, query.shape[-1] ** -0.5, 0.0, rows
    )


def toeplitz(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    from templates.ntk_symmetric import toeplitz_attention

    return toeplitz_attention(query, key, value, slopes, query.shape[-1] ** -0.5)


def toeplitz_padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    from templates.ntk_symmetric import toeplitz_attention, without_padding

    size, scale = query.shape[-1], query.shape[-1] ** -0.5
    real = torch.ones(1, query.shape[2], dtype=torch.bool)
    states = without_padding(query, key, value, real, scale)
    return toeplitz_attention(*states, slopes, scale)[..., :size]


def tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    from templates.ntk_symmetric import tiled_attention

    whole, scale = slice(0, query.shape[2]), query.shape[-1] ** -0.5
    return tiled_attention(query, key, value, slopes, scale, whole)


def causal_halves(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    """Folded causal ALiBi over the keys up to the query and over those from it on, merged by their sums."""
    from templates import ntk_alibi
    from templates.ntk_alibi import CHANNELS, fold

    size, scale = query.shape[-1], query.shape[-1] ** -0.5
    query_channels = ntk_alibi.query_channels(slopes, scale)
    key_channels = ntk_alibi.key_channels(torch.arange(query.shape[2])[None], None)

    def half(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = fold(q, query_channels), fold(k, key_channels), F.pad(v, (0, CHANNELS))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, logarithm = kernel(q, k, v, 0.0, True, scale=scale)
        # Folding leaves the query's own position out.
        return output[..., :size], logarithm - slopes * torch.arange(q.shape[2])

    before, before_sum = half(query, key, value)
    after, after_sum = (part.flip(2) for part in half(query.flip(2), key.flip(2), value.flip(2)))
    own = (query.float() * key.float()).sum(-1) * scale
    top = torch.maximum(before_sum, after_sum)
    first, second, both = ((part - top).exp()[..., None] for part in (before_sum, after_sum, own))
    return ((before * first + after * second - value * both) / (first + second - both)).to(query.dtype)


def flex() -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention)

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor
    ) -> torch.Tensor:
        by_head = slopes.flatten()

        def score(value: Any, _: Any, head: Any, i: Any, j: Any) -> Any:
            return value - by_head[head] * (i - j).abs()

        result: torch.Tensor = compiled(query, key, value, score_mod=score)
        return result

    return attend


WAYS: dict[str, Callable[[], Attend]] = {
    "no bias (not ALiBi)": lambda: no_bias,
    "whole bias [H, L, L]": lambda: whole_bias,
    "blocks of 128": lambda: blocks(128),
    "blocks of 256": lambda: blocks(256),
    "blocks of 512": lambda: blocks(512),
    "blocks of 1024": lambda: blocks(1024),
    "Toeplitz view": lambda: toeplitz,
    "Toeplitz view, padding channels": lambda: toeplitz_padded,
    "tiles of that view": lambda: tiles,
    "two causal halves": lambda: causal_halves,
    "flex_attention, compiled": flex,
}


@torch.inference_mode()
def measure(
    way: str, heads: int, size: int, length: int, dtype: str, repeats: int, threads: int = 1
) -> Measured:
    """Measures one way at one length; call it in a fresh process."""
    from templates.ntk_alibi import stock_slopes

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, length, size).to(getattr(torch, dtype)) for _ in range(3))
    slopes = torch.tensor(stock_slopes(heads))[None, :, None]
    rows = torch.tensor([0, 1, length // 3, length // 2, length - 1])
    expected = exact_rows(query, key, value, slopes, rows)
    # The first call initialises libraries.
    F.scaled_dot_product_attention(query[:, :, :64], key[:, :, :64], value[:, :, :64])
    attend = WAYS[way]()

    before = proc("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    times = []
    output = query
    for _ in range(repeats):
        start = time.perf_counter()
        output = attend(query, key, value, slopes)
        times.append(time.perf_counter() - start)
    error = (output[:, :, rows].double() - expected).norm() / expected.norm()
    return Measured(1000 * min(times[1:] or times), proc("VmHWM") - before, float(error), 1000 * times[0])


def exact_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The exact output of some rows, float64 [1, H, rows, D]."""
    scores = query[:, :, rows].double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
    distance = (rows[:, None] - torch.arange(query.shape[2])[None, :]).abs()
    rows_out: torch.Tensor = (scores - slopes.double()[..., None] * distance).softmax(-1) @ value.double()
    return rows_out


def proc(key: str) -> int:
    """A value of /proc/self/status in bytes; 0 if there is no such file."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


def fresh(*args: Any) -> Measured:
    """Runs ``measure`` in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args).result()


@click.command(help=__doc__)
@click.option("--lengths", default="512,2048,8192", show_default=True, help="Tokens.")
@click.option("--dtypes", default="float32,bfloat16", show_default=True)
@click.option("--heads", default=12, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--repeats", default=4, show_default=True, help="Runs of each way; the first does not count.")
@click.option("--write", is_flag=True, help="Write results/encoder_attention-cpu.md.")
def main(lengths: str, dtypes: str, heads: int, head_dim: int, repeats: int, write: bool) -> None:
    load_before = report.load()
    sections = [
        f"{heads} heads x {head_dim}, one row, no padding, one CPU thread. *Extra* is peak memory beyond "
        "queries, keys and values, and includes the output. *Error* is the relative error of the output "
        "against float64. *First run* includes compilation."
    ]
    for dtype in dtypes.split(","):
        for length in map(int, lengths.split(",")):
            table = []
            for way in WAYS:
                cell = fresh(way, heads, head_dim, length, dtype, repeats)
                line = [
                    way,
                    f"{cell.milliseconds:.0f}",
                    f"{cell.extra / 2**20:.0f}",
                    "" if "not ALiBi" in way else f"{cell.error:.1e}",
                    f"{cell.first:.0f}",
                ]
                click.echo(f"{dtype} {length}: " + ", ".join(line), err=True)
                table.append(line)
            head = [f"{dtype}, {length} tokens", "ms", "extra MiB", "error", "first run ms"]
            sections.append(report.table(head, table))
    if write:
        path = report.write(
            "encoder_attention-cpu", "Bidirectional ALiBi attention in torch", sections, load_before
        )
        click.echo(path)
    else:
        click.echo("\n\n".join(sections))


if __name__ == "__main__":
    main()
