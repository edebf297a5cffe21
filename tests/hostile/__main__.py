"""``python -m tests.hostile``: converts hostile sources of every kind and prints a table of the results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.hostile.kinds import KINDS
from tests.hostile.report import Row, outcomes, run, table

SAVED = Path("hostile-failures.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=300, metavar="N", help="time for all kinds together (300)"
    )
    parser.add_argument(
        "--cases", type=int, metavar="N", help="run N random cases of each kind, however long they take"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random cases (0)")
    parser.add_argument(
        "--kind", choices=list(KINDS), action="append", help="run only this kind; may be repeated"
    )
    parser.add_argument(
        "--case", metavar="NAME", help="run only this example, or random case N, of one --kind"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="with --case: write its source there, run nothing"
    )
    options = parser.parse_args()
    if options.case is not None and not options.kind:
        parser.error("--case needs --kind")
    if options.keep is not None:
        from tests.hostile.case import build

        build(KINDS[options.kind[0]], options.case, options.seed, options.keep)
        return 0
    if options.case is not None:
        kind = options.kind[0]
        row = Row(kind, KINDS[kind].title, list(outcomes(kind, options.seed, [options.case])))
        print(json.dumps([outcome.to_json() for outcome in row.outcomes], indent=2))
        return bool(row.failed)
    rows = run(seconds=options.seconds, cases=options.cases, seed=options.seed, kinds=options.kind)
    print(table(rows))
    failed = [outcome for row in rows for outcome in row.failed]
    for outcome in failed:
        print(f"\n{outcome.kind}, {outcome.case}: {outcome.problems}")
        again = f"--seed {options.seed} --kind {outcome.kind} --case {outcome.case!r}"
        print(f"  to repeat it: python -m tests.hostile {again}")
    if failed:
        SAVED.write_text(
            json.dumps([outcome.to_json() for outcome in failed], indent=2) + "\n", encoding="utf-8"
        )
        print(f"\nthe {len(failed)} failed cases are saved in {SAVED}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
