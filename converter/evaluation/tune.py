"""The scaling that serves a length best, found within a budget of time.

First all candidates answer the same few prompts and read the same windows at the target length, round after
round; one that falls behind the best in everything is dropped. Then the best by retrieval, the best by
perplexity and the model unscaled are measured again, from the trained length to the target, on prompts and
windows that took no part in the choice, because the best of several looks better than it is. Whether a
scaling helps is judged by these alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from converter.errors import UsageError
from converter.evaluation.candidates import candidates, command
from converter.evaluation.exam import LONGEST
from converter.evaluation.hardware import choose, explained
from converter.evaluation.results import PERPLEXITY, Comparison, Measurement, Results, finite
from converter.evaluation.search import LEAST, NONE, SEARCH, Candidate, Clock, Pool, finalists, search
from converter.evaluation.settings import run_settings
from converter.evaluation.statistics import compare
from converter.evaluation.subject import Subject, open_subject
from converter.evaluation.tasks.base import Task
from converter.progress import Advance, steps
from converter.scaling import Scaling


@dataclass(frozen=True)
class AgainstNone:
    """A scaling compared with none, by both measures; None of what was not measured."""

    retrieval: Comparison | None = None
    """All tasks taken together."""
    perplexity: Comparison | None = None


@dataclass(frozen=True)
class Choice:
    """The best scaling by one measure, on prompts and windows that took no part in choosing it."""

    measure: str
    """"retrieval" or "perplexity"."""
    scaling: Scaling
    at_target: AgainstNone
    """At the target length, of a file's prompts at their longest."""
    short: int | None
    """Tokens: the shortest length that was measured; None if all are above the trained one."""
    at_short: AgainstNone
    """At exactly that length: what it costs there."""

    @property
    def gains(self) -> bool:
        """Whether it is better than none at the target by its own measure, and not by chance (p < 0.05)."""
        own = self.at_target.perplexity if self.measure == PERPLEXITY else self.at_target.retrieval
        return own is not None and own.gains

    @property
    def loses(self) -> bool:
        """Whether it is worse than none at the target by the other measure, and not by chance."""
        other = self.at_target.retrieval if self.measure == PERPLEXITY else self.at_target.perplexity
        return other is not None and other.loses

    @property
    def helps(self) -> bool:
        """Whether it gains by its measure and does not lose by the other."""
        return self.gains and not self.loses


@dataclass(frozen=True)
class Tuning:
    """What was found."""

    model: str
    train_length: int
    target_length: int
    candidates: Sequence[Candidate]
    choices: Sequence[Choice]
    """By retrieval, and by perplexity where there was a text."""
    curve: Results
    """The choices and none, from the trained length to the target."""
    advice: Scaling
    """What to bake in: the first choice that helps, by retrieval before perplexity; else none."""
    command: str | None
    """The command line that bakes it in; None if nothing helps."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        value = {
            "model": self.model,
            "train_length": self.train_length,
            "target_length": self.target_length,
            "candidates": [
                asdict(each) | {"scaling": str(each.scaling), "accuracy": each.accuracy, "loss": each.loss}
                for each in self.candidates
            ],
            "choices": [
                asdict(each) | {"scaling": str(each.scaling), "helps": each.helps} for each in self.choices
            ],
            "curve": self.curve.to_json(),
            "advice": self.advice.to_json(),
            "command": self.command,
            "seconds": round(self.seconds, 1),
        }
        return {key: finite(each) for key, each in value.items()}


def tune(
    model: str | Path,
    target_length: int,
    *,
    tasks: Sequence[Task],
    text: Sequence[str | Path] = (),
    minutes: float = 10.0,
    train_length: int | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = False,
) -> Tuning:
    """Finds the scaling that serves ``target_length`` best, and says what it costs at short range.

    Args:
        model: a local folder or a Hub id, not converted.
        target_length: tokens to reach, above the trained length.
        tasks: retrieval tasks, from ``converter.evaluation.tasks.make_task``.
        text: UTF-8 files, for perplexity.
        minutes: the budget. The least work that tells anything is done even if that takes longer.
        train_length, seed, device, dtype, batch_size, revision, token, cache_dir, progress: as for
            ``evaluate``.

    Raises:
        UsageError: a target that is not above the trained length, a length that fits no prompt, or too few
            prompts or too little text to choose by some and measure by others.
        SourceError, UnsupportedModel, VerificationError: see ``evaluate``.
    """
    if not 0 < minutes < math.inf:
        raise UsageError(f"--minutes {minutes} is out of range; give a finite number above 0")
    if target_length > LONGEST:
        raise UsageError(f"--target-length {target_length} is out of range; give at most {LONGEST}")
    files = [Path(path) for path in text]
    settings = run_settings(seed, files, minutes=minutes)
    hardware = choose(device, dtype, batch_size)
    with open_subject(
        model,
        hardware,
        train_length=train_length,
        revision=revision,
        token=token,
        cache_dir=Path(cache_dir) if cache_dir else None,
        progress=progress,
    ) as subject:
        clock = Clock(minutes * 60)
        trained = _check(subject, target_length)
        scalings = candidates(trained, target_length, subject.recipe.check_scaling)
        pool = Pool.prepare(subject, tasks, files, trained, target_length, seed)
        with explained(), steps("choosing", round(clock.budget * SEARCH), show=progress) as advance:
            found = search(subject, pool, scalings, clock, advance)
        best = finalists(found)
        with explained(), steps("measuring", len({NONE, *best.values()}), show=progress) as advance:
            curve = _measure(subject, pool, [NONE, *best.values()], clock, advance)
    curve = replace(curve, settings=settings)
    choices = [_choice(measure, scaling, curve, trained) for measure, scaling in best.items()]
    advice = next((each.scaling for each in choices if each.helps), NONE)
    return Tuning(
        model=subject.name,
        train_length=trained,
        target_length=target_length,
        candidates=found,
        choices=choices,
        curve=curve,
        advice=advice,
        command=command(model, advice, train_length, revision) if advice != NONE else None,
        seconds=clock.elapsed,
    )


def _check(subject: Subject, target: int) -> int:
    """The trained length, if the target lies above it."""
    trained = subject.trained.tokens
    if subject.recipe.converted:
        raise UsageError(f"{subject.name} is converted already; give its source")
    if trained is None:
        raise UsageError(
            f"the trained length of {subject.name} is {subject.trained.origin}; add --train-length N"
        )
    if target <= trained:
        raise UsageError(
            f"--target-length {target} is not above the trained length {trained}; nothing needs scaling"
        )
    return trained


def _measure(
    subject: Subject, pool: Pool, scalings: Sequence[Scaling], clock: Clock, advance: Advance
) -> Results:
    """The finalists at every length, with as many prompts and windows as the rest of the time allows."""
    started = time.monotonic()
    wanted = list(dict.fromkeys(scalings))
    exam = pool.measuring
    part = min(1.0, clock.tokens(clock.left()) / max(1, exam.tokens * len(wanted)))
    exam = exam.cut(part, LEAST)
    measured = []
    for scaling in wanted:
        model = subject.scaled(scaling)
        measured.append(
            exam.measure(model, subject.tokenizer, subject.hardware, subject.name, str(scaling), int)
        )
        advance(1)
    compared = [
        replace(each, comparison=compare(each.metric, each.scores, unscaled.scores))
        for found in measured[1:]
        for each, unscaled in zip(found, measured[0], strict=True)
    ]
    described = {subject.name: subject.describe()}
    return Results([*measured[0], *compared], described, {}, time.monotonic() - started)


def _choice(measure: str, scaling: Scaling, curve: Results, trained: int) -> Choice:
    short = min((each.length for each in curve.measurements if each.length <= trained), default=None)
    longest = {
        task: max(each.length for each in curve.measurements if each.task == task) for task in curve.tasks()
    }
    at_target = [each for each in curve.measurements if each.length == longest[each.task]]
    at_short = [each for each in curve.measurements if each.length == short]
    gain, cost = _against_none(scaling, at_target), _against_none(scaling, at_short)
    return Choice(measure, scaling, gain, short, cost)


def _against_none(scaling: Scaling, measured: Sequence[Measurement]) -> AgainstNone:
    return AgainstNone(
        _pooled("retrieval", scaling, [each for each in measured if each.task != PERPLEXITY]),
        _pooled(PERPLEXITY, scaling, [each for each in measured if each.task == PERPLEXITY]),
    )


def _pooled(measure: str, scaling: Scaling, measured: Sequence[Measurement]) -> Comparison | None:
    """The scores of a scaling against those of none, all tasks taken together; None if it is none."""
    ours, theirs = (
        [score for each in measured if each.scaling == str(wanted) for score in each.scores]
        for wanted in (scaling, NONE)
    )
    return compare(measure, ours, theirs) if ours and scaling != NONE else None
