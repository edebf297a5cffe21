"""The benchmark of a model: prompts, collections and text windows, and its scores in them under a scaling.

``evaluate`` and ``tune`` measure it. ``fit`` takes its prompts and windows as well, and learns from them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError, option
from converter.evaluation.batches import masked_tokens, next_tokens
from converter.evaluation.checks import LONGEST_PROMPT, check_kinds
from converter.evaluation.comparison import Scores, TaskScores
from converter.evaluation.embeddings import find
from converter.evaluation.evaluated_model import EvaluatedModel
from converter.evaluation.losses import by_position, masked_positions, pieces, window_losses
from converter.evaluation.results import PERPLEXITY
from converter.evaluation.server import Served
from converter.evaluation.tasks import GENERATED, AnyTask, make_task
from converter.evaluation.tasks.task import Collection, Item, Retrieval
from converter.progress import Advance
from converter.scaling.scaling import Scaling
from converter.texts import MOST_UNKNOWN, read_windows

MULTIPLES = (1, 2, 4)
"""Multiples of the trained length that are measured by default."""

Material = Sequence[Item] | Collection
"""Prompts, or queries and documents."""


@dataclass(frozen=True)
class Benchmark:
    """Prompts, collections and windows, the same for every scaling."""

    tasks: Mapping[str, AnyTask]
    """By name."""
    material: Mapping[tuple[str, int], Material]
    """(name of the task, length in tokens) -> what is asked; the lengths of a task ascend."""
    windows: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    """[windows, longest length] token ids; empty without a text."""
    lengths: tuple[int, ...] = ()
    """Lengths to measure in the windows, ascending."""

    @classmethod
    def prepare(
        cls,
        evaluated: EvaluatedModel | Served,
        tasks: Sequence[AnyTask],
        text: Sequence[Path],
        lengths: Sequence[int],
        items: int,
        seed: int,
        say: Callable[[str], object] = str,
    ) -> Benchmark:
        """Draws the prompts of the ``tasks`` and reads the ``text``.

        Without both, the tasks are those without a file that the tokenizer can read. There are at most
        ``items`` prompts of each length, and windows of the longest. A seed gives the same prompts.
        ``say`` is called with a line about lengths that no document has; and see ``read_windows``. Raises
        ``UsageError`` for what this model cannot be asked.
        """
        ordered = tuple(sorted(set(lengths)))
        check_kinds(evaluated.model, tasks, text)
        if not tasks and not text:
            tasks = _readable(evaluated, ordered[0], seed)
        _check_outputs(evaluated, tasks, text)
        by_name: dict[str, AnyTask] = {}
        for task in tasks:
            if task.name in by_name:
                raise UsageError(f"two tasks are called {task.name}; measure them one after the other")
            by_name[task.name] = task
        material: dict[tuple[str, int], Material] = {}
        for name, task in by_name.items():
            by_length = task.items(evaluated.tokenizer, ordered, items, seed)
            for length in sorted(by_length):
                material[name, length] = by_length[length]
            left_out = [length for length in ordered if length not in by_length]
            if isinstance(task, Retrieval) and left_out:
                say(
                    f"{name} has no document of more than {max(by_length)} tokens, so it is not measured at "
                    f"{', '.join(map(str, left_out))}"
                )
        benchmark = cls(by_name, material, lengths=ordered)
        if not text:
            return benchmark
        windows = read_windows(evaluated.tokenizer, text, ordered[-1], items, say)
        return replace(benchmark, windows=windows)

    @property
    def tokens(self) -> int:
        """Tokens that one scaling takes."""
        total = 0
        for found in self.material.values():
            if isinstance(found, Collection):
                total += found.tokens
            else:
                total += sum(len(item.ids) for item in found)
        for length in self.window_lengths:
            total += pieces(self.windows, length).size
        return total

    @property
    def most_tokens_at_once(self) -> int:
        """Most tokens that are read and generated at once; a server generates one after each window."""
        most = 1 + max(self.window_lengths, default=0)
        for name, prompt in self._prompts():
            most = max(most, len(prompt.ids) + self.tasks[name].max_new_tokens)
        return most

    @property
    def sample(self) -> Sequence[int]:
        """The first window's tokens, else the longest prompt's."""
        if self.windows.size:
            return [int(token) for token in self.windows[0]]
        return max((prompt.ids for _, prompt in self._prompts()), key=len, default=())

    @property
    def window_lengths(self) -> tuple[int, ...]:
        """The lengths to measure in the windows; none without windows."""
        return self.lengths if self.windows.size else ()

    def only(self, places: Container[tuple[str, int]]) -> Benchmark:
        """Keeps what is asked of some tasks at some lengths, and all windows."""
        kept = {place: found for place, found in self.material.items() if place in places}
        return replace(self, material=kept)

    def up_to(self, length: int) -> Benchmark:
        """Leaves out what has a longer length, such as prompts of a file."""
        return self.only([place for place in self.material if place[1] <= length])

    def without(self, tasks: Sequence[str]) -> Benchmark:
        """Leaves out what is asked of some tasks."""
        return self.only([place for place in self.material if place[0] not in tasks])

    def at_longest(self) -> Benchmark:
        """Keeps each task's longest length alone."""
        longest: dict[str, int] = {}
        for task, length in self.material:
            longest[task] = length  # the last one, since they ascend
        return replace(self.only(longest.items()), lengths=self.lengths[-1:])

    def first_items(self) -> Benchmark:
        """Keeps the first prompt or query of each task and length, and the first window."""
        first = {place: found[0:1] for place, found in self.material.items()}
        return replace(self, material=first, windows=self.windows[0:1])

    def measure(
        self,
        evaluated: EvaluatedModel | Served,
        scaling: Scaling,
        advance: Advance = int,
        *,
        stop_at_failure: bool = False,
    ) -> Scores:
        """The scores in all tasks at all lengths, for one model under one scaling.

        With ``stop_at_failure``, a task with no right answer at its shortest length stops there, if the
        trained length covers it: longer prompts would tell nothing.
        """
        trained = evaluated.model.trained.tokens or 0
        found: Scores = {}
        for name, task in self.tasks.items():
            lengths = [length for task_name, length in self.material if task_name == name]
            for length in lengths:
                material = self.material[name, length]
                if isinstance(material, Collection):
                    scores = _rank(evaluated, scaling, task, material, advance)
                else:
                    scores = _ask(evaluated, scaling, task, material, advance)
                found[name, length] = scores
                shortest = length == lengths[0]
                if stop_at_failure and shortest and length <= trained and not any(scores.scores):
                    break
        for length in self.window_lengths:
            found[PERPLEXITY, length] = _read(evaluated, scaling, self.windows, length, advance)
        return found

    def _prompts(self) -> list[tuple[str, Item]]:
        """All prompts, each with the name of its task."""
        found: list[tuple[str, Item]] = []
        for (name, _), material in self.material.items():
            if not isinstance(material, Collection):
                found += [(name, prompt) for prompt in material]
        return found


def _ask(
    evaluated: EvaluatedModel | Served, scaling: Scaling, task: Any, prompts: Sequence[Item], advance: Advance
) -> TaskScores:
    """Lets the model continue prompts, and scores what it says."""
    ids = tuple(prompt.ids for prompt in prompts)
    texts = evaluated.complete(scaling, ids, task.max_new_tokens, advance)
    scores = [task.score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    depths = tuple(prompt.depth for prompt in prompts)
    return TaskScores(task.metric, tuple(scores), items=ids, depths=depths)


def _rank(
    evaluated: EvaluatedModel | Served, scaling: Scaling, task: Any, texts: Collection, advance: Advance
) -> TaskScores:
    """Ranks documents for queries by their embeddings, and scores the rankings."""
    assert isinstance(evaluated, EvaluatedModel)  # no server opens an encoder
    scores, vectors = find(
        evaluated.scaled(scaling), evaluated.pooling, evaluated.hardware, task, texts, advance
    )
    items: Hashable = hash((tuple(texts.queries), tuple(texts.documents)))
    return TaskScores(task.metric, scores, items=items, vectors=vectors)


def _read(
    evaluated: EvaluatedModel | Served,
    scaling: Scaling,
    windows: NDArray[np.int64],
    length: int,
    advance: Advance,
) -> TaskScores:
    """Each window's mean loss, and the loss by position, in pieces of a length."""
    cut = pieces(windows, length)
    mask = evaluated.mask
    if mask is None:
        # The first token of a piece is not predicted.
        losses = evaluated.losses(scaling, next_tokens(cut), advance)[:, :-1]
        predicted = np.ones(losses.shape, dtype=np.bool_)
        first = 1
    else:
        predicted = pieces(masked_positions(windows), length)
        losses = evaluated.losses(scaling, masked_tokens(cut, predicted, mask), advance)
        first = 0
    return TaskScores(
        metric="perplexity",
        scores=window_losses(losses, predicted, len(windows)),
        # The shape too: the same text may be cut into other windows for another model.
        items=(windows.shape, hash(windows.tobytes())),
        positions=by_position(losses, predicted, first),
    )


def _readable(evaluated: EvaluatedModel | Served, length: int, seed: int) -> list[AnyTask]:
    """The tasks without a file that fit the length, and whose words the tokenizer knows."""
    unknown = getattr(evaluated.tokenizer, "unk_token_id", None)
    found: list[AnyTask] = []
    why = ""
    for name in GENERATED:
        task: Any = make_task(name)
        try:
            [prompt] = task.items(evaluated.tokenizer, [length], 1, seed)[length]
        except UsageError as error:
            why = error.message.partition(";")[0]  # it names longer lengths, which tune does not take
            continue
        if prompt.ids.count(unknown) > MOST_UNKNOWN * len(prompt.ids):
            why = f"the tokenizer of {evaluated.model.name} does not know the words of {name}"
        else:
            found.append(task)
    if not found:
        raise UsageError(f"{why}; give {option.text}, or prompts of your own")
    return found


def _check_outputs(
    evaluated: EvaluatedModel | Served, tasks: Sequence[AnyTask], text: Sequence[Path]
) -> None:
    """Refuses an encoder that makes no vector of a text, and a text for one that predicts no tokens."""
    for task in tasks:
        if isinstance(task, Retrieval):
            assert isinstance(evaluated, EvaluatedModel)  # no server opens an encoder
            evaluated.pooling  # noqa: B018 -- raises before anything is computed
    if text:
        evaluated.mask  # noqa: B018 -- raises, too


def default_lengths(name: str, train_length: int | None, lengths: Sequence[int]) -> Sequence[int]:
    """The lengths asked for, else multiples of the trained length; raises ``UsageError``."""
    for length in lengths:
        if not 2 <= length <= LONGEST_PROMPT:
            raise UsageError(
                f"{option.lengths} {length} is out of range; give numbers of tokens, 2 to {LONGEST_PROMPT}"
            )
    if lengths:
        return lengths
    if train_length is None:
        raise UsageError(
            f"the trained length of {name} is not known; give {option.lengths} or {option.train_length}"
        )
    multiples = [multiple * train_length for multiple in MULTIPLES]
    for length in multiples:
        if not 2 <= length <= LONGEST_PROMPT:
            raise UsageError(
                f"{name} would be measured at {length} tokens, from its trained length {train_length}; give "
                f"{option.lengths} from 2 to {LONGEST_PROMPT}"
            )
    return multiples


def doubling_lengths(trained: int, target: int) -> list[int]:
    """From the trained length to the target: the trained length, its doublings, and the target."""
    lengths = [trained]
    while 2 * lengths[-1] < target:
        lengths.append(2 * lengths[-1])
    return [*lengths, target]
