"""Denormal numbers are zeros in every session that this project makes, or has others make."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter import OnnxOptions, export
from tests import forks
from tests.patched import Convert

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="onnxruntime supports this on x86 only"
)

ROOT = Path(__file__).parent.parent
PLAIN = "import onnxruntime; onnxruntime.InferenceSession(folder / 'model.onnx')"
EXAMPLE = "from examples.generate_onnx import Model; Model(folder)"
GENAI_EXAMPLE = f"import generate_genai; {EXAMPLE}; from generate_genai import og; og.Model(str(folder))"
GENAI = "import onnxruntime_genai; onnxruntime_genai.Model(str(folder))"

# The setting is the thread's, so NumPy shows it: 1e-38 / 8 is a denormal number.
SHOWN = "import numpy as np; print(*set((np.full(64, 1e-38, np.float32) / np.float32(8)).tolist()))"


@pytest.mark.parametrize(
    ("opened", "zero"),
    [(PLAIN, False), (EXAMPLE, True), (GENAI, True)],
    ids=["plain", "example", "genai"],
)
def test_denormal_numbers(converted: Convert, opened: str, *, zero: bool) -> None:
    """In a new process, because the first session decides for its thread."""
    if opened is GENAI and importlib.util.find_spec("onnxruntime_genai") is None:
        pytest.skip("onnxruntime-genai is not installed")
    folder = converted("bloom", 4, "ntk")
    export(folder, OnnxOptions(validate=False))
    code = f"import pathlib; folder = pathlib.Path({str(folder)!r}); {opened}; {SHOWN}"
    done = forks.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert float(done.stdout) == pytest.approx(0 if zero else 1.25e-39, rel=1e-3, abs=0)


def smallest() -> float:
    """1e-38 / 8, or 0 if this thread takes it for zero."""
    return float(np.float32(1e-38) / np.float32(8))


def test_validation_leaves_the_thread_as_it_was(converted: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis refuses to work in a thread without denormal numbers, and other people's code may too."""
    seen = []

    class Observed(onnxruntime.InferenceSession):
        def __init__(self, path: str, options: Any, **others: Any):
            super().__init__(path, options, **others)
            seen.append(options.get_session_config_entry("session.set_denormal_as_zero"))

        def run_with_iobinding(self, binding: Any) -> None:
            seen.append(smallest())
            super().run_with_iobinding(binding)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Observed)
    folder = converted("bloom", 4, "ntk")
    export(folder, OnnxOptions(validate=False))
    session = importlib.import_module("converter.onnx.session").Session(folder / "model.onnx", "cpu")
    assert smallest() > 0
    ids, mask = np.ones((1, 3), np.int64), np.ones((1, 3), np.int64)
    session.step(ids, mask)
    session.shared(1, 3).step(ids, mask)
    assert seen == ["1", 0, 0]
    assert smallest() > 0


OURS = "from converter.onnx.session import Session; Session(folder / 'model.onnx', 'cpu')"


@pytest.mark.parametrize("opened", [OURS, EXAMPLE, GENAI_EXAMPLE], ids=["ours", "example", "genai example"])
def test_no_telemetry(converted: Convert, tmp_path: Path, opened: str) -> None:
    """onnxruntime is imported anew, in a process without the variables by which it sees a test."""
    if opened is GENAI_EXAMPLE and importlib.util.find_spec("onnxruntime_genai") is None:
        pytest.skip("onnxruntime-genai is not installed")
    folder, home = converted("bloom", 4, "ntk"), tmp_path / "home"
    export(folder, OnnxOptions(validate=False))
    home.mkdir()
    code = f"import pathlib; folder = pathlib.Path({str(folder)!r}); {opened}"
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    words = [sys.executable, "-c", code]
    environment = {**kept, "HOME": str(home), "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert not [path for path in home.rglob("*") if "onnxruntime" in str(path)]
