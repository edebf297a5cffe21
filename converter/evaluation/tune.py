"""Finds the scaling that serves a length best, within a time budget.

First all candidates answer the same few prompts and read the same windows at the target length, round after
round. A candidate that falls behind the best by every measure is dropped. Then the best by retrieval, the
best by perplexity and the unscaled model are measured again, from the trained length to the target. This
second part uses other prompts and windows, because the best of several candidates looks better than it is. It
alone decides whether a scaling helps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from converter.errors import UsageError
from converter.evaluation.candidates import candidates, command
from converter.evaluation.exam import LONGEST, Exam
from converter.evaluation.fit import STEPS, fitted_candidate
from converter.evaluation.hardware import choose, explained
from converter.evaluation.results import PERPLEXITY, Comparison, Measurement, Results, finite
from converter.evaluation.search import LEAST, SEARCH, Candidate, Clock, Pool, finalists, search
from converter.evaluation.settings import run_settings
from converter.evaluation.statistics import compare
from converter.evaluation.subject import Subject, open_subject
from converter.evaluation.tasks import AnyTask, with_generated
from converter.progress import Advance, steps
from converter.scaling.scaling import UNSCALED, Scaling

FITTING = 0.25
"""Part of the budget for fitting slopes, if they are asked for; it is taken from that for choosing."""


@dataclass(frozen=True)
class AgainstNone:
    """A scaling compared with none, by both measures; None for a measure that was not taken."""

    retrieval: Comparison | None = None
    """All tasks taken together."""
    perplexity: Comparison | None = None


@dataclass(frozen=True)
class Choice:
    """The best scaling by one measure, measured on prompts and windows that were not used to choose it."""

    measure: str
    """"retrieval" or "perplexity"."""
    scaling: Scaling
    at_target: AgainstNone
    """At the target length; for prompts from a file, at their longest length."""
    short: int | None
    """The shortest length that was measured, in tokens; None if all exceed the trained length."""
    at_short: AgainstNone
    """At exactly the length ``short``: what the scaling costs there."""

    @property
    def gains(self) -> bool:
        """Whether it is significantly better than none at the target by its own measure (p < 0.05)."""
        own = self.at_target.perplexity if self.measure == PERPLEXITY else self.at_target.retrieval
        return own is not None and own.gains

    @property
    def loses(self) -> bool:
        """Whether it is significantly worse than none at the target by the other measure (p < 0.05)."""
        other = self.at_target.retrieval if self.measure == PERPLEXITY else self.at_target.perplexity
        return other is not None and other.loses

    @property
    def helps(self) -> bool:
        """Whether it gains by its measure and does not lose by the other."""
        return self.gains and not self.loses


@dataclass(frozen=True)
class Tuning:
    """The outcome of ``tune``."""

    model: str
    train_length: int
    target_length: int
    candidates: Sequence[Candidate]
    choices: Sequence[Choice]
    """The best by retrieval, and by perplexity if there was a text."""
    curve: Results
    """Measurements of the choices and of none, from the trained length to the target."""
    advice: Scaling
    """The scaling to bake in: the first choice that helps, retrieval before perplexity; else none."""
    command: str | None
    """The command line that bakes it in; None if nothing helps."""
    seconds: float
    used_up: Sequence[str] = ()
    """Tasks, or "perplexity", of which the choices got all prompts or windows there are at the target."""

    @property
    def slopes(self) -> dict[str, Any] | None:
        """The content of a file for ``--slopes`` with the slopes that were fitted; None if there are none."""
        found = [each.scaling for each in self.candidates if each.scaling.exponents is not None]
        return found[0].to_json() if found else None

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
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
    tasks: Sequence[AnyTask] = (),
    generated: bool = False,
    text: Sequence[str | Path] = (),
    minutes: float = 10.0,
    fitted: str | None = None,
    train_length: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = False,
) -> Tuning:
    """Finds the scaling that serves ``target_length`` best, and measures what it costs at short lengths.

    Args:
        model: a local folder or a Hub id, not converted.
        target_length: length to reach in tokens, above the trained length.
        tasks: retrieval tasks, from ``converter.evaluation.tasks.make_task``.
        generated: also measure the tasks for this kind of model that need no file.
        text: UTF-8 files for perplexity, of masked tokens in encoders.
        minutes: the time budget. A minimum of work is done even if that takes longer.
        fitted: also try slopes that are fitted to a third of the prompts and windows; a file name, under
            which the command finds ``Tuning.slopes``.
        train_length, overrides, seed, device, dtype, batch_size, revision, token, cache_dir, progress: as
            for ``evaluate``.

    Raises:
        UsageError: the target is not above the trained length, a length is too short for a prompt, or there
            are too few prompts or too little text for both choosing and measuring.
        SourceError, UnsupportedModel, VerificationError: see ``evaluate``.
    """
    if not 0 < minutes < math.inf:
        raise UsageError(f"`minutes` {minutes} is out of range; give a finite number above 0")
    if target_length > LONGEST:
        raise UsageError(f"`target_length` {target_length} is out of range; give at most {LONGEST}")
    files = [Path(path) for path in text]
    settings = run_settings(seed, files, minutes=minutes)
    hardware = choose(device, dtype, batch_size)
    with open_subject(
        model,
        hardware,
        train_length=train_length,
        overrides=overrides,
        revision=revision,
        token=token,
        cache_dir=Path(cache_dir) if cache_dir else None,
        progress=progress,
    ) as subject:
        clock = Clock(minutes * 60)
        trained = subject.stretched_to(target_length)
        recipe = subject.recipe
        scalings = candidates(
            trained, target_length, recipe.defaults.ramp, recipe.check_scaling, decoder=recipe.decoder
        )
        chosen = with_generated(tasks, decoder=subject.recipe.decoder) if generated else tasks
        pool = Pool.prepare(subject, chosen, files, trained, target_length, seed, learn=fitted is not None)
        if fitted is not None:
            scalings += _fitted(subject, pool, trained, clock, seed, progress)
        with explained(), steps("choosing", round(clock.budget * SEARCH), show=progress) as advance:
            found = search(subject, pool, scalings, clock, advance)
        best = finalists(found)
        with explained(), steps("measuring", len({UNSCALED, *best.values()}), show=progress) as advance:
            curve = _measure(subject, pool, [UNSCALED, *best.values()], clock, advance)
    curve = replace(curve, settings=settings)
    choices = [_choice(measure, scaling, curve, trained) for measure, scaling in best.items()]
    advice = next((each.scaling for each in choices if each.helps), UNSCALED)
    return Tuning(
        model=subject.name,
        train_length=trained,
        target_length=target_length,
        candidates=found,
        choices=choices,
        curve=curve,
        advice=advice,
        command=None
        if advice == UNSCALED
        else command(
            model, advice, trained, revision, overrides, told=train_length is not None, slopes=fitted
        ),
        seconds=clock.elapsed,
        used_up=_used_up(curve, pool.measuring),
    )


def _fitted(
    subject: Subject, pool: Pool, trained: int, clock: Clock, seed: int, progress: bool
) -> list[Scaling]:
    """The slopes that were fitted, if they gained anything."""
    if subject.patched is None:
        raise UsageError(f"{subject.name} has rotary positions, which have no slopes to fit")
    with explained(), steps("fitting", STEPS, show=progress) as advance:
        found = fitted_candidate(
            subject,
            pool.learning,
            pool.learning_windows,
            trained,
            pool.target,
            seconds=clock.left(FITTING),
            seed=seed,
            advance=advance,
        )
    return [] if found is None else [found]


def _measure(
    subject: Subject, pool: Pool, scalings: Sequence[Scaling], clock: Clock, advance: Advance
) -> Results:
    """Measures the finalists at every length, on as many prompts and windows as the time left allows."""
    started = time.monotonic()
    wanted = list(dict.fromkeys(scalings))
    exam = pool.measuring
    part = min(1.0, clock.tokens(clock.left()) / max(1, exam.tokens * len(wanted)))
    exam = exam.cut(part, LEAST)
    measured = []
    for scaling in wanted:
        measured.append(exam.measure(subject, scaling, int))
        advance(1)
    compared = [
        replace(each, comparison=compare(each.metric, each.scores, unscaled.scores))
        for found in measured[1:]
        for each, unscaled in zip(found, measured[0], strict=True)
    ]
    described = {subject.name: subject.describe(subject.scaled(wanted[-1]))}
    return Results([*measured[0], *compared], described, {}, time.monotonic() - started)


def _used_up(curve: Results, available: Exam) -> list[str]:
    """Tasks, or perplexity, that got all available prompts or windows at their longest length."""
    counts = {task: len(prompts[max(prompts)]) for task, prompts in available.prompts.items()}
    counts |= {task: len(found[max(found)].queries) for task, found in available.collections.items()}
    counts[PERPLEXITY] = len(available.windows)
    # The longest length of each task comes last, and stays.
    longest = {each.task: each for each in sorted(curve.measurements, key=lambda each: each.length)}
    return [task for task, each in longest.items() if each.items == counts[task]]


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
    """Compares a scaling's scores with those of none, over all tasks; None if the scaling is none."""
    ours, theirs = (
        [score for each in measured if each.scaling == str(wanted) for score in each.scores]
        for wanted in (scaling, UNSCALED)
    )
    return compare(measure, ours, theirs) if ours and scaling != UNSCALED else None
