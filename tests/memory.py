"""How much memory a command line takes, run as users run it: as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Run

ROOT = Path(__file__).parent.parent
SAMPLING = 0.005
"""Seconds between two looks at a process."""
MB = 1 << 20

needs_proc = pytest.mark.skipif(
    "RssAnon" not in (Path("/proc/self/status").read_text() if sys.platform == "linux" else ""),
    reason="the kernel does not say how much memory is no file's",
)


def measured(*words: object) -> tuple[Run, int]:
    """Runs a command line.

    Returns:
        What it gave, and the peak of the bytes that it and its workers allocated. Pages of mapped files are
        not counted: the kernel takes them back when it needs memory.
    """
    command = [sys.executable, "-m", "converter", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        ended, peaks = threading.Event(), [0]

        def watch() -> None:
            while not ended.wait(SAMPLING):
                peaks.append(max(peaks.pop(), sum(map(anonymous, family(process.pid)))))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            out, err = process.communicate()
        finally:
            ended.set()
            watcher.join()
    return Run(process.returncode, out, err), peaks[0]


def anonymous(pid: int) -> int:
    """Bytes of a process's memory that are not mapped from a file; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def family(pid: int) -> Iterator[int]:
    """A process and those that it started."""
    yield pid
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))
