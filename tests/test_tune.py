"""``tune``: which scalings it tries, how it chooses and judges, and what it says."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lines_task
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from scipy import stats

from converter import convert, evaluate, make_task, tune
from converter.cli import report
from converter.evaluation.benchmark import doubling_lengths
from converter.evaluation.comparison import Conclusion, TaskScores, conclude
from converter.evaluation.results import WORTH, Measurement, Results
from converter.evaluation.scalings import candidates, command
from converter.evaluation.statistics import (
    chance_to_show,
    compare_scores,
    paired_interval,
    permutation_p,
    power_text,
    prompts_to_show,
)
from converter.evaluation.tune import Choice, Tuning
from converter.model.open import SourceOptions, open_model
from converter.scaling.scaling import UNSCALED, Scaling
from tests import tiny
from tests.conftest import Pristine, RunCli
from tests.messages import says
from tests.models import model_of
from tests.patched import fitted_scaling
from tests.tiny import rotary

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-bloom"

# What is tried


@given(st.integers(1, 5000), st.integers(2, 40000))
def test_what_is_tried(trained: int, more: int) -> None:
    target = trained + more
    found = candidates(open_model(EXAMPLE), trained, target)
    assert found[0] == UNSCALED
    assert [each.dynamic for each in found if each.dynamic] == ["position"] * 5
    assert len(set(found)) == len(found)
    factors = [each.factor for each in found if each.static and each.method == "ntk"]
    assert target / trained in factors
    assert all(1 < factor <= 2 * target / trained for factor in factors)
    lengths = doubling_lengths(trained, target)
    assert (lengths[0], lengths[-1]) == (trained, target)
    assert all(1 < after / before <= 2 for before, after in pairwise(lengths))


def kinds(found: Sequence[Scaling]) -> list[str]:
    """Method and basis of each scaling, repetitions left out."""
    return list(dict.fromkeys(f"{each.method} {each.dynamic or ''}".strip() for each in found))


def test_what_is_tried_depends_on_the_model(tmp_path: Path) -> None:
    encoder = open_model(tiny.ENCODERS["mosaic_bert"](tmp_path / "encoder", 4))
    static = ["ntk", "by-parts", "linear"]
    both = [f"{method} {basis}" for basis in ("length", "position") for method in ("by-parts", "ntk")]
    for model, names in (
        (encoder, [*both, *static]),
        (open_model(EXAMPLE), ["concave position", "by-parts position", "ntk position", *static]),
        (model_of(ROTARY | {"model_type": "llama"}), ["ntk length", *static]),
        (model_of(ROTARY | {"model_type": "phi3"}), ["ntk"]),
    ):
        assert kinds(candidates(model, 64, 256)) == ["none", *names]


ROTARY = {"rope_theta": 1e4, **rotary.SIZES}


def test_the_command_says_what_was_asked() -> None:
    dynamic = Scaling("ntk", dynamic="position", rate=2.0, train_length=256)
    source: SourceOptions = {"train_length": 256, "revision": "main", "subfolder": "last"}
    words = shlex.split(command("a folder/model", dynamic, 256, source))
    assert words[1] == "a folder/model"
    for option, value in (
        ("--method", "ntk"),
        ("--dynamic", "position"),
        ("--rate", "2"),
        ("--train-length", "256"),
        ("--revision", "main"),
        ("--subfolder", "last"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--method" not in command("m", Scaling("ntk", 2.0), None, {})
    assert "linear" in command("m", Scaling("linear", 2.5), None, {})
    by_parts = command("m", Scaling("by-parts", 4.0, (16.0, 64.0)), 256, {})
    assert by_parts == "ntk-convert m --method by-parts --scale 4 --ramp 0.0625 0.25 --out DIR"


# What few items can say


@pytest.mark.parametrize("items", [1, 5, 12, 25])
def test_the_interval_of_a_difference_covers_it(items: int) -> None:
    """By enumeration of all samples; and it agrees with McNemar's exact test, whatever the sample."""
    samples = [(up, down) for up in range(items + 1) for down in range(items + 1 - up)]
    ends = np.array([paired_interval(up, down, items) for up, down in samples])
    for (up, down), (low, high) in zip(samples, ends, strict=True):
        p = stats.binomtest(up, up + down).pvalue if up + down else 1.0
        assert (low > 0 or high < 0) == (p < 0.05)
        assert -1 <= low <= (up - down) / items <= high <= 1
        assert high - low > 0.01
    for better in np.linspace(0, 1, 9):
        for worse in np.linspace(0, 1 - better, 9):
            covered = (ends[:, 0] <= better - worse + 1e-12) & (better - worse - 1e-12 <= ends[:, 1])
            shares = (better, worse, max(0.0, 1 - better - worse))
            chances = stats.multinomial.pmf([(*each, items - sum(each)) for each in samples], items, shares)
            assert np.sum(chances[covered]) >= 0.95


def concluded(metric: Any, scores: Sequence[float], baseline: Sequence[float]) -> Conclusion:
    items = range(len(scores))
    return conclude(TaskScores(metric, tuple(baseline), items), TaskScores(metric, tuple(scores), items))


def right(better: int, worse: int, same: int) -> tuple[list[float], list[float]]:
    """Scores of a scaling and of none."""
    return [1.0] * better + [0.0] * worse + [1.0] * same, [0.0] * better + [1.0] * worse + [1.0] * same


def lost(change: float, windows: int) -> tuple[list[float], list[float]]:
    """Losses of a scaling and of none, which differ by ``change`` and a little noise."""
    stock = np.linspace(2, 3, windows)
    noise = np.random.default_rng(0).normal(0, 0.005, windows)
    return (stock + change + noise).tolist(), stock.tolist()


def moved(changes: Sequence[float]) -> tuple[list[float], list[float]]:
    """Losses of a scaling and of none, with these changes."""
    stock = np.linspace(2, 3, len(changes))
    return (stock + changes).tolist(), stock.tolist()


@pytest.mark.parametrize(
    ("measure", "scores", "verdict"),
    [
        ("retrieval", right(30, 3, 67), "helps"),
        ("retrieval", right(6, 0, 0), "helps"),
        ("retrieval", right(5, 0, 95), "cannot tell"),  # p = 0.06, and +12 points are possible
        ("retrieval", right(3, 0, 17), "cannot tell"),
        ("retrieval", right(0, 0, 20), "cannot tell"),  # as after 20 prompts that all stay right
        ("retrieval", right(0, 0, 1), "cannot tell"),
        ("retrieval", right(0, 0, 100), "does not help"),
        ("retrieval", right(3, 30, 67), "does not help"),
        ("retrieval", right(475, 425, 100), "cannot tell"),
        ("perplexity", lost(-0.05, 40), "helps"),
        ("perplexity", lost(0.05, 40), "does not help"),
        ("perplexity", lost(0.0, 40), "does not help"),
        ("perplexity", lost(0.0, 5), "cannot tell"),
        ("perplexity", lost(-0.05, 5), "cannot tell"),
        ("perplexity", lost(-0.05, 9), "cannot tell"),
        ("perplexity", lost(0.05, 9), "cannot tell"),
        ("perplexity", lost(-0.05, 10), "helps"),
        ("perplexity", lost(0.05, 10), "does not help"),
        ("perplexity", moved([-0.01] * 13 + [0.2] * 3), "does not help"),  # most windows are better
        ("perplexity", moved([-0.01] * 52 + [0.2] * 12), "does not help"),
        ("perplexity", moved([0.01] * 52 + [-0.3] * 12), "helps"),  # and here worse
        ("perplexity", ([2.0] * 9, [2.0] * 9), "cannot tell"),
        ("perplexity", ([math.nan] * 9, [2.0] * 9), "does not help"),
        ("perplexity", ([1.0] * 9 + [math.nan], [2.0] * 9 + [1.0]), "cannot tell"),
        ("perplexity", ([3.0] * 9 + [1.0], [2.0] * 9 + [math.nan]), "cannot tell"),
        ("ndcg@10", ([0.45] * 40 + [0.0] * 10, [0.4] * 40 + [0.5] * 10), "does not help"),
        ("ndcg@10", ([0.5, 0.7] * 9, [0.4, 0.5] * 9), "helps"),
        ("ndcg@10", ([0.5, 0.7], [0.4, 0.5]), "cannot tell"),
    ],
)
def test_verdicts(measure: str, scores: tuple[list[float], list[float]], verdict: str) -> None:
    found = concluded(measure, *scores)
    assert found.verdict == verdict
    assert found.items == len(scores[0])
    assert found.comparison == compare_scores(measure, *scores)
    assert found.comparison.low < found.comparison.high or math.isinf(found.comparison.difference)
    assert found.needed > found.items
    gained = found.comparison.difference - (measure == "perplexity")
    if measure == "perplexity":
        gained = -gained
    assert found.seen == gained
    if 0 < gained < math.inf:
        assert found.needed_for_seen is not None
        assert found.needed_for_seen > found.items
    else:
        assert found.needed_for_seen is None


def test_the_gain_that_was_seen_takes_fewer_prompts_than_ten_points() -> None:
    """A third of the prompts got better, of which few may be by chance."""
    found = concluded("retrieval", *right(3, 0, 6))
    assert (found.verdict, found.gain, found.seen) == ("cannot tell", WORTH, 1 / 3)
    assert found.needed_for_seen is not None
    assert found.items < found.needed_for_seen < found.needed / 5


@pytest.mark.parametrize(
    ("better", "worse", "size"),
    [(0.1, 0.0, 78), (0.2, 0.0, 39), (0.3, 0.0, 25), (0.15, 0.05, 168), (0.3, 0.1, 84), (0.45, 0.15, 56)],
)
def test_how_many_prompts_show_a_gain(better: float, worse: float, size: int) -> None:
    """The fewest that do so in four of five trials, by enumeration of all samples."""
    assert prompts_to_show(better, worse) == size
    for items, enough in ((size, True), (size - 1, False)):
        up, down = np.triu_indices(items + 1)
        up, down = up, items - down
        p = 2 * stats.binom.cdf(down, up + down, 0.5)
        samples = np.stack([up, down, items - up - down], axis=1)
        chances = stats.multinomial.pmf(samples, items, (better, worse, 1 - better - worse))
        power = chances[(p < 0.05) & (up > down)].sum()
        assert (power >= 0.8) == enough
        assert chance_to_show(items, better, worse) == pytest.approx(power, abs=1e-6)


@pytest.mark.parametrize(("items", "gain"), [(300, 0.1), (20_000, 0.0125)])
def test_items_that_all_differ_are_judged_too(items: int, gain: float) -> None:
    found = concluded("retrieval", *right(items // 2, items // 2, 0))
    assert found.gain == gain
    assert found.needed > items


def test_as_many_prompts_as_are_named_show_the_gain() -> None:
    """In four of five trials, where as many prompts differ as the interval allows."""
    found = concluded("retrieval", *right(2, 2, 36))
    assert found.gain == WORTH
    most = stats.binomtest(4, 40).proportion_ci(method="exact").high
    rng = np.random.default_rng(0)
    changed = rng.binomial(found.needed, most, 4000)
    better = rng.binomial(changed, (1 + WORTH / most) / 2)
    p = 2 * stats.binom.cdf(np.minimum(better, changed - better), changed, 0.5)
    shown = (p < 0.05) & (better > changed / 2)
    assert 0.75 < np.mean(shown) < 0.9


@pytest.mark.parametrize("items", [2, 5, 13, 14, 60])
def test_a_mean_is_judged_by_two_tests(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of SciPy; the interval leaves out no change if the t test gives p < 0.05."""
    monkeypatch.setattr("converter.evaluation.statistics.SIGNS_AT_ONCE", 1000)  # in many parts
    rng = np.random.default_rng(items)
    for mean in (0.0, 0.3, 0.6, 1.0):
        changes = rng.exponential(1.0, items) - 1 + mean
        t = stats.ttest_1samp(changes, 0)
        p = stats.permutation_test((changes,), np.mean, permutation_type="samples", random_state=1).pvalue
        near = 1e-12 if items <= 13 else 5 * math.sqrt(2 * p * (1 - p) / 9999) + 1e-3
        assert permutation_p(changes) == pytest.approx(p, abs=near)
        for measure in ("perplexity", "ndcg@10"):
            found = compare_scores(measure, (2 + changes).tolist(), [2.0] * items)
            assert found.p == pytest.approx(max(t.pvalue, permutation_p(changes)))
            none = 1.0 if measure == "perplexity" else 0.0
            assert (t.pvalue < 0.05) == (not found.low <= none <= found.high)
            enough = measure == "ndcg@10" or items >= 10
            assert found.significant == (found.p < 0.05 and enough)


def test_a_permutation_test_takes_little_memory() -> None:
    changes = np.random.default_rng(0).normal(0, 1, 3000)
    tracemalloc.start()
    permutation_p(changes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 25  # all signs at once would take 240 MB


@pytest.mark.parametrize("windows", [12, 16, 64])
def test_a_text_that_gets_worse_is_not_said_to_gain(windows: int) -> None:
    """Where four of five windows get a little better and the others much worse, so that the mean is worse."""
    rng, helps = np.random.default_rng(0), 0
    for _ in range(100):
        changes = np.where(rng.random(windows) < 0.2, 0.08, -0.01) + rng.normal(0, 0.004, windows)
        verdict = concluded("perplexity", *moved(changes)).verdict
        assert verdict != "helps" or changes.mean() < 0
        helps += verdict == "helps"
    assert helps <= 15  # of a sign test: about 60, and all for 64 windows


def test_a_lost_window_is_worse_and_its_perplexity_infinite() -> None:
    found = compare_scores("perplexity", [1.0] * 9 + [math.nan], [2.0] * 9 + [1.0])
    assert (found.better, found.worse, found.difference) == (9, 1, math.inf)
    both = compare_scores("perplexity", [math.nan, 1.0], [math.inf, 2.0])
    assert (both.better, both.worse) == (1, 0)


@pytest.mark.parametrize(("items", "shown"), [(6, 6), (10, 7), (50, 8), (1000, 8)])
def test_what_is_promised_beforehand_is_shown(items: int, shown: int) -> None:
    says(power_text(items, "prompts"), f"{items} prompts", f"{shown} of them")
    for count, enough in ((shown, True), (shown - 1, False)):
        better = np.random.default_rng(0).binomial(items, count / items, 20_000)
        assert (np.mean(2 * stats.binom.cdf(0, better, 0.5) < 0.05) >= 0.8) == enough


# What is printed

B = Scaling("ntk", 4.0)
GAIN, EVEN, WORSE = right(30, 3, 67), right(2, 2, 16), right(1, 30, 69)
NO_GAIN, NO_LOSS, LOSS = right(0, 0, 100), lost(0.0, 40), lost(0.05, 40)


def tuning(*choices: Choice) -> Tuning:
    measured = ("words", "accuracy", 1024, (1.0,), 1.0, 0.0, 1.0)
    tried = Results([Measurement("model", str(scaling), *measured) for scaling in (UNSCALED, B)], {})
    found = Tuning("model", 256, 1024, tried, choices, tried, None, 12.0)
    return found if found.advice == UNSCALED else replace(found, command=command("org/m", B, None, {}))


def choice(measure: str, scores: Any, other: Any = None, short: Any = None) -> Choice:
    second = {"retrieval": "perplexity", "perplexity": "retrieval"}[measure]
    costs = {} if short is None else {measure: compare_scores(measure, *short)}
    against = None if other is None else compare_scores(second, *other)
    return Choice(measure, B, concluded(measure, *scores), against, 200 if costs else None, costs)


@pytest.mark.parametrize(
    ("choices", "verdict", "words"),
    [
        (
            [choice("retrieval", GAIN, NO_LOSS, EVEN)],
            "helps",
            [
                "By retrieval: ntk, factor 4",
                "retrieval +27.0 (+12.3 to +41.5); 30 better, 3 worse, p = 1.4e-06",
                "perplexity x 1.000 (0.998 to 1.001)",
                "at 200 tokens: retrieval +0.0 (",
                "Of 100 prompts",
                "30 are answered better",
                "and 3 worse",
                "perplexity is not measurably worse",
                "ntk-convert org/m --scale 4 --out DIR",
            ],
        ),
        (
            [choice("retrieval", EVEN)],
            "cannot tell",
            [
                "20 prompts",
                "a gain of 10 points",
                "and 2 worse",
                "Give more",
            ],
        ),
        (
            [choice("retrieval", right(3, 0, 6))],
            "cannot tell",
            ["of 10 points, and", "33.3 points that"],
        ),
        (
            [choice("perplexity", lost(-0.05, 4))],
            "cannot tell",
            ["4 windows", "gain of 2 %, and", "% that"],
        ),
        ([], "cannot tell", ["Give prompts"]),
        ([choice("retrieval", WORSE)], "does not help", ["and 30 worse"]),
        ([choice("retrieval", NO_GAIN)], "does not help", ["100 prompts", "0 are answered better"]),
        (
            [choice("retrieval", GAIN, LOSS), choice("perplexity", NO_LOSS)],
            "does not help",
            ["harms perplexity", "perplexity is worse"],
        ),
        (
            [choice("retrieval", NO_GAIN), choice("perplexity", lost(-0.05, 40), NO_GAIN)],
            "helps",
            ["Of 40 windows", "40 are predicted better", "0 worse", "retrieval is not measurably worse"],
        ),
        ([choice("retrieval", NO_GAIN), choice("perplexity", lost(-0.05, 4))], "cannot tell", []),
    ],
)
def test_each_verdict_is_told_in_words_and_in_json(
    choices: Sequence[Choice], verdict: str, words: Sequence[str]
) -> None:
    found = tuning(*choices)
    text = report.tuning(found)
    assert [each for each in words if each not in text] == []
    assert f"Verdict: {verdict}" in text
    assert ("leave the model as it is" in text) == (verdict == "does not help")
    assert ("ntk-convert" in text) == (verdict == "helps") == (found.advice != UNSCALED)
    assert found.to_json()["verdict"] == verdict


# With a real model


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts for tiny-bloom, of 1 and 4 times its trained length."""
    path = tmp_path_factory.mktemp("tune") / "prompts.jsonl"
    path.write_text(lines_task.prompts_as_json([256, 1024], 8, seed=0), encoding="utf-8")
    return path


def scores(found: Results, length: int, scaling: str) -> tuple[float, ...]:
    [measured] = [each for each in found.measurements if (each.length, each.scaling) == (length, scaling)]
    return measured.scores


def test_one_half_chooses_and_the_other_judges(run: RunCli, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--target-length", 1024, "--prompts", prompts, "--train-length", 256, "--items", 8)
    found = run("tune", EXAMPLE, *words, "--out", out)
    assert found.code == 0, found.err
    assert "13 scalings" in found.err
    says(found.err, "4 prompts or queries", "too few")
    written = json.loads((out / "tuning.json").read_text())
    curve = Results.from_json(json.loads((out / "results.json").read_text()))
    assert curve.settings["items"] == 8
    best = written["choices"][0]["scaling"]
    whole = evaluate([EXAMPLE], tasks=[make_task("prompts", prompts)], train_length=256)
    for length in (256, 1024):
        assert scores(curve, length, "none") == scores(whole, length, "none")[:4]
    chose = {each["scaling"]: each for each in written["candidates"]}
    assert tuple(chose["none"]["scores"]) == scores(whole, 1024, "none")[4:]
    assert {each["length"] for each in chose.values()} == {1024}
    means = {scaling: np.mean(each["scores"]) for scaling, each in chose.items() if scaling != "none"}
    assert best == max(means, key=lambda scaling: means[scaling])  # of equals the first
    for each in [*written["candidates"], *written["curve"]["measurements"]]:
        assert (each["comparison"] is None) == (each["scaling"] == "none")
    assert (
        written["choices"][0]["judgement"]["comparison"] == curve.to_json()["measurements"][3]["comparison"]
    )
    assert f"Verdict: {written['verdict']}" in found.out
    if written["command"]:
        words = shlex.split(written["command"])[1:]
        assert run(*words[:-1], tmp_path / "baked", "--no-verify").code == 0
        config = json.loads((tmp_path / "baked" / "config.json").read_text())
        assert config["alibi_scaling"] == written["advice"]


def text_file(path: Path, words: int) -> Path:
    rng = np.random.default_rng(0)
    path.write_text(" ".join(f"w{number}" for number in rng.integers(4, tiny.VOCAB_SIZE, words)))
    return path


def test_a_text_alone_means_perplexity(
    pristine: Pristine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the bars say what runs, from Python too."""
    text = text_file(tmp_path / "text.txt", 4000)
    said: list[str] = []
    slopes = tmp_path / "slopes.json"
    slopes.write_text(json.dumps(fitted_scaling(4, 2)))
    options: dict[str, Any] = {"train_length": 24, "slopes": slopes, "say": said.append, "progress": True}
    result = tune(pristine("bloom"), 64, text=text, items=8, **options)
    bars = capfd.readouterr().err
    says(bars, "verified loading: 100%", "none: ", "concave by position: ", "tuning: 100%")
    assert [each.measure for each in result.choices] == ["perplexity"]
    assert [each.length for each in result.curve.measurements] == [24, 48, 64] * 2
    # Perplexities of one table are of the same windows, and fitted slopes are one more candidate.
    assert {(each.task, each.length, each.items) for each in result.candidates.measurements} == {
        ("perplexity", 64, 4)
    }
    assert result.candidates.measurements[-1].scaling.startswith("fitted")
    assert len(said) == 3
    says(said[0], "8 windows", "1 file")
    says(said[2], "4 windows", "too few", "give text for 20")


def test_slopes_that_read_like_the_baseline_are_told_apart(pristine: Pristine, tmp_path: Path) -> None:
    """Of a model that was trained further with fitted slopes: others have the same text."""
    tuned, own = tmp_path / "tuned", fitted_scaling(4, 2, "position")
    convert(pristine("bloom"), tuned, slopes=own, verify=False)
    weights = load_file(tuned / "model.safetensors")
    name = min(weights)
    weights[name] = weights[name] + np.float32(0.01)
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    slopes = tmp_path / "slopes.json"
    others = [[2 * exponent for exponent in row] for row in own["exponents"]]
    slopes.write_text(json.dumps({**own, "exponents": others}))
    text = text_file(tmp_path / "text.txt", 4000)
    result = tune(tuned, 64, text=text, items=24, slopes=slopes)
    found = {each.scaling: each for each in result.candidates.measurements}
    assert len(found) == len(result.candidates.measurements)
    baseline, *_, fitted = found.values()
    assert baseline.scaling == f"{result.baseline}, as tuned"
    assert (baseline.comparison, fitted.scaling) == (None, str(result.baseline))
    assert fitted.comparison == compare_scores("perplexity", fitted.scores, baseline.scores)
    means = {scaling: np.mean(each.scores) for scaling, each in found.items() if each is not baseline}
    assert str(result.choices[0].scaling) == min(means, key=lambda scaling: means[scaling])
    report.tuning(result)


def test_tasks_that_the_model_cannot_do_tell_nothing(run: RunCli, pristine: Pristine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "w7 " * length, "answer": "never", "length": length + 1} for length in (20, 60)] * 4
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ("--target-length", 64, "--train-length", 24, "--prompts", file, "--json")
    found = run("tune", pristine("bloom"), *words)
    assert (found.code, found.json["verdict"]) == (0, "cannot tell")
    assert found.json["candidates"] == found.json["choices"] == []
    assert [each["length"] for each in found.json["curve"]["measurements"]] == [21]  # longer ones are not run


@pytest.mark.slow
def test_a_rotary_model(tmp_path: Path) -> None:
    source = rotary.rotary(tmp_path / "source", "llama")
    result = tune(source, 256, text=[text_file(tmp_path / "text.txt", 4000)], items=4)
    tried = list(dict.fromkeys(each.scaling for each in result.candidates.measurements))
    assert [name.partition(", rate")[0] for name in tried[:3]] == ["none", *["ntk, length-dynamic"] * 2]


@pytest.mark.parametrize("command", ["eval", "tune"])
def test_a_full_disk_does_not_lose_the_result(
    run: RunCli, pristine: Pristine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from converter.result import outputs

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(outputs, "write_files", full)
    text = text_file(tmp_path / "text.txt", 1000)
    words = {"eval": ("--lengths", 32), "tune": ("--target-length", 48)}[command]
    options = ("--items", 4, "--train-length", 24, "--text", text, "--out", tmp_path / "out")
    found = run(command, pristine("bloom"), *words, *options)
    assert found.code == 1
    assert "perplexity" in found.out
    assert "No space" in found.err
