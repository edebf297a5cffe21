"""The tests that need a GPU: ``pytest -m gpu``."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec

import report
from report import Document

from gpu.part import Settings

TITLE = "the tests marked gpu"
MARK = "pytest.mark.gpu"


def run(settings: Settings, document: Document) -> None:
    document.intro = "The end of the output of `pytest -m gpu`, of the files that have such tests."
    # Collecting all files of tests would take longer than the tests.
    found = [path for path in sorted((report.ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    files = [str(path.relative_to(report.ROOT)) for path in found]
    options = ["-q", "-rfEs", "--tb=line", "-m", "gpu", "-p", "no:cacheprovider"]
    if find_spec("xdist") and not settings.trial:  # most of the time of a tiny model's test is the CPU's
        options += ["-n", "4"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    seconds = max(1.0, settings.until - time.monotonic())
    try:
        ended = subprocess.run(command, cwd=report.ROOT, timeout=seconds, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        document.fail("pytest", f"not done within {seconds:.0f} s")
        return
    lines = (ended.stdout + ended.stderr).replace(str(report.ROOT), ".").splitlines()[-30:]
    document.put("Results", "\n".join(["```", *lines, "```"]))
    if ended.returncode:
        document.fail("pytest", f"ended with {ended.returncode}")
    elif "passed" not in lines[-1] and not settings.trial:
        document.fail("pytest", "no test passed")
