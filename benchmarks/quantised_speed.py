"""Measures how fast quantised graphs decode, beside float32 and beside a peer's quantised graphs.

    python benchmarks/quantised_speed.py --write
    python benchmarks/quantised_speed.py --layers 2 --head-dim 64 --lengths 64     # a minute

The peer is the graph of transformers' own exporter, quantised with onnxruntime's tools as their
documentation shows: ``quantize_dynamic`` to 8 bits, which is what most ``model_quantized.onnx`` on the Hub
are, and ``MatMulNBitsQuantizer`` to 4 bits. All graphs have the same random weights. A fresh process
measures each graph at each length, and they take turns; the tables show medians.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import click
import limits
import numpy as np
import onnx_speed
import report
from onnx_speed import DECODE_STEPS, WARM_UP, Cached, Setup, last, median, prefill, share, tokens
from peak import proc
from torch_speed import factor, fresh, integers, number, say

FORMATS = {"ours": ("fp32", "int8", "w8a8", "int4"), "transformers": ("fp32", "int8", "int4")}
FILES = {
    "fp32": "model.onnx",
    "int8": "model_quantized.onnx",
    "w8a8": "model_int8.onnx",
    "int4": "model_q4.onnx",
}
BLOCK = 32
BLOCK_BITS = {"int8": 8, "int4": 4}
"""Of a number and of the zero point of its block, whose scale has 32."""


@dataclass
class Measured:
    """One graph at one length."""

    prefill: list[float] = field(default_factory=list)
    """Seconds, as the next."""
    steps: list[float] = field(default_factory=list)
    resident: int = 0
    """Bytes at the peak, weights included."""
    logits: list[np.ndarray] = field(default_factory=list)


def export_ours(setup: Setup) -> None:
    """Writes our graphs, each in a folder of its name."""
    from converter import OnnxOptions, export

    for dtype in FORMATS["ours"]:
        options = OnnxOptions(dtype=dtype, last_logits=True, validate=False, standalone=True)
        export(setup.folder / "ours", options)


def quantise_peer(folder: Path) -> None:
    """Quantises the other graph with onnxruntime's tools."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.disable(logging.INFO)
    source = folder / FILES["fp32"]
    quantize_dynamic(
        source, folder / FILES["int8"], weight_type=QuantType.QInt8, use_external_data_format=True
    )
    quantiser = MatMulNBitsQuantizer(
        onnx.load(source), bits=4, block_size=BLOCK, is_symmetric=False, accuracy_level=4
    )
    quantiser.process()
    quantiser.model.save_model_to_file(str(folder / FILES["int4"]), use_external_data_format=True)


def measure(setup: Setup, side: str, dtype: str, length: int) -> Measured:
    """Measures one graph; needs a fresh process."""
    folder = f"{side}/onnx" if side == "ours" else f"{side}-last"
    cached = Cached(setup, folder, file=FILES[dtype])
    steps = WARM_UP + DECODE_STEPS
    ids = tokens(setup, length + steps)
    cached.clear(WARM_UP)
    cached.step(ids[:, :WARM_UP])
    seconds, logits = prefill(cached, ids, length)
    found = Measured([seconds], logits=[last(logits)])
    for step in range(steps):
        seconds, logits = onnx_speed.timed(cached, ids[:, length + step, None])
        found.steps += [seconds] if step >= WARM_UP else []
    found.logits.append(last(logits))
    found.resident = proc("/proc/self/status", "VmHWM")
    return found


def least_seconds(setup: Setup, machine: limits.Machine, dtype: str, length: int) -> float:
    """The time to read all weights and the float32 cache once, for one token."""
    width = setup.heads * setup.head_dim
    layers, head = 12 * setup.layers * width**2, setup.vocabulary * width
    bits = {"fp32": 32.0, "w8a8": 8.0, **{name: own + (32 + own) / BLOCK for name, own in BLOCK_BITS.items()}}
    outside = bits["fp32"] if dtype == "fp32" else bits["int8"]
    cache = 2 * setup.layers * width * length * 32
    return (layers * bits[dtype] + head * outside + cache) / 8 / machine.bandwidth


def rows_of(
    setup: Setup, machine: limits.Machine, results: dict[tuple[int, str, str], Measured]
) -> Iterator[list[str]]:
    for (length, side, dtype), found in results.items():
        base, ours = results[length, "ours", "fp32"], results[length, "ours", dtype]
        step, least = median(found.steps), least_seconds(setup, machine, dtype, length)
        change = np.sqrt(np.mean(np.square(np.subtract(found.logits, base.logits))))
        yield [
            side,
            dtype,
            str(length),
            number(1000 * (step or 0)),
            factor(median(base.steps), step),
            "-" if side == "ours" else factor(step, median(ours.steps)),
            number(1000 * least) if side == "ours" else "-",
            share(least, step) if side == "ours" else "-",
            number(median(found.prefill) or 0),
            factor(median(base.prefill), median(found.prefill)),
            f"{found.resident / 1e6:.0f}",
            f"{change / np.sqrt(np.mean(np.square(base.logits))):.3f}",
        ]


HEAD = (
    *("graph of", "dtype", "tokens", "decode ms", "float32 / it", "it / ours", "at best ms", "share"),
    *("prefill s", "float32 / it", "peak resident MB", "change of logits"),
)


@click.command(help=__doc__)
@click.option("--layers", default=6, show_default=True)
@click.option("--heads", default=16, show_default=True)
@click.option("--head-dim", default=128, show_default=True)
@click.option("--vocabulary", default=32000, show_default=True)
@click.option("--lengths", default="512,2048", show_default=True, callback=integers)
@click.option("--threads", default=1, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Turns of each graph.")
@click.option("--write", is_flag=True, help="Write the table to benchmarks/results/.")
def main(lengths: Sequence[int], repeats: int, write: bool, **options: int) -> None:
    report.clean_up_when_terminated()
    before = report.load()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options["threads"])}
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-") as temporary:
        setup = Setup(Path(temporary), **options, repeats=repeats, seconds=0)
        fresh(onnx_speed.make_checkpoints, setup, ["ours"])
        fresh(export_ours, setup)
        onnx_speed.export(setup, "transformers-last", None)
        fresh(quantise_peer, setup.folder / "transformers-last")
        machine = fresh(limits.measure, setup.threads)
        order = [(length, side, dtype) for length in lengths for side in FORMATS for dtype in FORMATS[side]]
        results = {key: Measured() for key in order}
        for _ in range(repeats):
            for (length, side, dtype), cell in results.items():
                found = fresh(measure, setup, side, dtype, length)
                cell.prefill += found.prefill
                cell.steps += found.steps
                cell.logits, cell.resident = found.logits, max(cell.resident, found.resident)
                say(f"{length}: {side} {dtype}: {number(1000 * (median(found.steps) or 0))} ms a token")
        machine = machine.or_better(fresh(limits.measure, setup.threads))
    width = setup.heads * setup.head_dim
    text = [
        f"BLOOM's layout with {setup.layers} layers of {width} channels and a vocabulary of "
        f"{setup.vocabulary}, random weights, CPU with {setup.threads} thread(s), onnxruntime "
        f"{version('onnxruntime')}. Denormal numbers are taken for zero. *float32 / it*: how many times "
        "faster than our float32 graph. *At best*: the weights and the cache read once at "
        f"{number(machine.bandwidth / 1e9)} GB/s, the fastest reading that was measured. *Change of "
        "logits*: root mean square, in parts of the logits'; random weights lose more than trained ones.",
        report.table(HEAD, rows_of(setup, machine, results), texts=2),
    ]
    click.echo("\n" + "\n\n".join(text))
    if write:
        name = f"quantised_speed-bloom-{setup.layers}x{width}-cpu"
        say(report.write(name, "Speed of quantised graphs", text, before, ("onnx", "onnxruntime")))


if __name__ == "__main__":
    main()
