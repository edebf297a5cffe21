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
        *("quantised encoders", "on_gpu", "originals", "common_tests", "serving"),
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
        ("serving", "| serve_onnx.py, 4 rows |"),
    ],
)
def test_smallest_run(command: str, expected: str) -> None:
    """Of scripts that need no other environment and take less than a minute."""
    name, *words = command.split()
    line = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, "--quick"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


# --- make gpu


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
