"""``python -m tests.hostile``: converts hostile sources of every kind and prints a table of the results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from tests.hostile.outcomes import Outcome, outcomes
from tests.hostile.sources import KINDS

BATCH = 200
"""Random cases that one process runs."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="time for all kinds together (300)")
    parser.add_argument("--kind", choices=list(KINDS), help="run only this kind")
    parser.add_argument("--case", type=int, metavar="N", help="run only this case of each kind")
    options = parser.parse_args()
    failed: list[Outcome] = []
    print("| kind | cases | rejected | with problems | slowest | memory |\n|---|---|---|---|---|---|")
    for kind in [options.kind] if options.kind else KINDS:
        share = options.seconds / (1 if options.kind else len(KINDS))
        done = list(run(kind, share) if options.case is None else outcomes(kind, [options.case]))
        bad = [outcome for outcome in done if outcome.problems]
        slowest = f"{max(outcome.seconds for outcome in done):.1f} s"
        memory = f"{max(outcome.memory for outcome in done) / 1e6:.0f} MB"
        cells = (kind, len(done), sum(outcome.code != 0 for outcome in done), len(bad), slowest, memory)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        failed += bad
    for outcome in failed:
        print(f"\npython -m tests.hostile --kind {outcome.kind} --case {outcome.number}: {outcome.problems}")
    return bool(failed)


def run(kind: str, seconds: float) -> Iterator[Outcome]:
    """All examples of a kind, then random cases until so many seconds are over."""
    started, first = time.monotonic(), len(KINDS[kind].examples)
    yield from outcomes(kind, range(first))
    while time.monotonic() < started + seconds:
        for outcome in outcomes(kind, range(first, first + BATCH)):
            yield outcome
            if time.monotonic() > started + seconds:
                return
        first += BATCH


if __name__ == "__main__":
    sys.exit(main())
