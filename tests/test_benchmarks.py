"""Every script of benchmarks/ starts, and computes what its tables say; ``make gpu`` too."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
Module = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """``module(name)``: a module of benchmarks/, which are scripts and no package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize(
    "command",
    [
        *("conversion copy", "conversion size", "conversion fit", "torch_speed", "encoder_speed"),
        *("vllm_speed", "onnx_speed graphs", "onnx_speed quantised", "quantised language"),
        *("quantised encoders", "on_gpu", "originals", "common_tests"),
    ],
)
def test_help(
    module: Module, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = module(command.split(maxsplit=1)[0])
    monkeypatch.setattr(sys, "argv", [*command.split(), "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out.lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("conversion size", "| `--hard-link` |"),
        ("torch_speed --family mpt", "| 32 | patched |"),
        ("encoder_speed", "| ONNX, float32 |"),
        ("vllm_speed", "| transformers, static |"),
    ],
)
def test_smallest_run(command: str, expected: str) -> None:
    """Of scripts that need no other environment and take less than a minute."""
    name, *words = command.split()
    line = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, "--quick"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_a_result_says_how_it_was_made_but_not_where(
    module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    words = ["--text=/home/a/x", "--python", "/opt/python", "--write", "--layers", "2"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/torch_speed.py", *words])
    report.finish("name", "Title", ["A table"], 1.25, write=True)
    text = (tmp_path / "name.md").read_text()
    assert "`python benchmarks/torch_speed.py --text=PATH --python PATH --layers 2`" in text
    assert text.startswith("# Title\n\n* Date: ")
    assert "load average before: 1.2" in text
    assert text.endswith("\n\nA table\n")


def test_a_side_without_memory_is_not_tried_again(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = module("measuring")
    tried = []

    def measure(side: str, length: int) -> object:
        tried.append((side, length))
        if (side, length) == ("large", 16):
            return measuring.Cell(measuring.Measured(failure="out of memory"))
        prompt = measuring.Measured([float(length)], extra=2 * 10**6)
        return measuring.Cell(prompt, measuring.Measured([0.5]))

    monkeypatch.setattr(measuring, "fresh", lambda function, *args: function(*args))
    results = measuring.in_turns(measure, ["small", "large"], [8, 16, 32], 2, float("inf"))
    assert [length for side, length in tried if side == "large"] == [8, 8, 16]
    assert [length for side, length in tried if side == "small"] == [8, 8, 16, 16, 32, 32]
    assert results[32]["large"].columns() == ["out of memory", "-", "out of memory", "-", "-", "-"]
    columns = results[8]["small"].columns(results[16]["small"])
    assert columns == ["8000", "0.50x", "2", "1.00x", "500", "1.00x"]


def test_texts_have_unequal_lengths_and_vectors_their_order(module: Module) -> None:
    encoder_speed = module("encoder_speed")
    lengths = [len(text) for text in encoder_speed.make_texts(64, 12)]
    assert (max(lengths), min(lengths) < 16, len(set(lengths)) > 6) == (64, True, True)
    assert encoder_speed.padding([4, 1, 3], 2) == 1 - 8 / 11
    assert encoder_speed.padding([4, 3, 1], 2) == 1 - 8 / 9
    texts = [[7], [5, 6, 8], [3, 3], [1, 2, 3, 4]]
    for ordered, batches in ((True, [(2, 4), (2, 2)]), (False, [(2, 3), (2, 4)])):
        sizes: list[tuple[int, ...]] = []

        def pooled(ids: np.ndarray, mask: np.ndarray, sizes: list[Any] = sizes) -> np.ndarray:
            sizes.append(ids.shape)
            total: np.ndarray = (ids * mask).sum(1, keepdims=True)
            return total

        vectors = encoder_speed.batched(pooled, ordered)(texts, 2)
        assert vectors[:, 0].tolist() == [sum(text) for text in texts]
        assert sizes == batches


def junit(**outcomes: str) -> str:
    """What pytest writes: tests, and what happened in each."""
    cases = "".join(f'<testcase name="{name}">{inside}</testcase>' for name, inside in outcomes.items())
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>"


SKIPPED = '<skipped message="no /tmp/x">/tmp/test.py:3: no</skipped>'
FAILED = '<failure message="AssertionError: 1 | 2&#10;more">trace</failure>'


def test_what_only_stock_passes_is_listed(module: Module) -> None:
    """And every failure; what a conversion alone passes is only counted. A failed subtest is a failure."""
    common_tests = module("common_tests")
    stock = common_tests.read_outcomes(junit(a="", b="", c="", d=SKIPPED, e=SKIPPED))
    none = common_tests.read_outcomes(junit(a="", b=SKIPPED, c=SKIPPED + FAILED, d=FAILED, e=""))
    dynamic = common_tests.read_outcomes(junit(a="", b="", c=FAILED, d="", e=""))
    results = {"jais": {"stock": stock, "none": none, "dynamic": dynamic}}
    reason = "AssertionError: 1 \\| 2"
    assert common_tests.failures(results) == [
        ["c", "failed", "passed", "jais none, jais dynamic", reason],
        ["d", "failed", "skipped", "jais none", reason],
        ["b", "skipped", "passed", "jais none", "no PATH"],
    ]
    assert list(common_tests.summary(results)) == [["jais", "bloom", "3 / 0 / 2", "2 / 2 / 1", "4 / 1 / 0"]]


# --- make gpu


def test_what_one_leaves_goes_to_those_after_it(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    part = module("gpu.part")
    now = 100.0
    monkeypatch.setattr(part.time, "monotonic", lambda: now)
    until = {}
    for name, end in part.shared(["a", "b", "c"], 200.0, [2, 1, 1]):
        until[name] = end
        now += {"a": 10, "b": 60, "c": 0}[name]  # a ends early, b late
    assert until == {"a": 150.0, "b": 155.0, "c": 200.0}


def test_a_result_is_written_as_it_grows(module: Module, tmp_path: Path) -> None:
    for name in module("on_gpu").PARTS:
        assert callable(module(f"gpu.{name}").run)
    document = module("report").Document("gpu-attention", "a title", tmp_path / "results")
    path = tmp_path / "results/gpu-attention.md"
    document.put("Numbers", "1 ms")
    assert "1 ms" in path.read_text()
    document.skip("flash", ImportError("not installed. Install it from /home/somebody/packages"))
    document.fail("sdpa", RuntimeError("cannot read /home/somebody/model.onnx\nTraceback"))
    assert "**Not complete**" in path.read_text()
    document.end()
    text = path.read_text()
    assert "* flash: not installed.\n" in text
    assert "* sdpa: RuntimeError: cannot read PATH\n" in text
    assert "Not complete" not in text
    assert list(path.parent.iterdir()) == [path]


def late() -> None:
    """A part that hangs, with a process of its own."""
    os.setsid()
    subprocess.run(["sleep", "600"], close_fds=False, check=False)


@pytest.mark.parametrize(
    ("part", "seconds", "problem"),
    [
        (late, 0.5, "was ended, because its time was over"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 60, "was ended by SIGTERM"),
        (lambda: sys.exit(1), 60, "failed; its result says what"),
        (lambda: None, 60, None),
    ],
)
def test_how_a_part_ended(
    module: Module, part: Callable[[], None], seconds: float, problem: str | None
) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    process = multiprocessing.get_context("fork").Process(target=part)
    process.start()
    os.close(write)
    assert module("on_gpu").ended(process, seconds) == problem
    assert select.select([read], [], [], 10)[0], "no process that has the other end is left"
    os.close(read)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_there_is_one_line(module: Module) -> None:
    result = CliRunner().invoke(module("on_gpu").main, [])
    line = "Error: torch finds no CUDA device; for a trial without one: make gpu DEVICE=cpu\n"
    assert (result.exit_code, result.output) == (1, line)


# Names as CUDA's profiler gives them, and as torch's CPU operators are called.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<160, 64, 64, 4>, false>()", "flash"),
        ("void onnxruntime::flash::flash_fwd_splitkv_kernel<onnxruntime::flash::Flash_fwd>", "flash"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90> >", "flash"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention<...>)", "memory-efficient"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", "cuDNN"),
        ("triton_tem_fused_flex_attention_0", "flex"),
        ("onnxruntime::contrib::cuda::H128::grp1_fp16::kernel_mha(unsigned int, unsigned int, float)", "XQA"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 11>(float*)", "softmax of a matrix"),
    ],
)
def test_the_kind_of_attention(module: Module, name: str, kind: str) -> None:
    described, product = module("gpu.kernels").described, "void gemm_kernel<float>(int)"
    assert described({product: 30.0, name: 10.0}) == f"{kind}, 25%"
    assert described({product: 30.0}) == "not found"


def test_what_ran_on_the_cpu_is_counted(module: Module) -> None:
    args = [("MemcpyToHost", "CUDAExecutionProvider"), ("Shape", "CPUExecutionProvider")]
    events = [
        {"name": f"{kind}{end}", "args": {"op_name": kind, "provider": provider}}
        for kind, provider in [*args, *args, ("MatMul", "CUDAExecutionProvider")]
        for end in ("_fence_before", "_kernel_time")
    ]
    assert module("gpu.graphs").placed(events) == (1, 1)


@pytest.mark.parametrize(
    ("form", "said", "copies", "failed"),
    [
        ("ours-last", "flash, 5%", 4, []),
        ("ours-last", "cuDNN, 5%", 5, []),
        ("ours-last", "not found", 4, ["the kernel of its attention is not flash|cuDNN, but not found"]),
        ("ours-last, new buffers", "flash, 5%", 9, ["9 copies between CPU and GPU, more than 5"]),
        ("flash", "cuDNN, 5%", 4, ["the kernel of its attention is not flash, but cuDNN, 5%"]),
        ("portable", "-", 9, []),
    ],
)
def test_another_kernel_than_wanted_is_noted(
    module: Module,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    form: str,
    said: str,
    copies: int,
    failed: list[str],
) -> None:
    graphs, setup = module("gpu.graphs"), module("measuring").Setup(tmp_path, 2, 16, 2, device="cuda")
    document = module("report").Document("graphs", "a title", tmp_path)
    chosen = next(each for each in graphs.FORMS["float16"] if each.name == form)
    monkeypatch.setattr(graphs, "export", lambda setup, form: None)
    monkeypatch.setattr(
        graphs, "fresh", lambda *_: ({}, [[form, "prefill", said, "CUDA", str(copies), "15"]])
    )
    assert graphs.tried(document, setup, chosen, [8], math.inf)
    assert [note.partition(": ")[2] for note in document.failed] == failed


def test_logits_that_are_too_far_from_stock_s_are_a_failure(module: Module, tmp_path: Path) -> None:
    attention = module("gpu.attention")
    document = module("report").Document("attention", "a title", tmp_path)
    comparison = attention.Comparison(document, None, "BLOOM", (2048,))
    comparison.reference = np.array([-10.0, 1.0])
    stock, sdpa, _, flash, *_ = attention.SIDES
    for side, dtype, logits, limit in [
        (stock, "float16", [-10.0, 9.0], 0.01),
        (sdpa, "float32", [-10.0, 1.009], 1e-3),
        (flash, "float32", [-10.0, 1.011], 1e-3),
        (flash, "bfloat16", [-10.0, math.nan], 0.01),
    ]:
        comparison.check(side, dtype, np.array(logits), limit)
    names = [line.partition(": ")[0] for line in document.failed]
    assert names == [f"BLOOM, {flash.name}, {dtype}" for dtype in ("float32", "bfloat16")]
