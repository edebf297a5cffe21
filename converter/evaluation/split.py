"""Parts of a benchmark. The test part takes no part in choosing or learning, and tells what came of it.

``tune`` splits what it asks into halves: validation, to choose by, and test. ``fit`` splits its text and
prompts into train, to learn from, validation, to stop by, and test; these parts become batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from converter.errors import UsageError, option
from converter.evaluation.batches import (
    MASKED_SHARE,
    AnsweredPrompt,
    Batch,
    Ids,
    Rows,
    answers,
    batches_by_length,
    masked_tokens,
    next_tokens,
)
from converter.evaluation.benchmark import Benchmark, Material, doubling_lengths
from converter.evaluation.checks import check_prompt_lengths
from converter.evaluation.evaluated_model import EvaluatedModel
from converter.evaluation.losses import pieces
from converter.evaluation.results import FEWEST
from converter.evaluation.runner import Hardware
from converter.evaluation.tasks.task import Collection, Item, Task

TOKENS_PER_STEP = 8192
MOST_TOKENS = 1 << 22
"""Of text that is read; more would not be looked at in the steps there are."""
FEWEST_TRAIN, FEWEST_VALIDATION, FEWEST_TEST = 8, 2, FEWEST
"""Fewest windows or prompts of each part of a fit."""
ONE_IN_TEST, ONE_IN_VALIDATION = 3, 8
"""One window or prompt of so many is in that part of a fit: it needs few to learn, and a test many."""
ENOUGH_TEST_ITEMS = 48
"""Windows or prompts of a fit's test part even if they take more than ``TEST_TOKENS``."""
VALIDATION_TOKENS, TEST_TOKENS = 1 << 15, 1 << 17
"""Most tokens of these parts of a fit, beyond their fewest and ``ENOUGH_TEST_ITEMS`` items."""


# --- tune


@dataclass(frozen=True)
class Halves:
    """The parts for ``tune``."""

    validation: Benchmark
    """Half of what is asked at the longest lengths; it chooses."""
    test: Benchmark
    """The other half, and half of what is asked at shorter lengths."""


def in_halves(benchmark: Benchmark, trained: int, target: int) -> Halves:
    """The halves; raises ``UsageError`` if a task, or the text, has too little for two."""
    for name, task in benchmark.tasks.items():
        lengths = [length for task_name, length in benchmark.material if task_name == name]
        check_prompt_lengths(task, lengths, trained, target)
    benchmark = benchmark.up_to(target)
    longest = benchmark.at_longest().material
    for name, length in longest:
        if len(longest[name, length]) < 2:
            raise UsageError(
                f"{name} has one prompt of length {length}, but choosing and judging need one each; give "
                "at least two of that length"
            )
    if len(benchmark.windows) == 1:
        raise UsageError(f"{option.text} has only one window of {target} tokens; give twice as much text")

    for_test: dict[tuple[str, int], Material] = {}
    for_validation: dict[tuple[str, int], Material] = {}
    for place, found in benchmark.material.items():
        half = len(found) // 2
        for_test[place] = found[0 : max(1, half)]
        for_validation[place] = found[half : len(found)]
    half = len(benchmark.windows) // 2
    test = replace(benchmark, material=for_test, windows=benchmark.windows[:half])
    validation = replace(benchmark, material=for_validation, windows=benchmark.windows[half:])
    return Halves(validation.at_longest(), test)


# --- fit


@dataclass(frozen=True)
class TextSplit:
    """Windows of text; every token is predicted from those before it, or masked ones from all others."""

    train: Ids
    """[windows, tokens], as the next two."""
    validation: Ids
    test: Ids
    trained: int
    """The trained length in tokens."""
    lengths: Sequence[int]
    """Of the pieces to learn from; one is drawn for each batch."""
    rows: Rows
    mask: int | None = None
    """Token id that masks a token, for a model that predicts masked tokens."""
    name: str = "text"

    @property
    def training_tokens(self) -> int:
        """How many tokens there are to learn from, those that only give context aside."""
        if self.mask is None:
            return self.train.size
        return int(self.train.size * MASKED_SHARE)

    def draw_batch(self, rng: np.random.Generator) -> Batch:
        """A batch to learn from."""
        length = int(rng.choice(self.lengths))
        count = self.rows(length)
        windows, longest = self.train.shape
        chosen = rng.integers(windows, size=count)[:, None]
        starts = rng.integers(longest - length + 1, size=count)[:, None]
        return self._batch(self.train[chosen, starts + np.arange(length)], rng)

    def batches(self, windows: Any) -> list[Batch]:
        """Windows as batches, in their order, and the same in every call."""
        rng = np.random.default_rng(0)
        step = self.rows(windows.shape[1])
        return [self._batch(windows[start : start + step], rng) for start in range(0, len(windows), step)]

    @property
    def test_beyond(self) -> Ids:
        """What the test part holds beyond the trained length: all windows."""
        return self.test

    @property
    def test_within(self) -> Ids:
        """The same windows in pieces of the trained length."""
        return pieces(self.test, self.trained)

    def _batch(self, ids: Ids, rng: np.random.Generator) -> Batch:
        if self.mask is None:
            return next_tokens(ids)
        chosen = rng.random(ids.shape) < MASKED_SHARE
        chosen[:, 0] |= ~chosen.any(axis=1)  # at least one token of each row
        return masked_tokens(ids, chosen, self.mask)


@dataclass(frozen=True)
class PromptSplit:
    """Prompts; only the tokens of the answers are predicted."""

    train: Sequence[AnsweredPrompt]
    validation: Sequence[AnsweredPrompt]
    test: Sequence[AnsweredPrompt]
    trained: int
    """The trained length in tokens."""
    rows: Rows
    name: str = "prompts"

    @property
    def training_tokens(self) -> int:
        """How many tokens of answers there are to learn from."""
        return sum(len(prompt.ids) - prompt.start for prompt in self.train)

    def draw_batch(self, rng: np.random.Generator) -> Batch:
        """A batch to learn from: neighbours by length, so that rows need little padding."""
        # Which of two prompts of one length comes first is drawn, too.
        shuffled = [self.train[place] for place in rng.permutation(len(self.train))]
        ordered = sorted(shuffled, key=lambda prompt: len(prompt.ids))
        end = int(rng.integers(len(ordered))) + 1
        longest = len(ordered[end - 1].ids)
        start = max(0, end - self.rows(longest))
        return answers(ordered[start:end])

    def batches(self, prompts: Any) -> list[Batch]:
        """Prompts as batches, the longest first."""
        lengths = [len(prompt.ids) for prompt in prompts]
        found = []
        for places in batches_by_length(lengths, self.rows):
            found.append(answers([prompts[place] for place in places]))
        return found

    @property
    def test_beyond(self) -> list[AnsweredPrompt]:
        """The prompts of the test part that are longer than the trained length."""
        return [prompt for prompt in self.test if len(prompt.ids) > self.trained]

    @property
    def test_within(self) -> list[AnsweredPrompt]:
        """The others."""
        return [prompt for prompt in self.test if len(prompt.ids) <= self.trained]


Split = TextSplit | PromptSplit
"""Data of one kind for ``fit``, in its three parts."""


def train_validation_test(
    evaluated: EvaluatedModel,
    files: Sequence[Path],
    prompts: Sequence[Task],
    trained: int,
    target: int,
    seed: int,
    say: Callable[[str], object] = str,
    *,
    static: bool,
) -> list[Split]:
    """The text and the prompts of a fit, each in three parts; which item is in which, the seed decides.

    ``static``: whether the slopes change within the trained length too. ``say``: see ``read_windows``.
    """
    rng = np.random.default_rng(seed)
    lengths = doubling_lengths(trained, target)
    found: list[Split] = []
    if files:
        count = max(FEWEST_TRAIN + FEWEST_VALIDATION + FEWEST_TEST, MOST_TOKENS // target)
        windows = Benchmark.prepare(evaluated, (), files, lengths, count, seed, say).windows
        # Slopes that are not static do not change up to the trained length.
        to_learn = lengths if static else lengths[1:]
        found.append(_split_text(evaluated, windows, trained, to_learn, rng))
    if prompts:
        items: list[Item] = []
        for task in prompts:
            benchmark = Benchmark.prepare(evaluated, [task], (), lengths, max(1, MOST_TOKENS // target), seed)
            for material in benchmark.material.values():
                assert not isinstance(material, Collection)  # which are for encoders
                items += material
        shortest = 0 if static else trained
        answered = with_answers(evaluated.tokenizer, items, shortest, target)
        found.append(_split_prompts(evaluated, answered, trained, target, rng))
    return found


def _split_text(
    evaluated: EvaluatedModel,
    windows: Ids,
    trained: int,
    lengths: Sequence[int],
    rng: np.random.Generator,
) -> TextSplit:
    count, target = windows.shape
    what = f"{option.text} has {count} windows of {target} tokens"
    test, validation = _checked_sizes(count, target, what)
    windows = windows[rng.permutation(count)]
    return TextSplit(
        train=windows[test + validation :],
        validation=windows[test : test + validation],
        test=windows[:test],
        trained=trained,
        lengths=lengths,
        rows=rows_per_step(evaluated.hardware),
        mask=evaluated.mask,
    )


def _split_prompts(
    evaluated: EvaluatedModel,
    prompts: Sequence[AnsweredPrompt],
    trained: int,
    target: int,
    rng: np.random.Generator,
) -> PromptSplit:
    """Splits the prompts beyond the trained length and those within it, so that each part has both."""
    prompts = [prompts[place] for place in rng.permutation(len(prompts))]
    beyond = [prompt for prompt in prompts if len(prompt.ids) > trained]
    within = [prompt for prompt in prompts if len(prompt.ids) <= trained]
    what = f"{option.prompts} has {len(beyond)} prompts with {trained + 1} to {target} tokens"
    test, validation = _checked_sizes(len(beyond), target, what)
    end = test + validation
    test_within, validation_within = _sizes(len(within), target)
    end_within = test_within + validation_within
    return PromptSplit(
        train=beyond[end:] + within[end_within:],
        validation=beyond[test:end] + within[test_within:end_within],
        test=beyond[:test] + within[:test_within],
        trained=trained,
        rows=rows_per_step(evaluated.hardware),
    )


def with_answers(tokenizer: Any, items: Sequence[Item], shortest: int, longest: int) -> list[AnsweredPrompt]:
    """Prompts with their first right answers, if both take more than ``shortest`` and at most ``longest``.

    The answer is what the model should go on with: after a space, unless the prompt ends with white space.
    """
    found = []
    for item in items:
        # The answer is tokenised after a character like the prompt's last, whose tokens are then left out.
        if tokenizer.decode(item.ids[-1:])[-1:].isspace():
            before, answer = "\n", item.answers[0]
        else:
            before, answer = "a", f" {item.answers[0]}"
        start = tokenizer(before, add_special_tokens=False)["input_ids"]
        whole = tokenizer(before + answer, add_special_tokens=False)["input_ids"]
        ids = whole[len(start) :]
        if ids and shortest < len(item.ids) + len(ids) <= longest:
            found.append(AnsweredPrompt((*item.ids, *ids), len(item.ids)))
    return found


def rows_per_step(hardware: Hardware) -> Rows:
    """How many rows of so many tokens a step runs at once."""

    def rows(length: int) -> int:
        return min(hardware.rows(length), max(1, TOKENS_PER_STEP // length))

    return rows


def most_test_items(length: int) -> int:
    """Most windows or prompts of a fit's test part."""
    return max(ENOUGH_TEST_ITEMS, TEST_TOKENS // length)


def _sizes(count: int, length: int) -> tuple[int, int]:
    """How many of so many items are in the test part, and how many in the validation part."""
    test = min(count // ONE_IN_TEST, most_test_items(length))
    validation = min(count // ONE_IN_VALIDATION, VALIDATION_TOKENS // length)
    return test, validation


def _checked_sizes(count: int, length: int, what: str) -> tuple[int, int]:
    """The same, at least the fewest that there must be; raises ``UsageError`` if there are not so many."""
    test, validation = _sizes(count, length)
    test = max(FEWEST_TEST, test)
    validation = max(FEWEST_VALIDATION, validation)
    needed = FEWEST_TRAIN + validation + test
    if count < needed:
        raise UsageError(
            f"{what}, and fitting needs {needed}: to learn from, to stop by and to judge by; give more, or "
            f"another {option.target_length}"
        )
    return test, validation
