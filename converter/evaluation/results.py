"""What was measured: values with their confidence, as JSON, CSV and tables."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from converter.errors import SourceError

FORMAT = 1
"""Of the JSON file; changes when a reader of the old one would misread the new one."""
PERPLEXITY = "perplexity"
SIGNIFICANT = 0.05
"""p below which a difference is marked."""
COLUMNS = (
    "model",
    "scaling",
    "task",
    "metric",
    "length",
    "items",
    "value",
    "low",
    "high",
    "difference",
    "difference_low",
    "difference_high",
    "better",
    "worse",
    "p",
    "tokens_per_second",
)

Metric = Literal["accuracy", "f1", "score", "perplexity"]


@dataclass(frozen=True)
class Comparison:
    """A scaling against the run's first one, usually none, on the same items."""

    difference: float
    """Of a score: value minus the first one's. Of perplexity: value divided by the first one's."""
    low: float
    high: float
    """95 % confidence interval of ``difference``."""
    better: int
    worse: int
    """Items that got better or worse."""
    p: float
    """Of an exact two-sided sign test, which for accuracies is McNemar's."""

    @property
    def significant(self) -> bool:
        """Whether the difference is no chance (p < 0.05)."""
        return self.p < SIGNIFICANT

    @property
    def gains(self) -> bool:
        """Whether more items got better than worse, and not by chance."""
        return self.significant and self.better > self.worse

    @property
    def loses(self) -> bool:
        """Whether more items got worse than better, and not by chance."""
        return self.significant and self.worse > self.better


@dataclass(frozen=True)
class Bucket:
    """The loss of tokens that stand at similar positions of their windows."""

    start: int
    end: int
    """Positions start <= p < end, counted from 0."""
    loss: float
    """Mean negative log-likelihood in nats a token."""


@dataclass(frozen=True)
class Measurement:
    """One model with one scaling at one task and length."""

    model: str
    scaling: str
    """``str(Scaling)``: "none", "ntk, factor 4"."""
    task: str
    """A task's name, or "perplexity"."""
    metric: Metric
    length: int
    """Tokens of a prompt with its answer, or of a window, at most."""
    scores: tuple[float, ...]
    """One an item, in the order of the items, from 0 to 1; of perplexity, a group of windows' mean loss in
    nats a token."""
    value: float
    """Mean of the scores, from 0 to 1; or perplexity."""
    low: float
    high: float
    """95 % confidence interval of ``value``."""
    depths: tuple[float | None, ...] = ()
    """Where each item's answer stands, from 0 (start) to 1 (end)."""
    positions: tuple[Bucket, ...] = ()
    """Of perplexity: the loss by position in the window."""
    comparison: Comparison | None = None
    """Against the run's first model and scaling; None of that one itself, and where the items differ."""
    tokens_per_second: float = 0.0

    @property
    def items(self) -> int:
        """Prompts, or groups of windows."""
        return len(self.scores)


@dataclass(frozen=True)
class Results:
    """All measurements of one run."""

    measurements: Sequence[Measurement]
    models: Mapping[str, Mapping[str, Any]]
    """Model's name -> what is known of it: family, commit, train_length, parameters, dtype."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Seed, items, the text's files and their SHA-256, versions."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON; numbers that are not finite (the interval of a single item) as null."""
        return {
            "format": FORMAT,
            "settings": dict(self.settings),
            "models": {name: dict(model) for name, model in self.models.items()},
            "measurements": [finite(asdict(each)) for each in self.measurements],
            "seconds": round(self.seconds, 1),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Results:
        """Reads what ``to_json`` gave.

        Raises:
            SourceError: not results of this version.
        """
        if value.get("format") != FORMAT:
            raise SourceError(
                f"this is no results file of ntk-convert eval in format {FORMAT}; measure again"
            )
        try:
            measurements = [_measurement(each) for each in value["measurements"]]
            models = {str(name): _model(model) for name, model in value["models"].items()}
            return cls(measurements, models, dict(value["settings"]), float(value["seconds"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SourceError(f"the results file is damaged ({type(error).__name__}: {error})") from error

    def to_csv(self) -> str:
        """A row each measurement, its items left out; see ``COLUMNS``."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for each in self.measurements:
            versus = each.comparison
            compared = (
                (versus.difference, versus.low, versus.high, versus.better, versus.worse, versus.p)
                if versus
                else ("",) * 6
            )
            name = (each.model, each.scaling, each.task, each.metric, each.length, each.items)
            writer.writerow([*name, each.value, each.low, each.high, *compared, each.tokens_per_second])
        return text.getvalue()

    def tasks(self) -> list[str]:
        """The tasks, in the order in which they were measured."""
        return list(dict.fromkeys(each.task for each in self.measurements))

    def table(self, task: str) -> str:
        """One task as a Markdown table: a row a model and scaling, a column a length.

        Scores are in per cent. A cell has the value, its 95 % confidence interval, and ``*`` where the
        difference to the first row on the same items is no chance (p < 0.05).
        """
        cells = {
            (each.model, each.scaling, each.length): _cell(each)
            for each in self.measurements
            if each.task == task
        }
        lengths = sorted({length for _, _, length in cells})
        rows = list(dict.fromkeys((model, scaling) for model, scaling, _ in cells))
        several = len({model for model, _ in rows}) > 1
        head = [*(["model"] if several else []), "scaling", *(str(length) for length in lengths)]
        body = [
            [*([model] if several else []), scaling]
            + [cells.get((model, scaling, length), "") for length in lengths]
            for model, scaling in rows
        ]
        widths = [max(len(row[column]) for row in [head, *body]) for column in range(len(head))]
        rule = ["-" * width for width in widths]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            for row in [head, rule, *body]
        ]
        return "\n".join(lines)

    def report(self) -> str:
        """All tables as Markdown, each under its task's name."""
        parts = []
        for task in self.tasks():
            found = [each for each in self.measurements if each.task == task]
            counts = sorted({each.items for each in found})
            what = "windows" if task == PERPLEXITY else "items"
            unit = "" if task == PERPLEXITY else ", %"
            number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            parts += [f"{task} ({found[0].metric}{unit}; {number} {what} a length)", "", self.table(task), ""]
        if any(each.comparison and each.comparison.significant for each in self.measurements):
            parts += ["* differs from the first row on the same items (sign test, p < 0.05)", ""]
        return "\n".join(parts[:-1])


def _cell(each: Measurement) -> str:
    star = " *" if each.comparison and each.comparison.significant else ""
    numbers = (each.value, each.low, each.high)
    if each.metric == PERPLEXITY:
        values = [f"{number:.3g}" if number < 10 else f"{number:.1f}" for number in numbers]
    else:
        values = [f"{100 * number:.1f}" for number in numbers]
    interval = f" ({values[1]} to {values[2]})" if each.items > 1 else ""
    return f"{values[0]}{interval}{star}"


def finite(value: Any) -> Any:
    """The value as JSON can say it: null for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _model(value: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a model, from its JSON; raises what a value of another kind raises."""
    length = value.get("train_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"train_length {length!r}")
    return dict(value)


def _measurement(value: Mapping[str, Any]) -> Measurement:
    """A measurement from its JSON; raises what a value of another kind raises."""
    comparison = value["comparison"]
    if value["metric"] not in get_args(Metric):
        raise ValueError(f"metric {value['metric']!r}")
    depths = tuple(None if depth is None else float(depth) for depth in value["depths"])
    if depths and len(depths) != len(value["scores"]):
        raise ValueError(f"{len(depths)} depths of {len(value['scores'])} scores")
    if not all(depth is None or 0 <= depth <= 1 for depth in depths):
        raise ValueError("a depth that is not from 0 to 1")
    return Measurement(
        model=str(value["model"]),
        scaling=str(value["scaling"]),
        task=str(value["task"]),
        metric=value["metric"],
        length=int(value["length"]),
        scores=tuple(map(float, value["scores"])),
        value=_number(value["value"], math.inf),
        low=_number(value["low"], -math.inf),
        high=_number(value["high"], math.inf),
        depths=depths,
        positions=tuple(
            Bucket(int(bucket["start"]), int(bucket["end"]), _number(bucket["loss"], math.inf))
            for bucket in value["positions"]
        ),
        comparison=None if comparison is None else _comparison(comparison),
        tokens_per_second=float(value["tokens_per_second"]),
    )


def _comparison(value: Mapping[str, Any]) -> Comparison:
    return Comparison(
        _number(value["difference"], math.inf),
        _number(value["low"], -math.inf),
        _number(value["high"], math.inf),
        int(value["better"]),
        int(value["worse"]),
        float(value["p"]),
    )


def _number(value: Any, infinite: float) -> float:
    """A number; null stands for one that is not finite."""
    return infinite if value is None else float(value)
