"""Finds the scaling that serves a length best: an evaluation of fixed candidates, in two halves.

The validation half of the prompts and windows chooses: every candidate gets it at the target length. The test
half judges the best by retrieval and the best by perplexity against the baseline, from the trained length to
the target. So the best of several, which looks better than it is, is not judged by what it was chosen by.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from converter.errors import UsageError, option
from converter.evaluation.benchmark import Benchmark, doubling_lengths
from converter.evaluation.checks import check_kinds, check_prompt_lengths, trained_length_below
from converter.evaluation.comparison import RETRIEVAL, Conclusion, Scores, ScoreTable, conclude
from converter.evaluation.evaluate import run_settings
from converter.evaluation.evaluated_model import EvaluatedModel, open_evaluated_model
from converter.evaluation.results import (
    FEWEST_WINDOWS,
    PERPLEXITY,
    Comparison,
    Results,
    Verdict,
    finite,
)
from converter.evaluation.runner import choose
from converter.evaluation.scalings import candidates, command
from converter.evaluation.split import in_halves
from converter.evaluation.statistics import power_text
from converter.evaluation.tasks import AnyTask, Task, make_tasks
from converter.model.model import Model
from converter.paths import listed
from converter.progress import token_bar
from converter.scaling.request import Request
from converter.scaling.scaling import UNSCALED, Scaling, short_names
from converter.source.slopes_file import read_slopes_file

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.model.open import SourceOptions

DEFAULT_ITEMS = 100


@dataclass(frozen=True)
class Choice:
    """The best scaling by one measure, judged against the baseline on the half that did not choose it."""

    measure: str
    """"retrieval" or "perplexity"."""
    scaling: Scaling
    judgement: Conclusion
    """At the target length; for prompts from a file, at their longest length."""
    other: Comparison | None
    """The same by the other measure; None if there is none."""
    short: int | None
    """The shortest length that was measured, in tokens; None if all exceed the trained length."""
    at_short: Mapping[str, Comparison]
    """By measure, at exactly the length ``short``: what the scaling costs there."""

    @property
    def verdict(self) -> Verdict:
        """Whether it helps: a gain by its measure is none if it significantly loses by the other."""
        verdict = self.judgement.verdict
        harms = self.other is not None and self.other.loses
        if harms and verdict == "helps":
            return "does not help"
        return verdict


@dataclass(frozen=True)
class Tuning:
    model: str
    train_length: int
    target_length: int
    candidates: Results
    """All candidates on the half that chooses, at the target; the first is the baseline."""
    choices: Sequence[Choice]
    """The best by retrieval, and by perplexity if there was a text."""
    curve: Results
    """The baseline and the choices on the other half, from the trained length to the target."""
    command: str | None
    """The command line that bakes ``advice`` in; None if nothing helps."""
    seconds: float
    baseline: Scaling = UNSCALED
    """What all are compared with: none, or the scaling that the model was tuned with."""

    @property
    def verdict(self) -> Verdict:
        """Whether a scaling helps; "cannot tell" also if the tasks cannot be done without scaling."""
        verdicts = [choice.verdict for choice in self.choices]
        if "helps" in verdicts:
            return "helps"
        if "cannot tell" in verdicts or not verdicts:
            return "cannot tell"
        return "does not help"

    @property
    def advice(self) -> Scaling:
        """The scaling to bake in: the first choice that helps, retrieval first; else the baseline."""
        for choice in self.choices:
            if choice.verdict == "helps":
                return choice.scaling
        return self.baseline

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON, and the verdict."""
        choices = []
        for choice in self.choices:
            named = {"scaling": str(choice.scaling), "verdict": choice.verdict}
            choices.append({**asdict(choice), **named})
        value = {
            "model": self.model,
            "train_length": self.train_length,
            "target_length": self.target_length,
            "verdict": self.verdict,
            "candidates": self.candidates.to_json()["measurements"],
            "choices": choices,
            "curve": self.curve.to_json(),
            "baseline": self.baseline.to_json(),
            "advice": self.advice.to_json(),
            "command": self.command,
            "seconds": round(self.seconds, 1),
        }
        return {key: finite(each) for key, each in value.items()}


def tune(
    model: str | Path,
    target_length: int,
    *,
    tasks: Sequence[AnyTask | str] = (),
    text: str | Path | Sequence[str | Path] = (),
    items: int = DEFAULT_ITEMS,
    slopes: str | Path | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    progress: bool = False,
    say: Callable[[str], object] = str,
    **source: Unpack[SourceOptions],
) -> Tuning:
    """Finds the scaling that serves ``target_length`` best, and measures what it costs at short lengths.

    Args:
        model: a local folder or a Hub id.
        target_length: length to reach in tokens, above the trained length.
        tasks, text: what to measure, as for ``evaluate``.
        items: most prompts of each length, and most windows; half of them choose, and half judge.
        slopes: a file of fitted slopes, one more candidate. What they were fitted to must not be in ``tasks``
            and ``text``.
        seed, device, dtype, batch_size, progress: as for ``evaluate``.
        say: called before it starts, with a line about how much is measured and how long it takes, one about
            what judges and what gain it can show, and one if few files give all windows.
        source: see ``SourceOptions``.

    Raises:
        UsageError: the target is not above the trained length, a length is too short for a prompt, or there
            are too few prompts or too little text for two halves.
        SourceError, UnsupportedModel, VerificationError: see ``evaluate``.
    """
    if items < 2:
        raise UsageError(
            f"{option.items} {items} is out of range; give at least 2, to choose and to judge by"
        )
    asked = make_tasks(tasks)
    files = [Path(path) for path in listed(text)]
    settings = run_settings(seed, files, items=items)
    hardware = choose(device, dtype, batch_size)
    check = partial(_check, asked=asked, files=files, target=target_length)
    with open_evaluated_model(model, hardware, check=check, progress=progress, **source) as evaluated:
        started = time.monotonic()
        trained = trained_length_below(evaluated.model, target_length)
        baseline = evaluated.baseline
        scalings = [baseline, *candidates(evaluated.model, trained, target_length)]
        if slopes is not None:
            scalings.append(evaluated.model.resolve(Request(slopes=read_slopes_file(slopes))))
        scalings = list(dict.fromkeys(scalings))

        evaluated.check_float16(scalings, target_length)
        lengths = doubling_lengths(trained, target_length)
        benchmark = Benchmark.prepare(evaluated, asked, files, lengths, items, seed, say)
        halves = in_halves(benchmark, trained, target_length)
        finalists = 1  # the baseline; then the best by retrieval, and the best by perplexity
        if benchmark.tasks:
            finalists += 1
        if benchmark.windows.size:
            finalists += 1
        work = halves.validation.tokens * len(scalings) + halves.test.tokens * finalists
        say(_announcement(evaluated, halves.validation, len(scalings), work))
        say(_power(halves.test))

        names = _names(scalings)
        short = short_names(names.values())
        titles = {scaling: short[name] for scaling, name in names.items()}
        with token_bar(titles[baseline], work, show=progress) as bar:
            test_scores = ScoreTable()
            baseline_scores = halves.test.measure(evaluated, baseline, bar, stop_at_failure=True)
            test_scores.add(baseline, baseline_scores)
            test = halves.test.only(baseline_scores)

            # A task that the model cannot do within the trained length tells nothing, so it does not choose.
            failed = _failed(baseline_scores, trained)
            validation = halves.validation.without(failed)
            validation_scores = ScoreTable()
            if validation.tokens:
                for scaling in scalings:
                    bar.rename(titles[scaling])
                    validation_scores.add(scaling, validation.measure(evaluated, scaling, bar))

            best = {}
            for measure in (RETRIEVAL, PERPLEXITY):
                if validation_scores.pooled(baseline, measure) is not None:
                    best[measure] = _best(validation_scores, measure, scalings[1:])
            for scaling in dict.fromkeys(best.values()):
                bar.rename(titles[scaling])
                test_scores.add(scaling, test.measure(evaluated, scaling, bar))
            bar.rename("tuning")
        about = {evaluated.model.name: evaluated.describe(baseline)}
    seconds = time.monotonic() - started

    name = evaluated.model.name
    tried = validation_scores.measurements(name, baseline, names)
    curve = test_scores.measurements(name, baseline, names)
    telling = test_scores.without(failed)
    choices = [_choice(measure, scaling, baseline, telling, trained) for measure, scaling in best.items()]
    result = Tuning(
        model=name,
        train_length=trained,
        target_length=target_length,
        candidates=Results(tried, about, settings, seconds),
        choices=choices,
        curve=Results(curve, about, settings, seconds),
        command=None,
        seconds=seconds,
        baseline=baseline,
    )
    if result.advice == baseline:
        return result
    source["revision"] = evaluated.model.source.commit  # what was measured
    file = None if slopes is None else str(slopes)
    return replace(result, command=command(model, result.advice, trained, source, slopes=file))


def _check(opened: Model, *, asked: Sequence[AnyTask], files: Sequence[Path], target: int) -> None:
    """Raises ``UsageError`` for what is wrong whatever the model computes."""
    trained = trained_length_below(opened, target)
    check_kinds(opened, asked, files)
    for task in asked:
        if isinstance(task, Task) and task.stated_lengths:
            check_prompt_lengths(task, task.stated_lengths, trained, target)


def _names(scalings: Sequence[Scaling]) -> dict[Scaling, str]:
    """The text of each scaling for results; the baseline, which comes first, may read like fitted slopes."""
    names = {scaling: str(scaling) for scaling in scalings}
    baseline, *others = scalings
    if names[baseline] in [names[scaling] for scaling in others]:
        names[baseline] += ", as tuned"
    return names


def _announcement(evaluated: EvaluatedModel, validation: Benchmark, scalings: int, work: int) -> str:
    """How much is measured, and how long it takes by the time of the first prompt of each task."""
    first = validation.first_items()
    evaluated.scaled(evaluated.baseline)  # loaded before the time is taken
    started = time.monotonic()
    first.measure(evaluated, evaluated.baseline)
    minutes = work / first.tokens * (time.monotonic() - started) / 60
    return f"measuring {scalings} scalings takes about {minutes:.1f} minutes; fewer items take less"


def _power(test: Benchmark) -> str:
    """What the test half holds at the target, and what gain it can show."""
    last = test.at_longest()
    asked = sum(len(found) for found in last.material.values())
    windows = len(last.windows)
    parts = []
    if asked:
        parts.append(power_text(asked, "prompts or queries"))
    if windows >= FEWEST_WINDOWS:
        parts.append(f"{windows} windows")
    elif windows:
        needed = 2 * FEWEST_WINDOWS
        parts.append(f"{windows} windows, too few to tell: give text for {needed}, of which half judge")
    return f"kept back to judge by: {'; '.join(parts)}"


def _failed(found: Scores, trained: int) -> list[str]:
    """The tasks without any right answer at the lengths within the trained one."""
    within: dict[str, list[float]] = {}
    for (task, length), scores in found.items():
        if task != PERPLEXITY and length <= trained:
            within.setdefault(task, []).extend(scores.scores)
    return [task for task, scores in within.items() if not any(scores)]


def _best(scores: ScoreTable, measure: str, scalings: Sequence[Scaling]) -> Scaling:
    """The best of these scalings by a measure; among equals the first."""

    def badness(scaling: Scaling) -> float:
        found = scores.pooled(scaling, measure)
        assert found is not None  # the baseline has scores by this measure, so all have
        mean = float(np.mean(found.scores))
        if measure == RETRIEVAL:
            return -mean
        return float(np.nan_to_num(mean, nan=math.inf))  # a loss that is no number is the worst

    return min(scalings, key=badness)


def _choice(measure: str, scaling: Scaling, baseline: Scaling, scores: ScoreTable, trained: int) -> Choice:
    """A scaling against the baseline: at the target by both measures, and at short range."""
    at_target = scores.at_longest()
    ours = at_target.pooled(scaling, measure)
    theirs = at_target.pooled(baseline, measure)
    assert ours is not None  # it was chosen by this measure
    assert theirs is not None
    other = PERPLEXITY if measure == RETRIEVAL else RETRIEVAL

    within = [length for length in scores.lengths() if length <= trained]
    short = min(within, default=None)
    costs = {}
    if short is not None:
        at_short = scores.at_length(short)
        for each in (RETRIEVAL, PERPLEXITY):
            cost = at_short.compared(baseline, scaling, each)
            if cost is not None:
                costs[each] = cost
    return Choice(
        measure=measure,
        scaling=scaling,
        judgement=conclude(theirs, ours),
        other=at_target.compared(baseline, scaling, other),
        short=short,
        at_short=costs,
    )
