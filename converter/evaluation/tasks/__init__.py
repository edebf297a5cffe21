"""What a model is asked: tasks by their names. A new one is a module here, and its name in ``MODULES``.

task.py       what a task is, and how it is offered
numbers.py    generated: a number hidden in filler text (passkey), or in a list (LongEval lines)
files.py      from a file: your own prompts, LongEval's lines and topics, LongBench's TREC and MultiFieldQA-en
beir.py       the user's queries and documents, for encoders: a folder in BEIR's format
records.py    reads files of JSON Lines; words.json has the words of generated prompts
tokens.py     prompts in tokens, as long as allowed, and seeded chance
scores.py     what an answer or a ranking is worth
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from converter.errors import UsageError
from converter.evaluation.tasks.task import Retrieval as Retrieval
from converter.evaluation.tasks.task import Task as Task
from converter.evaluation.tasks.task import TaskType as TaskType

AnyTask = Task | Retrieval
"""For causal language models; for encoders."""

MODULES = ("numbers", "files", "beir")
TYPES: dict[str, TaskType] = {
    each.name: each for module in MODULES for each in import_module(f"{__name__}.{module}").TYPES
}
"""By name, in the order of the modules."""
NAMES = tuple(TYPES)
GENERATED = tuple(name for name, each in TYPES.items() if each.generate)
"""Names of tasks that need no file."""
EMBEDDED = tuple(name for name, each in TYPES.items() if each.embeds)
"""Names of tasks for encoders; the others are for causal language models."""
READ = tuple(name for name, each in TYPES.items() if each.read)
"""Names of tasks that can be read from a file."""


def make_task(name: str, file: str | Path | None = None) -> AnyTask:
    """The task of that name, for ``evaluate``, ``tune`` and ``fit``.

    Args:
        name: one of ``NAMES``, such as ``passkey`` or ``prompts``.
        file: its test cases, JSON Lines or a folder, for a task that does not generate them.

    Raises:
        UsageError: no such task, a file where there can be none, or no file where one is needed.
        SourceError: a file that does not hold such cases; names the line.
    """
    if name not in TYPES:
        raise UsageError(f"there is no task {name!r}; choose one of {', '.join(NAMES)}")
    task = TYPES[name]
    if file is not None:
        if task.read is None:
            raise UsageError(f"the task {name} is generated and reads no file; drop {Path(file).name}")
        return task.read(Path(file))
    if task.generate is None:
        what = "a folder" if task.folder else "a file (.jsonl)"
        raise UsageError(f"the task {name} is read from {what}; give it with {task.option}, or to make_task")
    return task.generate()


def make_tasks(given: Sequence[AnyTask | str]) -> list[AnyTask]:
    """The tasks, with those made that are given by name; raises as ``make_task``."""
    names = [given] if isinstance(given, str) else given
    return [make_task(each) if isinstance(each, str) else each for each in names]
