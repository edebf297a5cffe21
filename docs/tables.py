"""Writes the tables that follow from the code into the pages: `python docs/tables.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from converter import catalogue
from converter.evaluation.statistics import prompts_to_show
from converter.evaluation.tasks import TYPES

ROOT = Path(__file__).parent.parent
NAMES = ("README.md", "README.zh.md", "docs/evaluation.md", "docs/families.md", "docs/recipes.md")
PAGES = [ROOT / name for name in NAMES]
MARKED = re.compile(
    r"(<!-- (families|rotary|checkpoints|tasks|prompts): .*?-->\n).*?\n(<!-- end of \2 -->)", re.DOTALL
)


def tasks() -> str:
    """What `--tasks` offers, beside perplexity."""
    rows = [("`--tasks`", "prompt", "right answer", "from"), ("---",) * 4]
    rows += [(f"`{task.name}`", task.prompt, task.right, task.origin) for task in TYPES.values()]
    return table(rows)


def checkpoints() -> str:
    """The known checkpoints, with the source of each trained length."""
    rows = [("trained length", "checkpoints", "according to"), ("---",) * 3]
    for entry in catalogue.supported():
        for group in entry.checkpoints:
            length = "not known" if group.tokens is None else str(group.tokens)
            rows.append((length, ", ".join(group.ids), group.source))
    return table(rows)


def prompts() -> str:
    """How many prompts show a gain."""
    head = ("gain, of 100 right answers", "if none gets worse", "if one gets worse for three that get better")
    rows = [head, ("---",) * 3]
    for points in (10, 20, 30):
        gain = points / 100
        none, some = prompts_to_show(gain, 0.0), prompts_to_show(1.5 * gain, 0.5 * gain)
        rows.append((str(points), str(none), str(some)))
    return table(rows)


def table(rows: Iterable[Iterable[str]]) -> str:
    """Rows in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def rotary() -> str:
    """The types of rotary models."""
    [entry] = catalogue.supported("rotary")
    return entry.recognised_by


def families() -> str:
    """What ``ntk-convert families --markdown`` prints, with a link in place of the types of rotary models."""
    types = rotary()
    link = f"[{len(types.split(', '))} types](docs/families.md#rotary-models)"
    return catalogue.markdown().replace(types, link)


TABLES = {
    "families": families,
    "rotary": rotary,
    "checkpoints": checkpoints,
    "tasks": tasks,
    "prompts": prompts,
}


def updated(text: str) -> str:
    """A page with the tables between its markers written anew."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
