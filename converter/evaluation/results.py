"""Measurements with confidence intervals, as JSON and tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from converter.config import is_count
from converter.errors import SourceError, reason
from converter.scaling.scaling import short_names

FORMAT = 1
"""Version of the JSON file's format; it changes when an old reader would misread the new file."""
RESULTS = "results.json"
PERPLEXITY = "perplexity"
WORST_LOSS = 700.0
"""Loss in nats above which the perplexity counts as infinite, since it nears the largest float64."""
SIGNIFICANT = 0.05
"""A difference with a smaller p is marked as significant."""
OTHER_CODE = "other"
"""Recorded of a converted repository whose code is not this version's, with which it is measured."""
FAILS = 0.1
"""Mean score below which a model counts as unable to do a task."""
WORSE_THAN_GUESSING = 0.5
"""Nats per token above the loss of guessing, ln of the vocabulary, from which a model cannot read a text."""
WORTH, WORTH_RATIO = 0.1, 0.98
"""The gain that is worth a scaling: in the mean score, and as a ratio of perplexities."""
FEWEST = 6
"""Items that must all get better for p < 0.05; fewer show nothing."""
FEWEST_WINDOWS = 10
"""Windows below which a mean loss shows nothing: the few that lose most may all be missing."""
WIDTH = 80
"""Columns of a terminal that tables fit into."""
Labels = Mapping[tuple[str, str], str]
"""Model and full name of the scaling -> a short name for both."""
Metric = Literal["accuracy", "f1", "score", "ndcg@10", "perplexity"]
Verdict = Literal["helps", "does not help", "cannot tell"]
Shown = Literal["gain", "loss", "nothing", "same"]


@dataclass(frozen=True)
class Comparison:
    """A candidate compared with a baseline, usually no scaling, on the same items."""

    difference: float
    """For a score, the candidate's value minus the baseline's; for perplexity, its value divided by that."""
    low: float
    high: float
    """95 % confidence interval of ``difference``; infinite if ``shows`` is "same", which has none."""
    better: int
    worse: int
    """Items that got better or worse."""
    p: float
    """Of the test that ``statistics.compare_scores`` chose."""
    shows: Shown
    """What is more than chance: a gain, a loss, or nothing. In measurements, "same" if both models computed
    the same: equal vectors, or equal losses of all windows. That leaves nothing to chance."""

    @property
    def significant(self) -> bool:
        """Whether the difference is statistically significant."""
        return self.gains or self.loses

    @property
    def gains(self) -> bool:
        """Whether it is significantly better."""
        return self.shows == "gain"

    @property
    def loses(self) -> bool:
        """Whether it is significantly worse."""
        return self.shows == "loss"

    def verdict(self, metric: str, items: int) -> Verdict:
        """What it shows, as a comparison of so many items.

        The candidate helps if it is significantly better. It does not help if it is significantly worse, or
        if the interval leaves out a gain of ``WORTH`` (for perplexity ``WORTH_RATIO``).
        """
        if self.gains:
            return "helps"
        if self.loses:
            return "does not help"
        if metric == PERPLEXITY:
            small, fewest = self.low > WORTH_RATIO, FEWEST_WINDOWS
        else:
            small, fewest = self.high < WORTH, FEWEST
        return "does not help" if small and items >= fewest else "cannot tell"


@dataclass(frozen=True)
class Bucket:
    """The mean loss of the tokens at similar positions in their windows."""

    start: int
    end: int
    """Positions start <= p < end, counted from 0."""
    loss: float
    """Mean negative log-likelihood in nats per token."""


@dataclass(frozen=True)
class Measurement:
    """One model under one scaling, on one task at one length."""

    model: str
    scaling: str
    """``str(Scaling)``, for example "none" or "ntk, factor 4"."""
    task: str
    """A task's name, or "perplexity"."""
    metric: Metric
    length: int
    """Most tokens in a prompt with its answer, or the tokens in a window."""
    scores: tuple[float, ...]
    """One score per item, from 0 to 1, in the order of the items; for perplexity, the mean loss of each
    longest window in nats per token."""
    value: float
    """The mean of the scores, from 0 to 1; or the perplexity."""
    low: float
    high: float
    """95 % confidence interval of ``value``."""
    depths: tuple[float | None, ...] = ()
    """Where each item's answer is in its prompt, from 0 (start) to 1 (end)."""
    positions: tuple[Bucket, ...] = ()
    """For perplexity, the loss by position in the window."""
    comparison: Comparison | None = None
    """With the first model and scaling that were measured on this task at this length; None for these
    themselves, and if the items differ."""

    @property
    def late(self) -> float | None:
        """The perplexity in the last quarter of the window; None without the loss by position."""
        parts = [part for part in self.positions if part.start + part.end > 1.5 * self.length]
        if not parts:
            return None
        widths = [part.end - part.start for part in parts]
        losses = [part.loss * width for part, width in zip(parts, widths, strict=True)]
        return exp_of(sum(losses) / sum(widths))

    @property
    def items(self) -> int:
        """The number of prompts, or of the longest windows."""
        return len(self.scores)

    @property
    def verdict(self) -> Verdict | Literal["same"] | None:
        if self.comparison is None:
            return None
        if self.comparison.shows == "same":
            return "same"
        return self.comparison.verdict(self.metric, self.items)


@dataclass(frozen=True)
class Results:
    measurements: Sequence[Measurement]
    models: Mapping[str, Mapping[str, Any]]
    """Name of the model -> its family, commit, train_length, parameters, dtype and so on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Seed, items, text files with their SHA-256, versions."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON, and each measurement's verdict; numbers that are not finite become null."""
        return {
            "format": FORMAT,
            "settings": dict(self.settings),
            "models": {name: dict(model) for name, model in self.models.items()},
            "measurements": [{**finite(asdict(each)), "verdict": each.verdict} for each in self.measurements],
            "seconds": round(self.seconds, 1),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Results:
        """Reads the output of ``to_json``; raises ``SourceError`` for anything else."""
        if value.get("format") != FORMAT:
            raise SourceError(
                f"this is not a results file of ntk-convert eval in format {FORMAT}; measure again"
            )
        try:
            measurements = [_measurement(each) for each in value["measurements"]]
            models = {str(name): dict(model) for name, model in value["models"].items()}
            for model in models.values():
                length = model.get("train_length")
                if length is not None and not is_count(length):
                    raise ValueError(f"train_length {length!r}")
            return cls(measurements, models, dict(value["settings"]), float(value["seconds"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SourceError(f"the results file is damaged ({reason(error)})") from error

    def tasks(self) -> list[str]:
        """The tasks, in the order in which they were measured."""
        return list(dict.fromkeys(each.task for each in self.measurements))

    def labels(self) -> Labels:
        """Short names for tables and legends: of the scaling if one model was measured, else of both."""
        rows = dict.fromkeys((each.model, each.scaling) for each in self.measurements)
        models = {model for model, _ in rows}
        short = short_names(scaling for _, scaling in rows)
        labels = {}
        for model, scaling in rows:
            if len(models) == 1:
                label = short[scaling]
            elif len(models) == len(rows):
                label = model
            else:
                label = f"{model}: {short[scaling]}"
            labels[model, scaling] = label
        return labels

    def table(self, task: str, labels: Labels | None = None, *, late: bool = False) -> str:
        """One task as Markdown: a row for each model and scaling, a column for each length.

        Scores are in per cent. A cell has the value and a 95 % confidence interval: in a column's first cell,
        (in round brackets) of the value; in the others, [in square brackets] of the difference from the first
        on the same items, with signs, or for perplexity of the ratio, with an x. ``*`` marks a significant
        one, and ``?`` too few items to tell. Lengths for which ``WIDTH`` has no room are in further tables
        below. With ``late``, a cell has the perplexity of the last quarter of the windows and, in square
        brackets, its ratio to the column's first.
        """
        labels = self.labels() if labels is None else labels
        baselines: dict[int, Measurement] = {}
        cells: dict[tuple[str, str], dict[int, str]] = {}
        for each in self._of(task):
            baseline = baselines.setdefault(each.length, each)
            values = cells.setdefault((each.model, each.scaling), {})
            values[each.length] = _late_cell(baseline, each) if late else _cell(each)

        models = {model for model, _ in cells}
        head = "scaling" if len(models) == 1 else "model"
        first_width = max(len(head), *(len(labels[row]) for row in cells))
        width = max(len(cell) for values in cells.values() for cell in values.values())
        columns = max(1, (WIDTH - first_width - 4) // (width + 3))

        lengths = sorted(baselines)
        tables = []
        for start in range(0, len(lengths), columns):
            part = lengths[start : start + columns]
            rows = [[head, *map(str, part)]]
            for row, values in cells.items():
                rows.append([labels[row], *(values.get(length, "") for length in part)])
            tables.append(markdown(rows))
        return "\n\n".join(tables)

    def report(self, labels: Labels | None = None) -> str:
        """All tables as Markdown, each below the name of its task, and then what the labels stand for.

        With ``labels``, the caller has said or will say that, see ``legend``.
        """
        own = self.labels() if labels is None else labels
        parts = []
        for task in self.tasks():
            parts += [self._title(task), self.table(task, own)]
            if any(each.late is not None for each in self._of(task)):
                parts += ["In the last quarter of each window:", self.table(task, own, late=True)]
        parts += self._marks()
        parts += self._task_warnings()
        parts += self._text_warnings()
        parts += self._circumstances()
        if labels is None:
            named = legend(own)
            if named:
                parts.append(named)
        return "\n\n".join(parts)

    def _of(self, task: str) -> list[Measurement]:
        return [each for each in self.measurements if each.task == task]

    def _title(self, task: str) -> str:
        """A task with its metric, and how many items it has."""
        found = self._of(task)
        counts = sorted({each.items for each in found})
        number = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        metric = found[0].metric
        if task != PERPLEXITY:
            return f"{task} ({metric}, %; {number} items per length)"
        masked = "predicts" in self.models.get(found[0].model, {})
        name = f"{task} of masked tokens" if masked else task
        return f"{name} ({metric}; {number} windows per length)"

    def _marks(self) -> list[str]:
        """What brackets and marks in the tables mean, as far as there are any."""
        marks = {_mark(each) for each in self.measurements}
        found = []
        if any(each.comparison for each in self.measurements):
            found.append("( ) 95 % interval of the value")
            found.append("[ ] 95 % interval of the difference from the column's first (x: of the ratio)")
        if "*" in marks:
            found.append("* differs from the column's first on the same items (p < 0.05)")
        if "?" in marks:
            gain = f"{100 * WORTH:g} points, or {100 * (1 - WORTH_RATIO):.0f} % of perplexity"
            found.append(f"? too few items to tell a gain of {gain}")
        return found

    def _circumstances(self) -> list[str]:
        """A sentence for each model with other code, and for each on a server."""
        found = []
        for name, model in self.models.items():
            if model.get("code") == OTHER_CODE:
                found.append(
                    f"{name} has code of another version, or edited code; measured with the code of this "
                    "version."
                )
            there = model.get("server")
            if there:
                found.append(
                    f"{name} was measured on {there['url']}, as {there['model']}. Does it scale? "
                    f"{there['scales']}."
                )
        return found

    def _text_warnings(self) -> list[str]:
        """A warning for each model that, unscaled and within its length, reads a text worse than guessing."""
        shortest: dict[str, Measurement] = {}
        for each in sorted(self.measurements, key=lambda each: each.length):
            if each.scaling == "none" and each.metric == PERPLEXITY:
                shortest.setdefault(each.model, each)
        notes = []
        for name, each in shortest.items():
            about = self.models.get(name, {})
            trained, vocabulary = about.get("train_length"), about.get("vocabulary")
            within = trained is None or each.length <= trained
            if within and vocabulary and each.value > vocabulary * math.exp(WORSE_THAN_GUESSING):
                notes.append(
                    f"Unscaled, {name} reads the text worse than guessing: a perplexity of "
                    f"{perplexity_text(each.value)} at {each.length} tokens, with {vocabulary} different "
                    "tokens. It tells nothing about how scaling affects it; measure a text of the kind that "
                    "it was trained on."
                )
        return notes

    def _task_warnings(self) -> list[str]:
        """A warning for each model that fails at tasks without scaling, at a length that needs none."""
        shortest: dict[tuple[str, str], Measurement] = {}
        for each in sorted(self.measurements, key=lambda each: each.length):
            if each.scaling == "none" and each.metric != PERPLEXITY:
                shortest.setdefault((each.model, each.task), each)
        failed: dict[str, list[str]] = {}
        for each in shortest.values():
            trained = self.models.get(each.model, {}).get("train_length")
            if each.value < FAILS and (trained is None or each.length <= trained):
                share = f"{100 * each.value:.0f} % at {each.length} tokens"
                failed.setdefault(each.model, []).append(f"{each.task} ({share})")
        return [
            f"Unscaled, {model} fails even at the shortest length: {', '.join(tasks)}. These tasks tell "
            "nothing about how scaling affects it; measure it on tasks of your own."
            for model, tasks in failed.items()
        ]


def legend(labels: Labels) -> str:
    """What labels stand for: a Markdown list of those that are shorter than the scaling's full name."""
    lines = (f"- {label}: {scaling}" for (_, scaling), label in labels.items() if label != scaling)
    fill = partial(textwrap.fill, width=WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(map(fill, lines))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _cell(each: Measurement) -> str:
    text = perplexity_text if each.metric == PERPLEXITY else "{:.1f}".format
    unit = 1 if each.metric == PERPLEXITY else 100
    value, low, high = (text(unit * number) for number in (each.value, each.low, each.high))
    if each.comparison is not None:
        return f"{value} [{difference_text(each.metric, each.comparison)[1]}]{_mark(each)}"
    return f"{value} ({low} to {high})" if each.items > 1 else value


def _late_cell(baseline: Measurement, candidate: Measurement) -> str:
    if candidate.late is None:
        return ""
    value = perplexity_text(candidate.late)
    if candidate.comparison is None or not baseline.late:
        return value
    ratio = candidate.late / baseline.late
    return f"{value} [x {_ratio_text(ratio)}]" if math.isfinite(ratio) else value


def _mark(each: Measurement) -> str:
    """What the difference shows: ``*`` if it is significant, ``?`` if the items cannot tell."""
    found = each.comparison
    if found is None:
        return ""
    if found.significant:
        return "*"
    same = each.metric == PERPLEXITY and not found.better + found.worse  # leaves no question
    return "?" if each.verdict == "cannot tell" and not same else ""


def difference_text(measure: str, found: Comparison) -> tuple[str, str]:
    """A paired difference and its interval: "+3.0" and "-1.0 to +7.1", or "x 0.98" and "x 0.96 to 1.01".

    In place of the interval, "the same" if both models computed the same.
    """
    ends = found.difference, found.low, found.high
    if found.shows == "same":
        return "x 1.000" if measure == PERPLEXITY else "+0.0", "the same"
    if measure != PERPLEXITY:
        value, low, high = (f"{100 * number:+.1f}" for number in ends)
        return value, f"{low} to {high}"
    if not found.better + found.worse:
        return "x 1.000", "the same"
    value, low, high = map(_ratio_text, ends)
    return f"x {value}", f"x {low} to {high}"


def _ratio_text(value: float) -> str:
    return f"{value:.3f}" if value < 1000 else f"{value:.2g}"


def perplexity_text(value: float) -> str:
    """A perplexity with the digits that matter, such as 7.25, 123.4 or 1.2e+06."""
    if value >= 1e5:
        return f"{value:.2g}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"


def exp_of(loss: float) -> float:
    """A perplexity; infinite instead of an overflow."""
    return math.inf if loss > WORST_LOSS else math.exp(loss)


def finite(value: Any) -> Any:
    """The value as JSON can represent it: None (null) for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measurement(value: Mapping[str, Any]) -> Measurement:
    """A measurement from its JSON; raises what values of the wrong type happen to raise."""
    versus = value["comparison"]
    if value["metric"] not in get_args(Metric):
        raise ValueError(f"metric {value['metric']!r}")
    depths = tuple(None if depth is None else float(depth) for depth in value["depths"])
    if depths and len(depths) != len(value["scores"]):
        raise ValueError(f"{len(depths)} depths for {len(value['scores'])} scores")
    if not all(depth is None or 0 <= depth <= 1 for depth in depths):
        raise ValueError("a depth that is not from 0 to 1")
    comparison = None
    if versus is not None:
        comparison = Comparison(**_interval(versus, "difference"), **_test(versus))
    return Measurement(
        model=str(value["model"]),
        scaling=str(value["scaling"]),
        task=str(value["task"]),
        metric=value["metric"],
        length=int(value["length"]),
        scores=tuple(_number(score, math.inf) for score in value["scores"]),
        **_interval(value, "value"),
        depths=depths,
        positions=tuple(
            Bucket(int(part["start"]), int(part["end"]), _number(part["loss"], math.inf))
            for part in value["positions"]
        ),
        comparison=comparison,
    )


def _test(versus: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison's test found; files of older versions have a sign test, without what it shows."""
    better, worse, p = int(versus["better"]), int(versus["worse"]), float(versus["p"])
    more: Shown = "gain" if better > worse else "loss"
    shows = versus.get("shows", more if p < SIGNIFICANT else "nothing")
    if shows not in get_args(Shown):
        raise ValueError(f"shows {shows!r}")
    return {"better": better, "worse": worse, "p": p, "shows": shows}


def _interval(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A number and the ends of its interval; null is infinite."""
    ends = {name: math.inf, "low": -math.inf, "high": math.inf}
    return {key: _number(value[key], infinite) for key, infinite in ends.items()}


def _number(value: Any, infinite: float) -> float:
    return infinite if value is None else float(value)
