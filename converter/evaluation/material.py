"""What slopes are fitted on: the user's text and prompts, in parts that do not overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.evaluation.candidates import ladder
from converter.evaluation.hardware import Hardware
from converter.evaluation.subject import Subject
from converter.evaluation.tasks.base import Item, Task
from converter.fitting.samples import Answered, Prompts, Samples, Windows
from converter.scaling.scaling import Dynamic, Static
from converter.texts.windows import read_windows

TOKENS_PER_STEP = 8192
MOST_TOKENS = 1 << 22
"""Of text that is read; more would not be looked at in the steps there are."""
STOP, JUDGE = 2, 6
"""Fewest windows or prompts to stop by, and to judge by: six that all get better are the fewest that are more
than chance."""
STOP_TOKENS, JUDGE_TOKENS = 1 << 15, 1 << 17
"""Most tokens of either, beyond the fewest windows or prompts."""
LEARN = 8
"""Fewest windows or prompts to learn from."""


def answered(tokenizer: Any, items: Sequence[Item], shortest: int, longest: int) -> list[Answered]:
    """Prompts with their first right answers, if both take more than ``shortest`` and at most ``longest``.

    The answer is what the model should go on with: after a space, unless the prompt ends with white space.
    """
    found = []
    for item in items:
        blank = tokenizer.decode(item.ids[-1:])[-1:].isspace()
        before = "\n" if blank else "a"
        start = tokenizer(before, add_special_tokens=False)["input_ids"]
        whole = tokenizer(f"{before}{'' if blank else ' '}{item.answers[0]}", add_special_tokens=False)
        answer = whole["input_ids"][len(start) :]
        if answer and shortest < len(item.ids) + len(answer) <= longest:
            found.append(Answered((*item.ids, *answer), len(item.ids)))
    return found


def rows_of(hardware: Hardware) -> Callable[[int], int]:
    """How many rows of so many tokens a step runs at once."""
    return lambda length: min(hardware.rows(length), max(1, TOKENS_PER_STEP // length))


def windows_of(
    subject: Subject,
    windows: NDArray[np.int64],
    form: Static | Dynamic,
    trained: int,
    judge: int,
    stop: int,
) -> Windows:
    """Windows [windows, target]: the first to judge by, then those to stop by, the others to learn from."""
    # With a position-dynamic form, no slope changes up to the trained length.
    lengths = ladder(trained, windows.shape[1])[0 if isinstance(form, Static) else 1 :]
    parts = windows[judge + stop :], windows[judge : judge + stop], windows[:judge]
    return Windows(*parts, lengths, rows_of(subject.hardware), subject.mask)


def prompts_of(subject: Subject, cases: Sequence[Answered], judge: int, stop: int) -> Prompts:
    """Prompts in the same order of parts."""
    parts = cases[judge + stop :], cases[judge : judge + stop], cases[:judge]
    return Prompts(*parts, rows_of(subject.hardware))


def samples_of(
    subject: Subject,
    files: Sequence[Path],
    prompts: Sequence[Task],
    form: Static | Dynamic,
    trained: int,
    target: int,
    seed: int,
) -> list[Samples]:
    """What to learn from, and the parts that are kept back; which they are, the seed decides."""
    rng = np.random.default_rng(seed)
    found: list[Samples] = []
    if files:
        count = max(LEARN + STOP + JUDGE, MOST_TOKENS // target)
        windows = read_windows(subject.tokenizer, files, target, count)
        judge, stop = _kept(len(windows), target, f"`text` has {len(windows)} windows of {target} tokens")
        windows = windows[rng.permutation(len(windows))]
        found.append(windows_of(subject, windows, form, trained, judge, stop))
    if prompts:
        lengths, count = ladder(trained, target), MOST_TOKENS // target
        drawn = [task.items(subject.tokenizer, lengths, count, seed) for task in prompts]
        items = [item for by_length in drawn for each in by_length.values() for item in each]
        shortest = 0 if isinstance(form, Static) else trained
        cases = answered(subject.tokenizer, items, shortest, target)
        cases = [cases[index] for index in rng.permutation(len(cases))]
        what = f"`prompts` has {len(cases)} prompts with {shortest + 1} to {target} tokens"
        judge, stop = _kept(len(cases), target, what)
        found.append(prompts_of(subject, cases, judge, stop))
    return found


def _kept(count: int, length: int, what: str) -> tuple[int, int]:
    """How many items to judge by, and to stop by."""
    judge = max(JUDGE, min(count // 8, JUDGE_TOKENS // length))
    stop = max(STOP, min(count // 8, STOP_TOKENS // length))
    if count < LEARN + judge + stop:
        raise UsageError(
            f"{what}, and fitting needs {LEARN + judge + stop}: to learn from, to stop by and to judge by; "
            "give more, or another `target_length`"
        )
    return judge, stop
