"""Graphs under onnxruntime's CUDA provider: forms of ours beside a peer's, kernels, buffers and heads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import measuring
import onnx_speed
import report
import torch
from measuring import STEPS, WARM_UP, Cell, Setup, fresh
from onnx_speed import Cached, Graph
from report import Document

from converter import OnnxOptions
from converter.errors import ConverterError
from converter.exports.onnx.files import standalone_graph
from converter.exports.onnx.requirements import check_installed
from gpu import kernels
from gpu.part import BLOOM_1B7, EXACT, ROUNDING, Settings, shared

TITLE = "graphs under onnxruntime"
OURS, PORTABLE, PEER = "ours-last", "ours-portable-last", "transformers-last"
"""Folders."""
EXPORTING = 45.0
"""Seconds that an export may take."""
RUNS = 3
COPIES = 5
"""Most copies between CPU and GPU in a graph whose attention is onnxruntime's, in half precision. Two are for
the choice of the last token."""
TF32, QUANTISED = 0.02, 0.5
"""Largest difference from stock where inputs of products have 10 bits, and where weights have 8 or 4."""
KERNEL_INFO = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
"""With this variable set, onnxruntime prints which attention kernel a node uses."""


class Form(NamedTuple):
    """A graph, and how onnxruntime runs it."""

    name: str
    folder: str = OURS
    dtype: str = "native"
    """As for ``--onnx-dtype``; such a graph has its own weights."""
    in_place: bool = False
    """Past and present are one buffer; else each token gets new ones, as the graphs of others must."""
    provider: Mapping[str, str] | None = None
    """Options of the CUDA provider."""
    limit: float | None = None
    """Largest difference of logits from stock's in float32; None for ``ROUNDING``."""

    @property
    def graph(self) -> Graph:
        return Graph(self.folder, *([] if self.dtype == "native" else [standalone_graph(self.dtype)]))

    def open(self, setup: Setup, **options: Any) -> Cached:
        """The graph in a session; other options are those of ``Cached``."""
        cached = Cached(setup, self.graph, provider=self.provider, **options)
        cached.in_place = self.in_place
        return cached


CHOSEN = Form(OURS, in_place=True)
FLASH = Form("flash", in_place=True, provider={"sdpa_kernel": "1"})
CUDNN = Form("cuDNN", in_place=True, provider={"sdpa_kernel": "8"})
HALF = (
    CHOSEN,
    Form(f"{OURS}, new buffers"),
    FLASH,
    Form("flash, new buffers", provider=FLASH.provider),
    CUDNN,
    Form("cuDNN, new buffers", provider=CUDNN.provider),
    Form(PEER, PEER),
)
OTHERS = (
    *(Form(dtype, OURS, dtype, True, limit=QUANTISED) for dtype in ("int8-fp16", "int4-fp16")),
    Form("fp32, portable", PORTABLE, "fp32", provider={"use_tf32": "0"}, limit=EXACT),
    Form("fp32 in TF32, portable", PORTABLE, "fp32", limit=TF32),
    *(Form(f"{dtype}, portable", PORTABLE, dtype, limit=QUANTISED) for dtype in ("int8", "int4")),
)
"""They are measured at the shorter lengths."""
FORMS = {"float16": HALF + OTHERS, "bfloat16": (*HALF[:2], HALF[-1])}
HEADS = ((36, 56), (32, 64), (17, 120), (16, 128))
"""Number and size; in the graph, each has 8 channels more. Flash attention has kernels for some sizes only,
and onnxruntime has another one for decoding with sizes of 64, 128 and 256."""
INTRO = f"""\
{{sizes}}; random weights, the same for all, scaling none. Only the last token's logits are computed.

{measuring.SAID} *Extra* is by how much onnxruntime's memory on the GPU grew since a prompt of
{WARM_UP} tokens, and the cache is the prompt's. `{OURS}` has one buffer for past and present, and the kernel
that onnxruntime chooses. *New buffers*: the same graph returns a new cache for each token. *flash* and
*cuDNN*: no other kernel is allowed (`sdpa_kernel`). Other names are the dtype of another graph, which has one
buffer too if it is not portable. Ratios are to `{OURS}`. *Difference*: the largest difference of the last
logits from stock's in torch in float32, relative to the largest logit, for the shortest prompt.

{kernels.SAID} *Copies* between CPU and GPU and *nodes on the CPU* are of the graph, not of a run."""
TIMES_HEAD = ["tokens", "graph", *measuring.COLUMNS, "difference"]
RAN_HEAD = ["graph", "run", "onnxruntime says", "kernels", "copies", "nodes on the CPU"]
HEADS_HEAD = ["heads", "in the graph", "prefill", "decoding", "tokens", "prefill ms", "decoding ms"]


def run(settings: Settings, document: Document) -> None:
    if lacking := missing(settings.device):
        document.skip("everything", lacking)
        return
    dtypes, heads = settings.size([*FORMS], ["float16"]), settings.size(HEADS, HEADS[:1])
    weights = [*(len(FORMS[dtype]) for dtype in dtypes), *[2] * len(heads)]
    table: list[list[str]] = []
    for item, until in shared([*dtypes, *heads], settings.until, weights):
        if isinstance(item, str):
            compare_forms(document, settings, item, until)
        else:
            table += head_rows(document, settings, *item, until)
            document.put("Heads, float16", report.table(HEADS_HEAD, table, texts=4))


def missing(device: str) -> str | None:
    """What is not installed or does not work, or None."""
    try:
        check_installed(OnnxOptions(provider=device))
    except ConverterError as error:
        return str(error)
    return None


def compare_forms(document: Document, settings: Settings, dtype: str, until: float) -> None:
    """Measures all forms of a checkpoint in this dtype, and writes the tables after each."""
    forms = settings.size(FORMS[dtype], (CHOSEN, HALF[-1], *OTHERS[::2]))
    lengths = settings.size((2048, 8192, 32768, 65536), (24, 48))
    setup = settings.setup(dtype, BLOOM_1B7, lengths[-1], layers=6, vocabulary=32768, dtype=dtype)
    document.intro = INTRO.format(sizes=setup.said())
    setup.folder.mkdir()
    onnx_speed.make_checkpoints(setup, list(dict.fromkeys(form.folder for form in forms)))
    right = fresh(onnx_speed.stock_logits, setup, lengths[0])
    own = onnx_speed.difference(right, fresh(onnx_speed.stock_logits, setup, lengths[0], setup.dtype))
    results: dict[int, dict[str, Cell]] = {length: {} for length in lengths}
    gaps: dict[str, float] = {}
    ran: list[list[str]] = []
    for form, form_until in shared(forms, until):
        some = lengths[:2] if form in OTHERS else lengths
        if (found := tried(document, setup, form, some, form_until)) is None:
            continue
        cells, rows = found
        ran += rows
        for length, cell in cells.items():
            results[length][form.name] = cell
        if logits := cells[lengths[0]].logits:
            gap = gaps[form.name] = onnx_speed.difference(right[: len(logits)], logits)
            if not gap <= (form.limit or max(EXACT, ROUNDING * own)):
                said = f"logits differ from stock's in float32 by {gap:.1e}, its own by {own:.1e}"
                note = document.skip if form.folder == PEER else document.fail
                note(f"{form.name}, {dtype}", said)
        document.put(f"What ran, {dtype}", report.table(RAN_HEAD, ran, texts=4))
        document.put(f"BLOOM's graphs, {dtype}", report.table(TIMES_HEAD, time_rows(results, gaps), texts=2))


def head_rows(
    document: Document, settings: Settings, heads: int, size: int, until: float
) -> Iterator[list[str]]:
    """The lines of a model with so many heads of this size."""
    lengths, name = settings.size((8192, 65536), (24,)), f"{heads}x{size}"
    geometry = {"heads": heads, "head_dim": size, "layers": 6, "vocabulary": 1024, "dtype": "float16"}
    setup = settings.setup(name, geometry, lengths[-1])
    setup.folder.mkdir()
    onnx_speed.make_checkpoints(setup, [OURS])
    cells, ran = tried(document, setup, FLASH, lengths, until) or ({}, [])
    said = [f"{setup.heads} x {setup.head_dim}", str(setup.head_dim + 8), *(row[2] for row in ran)]
    for length, cell in cells.items():
        yield [*said, str(length), cell.prompt.milliseconds, cell.token.milliseconds]


def tried(
    document: Document, setup: Setup, form: Form, lengths: Sequence[int], until: float
) -> tuple[dict[int, Cell], list[list[str]]] | None:
    """What ``measure`` finds in a process of its own, with a new graph if there is none; notes problems."""
    name = f"{form.name}, {setup.heads} heads x {setup.head_dim}, {setup.dtype}"
    # Not every onnxruntime has cuDNN's attention for every graph.
    note = document.skip if form.folder == PEER or form.provider == CUDNN.provider else document.fail
    if time.monotonic() > until:
        document.skip(name, "no time")
        return None
    try:
        if not (setup.folder / form.graph.folder / form.graph.file).exists():
            export(setup, form)
        cells, ran = fresh(measure, setup, form, lengths, until)
    except Exception as error:  # the other forms can still be measured; a process may have been killed
        note(name, error)
        return None
    if setup.device != "cpu" and form.folder == OURS:
        said = " ".join(f"{row[2]} {row[3]}" for row in ran).lower()
        wanted = "cudnn" if form.provider == CUDNN.provider else "flash" if form.provider else "flash|cudnn"
        if not re.search(wanted, said):
            note(name, f"the kernel of its attention is not {wanted}, but {said}")
            return None
        if max(int(row[4]) for row in ran) > COPIES:
            note(name, f"{ran[0][4]} copies between CPU and GPU, more than {COPIES}")
    return cells, ran


def export(setup: Setup, form: Form) -> None:
    """Writes a form's graph.

    Raises:
        RuntimeError: that did not work, or took too long.
    """
    path = os.pathsep.join([str(report.ROOT), os.environ.get("PYTHONPATH", "")])
    words = ["--onnx-profile", "portable"] if form.folder == PORTABLE else []
    words += [] if form.dtype == "native" else ["--onnx-dtype", form.dtype, "--onnx-standalone"]
    command = [*onnx_speed.export_command(setup, form.folder, None), *words]
    try:
        subprocess.run(
            command,
            check=True,
            env=os.environ | {"PYTHONPATH": path},
            timeout=EXPORTING,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError("the export took too long") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError((error.stderr.strip().splitlines() or ["the export failed"])[-1]) from None


def measure(
    setup: Setup, form: Form, lengths: Sequence[int], until: float
) -> tuple[dict[int, Cell], list[list[str]]]:
    """Times a graph at all lengths, then what ``kernels_of`` finds; needs a process of its own."""
    cached = form.open(setup)
    cached.prompt(onnx_speed.tokens(setup, WARM_UP), WARM_UP)
    before = free_memory(setup.device)
    results: dict[int, Cell] = {}
    failure, last, taken = None, lengths[0], 0.0
    for length in lengths:
        started = time.monotonic()
        cell = results[length] = Cell()
        late = started + taken * (length / last) ** 2 > until
        cell.prompt.failure = failure or ("no time" if late else None)
        if cell.failure:
            continue
        with measuring.noting_failure(cell.prompt):
            ids = onnx_speed.tokens(setup, length + WARM_UP + STEPS)
            cached.prompt(ids[:, :length], ids.shape[1])  # fills the memory pool
            onnx_speed.measure_steps(cached, ids, length, RUNS, cell)
            last, taken = length, time.monotonic() - started
            cell.prompt.extra = before - free_memory(setup.device) if setup.device != "cpu" else None
        if cell.failure == "fails":
            raise RuntimeError(cell.prompt.reason)
        failure = cell.failure
    del cached  # its memory
    return results, kernels_of(setup, form, lengths[0])


def free_memory(device: str) -> int:
    """Bytes of the GPU that no process uses; 0 on the CPU."""
    return torch.cuda.mem_get_info()[0] if device != "cpu" else 0


def time_rows(results: Mapping[int, Mapping[str, Cell]], gaps: Mapping[str, float]) -> Iterator[list[str]]:
    """The lines of one dtype's table."""
    for length, cells in results.items():
        for name, cell in cells.items():
            gap = gaps.get(name) if length == min(results) else None
            columns = cell.columns(None if name == OURS else cells.get(OURS))
            yield [str(length), name, *columns, "-" if gap is None else f"{gap:.1e}"]


def kernels_of(setup: Setup, form: Form, length: int) -> list[list[str]]:
    """The lines of ``RAN_HEAD`` for a prompt, and for a token over its cache; needs a process of its own."""
    os.environ[KERNEL_INFO] = "1"
    cached = form.open(setup, profile=setup.folder / "profile")
    ids = onnx_speed.tokens(setup, length + WARM_UP)
    prompt = partial(cached.prompt, ids[:, :length], ids.shape[1])
    token = partial(cached.step, ids[:, length : length + 1])
    found = []
    for name, call in (("prefill", prompt), ("decoding", token)):
        with printed() as lines:
            times = kernels.profile(call, setup.device)
        found.append([form.name, name, kernel_info(lines), kernels.described(times)])
    copies, on_cpu = placed(cached.profiled())
    return [[*row, str(copies), str(on_cpu)] for row in found]


def placed(events: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many nodes of a profile copy between devices, and how many others ran on the CPU."""
    nodes = {event["name"]: event["args"] for event in events if event["name"].endswith("_kernel_time")}
    copies = [node for node in nodes.values() if node["op_name"].startswith("Memcpy")]
    on_cpu = [node for node in nodes.values() if node.get("provider") == onnx_speed.PROVIDERS["cpu"]]
    return len(copies), len(on_cpu)


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


def kernel_info(lines: Sequence[str]) -> str:
    """The kernels of GroupQueryAttention as onnxruntime calls them, each once."""
    found = re.findall(r"Operator=GroupQueryAttention .*SdpaKernel=(\w+)", "\n".join(lines))
    return ", ".join(dict.fromkeys(found)) or "-"
