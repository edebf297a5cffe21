"""``make gpu``: how time is shared, what is written when, how kernels are told apart; a trial runs more."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
Module = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """``module(name)``: a module of benchmarks/, which are scripts and no package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture
def settings(module: Module, tmp_path: Path) -> Any:
    """The settings of a part on a GPU, which writes into ``tmp_path``."""
    return module("gpu.settings").Settings("cuda", tmp_path, tmp_path / "results", time.monotonic() + 60)


def test_what_one_leaves_goes_to_those_after_it(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu.settings")
    now = 100.0
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now)
    until = {}
    for name, end in gpu.shared(["a", "b", "c"], 200.0, [2, 1, 1]):
        until[name] = end
        now += {"a": 10, "b": 60, "c": 0}[name]  # a ends early, b late
    assert until == {"a": 150.0, "b": 155.0, "c": 200.0}


def test_every_part_can_be_run(module: Module) -> None:
    for name in module("on_gpu").PARTS:
        part = module(f"gpu.{name}")
        assert callable(part.run)
        assert part.TITLE


def test_a_result_is_written_as_it_grows(module: Module, settings: Any) -> None:
    document = module("gpu.document").Document(settings, "attention", "a title")
    path = settings.results / "gpu-attention.md"
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
    assert list(settings.results.iterdir()) == [path]


def test_a_trial_is_printed_or_written_where_it_is_told(
    module: Module, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = replace(settings, device="cpu")
    for each in (replace(trial, results=None), trial):
        document = module("gpu.document").Document(each, "attention", "a title")
        document.put("Numbers", "1 ms")
        document.end()
    printed, written = capsys.readouterr().out, (trial.results / "gpu-attention.md").read_text()
    for text in (printed, written):
        assert text.count("1 ms") == text.count("A trial on the CPU") == 1


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


def test_without_a_device_there_is_one_line(module: Module) -> None:
    from click.testing import CliRunner

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    result = CliRunner().invoke(module("on_gpu").main, [])
    assert result.exit_code == 1
    assert result.output == (
        "Error: torch finds no CUDA device; for a trial without one: make gpu DEVICE=cpu\n"
    )


# Names as CUDA's profiler gives them, and as torch's CPU operators are called.
KERNELS = {
    "flash": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<160, 64, 64, 4>, false, true>(...)",
        "void onnxruntime::flash::flash_fwd_splitkv_kernel<onnxruntime::flash::Flash_fwd_kernel_traits<...>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...> > >",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "memory-efficient": [
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>)"
    ],
    "cuDNN": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
    ],
    "flex": ["triton_tem_fused_flex_attention_0"],
    "softmax of a matrix": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11>(float*)"
    ],
    "not found": ["void gemm_kernel<float>(int)"],
}


@pytest.mark.parametrize("kind", KERNELS)
def test_the_kind_of_attention(module: Module, kind: str) -> None:
    kernels = module("gpu.kernels")
    for name in KERNELS[kind]:
        found, share, top = kernels.described({"void gemm_kernel<float>(int)": 30.0, name: 10.0})
        assert found == kind, name
        assert share == ("-" if kind == "not found" else "25%")
        assert "`gemm_kernel`" in top
        assert "<" not in top


def test_what_onnxruntime_says_about_its_kernels(module: Module) -> None:
    graphs = module("gpu.graphs")
    with graphs.printed() as lines:
        for node in range(2):
            line = (
                f"Operator=GroupQueryAttention Node=/attention{node} DataType=fp16 SdpaKernel=FLASH_ATTENTION"
            )
            os.write(1, f"\x1b[36m{line}\x1b[0m\n".encode())
    assert graphs.kernel_info([*lines, "another line"]) == ["SdpaKernel=FLASH_ATTENTION"]


def test_a_length_is_tried_if_a_shorter_one_ran_and_there_is_time(module: Module) -> None:
    attention, measured = module("gpu.attention"), module("torch_speed").Measured
    until = time.monotonic() + 10
    for before, expected, failure in [
        (measured(), 1.0, None),
        (measured(), 100.0, "no time"),
        (measured(failure="out of memory"), 1.0, "out of memory"),
    ]:
        found = measured()
        assert attention.can_start(found, before, expected, until) is (failure is None)
        assert found.failure == failure


def test_logits_that_are_too_far_from_stock_s_are_a_failure(
    module: Module, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, geometry = module("gpu.attention"), module("gpu.settings").BLOOM
    monkeypatch.setattr(attention.torch_speed, "tokens", lambda *_: None)
    monkeypatch.setattr(attention.torch_speed, "prefill", lambda logits, _: torch.tensor(logits))
    document = module("gpu.document").Document(settings, "attention", "a title")
    comparison = attention.Comparison(document, None, geometry, (2048,))
    stock, sdpa, flash, *_ = attention.SIDES
    for side, dtype, logits in [
        (stock, "float32", [-10.0, 1.0]),
        (stock, "float16", [-10.0, 1.1]),
        (sdpa, "float32", [-10.0, 1.009]),
        (sdpa, "float16", [-10.0, 1.25]),
        (flash, "float32", [-10.0, 1.011]),
        (flash, "float16", [-10.0, 1.35]),
        (flash, "bfloat16", [-10.0, math.nan]),
    ]:
        comparison.compare(side, logits, dtype)
    names = [line.partition(": ")[0] for line in document.failed]
    assert names == [f"BLOOM-1b7, {flash.name}, {dtype}" for dtype in ("float32", "float16", "bfloat16")]
