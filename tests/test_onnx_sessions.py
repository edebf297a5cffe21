"""Denormal numbers are zeros in every session that this project makes, or has others make."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

import pytest

from converter import OnnxOptions, export
from tests import forks
from tests.patched import Convert

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="onnxruntime supports this on x86 only"
)

ROOT = Path(__file__).parent.parent
PLAIN = "import onnxruntime; onnxruntime.InferenceSession(folder / 'model.onnx')"
SESSION = "from converter.exports.onnx.session import Session; Session(folder / 'model.onnx', 'cpu')"
EXAMPLE = "from examples.generate_onnx import Model; Model(folder)"
GENAI = "import onnxruntime_genai; onnxruntime_genai.Model(str(folder))"

# The setting is the thread's, so NumPy shows it: 1e-38 / 8 is a denormal number.
SHOWN = "import numpy as np; print(*set((np.full(64, 1e-38, np.float32) / np.float32(8)).tolist()))"


@pytest.mark.parametrize(
    ("opened", "zero"),
    [(PLAIN, False), (SESSION, True), (EXAMPLE, True), (GENAI, True)],
    ids=["plain", "session", "example", "genai"],
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
