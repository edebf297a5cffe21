"""What a model is asked: tasks by their names.

base.py       what every task says of itself
passkey.py    a number hidden in filler text
lines.py      LongEval lines, generated or from a published file
topics.py     LongEval topics, from a published file
longbench.py  LongBench's TREC and MultiFieldQA-en, from their published files
prompts.py    the user's own
cases.py      reading such files
fitting.py    prompts in tokens, as long as allowed
drawing.py    seeded chance
answers.py    what counts as an answer
words.py      names of lines
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from converter.errors import UsageError
from converter.evaluation.tasks.base import Item, Metric, Task
from converter.evaluation.tasks.lines import Lines, PublishedLines
from converter.evaluation.tasks.longbench import read_multifieldqa_en, read_trec
from converter.evaluation.tasks.passkey import Passkey
from converter.evaluation.tasks.prompts import Prompts
from converter.evaluation.tasks.topics import Topics

_GENERATED: dict[str, Callable[[], Task]] = {"passkey": Passkey, "lines": Lines}
_READ: dict[str, Callable[[Path], Task]] = {
    "lines": PublishedLines.read,
    "topics": Topics.read,
    "trec": read_trec,
    "multifieldqa_en": read_multifieldqa_en,
    "prompts": Prompts.read,
}

GENERATED = tuple(_GENERATED)
"""Names of tasks that need no file."""
READ = tuple(_READ)
"""Names of tasks that can be read from a file."""
NAMES = (*GENERATED, *(name for name in READ if name not in GENERATED))

__all__ = ["GENERATED", "NAMES", "READ", "Item", "Lines", "Metric", "Task", "make_task"]


def make_task(name: str, file: Path | None = None) -> Task:
    """The task of that name.

    Args:
        name: one of ``NAMES``.
        file: its test cases, JSON Lines; a task of ``READ`` that is not ``GENERATED`` needs one.

    Raises:
        UsageError: no such task, or a file where there can be none, or none where one is needed.
        SourceError: a file that does not hold such cases; names the line.
    """
    if name not in NAMES:
        raise UsageError(f"there is no task {name!r}; choose one of {', '.join(NAMES)}")
    if file is None:
        if name not in _GENERATED:
            raise UsageError(f"the task {name} is read from a file; give its test cases (.jsonl)")
        return _GENERATED[name]()
    if name not in _READ:
        raise UsageError(f"the task {name} is generated and reads no file; drop {file.name}")
    return _READ[name](file)
