"""Graphs under onnxruntime's CUDA provider: both profiles and a peer's, their kernels, and what ran where."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
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
from converter.onnx.files import standalone_graph
from converter.onnx.requirements import check_installed
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
QUANTISED = 0.5
"""Largest difference from stock where weights have 8 or 4 bits."""


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
OTHERS = (
    Form("portable", PORTABLE),
    Form("fp32, portable", PORTABLE, "fp32", provider={"use_tf32": "0"}, limit=EXACT),
    *(Form(dtype, OURS, dtype, True, limit=QUANTISED) for dtype in ("int8-fp16", "int4-fp16")),
    Form(PEER, PEER),
)
"""They are measured at the shorter lengths."""
FORMS = {"float16": (CHOSEN, Form(f"{OURS}, new buffers"), FLASH, *OTHERS), "bfloat16": (CHOSEN,)}
INTRO = f"""\
{{sizes}}; random weights, the same for all, scaling none. Only the last token's logits are computed.

{measuring.SAID} *Extra* is by how much onnxruntime's memory on the GPU grew since a prompt of
{WARM_UP} tokens, and the cache is the prompt's. `{OURS}` has one buffer for past and present, and the kernel
that onnxruntime chooses. *New buffers*: the same graph returns a new cache for each token. *flash*: no other
kernel is allowed (`sdpa_kernel`). *Portable* is the profile of standard operators. Other names are the dtype
of another graph. Ratios are to `{OURS}`. *Difference*: the largest difference of the last logits from stock's
in torch in float32, relative to the largest logit, for the shortest prompt.

{kernels.SAID} *Copies* between CPU and GPU and *nodes on the CPU* are of the graph, not of a run. *Providers*
are those that the session names."""
TIMES_HEAD = ["tokens", "graph", *measuring.COLUMNS, "difference"]
RAN_HEAD = ["graph", "run", "kernels", "providers", "copies", "nodes on the CPU"]


def run(settings: Settings, document: Document) -> None:
    try:
        check_installed(OnnxOptions(provider=settings.device))
    except ConverterError as error:
        document.skip("everything", str(error))
        return
    dtypes = settings.size([*FORMS], ["float16"])  # the CPU's attention does not have bfloat16
    for dtype, until in shared(dtypes, settings.until, [len(FORMS[dtype]) for dtype in dtypes]):
        compare_forms(document, settings, dtype, until)


def compare_forms(document: Document, settings: Settings, dtype: str, until: float) -> None:
    """Measures all forms of a checkpoint in this dtype, and writes the tables after each."""
    forms = settings.size(FORMS[dtype], (CHOSEN, *OTHERS))
    lengths = settings.size((2048, 8192, 32768), (24, 48))
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


def tried(
    document: Document, setup: Setup, form: Form, lengths: Sequence[int], until: float
) -> tuple[dict[int, Cell], list[list[str]]] | None:
    """What ``measure`` finds in a process of its own, with a new graph if there is none; notes problems."""
    name = f"{form.name}, {setup.heads} heads x {setup.head_dim}, {setup.dtype}"
    note = document.skip if form.folder == PEER else document.fail
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
        said, wanted = " ".join(row[2] for row in ran), "flash" if form.provider else "flash|cuDNN"
        if not re.search(wanted, said):
            note(name, f"the kernel of its attention is not {wanted}, but {said}")
        if max(int(row[4]) for row in ran) > COPIES:
            note(name, f"{ran[0][4]} copies between CPU and GPU, more than {COPIES}")
    return cells, ran


def export(setup: Setup, form: Form) -> None:
    """Writes a form's graph; an error says why that did not work, or that it took too long."""
    path = os.pathsep.join([str(report.ROOT), os.environ.get("PYTHONPATH", "")])
    words = ["--onnx-profile", "portable"] if form.folder == PORTABLE else []
    words += [] if form.dtype == "native" else ["--onnx-dtype", form.dtype, "--onnx-standalone"]
    command = [*onnx_speed.export_command(setup, form.folder, None), *words]
    how: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": path}, "timeout": EXPORTING}
    done = subprocess.run(command, capture_output=True, text=True, **how)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the export failed"])[-1])


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
    cached = form.open(setup, profile=setup.folder / "profile")
    ids = onnx_speed.tokens(setup, length + WARM_UP)
    prompt = partial(cached.prompt, ids[:, :length], ids.shape[1])
    token = partial(cached.step, ids[:, length : length + 1])
    found = []
    for name, call in (("prefill", prompt), ("decoding", token)):
        found.append([form.name, name, kernels.described(kernels.profile(call, setup.device))])
    providers = ", ".join(each.removesuffix("ExecutionProvider") for each in cached.session.get_providers())
    copies, on_cpu = placed(cached.profiled())
    return [[*row, providers, str(copies), str(on_cpu)] for row in found]


def placed(events: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many nodes of a profile copy between devices, and how many others ran on the CPU."""
    nodes = {event["name"]: event["args"] for event in events if event["name"].endswith("_kernel_time")}
    copies = [node for node in nodes.values() if node["op_name"].startswith("Memcpy")]
    on_cpu = [node for node in nodes.values() if node.get("provider") == onnx_speed.PROVIDERS["cpu"]]
    return len(copies), len(on_cpu)
