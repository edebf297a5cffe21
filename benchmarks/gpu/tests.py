"""The tests that need a GPU: ``pytest -m gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec

import report
from report import Document

from gpu.part import Settings

TITLE = "the tests marked gpu"
MARK = "pytest.mark.gpu"
LINES = 80


def run(settings: Settings, document: Document) -> None:
    document.intro = "The end of the output of `pytest -m gpu`, of the files that have such tests."
    # Collecting all files of tests would take longer than the tests.
    found = [path for path in sorted((report.ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    files = [str(path.relative_to(report.ROOT)) for path in found]
    command = [sys.executable, "-m", "pytest", "-v", "-rfEs", "--tb=line", "-m", "gpu", *files]
    command += ["-p", "no:cacheprovider"]
    if find_spec("xdist") and not settings.trial:  # most of the time of a tiny model's test is the CPU's
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    log = settings.folder / "log"
    with log.open("w") as output:
        single = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=report.ROOT, env=single, stdout=output, stderr=output)
        while True:
            code = process.poll()
            lines = log.read_text().replace(str(report.ROOT), ".").splitlines()[-LINES:]
            document.put("Results", "\n".join(["```", *lines, "```"]))
            if code is not None or time.monotonic() > settings.until:
                break
            time.sleep(0.5)
        process.kill()
    if code is None:
        document.fail("pytest", "no time")
    elif code:
        document.fail("pytest", f"ended with {code}")
    elif "passed" not in lines[-1] and not settings.trial:
        document.fail("pytest", "no test passed")
