"""Find out where the ramp of by-parts should lie: measure some ramps on small models of two kinds.

    python examples/evidence_ramps.py             # train and measure what is missing; half an hour
    python examples/evidence_ramps.py --tables    # write only the table, from the stored results

In BLOOM's slopes, down to 2^-8, the flattest head of these models sees 5 times their trained length. With
MPT's `alibi_bias_max` of 5, it sees 0.6 times that length, as in BLOOM-1b7 and MPT-7B. Models are kept in
.evidence/, beside those of evidence.py, and results in examples/evidence/ramps.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from evidence import ROOT, to_text, train
from evidence_design import EXAMPLES, LENGTHS, SCALE, TRAINED_LENGTH, Model
from evidence_tables import markdown
from lines_task import prompts_as_json
from text_task import read_corpus

from converter.evaluation.evaluate import evaluate
from converter.evaluation.results import PERPLEXITY, Measurement, Results
from converter.evaluation.tasks import make_task
from converter.scaling.slopes import NATS, stock_slopes

RESULTS = EXAMPLES / "evidence" / "ramps.json"
DOCUMENT = EXAMPLES / "evidence" / "README.md"
BLOCK = re.compile(r"(?P<start><!-- ramps: [^\n]*-->\n).*?(?P<end><!-- end of ramps -->)", re.DOTALL)
PROMPTS = {256: 100, 512: 60, 1024: 60, 2048: 40}
"""Number of prompts of the lines task for each length."""
WINDOWS = 16
"""Number of windows of text."""
MODELS = (Model("lines", 8, 0), Model("lines", 8, 0, 5))
RAMPS = ((1 / 32, 1 / 8), (1 / 16, 1 / 4), (1 / 8, 1 / 2), (1 / 4, 1))
"""Ramps in parts of the trained length."""
RANKS = ((0, 0.5),)
"""Ramps by the rank of a head: its place from the steepest, 0, to the flattest, 1. From 0 to 1 is ntk."""


def by_rank(model: Model, ranks: tuple[float, float]) -> tuple[float, float]:
    """The ramp between the spans at two ranks, in parts of the trained length.

    The slopes of 12 heads are not evenly spaced, so a rank is a place between the shortest span and the
    longest, by their logarithms.
    """
    slopes = stock_slopes(model.heads, 8 if model.bias_max is None else model.bias_max)
    shortest, longest = (NATS / slope / TRAINED_LENGTH for slope in (max(slopes), min(slopes)))
    start, end = (shortest * (longest / shortest) ** rank for rank in ranks)
    return start, end


def measure(model: Model, models: Path) -> Results:
    """Measures a trained model under all its scalings."""
    asked: dict[str, Any]
    if model.task == "lines":
        prompts = models / "ramps.jsonl"
        rows = "".join(prompts_as_json([length], PROMPTS[length], seed=0) for length in LENGTHS)
        prompts.write_text(rows, encoding="utf-8")
        asked = {"tasks": [make_task("prompts", prompts)], "items": max(PROMPTS.values())}
    else:
        held_out = models / "held-out.txt"
        held_out.write_text(read_corpus().held_out, encoding="utf-8", newline="\n")
        asked = {"text": [held_out], "items": WINDOWS}
    ramps = [*RAMPS, *(by_rank(model, ranks) for ranks in RANKS)]
    runs: tuple[dict[str, Any], ...] = (
        {"methods": ("none", "linear", "ntk"), "scales": (SCALE,)},
        {"methods": ("by-parts",), "scales": (SCALE,), "ramps": ramps},
        {"methods": ("ntk", "by-parts"), "dynamics": ("position",)},
    )
    parts = [
        evaluate(
            [model.folder(models)],
            lengths=LENGTHS,
            train_length=TRAINED_LENGTH,
            progress=sys.stderr.isatty(),
            **asked,
            **run,
        )
        for run in runs
    ]
    [about] = parts[0].models.values()
    measured = [
        replace(each, model=model.name, depths=(), positions=(), tokens_per_second=0.0)
        for part in parts
        for each in part.measurements
    ]
    return Results(measured, {model.name: about}, parts[0].settings, sum(part.seconds for part in parts))


def table(results: Results) -> str:
    """Right answers in per cent, or perplexity, by model, scaling and length."""

    def cell(each: Measurement) -> str:
        return f"{each.value:.3f}" if each.metric == PERPLEXITY else f"{100 * each.value:.0f}"

    rows: dict[tuple[str, str], list[Measurement]] = {}
    for each in results.measurements:
        rows.setdefault((each.model, each.scaling), []).append(each)
    header = ["model", "scaling", *(f"{length // TRAINED_LENGTH}x" for length in LENGTHS)]
    return markdown(
        header,
        [[*key, *map(cell, found)] for key, found in rows.items()],
    )


def write(results: Results) -> None:
    """Writes the table into the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda block: block["start"] + table(results) + block["end"], text)
    DOCUMENT.write_text(new, encoding="utf-8")
    print(DOCUMENT)


def main() -> None:
    """Read the command line; train, measure and write."""
    parser = argparse.ArgumentParser(description="Measure ramps of by-parts on small models.")
    parser.add_argument("--models", type=Path, default=ROOT / ".evidence", help="models' folder [.evidence]")
    parser.add_argument("--tables", action="store_true", help="only rewrite the table")
    arguments = parser.parse_args()

    if not arguments.tables:
        arguments.models.mkdir(parents=True, exist_ok=True)
        found = []
        for model in MODELS:
            print(model.name, flush=True)
            if not model.folder(arguments.models).exists():
                train(model, model.folder(arguments.models))
            kept = arguments.models / f"ramps-{model.name}.json"
            if not kept.exists():
                kept.write_text(json.dumps(measure(model, arguments.models).to_json()), encoding="utf-8")
            found.append(Results.from_json(json.loads(kept.read_text(encoding="utf-8"))))
        joined = Results(
            [each for results in found for each in results.measurements],
            {name: about for results in found for name, about in results.models.items()},
            {**found[0].settings, "items": {"lines": PROMPTS, "text": WINDOWS}},
            sum(results.seconds for results in found),
        )
        RESULTS.write_text(to_text(joined), encoding="utf-8")
    write(Results.from_json(json.loads(RESULTS.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
