"""The tests that need a GPU: ``pytest -m gpu``."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from xml.etree import ElementTree

import report
from report import Document

from gpu.part import Settings

TITLE = "the tests marked gpu"
MARK = "pytest.mark.gpu"


def run(settings: Settings, document: Document) -> None:
    document.intro = "`pytest -m gpu`, of the files that have such tests."
    # Collecting all files of tests would take longer than the tests.
    files = [path for path in sorted((report.ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    record = settings.folder / "tests.xml"
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={record}"]
    if not settings.trial and find_spec("xdist"):
        options += ["-n", "4"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    seconds = max(1.0, settings.until - time.monotonic())
    try:
        ended = subprocess.run(command, cwd=report.ROOT, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        document.fail("pytest", f"not done within {seconds:.0f} s")
        return
    if not record.is_file():
        document.fail("pytest", f"ended with {ended.returncode} and without a record; is it installed?")
        return
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(record).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("tests.")
        if outcome is None:
            counts["passed"] += 1
        elif outcome.tag == "skipped":
            counts["skipped"] += 1
            document.skip(name.partition("[")[0], outcome.get("message"))
        else:
            counts["failed"] += 1
            document.fail(name, outcome.get("message"))
    if not counts["passed"] and not settings.trial:
        document.fail("pytest", "no test passed")
    rows = [[word, str(count)] for word, count in counts.items()]
    document.put("Results", report.table(["outcome", "tests"], rows))
