"""Finds the scaling that serves a length best: an evaluation of fixed candidates, in two halves.

Half of the prompts and windows choose: every candidate gets them at the target length. The other half judges
the best by retrieval and the best by perplexity against the unscaled model, from the trained length to the
target. So the best of several, which looks better than it is, is not judged by what it was chosen by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from converter.errors import UsageError
from converter.evaluation.evaluate import compared, run_settings
from converter.evaluation.exam import Exam
from converter.evaluation.results import (
    FEWEST_WINDOWS,
    PERPLEXITY,
    Comparison,
    Measurement,
    Results,
    Verdict,
    finite,
)
from converter.evaluation.runner import choose
from converter.evaluation.scalings import candidates, command, ladder
from converter.evaluation.statistics import Judgement, compare, judge, promise
from converter.evaluation.subject import Subject, open_subject
from converter.evaluation.tasks import AnyTask, make_tasks
from converter.paths import listed
from converter.progress import Bar, token_bar
from converter.scaling.request import Request
from converter.scaling.scaling import UNSCALED, Scaling, short_names
from converter.source.slopes_file import read_slopes_file

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.model.open import SourceOptions

RETRIEVAL = "retrieval"
"""All tasks taken together."""
ITEMS = 100


@dataclass(frozen=True)
class Choice:
    """The best scaling by one measure, judged against the baseline on the half that did not choose it."""

    measure: str
    """"retrieval" or "perplexity"."""
    scaling: Scaling
    judgement: Judgement
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
        harms = self.other is not None and self.other.loses
        return "does not help" if harms and self.judgement.verdict == "helps" else self.judgement.verdict


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
        found = [choice.verdict for choice in self.choices]
        order: tuple[Verdict, ...] = ("helps", "cannot tell", "does not help")
        return next((each for each in order if each in found), "cannot tell")

    @property
    def advice(self) -> Scaling:
        """The scaling to bake in: the first choice that helps, retrieval first; else the baseline."""
        return next((each.scaling for each in self.choices if each.verdict == "helps"), self.baseline)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON, and the verdict."""
        value = {
            "model": self.model,
            "train_length": self.train_length,
            "target_length": self.target_length,
            "verdict": self.verdict,
            "candidates": self.candidates.to_json()["measurements"],
            "choices": [
                asdict(each) | {"scaling": str(each.scaling), "verdict": each.verdict}
                for each in self.choices
            ],
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
    items: int = ITEMS,
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
        say: called before it starts, with a line about how much is measured and how long it takes, and one
            about what judges, and what gain it can show.
        source: see ``SourceOptions``.

    Raises:
        UsageError: the target is not above the trained length, a length is too short for a prompt, or there
            are too few prompts or too little text for two halves.
        SourceError, UnsupportedModel, VerificationError: see ``evaluate``.
    """
    if items < 2:
        raise UsageError(f"`items` {items} is out of range; give at least 2, to choose and to judge by")
    asked = make_tasks(tasks)
    files = [Path(path) for path in listed(text)]
    settings = run_settings(seed, files, items=items)
    hardware = choose(device, dtype, batch_size)
    with open_subject(model, hardware, progress=progress, **source) as subject:
        started = time.monotonic()
        trained = subject.stretched_to(target_length)
        baseline = subject.baseline
        others = candidates(subject.model, trained, target_length)
        scalings = list(dict.fromkeys([baseline, *others]))
        if slopes is not None:
            scalings.append(subject.model.resolve(Request(slopes=read_slopes_file(slopes))))
        exam = Exam.prepare(subject, asked, files, ladder(trained, target_length), items, seed, say)
        judging, choosing = _halves(exam, trained, target_length)
        finalists = 1 + bool(exam.tasks) + bool(exam.windows.size)
        work = choosing.tokens * len(scalings) + judging.tokens * finalists
        say(_announcement(subject, choosing, len(scalings), work))
        say(_promise(judging))
        named = {scaling: short_names(map(str, scalings))[str(scaling)] for scaling in scalings}
        with token_bar(named[baseline], work, show=progress) as bar:
            stock = judging.measure(subject, baseline, bar, first=True)
            failed = [each.task for each in stock if each.length <= trained and each.value == 0]
            choosing, judging = choosing.at_longest(failed), judging.only(stock)
            found = _run(choosing, subject, named if choosing.tokens else {}, bar)
            best = {
                measure: _best(found, measure, scalings[1:])
                for measure in (RETRIEVAL, PERPLEXITY)
                if any(_of(measure, each) for each in found)
            }
            curve = _run(judging, subject, {each: named[each] for each in best.values()}, bar, stock)
            bar.rename("tuning")
        about = {subject.model.name: subject.describe(baseline)}
    seconds = time.monotonic() - started
    result = Tuning(
        model=subject.model.name,
        train_length=trained,
        target_length=target_length,
        candidates=Results(found, about, settings, seconds),
        choices=[
            _choice(measure, scaling, baseline, [each for each in curve if each.task not in failed], trained)
            for measure, scaling in best.items()
        ],
        curve=Results(curve, about, settings, seconds),
        command=None,
        seconds=seconds,
        baseline=baseline,
    )
    if result.advice == baseline:
        return result
    source["revision"] = subject.model.source.commit  # what was measured
    bake = command(model, result.advice, trained, source, slopes=None if slopes is None else str(slopes))
    return replace(result, command=bake)


def pooled(measure: str, scaling: Scaling, found: Sequence[Measurement]) -> list[float]:
    """The scores of a scaling by a measure, over all tasks and lengths in ``found``."""
    own = [each for each in found if _of(measure, each) and each.scaling == str(scaling)]
    return [score for each in own for score in each.scores]


def _halves(exam: Exam, trained: int, target: int) -> tuple[Exam, Exam]:
    """Half of the prompts of each length to judge by, and the others of the longest length to choose by."""
    exam = exam.keeping(lambda _, length: length <= target)  # a file may hold longer prompts
    for name, by_length in exam.material.items():
        last = max(by_length, default=0)
        if last <= trained:
            raise UsageError(
                f"{name} has no prompts between the trained length {trained} and the target {target}; "
                "give longer ones, or another `target_length`"
            )
        if len(by_length[last]) < 2:
            raise UsageError(
                f"{name} has one prompt of length {last}, but choosing and judging need one each; give at "
                "least two of that length"
            )
    if len(exam.windows) == 1:
        raise UsageError(f"`text` has only one window of {target} tokens; give twice as much text")
    judging = exam.sliced(lambda count: slice(0, max(1, count // 2)))
    return judging, exam.sliced(lambda count: slice(count // 2, count)).at_longest()


def _announcement(subject: Subject, exam: Exam, scalings: int, work: int) -> str:
    """How much is measured, and how long it takes by the time of the first prompt of each task."""
    first = exam.sliced(lambda _: slice(0, 1))
    subject.scaled(subject.baseline)  # loaded before the time is taken
    started = time.monotonic()
    first.measure(subject, subject.baseline)
    minutes = work / first.tokens * (time.monotonic() - started) / 60
    return f"measuring {scalings} scalings takes about {minutes:.1f} minutes; fewer items take less"


def _promise(judging: Exam) -> str:
    """What judges at the target, and what gain it can show."""
    last = judging.at_longest()
    asked = sum(len(found) for by_length in last.material.values() for found in by_length.values())
    parts = [promise(asked, "prompts or queries")] if asked else []
    if windows := len(last.windows):
        few = f", too few to tell: give text for {2 * FEWEST_WINDOWS}, of which half judge"
        parts.append(f"{windows} windows" + few * (windows < FEWEST_WINDOWS))
    return f"kept back to judge by: {'; '.join(parts)}"


def _run(
    exam: Exam,
    subject: Subject,
    named: Mapping[Scaling, str],
    bar: Bar,
    stock: Sequence[Measurement] = (),
) -> list[Measurement]:
    """Measures the scalings, which the bar names, and compares them with the first one, or with ``stock``."""
    found: list[Measurement] = []
    for scaling, name in named.items():
        bar.rename(name)
        found += exam.measure(subject, scaling, bar)
    return compared([(each, None) for each in (*stock, *found)])


def _of(measure: str, each: Measurement) -> bool:
    return (each.task == PERPLEXITY) == (measure == PERPLEXITY)


def _best(found: Sequence[Measurement], measure: str, scalings: Sequence[Scaling]) -> Scaling:
    """The best scaling but the baseline by a measure; among equals the first, which is the mildest."""

    def badness(scaling: Scaling) -> float:
        mean = float(np.mean(pooled(measure, scaling, found)))
        return float(np.nan_to_num(mean, nan=np.inf)) if measure == PERPLEXITY else -mean

    return min(scalings, key=badness)


def _choice(
    measure: str, scaling: Scaling, baseline: Scaling, curve: Sequence[Measurement], trained: int
) -> Choice:
    longest = {
        task: max(each.length for each in curve if each.task == task)
        for task in {each.task for each in curve}
    }
    at_target = [each for each in curve if each.length == longest[each.task]]
    short = min((each.length for each in curve if each.length <= trained), default=None)
    at_short = [each for each in curve if each.length == short]

    def versus(measure: str, measured: Sequence[Measurement]) -> Comparison | None:
        ours, theirs = (pooled(measure, each, measured) for each in (scaling, baseline))
        return compare(measure, ours, theirs) if ours else None

    other = PERPLEXITY if measure == RETRIEVAL else RETRIEVAL
    costs = {each: versus(each, at_short) for each in (RETRIEVAL, PERPLEXITY)}
    return Choice(
        measure=measure,
        scaling=scaling,
        judgement=judge(measure, *(pooled(measure, each, at_target) for each in (scaling, baseline))),
        other=versus(other, at_target),
        short=short,
        at_short={each: found for each, found in costs.items() if found is not None},
    )
