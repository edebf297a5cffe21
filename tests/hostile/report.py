"""Starts workers, and makes the table of results.

rows = run(seconds=60, seed=0)
print(table(rows))
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.hostile.case import SLOWEST, Outcome
from tests.hostile.kinds import KINDS

ROOT = Path(__file__).parents[2]
BATCH = 500
"""Number of cases that one worker runs."""
STARTING = 120.0
"""Seconds that a worker may take for its imports."""


@dataclass
class Row:
    """One kind of input and the results of its cases."""

    kind: str
    title: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[Outcome]:
        """The cases with a problem."""
        return [outcome for outcome in self.outcomes if outcome.problems]

    def count(self, problem: str) -> int:
        """The number of cases with a problem of this type: ``crash``, ``write``, ``code`` or ``limit``."""
        return sum(any(found.startswith(problem) for found in case.problems) for case in self.outcomes)

    @property
    def cells(self) -> list[str]:
        """The cells of this row in the table."""
        accepted = sum(outcome.code == 0 for outcome in self.outcomes)
        slowest = max((outcome.seconds for outcome in self.outcomes), default=0.0)
        memory = max((outcome.memory for outcome in self.outcomes), default=0)
        return [
            self.title,
            *(str(number) for number in (len(self.outcomes), len(self.outcomes) - accepted, accepted)),
            *(str(self.count(problem)) for problem in ("crash", "write", "code", "limit")),
            f"{slowest:.1f} s",
            f"{memory / 1e6:.0f} MB",
        ]


HEADINGS = [
    "kind",
    "cases",
    "refused",
    "accepted",
    "tracebacks",
    "writes outside",
    "code executed",
    "over limits",
]
HEADINGS += ["slowest case", "most memory"]


def run(
    *, seconds: float | None = None, cases: int | None = None, seed: int = 0, kinds: list[str] | None = None
) -> list[Row]:
    """Runs every example of each kind, then random cases.

    Args:
        seconds: time for all kinds together; all examples run, however long they take.
        cases: number of random cases per kind, instead of a time.
        seed: seed of the random cases; the same seed gives the same cases.
        kinds: names from ``KINDS``; all by default.
    """
    chosen = kinds or list(KINDS)
    rows = []
    for name in chosen:
        row = Row(name, KINDS[name].title)
        started = time.monotonic()
        row.outcomes += outcomes(name, seed, list(KINDS[name].examples))
        number = 0
        while True:
            if cases is None:
                spent = time.monotonic() - started
                rate = max(len(row.outcomes) / spent, 0.1)
                wanted = min(BATCH, int((max(0.0, (seconds or 0) / len(chosen) - spent)) * rate))
            else:
                wanted = min(BATCH, cases - number)
            if wanted <= 0:
                break
            row.outcomes += outcomes(name, seed, [str(at) for at in range(number, number + wanted)])
            number += wanted
        rows.append(row)
    return rows


def outcomes(kind: str, seed: int, cases: list[str]) -> Iterator[Outcome]:
    """Runs cases in a worker process, which is started again if a case ends it."""
    while cases:
        done = 0
        for outcome in _batch(kind, seed, cases):
            done += 1
            yield outcome
        cases = cases[done:]


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table with aligned columns."""
    lines = [HEADINGS, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _batch(kind: str, seed: int, cases: list[str]) -> Iterator[Outcome]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.worker", kind, str(seed), *cases],
        stdout=subprocess.PIPE,
        # Not a pipe: nobody reads it, and once it is full the worker would wait forever.
        stderr=subprocess.DEVNULL if "HOSTILE_DEBUG" not in os.environ else None,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    current, wait, rest = None, STARTING, b""
    try:
        while True:
            ready, _, _ = select.select([process.stdout], [], [], wait)
            block = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not block:
                break
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                message = json.loads(line)
                current, wait = message.get("begin"), 3 * SLOWEST
                if current is None:
                    yield Outcome(**message)
    finally:
        hung = process.poll() is None and current is not None
        process.kill()
        process.wait()
    if current is not None:
        what = (
            "limit did not end"
            if hung and process.returncode == -9
            else f"crash the process ended with {process.returncode}"
        )
        yield Outcome(kind, current, "", None, "", wait if hung else 0.0, 0, [what])
    elif process.returncode not in (0, -9):
        raise RuntimeError(f"the worker of {kind} failed to start: exit code {process.returncode}")
