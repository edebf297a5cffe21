"""Compares time and memory of the graph from ``ntk-convert export`` with graphs of other exporters.

    python benchmarks/onnx_speed.py --optimum-python PATH
    python benchmarks/onnx_speed.py --layers 2 --lengths 128,512 --vocabulary 1024

The others are transformers' own ``OnnxExporter`` and optimum-onnx, which has its own environment. All graphs
have the same random weights and run in the same onnxruntime on the CPU, each with denormal numbers kept and
taken for zero. A fresh process measures each of these at each length, and they take turns; the tables show
medians, and beside them what the machine could do at best.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import click
import conversion
import limits
import numpy as np
import report
import torch
from peak import limit_memory, proc
from torch_speed import factor, fresh, integers, number, say

STOCK = "stock"
"""Folder of the checkpoint that all graphs are exported from."""
WARM_UP = 8
"""Tokens of the run before a measurement, and untimed steps before the timed ones."""
DECODE_STEPS = 16
"""Timed tokens in each process."""
TOLERANCE = 1e-3
"""Largest difference of the last token's logits between graphs, relative to the largest logit."""

OURS = [sys.executable, "-m", "converter", "export", "{out}", "--no-validate"]
# The scripts must not contain braces: in the words of a command, braces are replaced by folders.
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

source, out, dtype, device = sys.argv[1:]
task = "text-generation-with-past"
main_export(source, out, task=task, dtype=dtype, device=device, do_validation=False)
"""
OPTIMUM_PYTHON, OPTIMUM_DTYPE, DEVICE = "{optimum}", "{dtype}", "{device}"
"""Words of a command that stand for settings."""
EXPORTS = {
    "ours": OURS,
    "transformers": [sys.executable, "-c", TRANSFORMERS, "{source}", "{out}"],
    "optimum": [OPTIMUM_PYTHON, "-c", OPTIMUM, "{source}", "{out}", OPTIMUM_DTYPE, DEVICE],
    "ours-last": [*OURS, "--last-logits"],
    "transformers-last": [sys.executable, "-c", TRANSFORMERS, "{source}", "{out}", "last"],
}
"""Graph -> the command that writes it. A graph named ``-last`` returns only the last token's logits."""
OPTIMUM_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Setup:
    """The settings that a measuring process needs."""

    folder: Path
    """Holds the checkpoint and a folder for each graph."""
    heads: int
    head_dim: int
    layers: int
    vocabulary: int
    threads: int
    repeats: int
    seconds: float
    dtype: str = "float32"
    device: str = "cpu"
    """``cpu`` or ``cuda``: where weights are made, and onnxruntime's provider."""


@dataclass
class Measured:
    """One graph at one length."""

    prefill: list[float] = field(default_factory=list)
    """Seconds of each timed prompt."""
    extra: int | None = None
    """Bytes at a prompt's peak beyond those in use before."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each token decoded after the prompt."""
    logits: list[np.ndarray] = field(default_factory=list)
    """Logits after the prompt and after the last decoded token, each float32 [vocabulary]."""
    failure: str | None = None
    """The reason why a measurement is missing; shown in the table."""


class Side(NamedTuple):
    """What is measured."""

    graph: str
    zero: bool
    """Whether onnxruntime takes denormal numbers for zero."""

    @property
    def denormals(self) -> str:
        return "zero" if self.zero else "kept"


Results = dict[int, dict[Side, Measured]]
"""Length -> side -> measurements."""


def make_checkpoints(setup: Setup, graphs: Sequence[str]) -> None:
    """Writes a BLOOM with random weights, and converts it once for each of our graphs."""
    from transformers import BloomConfig, BloomForCausalLM

    from converter import convert

    config = BloomConfig(
        vocab_size=setup.vocabulary,
        hidden_size=setup.heads * setup.head_dim,
        n_head=setup.heads,
        n_layer=setup.layers,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(setup.device):
        model = BloomForCausalLM(config).to(getattr(torch, setup.dtype))
    for parameter in model.parameters():
        if parameter.dim() == 2:  # large, so attention is peaked and a wrong bias shows
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(setup.folder / STOCK)
    for graph in graphs:
        if graph.startswith("ours"):
            convert(setup.folder / STOCK, setup.folder / graph, method="none", verify=False)


def export(setup: Setup, graph: str, optimum_python: str | None) -> conversion.Run:
    """Exports a graph in a separate process."""
    out = setup.folder / graph
    out.mkdir(exist_ok=True)
    return conversion.run(export_command(setup, graph, optimum_python), setup.folder / STOCK, out)


def export_command(setup: Setup, graph: str, optimum_python: str | None) -> list[str]:
    """The command that exports a graph; ``{source}`` and ``{out}`` in it stand for folders."""
    settings = {
        OPTIMUM_PYTHON: optimum_python or "",
        OPTIMUM_DTYPE: OPTIMUM_DTYPES[setup.dtype],
        DEVICE: setup.device,
    }
    return [settings.get(word, word) for word in EXPORTS[graph]]


class Cached:
    """A graph in a session, with a cache that is handled in the best way for the graph.

    Our graphs write new keys and values into the buffer that holds the old ones. The other graphs return a
    new cache, which is passed to the next step without a copy through NumPy.

    Args:
        setup: the settings.
        graph: its name.
        zero: take denormal numbers for zero; it has no effect unless this is the process's first session.
        file: of the graph, in its folder.
        profile: write onnxruntime's profile to a file whose name starts like this.
    """

    def __init__(
        self,
        setup: Setup,
        graph: str,
        *,
        zero: bool = True,
        file: str = "model.onnx",
        profile: Path | None = None,
    ):
        import onnxruntime

        from converter.exports.onnx.session import PROVIDERS
        from converter.exports.onnx.session_options import session_options

        options = session_options() if zero else onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = setup.threads, 1
        options.log_severity_level = 4  # failures are shown in the table
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        path = setup.folder / graph / file
        if setup.device == "cuda":
            onnxruntime.preload_dlls()  # those that torch brought
        provider = PROVIDERS[setup.device]
        # On CUDA, onnxruntime would ask for more memory than it needs, in steps of powers of two.
        settings = {"arena_extend_strategy": "kSameAsRequested"} if setup.device == "cuda" else {}
        providers = [(provider, settings)]
        self.session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        if self.session.get_providers()[0] != provider:
            raise RuntimeError(f"onnxruntime fell back from {provider}")
        self.device = setup.device
        self.in_place = graph.startswith("ours")
        self.pasts = {slot(value.name): value for value in self.session.get_inputs() if slot(value.name)}
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.cache: dict[str, Any] = {}
        self.length = 0

    def clear(self, capacity: int = 0) -> None:
        """Empties the cache; ``capacity`` is the number of tokens that a buffer must hold."""
        from onnxruntime import OrtValue

        from converter.exports.onnx.session import ONNX_TYPES

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
        mask = np.ones((1, self.length), np.int64)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
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


def slot(name: str) -> str | None:
    """The "LAYER key" or "LAYER value" of a cache's input or output in any naming scheme, or None."""
    found = re.search(r"\.(\d+)\.(key|value)s?$", name)
    return f"{found[1]} {found[2]}" if found else None


def tokens(setup: Setup, count: int) -> np.ndarray:
    """Token ids, int64 [1, count]; the same for all graphs."""
    return np.random.default_rng(count).integers(setup.vocabulary, size=(1, count))


def measure(setup: Setup, side: Side, length: int) -> Measured:
    """Measures memory with one prompt, and time with another and its decoded tokens; needs a fresh process.

    Raises:
        RuntimeError: there is no /proc, which is needed to measure memory.
    """
    limit_memory()
    measured = Measured()
    try:
        cached = Cached(setup, side.graph, zero=side.zero)
        cached.clear(WARM_UP)
        cached.step(tokens(setup, WARM_UP))  # loads the weights into memory, so they do not count as extra
        steps = WARM_UP + DECODE_STEPS
        ids = tokens(setup, length + steps)
        before = proc("/proc/self/status", "VmRSS")
        if not before:
            raise RuntimeError("memory is measured with Linux's /proc")
        Path("/proc/self/clear_refs").write_text("5")
        prefill(cached, ids, length)
        measured.extra = proc("/proc/self/status", "VmHWM") - before
        taken, logits = prefill(cached, ids, length)
        measured.prefill.append(taken)
        measured.logits.append(last(logits))
        del logits
        for step in range(steps):
            taken, logits = timed(cached, ids[:, length + step, None])
            measured.steps += [taken] if step >= WARM_UP else []
        measured.logits.append(last(logits))
    except Exception as error:  # onnxruntime's exceptions have no common base class
        if not re.search(r"alloc|memory", f"{type(error).__name__} {error}"):
            raise
        measured.failure = "out of memory"
    return measured


def prefill(cached: Cached, ids: np.ndarray, length: int) -> tuple[float, Any]:
    """Runs a prompt over an empty cache with room for all tokens; the time includes making the cache."""
    started = time.perf_counter()
    cached.clear(ids.shape[1])
    logits = cached.step(ids[:, :length])
    return time.perf_counter() - started, logits


def timed(cached: Cached, token: np.ndarray) -> tuple[float, Any]:
    """Adds a token [1, 1]; the seconds that it took, and its logits."""
    started = time.perf_counter()
    logits = cached.step(token)
    return time.perf_counter() - started, logits


def last(logits: Any) -> np.ndarray:
    """The last token's logits in float32; a copy."""
    if logits.data_type() == "tensor(bfloat16)":  # which NumPy does not have
        return torch.from_dlpack(logits)[0, -1].float().numpy()
    return logits.numpy()[0, -1].astype(np.float32)


@torch.inference_mode()
def stock_logits(setup: Setup, length: int) -> list[np.ndarray]:
    """The logits that ``measure`` must find, from transformers' class in torch."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setup.threads)
    model = AutoModelForCausalLM.from_pretrained(setup.folder / STOCK, dtype=torch.float32).eval()
    ids = torch.from_numpy(tokens(setup, length + WARM_UP + DECODE_STEPS)).to(setup.device)
    logits = model.to(setup.device)(ids, use_cache=False).logits[0].cpu()
    return [logits[length - 1].numpy(), logits[-1].numpy()]


def difference(reference: Sequence[np.ndarray], measured: Measured) -> float:
    """Largest difference, relative to the largest logit."""
    pairs = zip(reference, measured.logits, strict=True)
    return max(float(np.abs(one - other).max() / np.abs(one).max()) for one, other in pairs)


def measure_all(setup: Setup, graphs: Sequence[str], lengths: Sequence[int]) -> tuple[Results, float]:
    """Measures the graphs in turn, and checks that they all compute the same.

    Returns:
        The measurements, and the largest difference of logits: for the shortest prompt, to torch; for longer
        ones, to the first graph.

    Raises:
        ClickException: the logits of a graph differ.
    """
    sides = [Side(graph, zero) for graph in graphs for zero in (False, True)]
    results: Results = {length: {side: Measured() for side in sides} for length in lengths}
    failures: dict[str, str] = {}
    largest = 0.0
    reference = fresh(stock_logits, setup, lengths[0])
    for length, cells in results.items():
        started = time.monotonic()
        for turn in range(setup.repeats):
            if turn and time.monotonic() - started > setup.seconds:
                break
            for side, cell in cells.items():
                graph = side.graph
                cell.failure = failures.get(graph)
                if cell.failure:
                    continue
                try:
                    found = fresh(measure, setup, side, length)
                except BrokenProcessPool:  # the process was killed in spite of the limit
                    found = Measured(failure="out of memory")
                if found.failure:
                    failures[graph] = cell.failure = found.failure  # longer prompts would fail too
                    say(f"{length}: {graph} {found.failure}")
                    continue
                reference = reference or found.logits
                gap = difference(reference, found)
                if not gap <= TOLERANCE:
                    raise click.ClickException(
                        f"after {length} tokens the logits of {graph} differ by {gap:.1e} of the largest"
                    )
                largest = max(largest, gap)
                cell.prefill += found.prefill
                cell.steps += found.steps
                cell.extra = max(cell.extra or 0, found.extra or 0)
                say(
                    f"{length}: {graph}, denormals {side.denormals}: {number(found.prefill[0])} s, "
                    f"{number((found.extra or 0) / 1e6)} MB extra, "
                    f"{number(1000 * statistics.median(found.steps))} ms a token"
                )
        reference = []
    return results, largest


def baseline(graph: str, graphs: Sequence[str]) -> str | None:
    """The graph of ours that a graph is compared with: the one that returns as many logits."""
    like = "ours-last" if graph.endswith("-last") else "ours"
    return like if like in graphs and like != graph else None


HEAD = [
    *("graph", "tokens", "denormals", "prefill s", "ratio", "at best s", "share", "extra MB", "ratio"),
    *("decode ms", "ratio", "at best ms", "share", "runs"),
]


def rows_of(results: Results, model: limits.Bloom, machine: limits.Machine) -> Iterator[list[str]]:
    """The lines of the table, one per length and side."""
    for length, cells in results.items():
        for side, cell in cells.items():
            names = [side.graph, str(length), side.denormals]
            if cell.failure:
                yield [*names, cell.failure, *["-"] * (len(HEAD) - len(names) - 1)]
                continue
            like = baseline(side.graph, [other.graph for other in cells])
            ours = cells.get(Side(like or "", side.zero), Measured())
            time_, our_time = (median(one.prefill) for one in (cell, ours))
            step, our_step = (median(one.steps) for one in (cell, ours))
            logits = 1 if side.graph.endswith("-last") else length
            least = model.prefill_seconds(machine, length, logits)
            # The timed tokens are those after the warm-up; this is the one in their middle.
            least_step = model.decode_seconds(machine, length + WARM_UP + (DECODE_STEPS + 1) / 2)
            yield [
                *names,
                number(time_ or 0),
                factor(time_, our_time),
                number(least),
                share(least, time_),
                number((cell.extra or 0) / 1e6),
                factor(cell.extra, ours.extra),
                number(1000 * (step or 0)),
                factor(step, our_step),
                number(1000 * least_step),
                share(least_step, step),
                str(len(cell.prefill)),
            ]


def share(least: float, taken: float | None) -> str:
    """How much of the limit was reached, in percent."""
    return f"{100 * least / taken:.0f} %" if taken else "-"


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def export_rows(setup: Setup, exports: dict[str, conversion.Run]) -> Iterator[list[str]]:
    """The lines of the table of exports."""
    for graph, run in exports.items():
        written = sum(path.stat().st_size for path in (setup.folder / graph).glob("*.onnx*"))
        ours = exports.get(baseline(graph, list(exports)) or "")
        sizes = [f"{size / 1e6:.0f}" for size in (run.resident, run.anonymous)]
        ratio = factor(run.returned, ours and ours.returned)
        yield [graph, number(run.returned), ratio, *sizes, number(written / 1e6)]


def optimum_versions(python: str) -> str:
    """The versions in optimum's environment.

    Raises:
        ClickException: there is no such environment, or it does not have optimum-onnx.
    """
    packages = ("optimum-onnx", "transformers", "torch")
    code = f"from importlib.metadata import version; print(*map(version, {packages}))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise click.ClickException(f"--optimum-python {python} has no optimum-onnx: {error}") from error
    return "optimum-onnx {} with transformers {} and torch {}".format(*found.stdout.split())


def words(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    chosen = [word for word in value.split(",") if word]
    if unknown := sorted(set(chosen) - set(EXPORTS)):
        raise click.BadParameter(f"{', '.join(unknown)}; known are {', '.join(EXPORTS)}")
    return chosen


@click.command()
@click.option("--graphs", default=",".join(EXPORTS), show_default=True, callback=words)
@click.option(
    "--optimum-python", metavar="PATH", help="Python with optimum-onnx; without it, optimum is left out."
)
@click.option("--layers", default=6, show_default=True)
@click.option("--heads", default=16, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--vocabulary", default=32000, show_default=True, help="Vocabulary size; BLOOM has 250880.")
@click.option("--lengths", default="512,2048,4096,8192", show_default=True, callback=integers)
@click.option("--threads", default=1, show_default=True, help="Threads of onnxruntime.")
@click.option("--repeats", default=3, show_default=True, help="Turns of each graph.")
@click.option("--seconds", default=240.0, show_default=True, help="Start no new turn of a length after this.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Folder for temporary files.")
@click.option("--write", is_flag=True, help="Write the tables to benchmarks/results/.")
def main(
    graphs: list[str],
    optimum_python: str | None,
    lengths: list[int],
    folder: Path | None,
    write: bool,
    **options: Any,
) -> None:
    """Compares our graphs with those of transformers and optimum: export, prefill, memory and decoding."""
    report.clean_up_when_terminated()
    load_before = report.load()
    environment = ""
    if "optimum" in graphs:
        if optimum_python:
            environment = f"; {optimum_versions(optimum_python)}"
        else:
            say("optimum is left out, because --optimum-python is not given")
            graphs.remove("optimum")
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-", dir=folder) as temporary:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        os.environ["OMP_NUM_THREADS"] = str(options["threads"])
        setup = Setup(Path(temporary), **options)
        fresh(make_checkpoints, setup, graphs)
        exports = {}
        for graph in graphs:
            exports[graph] = export(setup, graph, optimum_python)
            say(f"export: {graph} {number(exports[graph].returned)} s")
        exported = list(export_rows(setup, exports))
        machine = fresh(limits.measure, setup.threads)
        results, gap = measure_all(setup, graphs, lengths)
        machine = machine.or_better(fresh(limits.measure, setup.threads))

    model = limits.Bloom(setup.heads * setup.head_dim, setup.layers, setup.vocabulary)
    weights = setup.layers * 12 * (setup.heads * setup.head_dim) ** 2 * 4 / 1e6
    all_logits = 4 * setup.vocabulary * lengths[-1] / 1e6
    sections = [
        f"{setup.heads} heads x {setup.head_dim}, hidden {setup.heads * setup.head_dim}, {setup.layers} "
        f"layers ({weights:.0f} MB), vocabulary {setup.vocabulary}, float32, CPU with {setup.threads} "
        f"thread(s), onnxruntime {version('onnxruntime')}{environment}; the same random weights for all, "
        f"scaling none. The last logits of all graphs agree within {gap:.1e} of the largest, after the "
        f"prompt and after {WARM_UP + DECODE_STEPS} decoded tokens; for {lengths[0]} tokens, they also agree "
        "with torch.",
        "Ratios are to `ours`, or to `ours-last` for graphs named `-last`. A graph without `-last` returns "
        f"the logits of all tokens ({all_logits:.0f} MB for {lengths[-1]}), which count in its time and "
        "memory; optimum's graph always does.",
        "Export, each in a separate process and without validation; ours exports a converted folder:\n\n"
        + report.table(
            ["graph", "s", "ratio", "peak resident MB", "peak anonymous MB", "written MB"], exported
        ),
        "*Denormals*: onnxruntime keeps denormal numbers, or takes them for zero "
        "(`session.set_denormal_as_zero`). Ratios are between graphs that do the same.",
        f"*At best*: {number(machine.operations / 1e9)} GFLOP/s (the fastest product of matrices) and "
        f"{number(machine.bandwidth / 1e9)} GB/s (the fastest reading) were measured before and after all "
        "else. A prompt needs the operations of its products and of causal attention; a decoded token needs "
        "to read all weights and the cache. *Share* is that time divided by the measured one.",
        "One row: prefill, the memory it takes beyond the loaded graph (including the cache), and decoding "
        "after it:\n\n" + report.table(HEAD, rows_of(results, model, machine)),
    ]
    click.echo("\n" + "\n\n".join(sections))
    if write:
        size = f"{options['layers']}x{options['heads'] * options['head_dim']}"
        path = report.write(
            f"onnx_speed-bloom-{size}-cpu-float32", "ONNX graphs: ours and its peers'", sections, load_before
        )
        say(f"wrote results/{path.name}")


if __name__ == "__main__":
    main()
