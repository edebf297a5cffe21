"""``python -m tests.faults [--seconds N] [--kind TEXT]``: runs all faults and prints a table."""

from __future__ import annotations

import argparse
import sys

from tests.faults.campaign import can_mount, report, table
from tests.faults.trial import KINDS


def main() -> None:
    """Prints the table; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Runs with faults.")
    parser.add_argument("--seconds", type=float, default=300, help="approximate time; 300 by default")
    parser.add_argument("--kind", default="", help="only kinds of runs whose names contain this text")
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if arguments.kind in kind.name]
    if not kinds:
        parser.error(f"no kind's name contains {arguments.kind!r}: {[kind.name for kind in KINDS]}")
    result = report(arguments.seconds, kinds)
    print(table(result))
    if not can_mount():
        print("full disks were not tried, because only root can mount a small disk")
    failed = {row.kind.partition(", then ")[0] for row in result if row.failures}
    for kind in sorted(failed):
        print(f"to repeat: python -m tests.faults --kind {kind!r}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
