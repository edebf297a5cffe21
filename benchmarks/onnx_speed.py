"""Time and memory of our ONNX graphs, beside those of other exporters.

    python benchmarks/onnx_speed.py graphs --optimum-python PATH
    python benchmarks/onnx_speed.py quantised          # int8, w8a8 and int4

The others are transformers' own ``OnnxExporter``, quantised with onnxruntime's tools, and optimum-onnx, which
has its own environment. All graphs have the same random weights and run in the same onnxruntime on the CPU. A
fresh process measures each of them at each length, and they take turns; the tables show medians.
"""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import click
import measuring
import numpy as np
import report
import torch
from conversion import watch
from measuring import DENORMAL_AS_ZERO, STEPS, STOCK, WARM_UP, Cell, Setup, fresh
from report import number, ratio, say

TOLERANCE = 1e-3
"""Largest difference of the last token's logits between graphs, relative to the largest logit."""
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
ONNX_TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}
KEPT = ", denormals kept"
"""End of a side's name: the graph of the name before it, in onnxruntime's default."""
PACKAGES = ("onnx", "onnxruntime")


class Graph(NamedTuple):
    """Where a graph is; a folder named ``-last`` has one that returns only the last token's logits."""

    folder: str
    file: str = "model.onnx"

    @property
    def is_ours(self) -> bool:
        return self.folder.startswith("ours")


PEERS = ("ours", "transformers", "optimum", "ours-last", "transformers-last")
GRAPHS = {name: Graph(name) for name in PEERS} | {
    "ours int8": Graph("ours-last", "onnx/model_quantized.onnx"),
    "ours w8a8": Graph("ours-last", "onnx/model_int8.onnx"),
    "ours int4": Graph("ours-last", "onnx/model_q4.onnx"),
    "transformers int8": Graph("transformers-last", "model_quantized.onnx"),
    "transformers int4": Graph("transformers-last", "model_q4.onnx"),
}
TRANSFORMERS = """
import sys
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

source, out, *options = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
past = DynamicCache()
heads = model.config.n_head
for layer in range(model.config.n_layer):
    shape = (2, 2, heads, 5, model.config.hidden_size // heads)
    past.update(*torch.zeros(shape, dtype=model.dtype), layer)
mask = torch.ones(2, 8, dtype=torch.int64)
mask[0, :2] = 0  # a mask of ones is left out of the graph
inputs = dict(input_ids=torch.ones(2, 3, dtype=torch.int64), attention_mask=mask, past_key_values=past)
if "last" in options:
    inputs["logits_to_keep"] = 1
program = OnnxExporter().export(model, inputs, OnnxConfig(dynamic=True))
if hasattr(program, "save_pretrained"):
    program.save_pretrained(out)
else:  # older releases return the program of torch.onnx
    program.save(out + "/model.onnx")
"""
OPTIMUM = """
import sys
from optimum.exporters.onnx import main_export

source, out = sys.argv[1:]
main_export(source, out, task="text-generation-with-past", dtype="fp32", do_validation=False)
"""


def make_checkpoints(setup: Setup, folders: Sequence[str]) -> None:
    """Writes a BLOOM with random weights, and converts it once for each of our graphs."""
    ours = {name: {"method": "none"} for name in folders if Graph(name).is_ours}
    measuring.make_repositories(setup, ours)
    for name in folders:
        (setup.folder / name).mkdir(exist_ok=True)


def export_command(setup: Setup, name: str, optimum_python: str | None) -> list[str]:
    """The command that writes one of ``PEERS``."""
    source, out = setup.folder / STOCK, setup.folder / name
    last = name.endswith("-last")
    if Graph(name).is_ours:
        words = [sys.executable, "-m", "converter", "export", str(out), "--no-validate"]
        return [*words, *(["--last-logits"] if last else [])]
    words = [str(source), str(out)]
    if name == "optimum":
        return [str(optimum_python), "-c", OPTIMUM, *words]
    return [sys.executable, "-c", TRANSFORMERS, *words, *(["last"] if last else [])]


def quantise(setup: Setup) -> None:
    """Writes our quantised graphs, and quantises the peer's as the documentation of onnxruntime shows."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    for dtype in ("int8", "w8a8", "int4"):
        subprocess.run([*export_command(setup, "ours-last", None), "--onnx-dtype", dtype, "-q"], check=True)
    logging.disable(logging.INFO)
    folder = setup.folder / "transformers-last"
    quantize_dynamic(
        folder / "model.onnx",
        folder / "model_quantized.onnx",
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
    )
    model = onnx.load(folder / "model.onnx")
    quantiser = MatMulNBitsQuantizer(model, bits=4, block_size=32, is_symmetric=False, accuracy_level=4)
    quantiser.process()
    quantiser.model.save_model_to_file(str(folder / "model_q4.onnx"), use_external_data_format=True)


class Cached:
    """A graph in a session, with a cache that is handled in the best way for the graph.

    Our graphs write new keys and values into the buffer that holds the old ones. The other graphs return a
    new cache, which is passed to the next step without a copy through NumPy.

    Other options are those of ``measuring.session``; ``provider`` has those of the CUDA provider.
    """

    def __init__(
        self, setup: Setup, graph: Graph, *, provider: Mapping[str, str] | None = None, **options: Any
    ):
        if setup.device == "cuda":
            import onnxruntime

            onnxruntime.preload_dlls()  # those that torch brought
        # On CUDA, onnxruntime would ask for more memory than it needs, in steps of powers of two.
        memory = {"arena_extend_strategy": "kSameAsRequested"}
        needed = {**memory, **(provider or {})} if setup.device == "cuda" else {}
        asked = PROVIDERS[setup.device]
        path = setup.folder / graph.folder / graph.file
        self.session = measuring.session(path, setup.threads, providers=[(asked, needed)], **options)
        if self.session.get_providers()[0] != asked:
            raise RuntimeError(f"onnxruntime fell back from {asked}")
        self.device = setup.device
        self.in_place = graph.is_ours
        self.pasts = {slot(value.name): value for value in self.session.get_inputs() if slot(value.name)}
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.cache: dict[str, Any] = {}
        self.length = 0

    def clear(self, capacity: int = 0) -> None:
        """Empties the cache; ``capacity`` is the number of tokens that a buffer must hold."""
        from onnxruntime import OrtValue

        self.length = 0
        self.cache.clear()
        for key, past in self.pasts.items():
            # Fixed sizes are numbers or strings of digits.
            shape = [1, int(past.shape[1]), capacity if self.in_place else 0, int(past.shape[3])]
            kind = ONNX_TYPES[past.type]
            self.cache[key] = OrtValue.ortvalue_from_shape_and_type(shape, kind, self.device, 0)

    def step(self, ids: np.ndarray) -> Any:
        """Adds tokens [1, S] to the cache; returns their logits as an OrtValue."""
        self.length += ids.shape[1]
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", np.ones((1, self.length), np.int64))
        for key, past in self.pasts.items():
            binding.bind_ortvalue_input(past.name, self.cache[key])
        for name in self.outputs:
            key = slot(name)
            if key and self.in_place:
                binding.bind_ortvalue_output(name, self.cache[key])
            else:
                binding.bind_output(name, self.device if key else "cpu")
        self.session.run_with_iobinding(binding)
        returned = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        if not self.in_place:
            self.cache = {key: value for name, value in returned.items() if (key := slot(name))}
        return returned["logits"]

    def prompt(self, ids: np.ndarray, capacity: int) -> Any:
        """Runs a prompt over an empty cache with room for all tokens; the logits."""
        self.clear(capacity)
        return self.step(ids)

    def profiled(self) -> list[dict[str, Any]]:
        """The events of the profile, which ends here."""
        found: list[dict[str, Any]] = json.loads(Path(self.session.end_profiling()).read_text("utf-8"))
        return found


def slot(name: str) -> str | None:
    """The "LAYER key" or "LAYER value" of a cache's input or output in any naming scheme, or None."""
    found = re.search(r"\.(\d+)\.(key|value)s?$", name)
    return f"{found[1]} {found[2]}" if found else None


def tokens(setup: Setup, count: int) -> np.ndarray:
    """Token ids, int64 [1, count]; the same for all graphs, and for torch."""
    ids: np.ndarray = measuring.tokens(setup, count).cpu().numpy()
    return ids


def last(logits: Any) -> np.ndarray:
    """The last token's logits in float32; a copy."""
    if logits.data_type() == "tensor(bfloat16)":  # which NumPy does not have
        found: np.ndarray = torch.from_dlpack(logits)[0, -1].float().numpy()
    else:
        found = logits.numpy()[0, -1].astype(np.float32)
    return found


def measure(setup: Setup, side: str, length: int) -> Cell:
    """Measures memory with a prompt, and time with another and tokens after it; needs a fresh process."""
    measuring.limit_memory()
    cell = Cell()
    with measuring.noting_failure(cell.prompt):
        cached = Cached(setup, GRAPHS[side.removesuffix(KEPT)], zero=not side.endswith(KEPT))
        cached.prompt(tokens(setup, WARM_UP), WARM_UP)  # loads the weights, so they do not count as extra
        ids = tokens(setup, length + WARM_UP + STEPS)
        with measuring.noting_extra(cell.prompt):
            cached.prompt(ids[:, :length], ids.shape[1])
        measure_steps(cached, ids, length, 1, cell)
        cell.resident = measuring.peak()
    return cell


def measure_steps(cached: Cached, ids: np.ndarray, length: int, runs: int, cell: Cell) -> None:
    """Times some prompts, and then tokens over the cache of the last one."""
    clock = "cpu"  # onnxruntime returns when the logits are there, on a GPU too
    for _ in range(runs):
        taken, logits = measuring.timed(clock, partial(cached.prompt, ids[:, :length], ids.shape[1]))
        cell.prompt.seconds.append(taken)
    cell.logits.append(last(logits))
    for step in range(WARM_UP + STEPS):
        taken, logits = measuring.timed(clock, partial(cached.step, ids[:, length + step, None]))
        cell.token.seconds += [taken] if step >= WARM_UP else []
    cell.logits.append(last(logits))


@torch.inference_mode()
def stock_logits(setup: Setup, length: int, dtype: str = "float32") -> list[np.ndarray]:
    """The logits that ``measure`` must find, from transformers in torch."""
    torch.set_num_threads(setup.threads)
    ids = torch.from_numpy(tokens(setup, length + WARM_UP + STEPS)).to(setup.device)
    logits = measuring.load(setup, STOCK, dtype)(ids, use_cache=False).logits[0].float().cpu()
    return [logits[length - 1].numpy(), logits[-1].numpy()]


def difference(reference: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """Largest difference, relative to the largest logit."""
    return max(map(measuring.difference, reference, found), default=math.nan)


def check(setup: Setup, results: Mapping[int, Mapping[str, Cell]]) -> float:
    """The largest difference of logits: to torch for the shortest prompt, between graphs for longer ones.

    Raises:
        ClickException: the logits of a graph differ.
    """
    largest, reference = 0.0, fresh(stock_logits, setup, min(results))
    for length, cells in results.items():
        for side, cell in cells.items():
            if not cell.failure:
                reference = reference or cell.logits
                gap = difference(reference, cell.logits)
                if not gap <= TOLERANCE:
                    raise click.ClickException(f"{side} at {length} tokens: logits differ by {gap:.1e}")
                largest = max(largest, gap)
        reference = []
    return largest


# --- the command line


@click.group(help=__doc__)
def main() -> None:
    pass


QUICK = {"layers": 1, "heads": 2, "head_dim": 32, "vocabulary": 512, "lengths": "16"}


@main.command()
@click.option("--optimum-python", metavar="PATH", help="Python with optimum-onnx; else optimum is left out.")
@report.numbers(layers=6, heads=16, head_dim=64, vocabulary=32000, threads=1, repeats=3, seconds=240.0)
@report.lengths("512,2048,4096,8192")
@report.common(**QUICK, repeats=1)
def graphs(
    optimum_python: str | None,
    lengths: list[int],
    repeats: int,
    seconds: float,
    write: bool,
    **options: Any,
) -> None:
    """Compares our graphs with those of transformers and optimum: export, prefill, memory and decoding."""
    before = report.load()
    chosen = [name for name in PEERS if name != "optimum" or optimum_python]
    with measuring.workplace(options["threads"]) as temporary:
        setup = Setup(temporary, **options)
        fresh(make_checkpoints, setup, chosen)
        exported, taken = [], {}
        for name in chosen:
            cost = watch(export_command(setup, name, optimum_python))
            written = sum(path.stat().st_size for path in (temporary / name).glob("*.onnx*"))
            taken[name] = cost.seconds
            peaks = [f"{each / 1e6:.0f}" for each in (cost.resident, cost.anonymous)]
            seconds_ = [number(cost.seconds), ratio(cost.seconds, taken.get(like(name)))]
            exported.append([name, *seconds_, *peaks, number(written, 1e-6)])
            say(f"export: {name} {number(cost.seconds)} s")
        sides = [name + end for name in chosen for end in ("", KEPT)]
        results = measuring.in_turns(partial(measure, setup), sides, lengths, repeats, seconds)
        gap = check(setup, results)
    rows = []
    for length, cells in results.items():
        for side, cell in cells.items():
            name = side.removesuffix(KEPT)
            base = cells.get(like(name) + side.removeprefix(name))
            rows.append([side, str(length), *cell.columns(base), str(len(cell.prompt.seconds))])
    size = f"{setup.layers}x{setup.hidden}"
    sections = [
        f"{setup.said()}, onnxruntime {version('onnxruntime')}; the same random weights for all, scaling "
        f"none. The last logits of all graphs agree within {gap:.1e} of the largest, after the prompt and "
        f"after {WARM_UP + STEPS} decoded tokens; for {lengths[0]} tokens, they also agree with torch.",
        "Ratios are to `ours`, or to `ours-last` for graphs named `-last`, which return the logits of the "
        f"last token only. Those of all tokens are {4e-6 * setup.vocabulary * lengths[-1]:.0f} MB for "
        f"{lengths[-1]}. *Denormals kept*: without `{DENORMAL_AS_ZERO}`. {measuring.SAID}",
        report.table(
            ["export of", "s", "ratio", "peak resident MB", "peak anonymous MB", "written MB"], exported
        ),
        report.table(["graph", "tokens", *measuring.COLUMNS, "runs"], rows),
    ]
    title = "ONNX graphs: ours and its peers'"
    name = f"onnx_speed-bloom-{size}-cpu-float32"
    report.finish(name, title, sections, before, PACKAGES, write=write)


def like(name: str) -> str:
    """The graph of ours that returns as many logits, if it is another one."""
    ours = "ours-last" if name.endswith("-last") else "ours"
    return "" if ours == name else ours


@main.command()
@report.numbers(layers=6, heads=16, head_dim=128, vocabulary=32000, threads=1, repeats=3)
@report.lengths("512,2048")
@report.common(**QUICK, repeats=1)
def quantised(lengths: list[int], repeats: int, write: bool, **options: Any) -> None:
    """Compares quantised graphs with float32, and with quantised graphs of transformers."""
    before = report.load()
    names = [name for name in GRAPHS if name not in ("ours", "transformers", "optimum")]
    names.sort(key=lambda name: GRAPHS[name].folder)  # ours first
    with measuring.workplace(options["threads"]) as temporary:
        setup = Setup(temporary, **options)
        peers = ("ours-last", "transformers-last")
        fresh(make_checkpoints, setup, peers)
        for name in peers:
            watch(export_command(setup, name, None))
        fresh(quantise, setup)
        results = measuring.in_turns(partial(measure, setup), names, lengths, repeats, math.inf)
    rows = []
    for length, cells in results.items():
        base = cells["ours-last"]
        for name, cell in cells.items():
            ours = cells[name.replace("transformers", "ours")]
            change = np.square(np.subtract(cell.logits, base.logits)).mean() / np.square(base.logits).mean()
            row = [name.replace("-last", " fp32"), str(length), cell.token.milliseconds]
            row += [ratio(base.token.median, cell.token.median)]
            row += ["-" if GRAPHS[name].is_ours else ratio(cell.token.median, ours.token.median)]
            row += [number(cell.prompt.median), ratio(base.prompt.median, cell.prompt.median)]
            rows.append([*row, f"{cell.resident / 1e6:.0f}", f"{change**0.5:.3f}"])
    head = ["graph", "tokens", "decode ms", "float32 / it", "it / ours", "prefill s", "float32 / it"]
    sections = [
        f"{setup.said()}, random weights, onnxruntime {version('onnxruntime')}; denormal numbers are taken "
        "for zero. *float32 / it*: how many times faster than our float32 graph. *Change of logits*: root "
        "mean square, in parts of the logits'; random weights lose more than trained ones.",
        report.table([*head, "peak resident MB", "change of logits"], rows),
    ]
    name = f"quantised_speed-bloom-{setup.layers}x{setup.hidden}-cpu"
    report.finish(name, "Speed of quantised graphs", sections, before, PACKAGES, write=write)


if __name__ == "__main__":
    main()
