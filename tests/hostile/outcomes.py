"""Runs cases in worker processes and reads their results."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """The result of one case."""

    kind: str
    number: int
    code: int | None = None
    """Exit code; None if there was a traceback or the process ended."""
    seconds: float = 0.0
    memory: int = 0
    """Peak in bytes, above that at the start; or the whole peak of a process that the run started."""
    problems: Sequence[str] = ()
    """Everything that must not happen; each starts with ``crash``, ``write``, ``code`` or ``limit``."""


def outcomes(kind: str, numbers: Sequence[int]) -> Iterator[Outcome]:
    """Runs cases one after another; after one that ended its process, in a new one."""
    while numbers:
        done = 0
        for outcome in _until_it_ends(kind, numbers):
            done += 1
            yield outcome
        numbers = numbers[done:]


def _until_it_ends(kind: str, numbers: Sequence[int]) -> Iterator[Outcome]:
    process = forks.Popen(
        [sys.executable, "-m", "tests.hostile.worker", kind, *map(str, numbers)],
        stdout=forks.PIPE,
        # Not a pipe: nobody reads it, and once it is full the worker would wait forever.
        stderr=forks.DEVNULL,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    done = 0
    try:
        for line in process.stdout:
            yield Outcome(**json.loads(line))
            done += 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if done < len(numbers):
        what = "limit did not end" if code == -signal.SIGALRM else f"crash the process ended with code {code}"
        yield Outcome(kind, numbers[done], problems=[what])
