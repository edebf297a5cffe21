"""Graphs under onnxruntime's CUDA provider, ours beside other exporters', and which attention ran."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import measuring
import onnx_speed
import report
import torch
from measuring import STEPS, WARM_UP, Cell, Setup, fresh
from onnx_speed import GRAPHS, Cached
from report import Document

from gpu import kernels
from gpu.part import BLOOM_1B7, EXACT, ROUNDING, Settings, shared

TITLE = "graphs under onnxruntime"
OURS, COPIED = "ours-last", "ours-last, new buffers"
PEER = "transformers-last"
EXPORTING = 0.3
"""Share of the time that an export may take."""
RUNS = 3
KERNEL_INFO = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
"""With this variable set, onnxruntime prints which attention kernel a node uses."""
INTRO = f"""\
{{sizes}}; random weights, the same for all, scaling none. Only the last token's logits are computed.

{measuring.SAID} *Extra* is by how much onnxruntime's memory on the GPU grew since a prompt of
{WARM_UP} tokens, and the cache is the prompt's. `{OURS}` writes into one buffer for past and present.
`{COPIED}` is the same graph, but returns a new cache for each token, as the graphs of others must.
Ratios are to `{OURS}`. *Difference*: the largest difference of the last logits from stock's in torch in
float32, relative to the largest logit, for the shortest prompt. {kernels.SAID}"""
HEAD = ["tokens", "graph", *measuring.COLUMNS, "difference"]
ATTENTION_HEAD = ["dtype", "run", "provider", "onnxruntime says", "kernels"]
Results = dict[int, dict[str, Cell]]
"""Length -> graph -> measurements."""


def run(settings: Settings, document: Document) -> None:
    lacking = missing(settings.device)
    if lacking:
        document.skip("everything", lacking)
        return
    lengths = settings.size((2048, 8192, 32768, 65536), (24, 48))
    rows: list[list[str]] = []
    for dtype, until in shared(settings.size(("float16", "bfloat16"), ("float16",)), settings.until):
        setup = settings.setup(dtype, BLOOM_1B7, lengths[-1], layers=6, vocabulary=32768, dtype=dtype)
        document.intro = INTRO.format(sizes=setup.said())
        setup.folder.mkdir()
        onnx_speed.make_checkpoints(setup, [OURS, PEER])
        graphs = [graph for graph in (OURS, PEER) if export(document, setup, graph, until)]
        if OURS in graphs:
            rows += attention_rows(document, setup, lengths[0])
            table = report.table(ATTENTION_HEAD, rows, texts=len(ATTENTION_HEAD))
            document.put("Attention of our graph", table)
        names = [*graphs, *([COPIED] if OURS in graphs else [])]
        measure_all(document, setup, names, lengths, until)


def missing(device: str) -> str | None:
    """What is not installed, or None."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as error:
        return f"{error.name} is not installed"
    available, wanted = onnxruntime.get_available_providers(), onnx_speed.PROVIDERS[device]
    if wanted in available:
        return None
    return (
        f"onnxruntime {onnxruntime.__version__} has no {wanted} here, only {', '.join(available)}; install "
        "onnxruntime-gpu in place of onnxruntime"
    )


def export(document: Document, setup: Setup, graph: str, until: float) -> bool:
    """Writes a graph; whether that worked."""
    path = os.pathsep.join([str(report.ROOT), os.environ.get("PYTHONPATH", "")])
    seconds = max(0.1, EXPORTING * (until - time.monotonic()))
    options = {"env": os.environ | {"PYTHONPATH": path}, "timeout": seconds, "capture_output": True}
    try:
        subprocess.run(onnx_speed.export_command(setup, graph, None), check=True, **options)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        last = ((error.stderr or b"").decode(errors="replace").strip().splitlines() or [""])[-1]
        note = document.fail if graph == OURS else document.skip
        note(f"{graph}, {setup.dtype}", last or "the export took too long")
        return False
    return True


def measure_all(
    document: Document, setup: Setup, names: Sequence[str], lengths: Sequence[int], until: float
) -> None:
    """Measures each graph, and writes a table after each."""
    results: Results = {length: {} for length in lengths}
    right = fresh(onnx_speed.stock_logits, setup, lengths[0])
    own = onnx_speed.difference(right, fresh(onnx_speed.stock_logits, setup, lengths[0], setup.dtype))
    differences: dict[str, float] = {}
    for name, side_until in shared(names, until):
        note = document.fail if name.startswith(OURS) else document.skip
        try:
            for length, cell in fresh(measure, setup, name, lengths, side_until).items():
                results[length][name] = cell
        except Exception as error:  # the other graphs can still be measured; a process may have been killed
            note(f"{name}, {setup.dtype}", error)
            continue
        found = results[lengths[0]][name].logits
        differences[name] = onnx_speed.difference(right[: len(found)], found)
        if not differences[name] <= max(EXACT, ROUNDING * own):
            said = f"logits differ from stock's in float32 by {differences[name]:.1e}, its own by {own:.1e}"
            document.fail(f"{name}, {setup.dtype}", said)
        rows = rows_of(results, differences)
        document.put(f"BLOOM's graphs, {setup.dtype}", report.table(HEAD, rows, texts=2))


def measure(setup: Setup, name: str, lengths: Sequence[int], until: float) -> dict[int, Cell]:
    """Measures one graph at all lengths; needs a process of its own, whose memory nothing else uses."""
    cached = Cached(setup, GRAPHS[OURS if name == COPIED else name])
    cached.in_place = name == OURS
    cached.prompt(onnx_speed.tokens(setup, WARM_UP), WARM_UP)
    before = free_memory(setup.device)
    results: dict[int, Cell] = {}
    failure, longest = None, 0.0
    for length in lengths:
        cell = results[length] = Cell()
        late = time.monotonic() + 16 * longest > until
        cell.prompt.failure = failure or ("no time" if late else None)
        if cell.failure:
            continue
        with measuring.noting_failure(cell.prompt):
            ids = onnx_speed.tokens(setup, length + WARM_UP + STEPS)
            cached.prompt(ids[:, :length], ids.shape[1])  # fills the memory pool
            onnx_speed.measure_steps(cached, ids, length, RUNS, cell)
            longest = max(cell.prompt.seconds)
            cell.prompt.extra = before - free_memory(setup.device) if setup.device != "cpu" else None
        if cell.failure == "fails":
            raise RuntimeError(cell.prompt.reason)
        failure = cell.failure
    return results


def free_memory(device: str) -> int:
    """Bytes of the GPU that no process uses; 0 on the CPU."""
    return torch.cuda.mem_get_info()[0] if device != "cpu" else 0


def rows_of(results: Results, differences: dict[str, float]) -> Iterator[list[str]]:
    """The lines of one dtype's table."""
    for length, cells in results.items():
        for name, cell in cells.items():
            gap = differences.get(name) if length == min(results) else None
            columns = cell.columns(None if name == OURS else cells.get(OURS))
            yield [str(length), name, *columns, "-" if gap is None else f"{gap:.1e}"]


def attention_rows(document: Document, setup: Setup, length: int) -> list[list[str]]:
    """Where our graph's attention ran and with what kernel; on a GPU, only flash attention is right."""
    try:
        rows = fresh(attention, setup, length)
    except Exception as error:  # the times can still be measured
        document.fail(f"the attention of our graph, {setup.dtype}", error)
        return []
    for row in rows:
        if setup.device != "cpu" and "flash" not in f"{row[3]} {row[4]}".lower():
            document.fail(f"the attention of our graph, {row[0]}, {row[1]}", "no sign of flash attention")
    return rows


def attention(setup: Setup, length: int) -> list[list[str]]:
    """A line for a prompt, and one for a token over a shared buffer; needs a process of its own."""
    os.environ[KERNEL_INFO] = "1"
    cached = Cached(setup, GRAPHS[OURS], profile=setup.folder / "profile")
    ids = onnx_speed.tokens(setup, length + WARM_UP)
    prompt = partial(cached.prompt, ids[:, :length], ids.shape[1])
    token = partial(cached.step, ids[:, length : length + 1])
    found = []
    for name, call in (("prefill", prompt), ("decoding", token)):
        with printed() as lines:
            times = kernels.profile(call, setup.device)
        found.append((name, ", ".join(kernel_info(lines)) or "-", kernels.described(times)))
    nodes = [event["args"] for event in cached.profiled() if event["name"].endswith("_kernel_time")]
    ran = {node.get("provider", "-") for node in nodes if node["op_name"] == "GroupQueryAttention"}
    return [[setup.dtype, name, ", ".join(sorted(ran)), said, kind] for name, said, kind in found]


@contextmanager
def printed() -> Iterator[list[str]]:
    """The lines that this process, onnxruntime's library included, prints to stdout; they are not shown."""
    lines: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            lines += file.read().splitlines()


def kernel_info(lines: Sequence[str]) -> list[str]:
    """What onnxruntime says about the kernels of GroupQueryAttention, each once."""
    found = []
    for line in lines:
        if "Operator=GroupQueryAttention" in line:
            words = re.sub(r"\x1b\[\d*m", "", line).split()
            kept = [word for word in words if not word.startswith(("Operator=", "Node=", "DataType="))]
            found.append(" ".join(kept))
    return list(dict.fromkeys(found))
