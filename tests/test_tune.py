"""``tune``: which scalings it tries, how it chooses, and what it prints."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import shlex
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import recipes
from converter.cli import report
from converter.errors import UsageError
from converter.evaluation import search as searching
from converter.evaluation import tune as tuning_module
from converter.evaluation.candidates import candidates, command, ladder
from converter.evaluation.evaluate import evaluate
from converter.evaluation.exam import Exam
from converter.evaluation.results import Comparison, Measurement, Results
from converter.evaluation.search import Candidate
from converter.evaluation.statistics import compare, summarise
from converter.evaluation.tasks import make_task
from converter.evaluation.tasks.base import Item
from converter.evaluation.tune import AgainstNone, Choice, Tuning, tune
from converter.scaling.request import RAMP
from converter.scaling.scaling import UNSCALED, Dynamic, Scaling, Static
from tests import tiny
from tests.conftest import Run
from tests.tiny import rotary

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-bloom"
Command = Callable[..., Run]


@given(st.integers(1, 5000), st.integers(2, 40000))
def test_what_is_tried(trained: int, more: int) -> None:
    target = trained + more
    found = candidates(trained, target, RAMP, lambda _: None)
    assert found[0] == UNSCALED
    assert [each.dynamic for each in found if isinstance(each, Dynamic)] == ["position"] * 4
    assert len(set(found)) == len(found)
    factors = [each.factor for each in found if isinstance(each, Static) and each.method == "ntk"]
    assert target / trained in factors
    assert all(1 < factor <= 2 * target / trained for factor in factors)
    lengths = ladder(trained, target)
    assert (lengths[0], lengths[-1]) == (trained, target)
    assert all(1 < after / before <= 2 for before, after in pairwise(lengths))


def test_what_is_tried_of_rotary_models() -> None:
    def of(model_type: str) -> list[Scaling]:
        config = {"model_type": model_type, "rope_theta": 1e4, **rotary.SIZES}
        recipe = recipes.of_checkpoint(config)
        return candidates(64, 256, recipe.defaults.ramp, recipe.check_scaling)

    by_length = [Dynamic("ntk", "length", rate=rate, train_length=64) for rate in (1.0, 2.0)]
    assert of("llama")[:3] == [UNSCALED, *by_length]
    assert [each.method for each in of("llama")[3:]] == ["ntk"] * 3 + ["by-parts"] * 2 + ["linear"] * 2
    assert [each.method for each in of("phi3")] == ["none"] + ["ntk"] * 3


# The search, with models whose answers are known


class Script:
    """A subject whose scores and losses are drawn from each scaling's own probability and loss."""

    def __init__(self, right: dict[Scaling, float], loss: dict[Scaling, float] | None = None) -> None:
        rng = np.random.default_rng(0)
        chance = rng.random(400)
        self.scores = {each: (chance < share).astype(float) for each, share in right.items()}
        noise = rng.normal(0, 0.02, 400)
        self.losses = {each: mean + noise for each, mean in (loss or {}).items()}
        self.asked: list[Scaling] = []


ITEM = Item((1, 2, 3), ("x",))
A, B, C = (Static("ntk", float(factor)) for factor in (2, 4, 8))


def run_search(script: Script, monkeypatch: pytest.MonkeyPatch, rounds: int) -> list[Candidate]:
    """Runs ``search`` over the script's scalings, as if there were time for this many rounds."""

    def answer(_: Any, __: Any, candidate: Candidate, start: int, end: int) -> Candidate:
        script.asked.append(candidate.scaling)
        losses = script.losses.get(candidate.scaling)
        return replace(
            candidate,
            scores=(*candidate.scores, *script.scores[candidate.scaling][start:end]),
            losses=() if losses is None else (*candidate.losses, *losses[start:end]),
        )

    class Time(searching.Clock):
        left_rounds = rounds

        def tokens(self, _: float) -> float:
            self.left_rounds -= 1
            return math.inf if self.left_rounds > 0 else 0.0

    monkeypatch.setattr(searching, "_round", answer)
    pool = searching.Pool({}, {"task": [ITEM] * 400}, np.empty((0, 0), dtype=np.int64), None, 64)  # type: ignore[arg-type]
    return searching.search(None, pool, list(script.scores), Time(60.0), int)  # type: ignore[arg-type]


def test_the_best_is_found_and_the_worst_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({UNSCALED: 0.5, A: 0.6, B: 0.9, C: 0.1})
    found = run_search(script, monkeypatch, rounds=7)
    by_scaling = {each.scaling: each for each in found}
    assert searching.finalists(found) == {"retrieval": B}
    assert by_scaling[C].dropped
    assert not by_scaling[UNSCALED].dropped
    assert len(by_scaling[C].scores) < len(by_scaling[B].scores) == len(by_scaling[UNSCALED].scores)
    assert script.asked.count(C) < script.asked.count(B)


def test_the_best_by_either_measure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({UNSCALED: 0.2, A: 0.1, B: 0.9, C: 0.1}, {UNSCALED: 2.0, A: 1.8, B: 2.4, C: 3.0})
    found = run_search(script, monkeypatch, rounds=7)
    assert searching.finalists(found) == {"retrieval": B, "perplexity": A}
    assert [each.scaling for each in found if each.dropped] == [C]


def test_of_equals_the_mildest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_search(Script({UNSCALED: 0.5, A: 0.5, B: 0.5}), monkeypatch, rounds=4)
    assert searching.finalists(found) == {"retrieval": UNSCALED}


def test_one_round_is_done_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_search(Script({UNSCALED: 0.5, A: 0.5}), monkeypatch, rounds=0)
    assert [len(each.scores) for each in found] == [searching.FIRST_ROUND] * 2


@pytest.mark.parametrize("overflow", [0, 5])
def test_losses_that_are_no_numbers_are_the_worst(monkeypatch: pytest.MonkeyPatch, overflow: int) -> None:
    script = Script({UNSCALED: 0.5, A: 0.5, B: 0.5}, {UNSCALED: 2.0, A: 1.5, B: 1.8})
    script.losses[A][overflow:] = math.nan
    found = run_search(script, monkeypatch, rounds=7)
    assert searching.finalists(found)["perplexity"] == B
    assert found[1].loss == math.inf
    script.losses[UNSCALED][:] = script.losses[B][:] = math.nan
    everywhere = run_search(script, monkeypatch, rounds=7)
    assert searching.finalists(everywhere)["perplexity"] == UNSCALED


def test_a_scaling_whose_losses_overflow_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({UNSCALED: 0.5, A: 0.9, B: 0.1}, {UNSCALED: 2.0, A: 1.9, B: 1.5})
    script.losses[B][:] = math.nan
    assert [each.dropped for each in run_search(script, monkeypatch, rounds=7)] == [False, False, True]


def test_a_lost_window_is_worse_and_makes_the_perplexity_infinite() -> None:
    losses, baseline = [1.0] * 9 + [math.nan], [2.0] * 9 + [1.0]
    found = compare("perplexity", losses, baseline)
    assert (found.better, found.worse, found.difference) == (9, 1, math.inf)
    assert summarise("perplexity", losses) == (math.inf, 0.0, math.inf)
    both = compare("perplexity", [math.nan, 1.0], [math.inf, 2.0])
    assert (both.better, both.worse) == (1, 0)


def test_the_clock_counts_what_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    monkeypatch.setattr(searching.Clock, "note", lambda _, tokens, __: noted.append(tokens))
    items = {"long": [Item((1,) * 50, ("x",))] * 20, "short": [Item((1,) * 7, ("x",))] * 2}
    windows = np.zeros((6, 64), dtype=np.int64)
    monkeypatch.setattr(searching, "_round", lambda _, __, candidate, ___, ____: candidate)
    pool = searching.Pool({}, items, windows, None, 64)  # type: ignore[arg-type]
    searching.search(None, pool, [UNSCALED], searching.Clock(1e9), int)  # type: ignore[arg-type]
    assert noted == [4 * 50 + 2 * 7 + 4 * 64, 4 * 50 + 2 * 64, 8 * 50, 4 * 50]


# What is printed

GAIN = Comparison(0.2, 0.1, 0.3, 30, 3, 1e-6)
COST = Comparison(-0.01, -0.05, 0.03, 1, 2, 1.0)
NEITHER = Comparison(0.02, -0.1, 0.14, 6, 5, 1.0)
LOSS = Comparison(-0.2, -0.3, -0.1, 3, 30, 1e-6)
EVEN = Comparison(0.99, 0.97, 1.01, 11, 9, 0.8)
RATIO = Comparison(1.04, 1.02, 1.06, 2, 18, 4e-4)


def tuning(*choices: Choice) -> Tuning:
    advice = next((each.scaling for each in choices if each.helps), UNSCALED)
    words = command("org/model", advice, None, None) if advice != UNSCALED else None
    found = [Candidate(UNSCALED, (0.0, 1.0), (2.0,)), Candidate(B, (1.0, 1.0), (2.1,))]
    return Tuning("model", 256, 1024, found, choices, Results([], {}), advice, words, 12.0)


def test_a_choice_that_helps_is_recommended_with_its_cost() -> None:
    text = report.tuning(
        tuning(
            Choice("retrieval", B, AgainstNone(GAIN, EVEN), 200, AgainstNone(COST, RATIO)),
            Choice("perplexity", UNSCALED, AgainstNone(), 200, AgainstNone()),
        )
    )
    assert (
        "By retrieval: ntk, factor 4, better than none; at the target: "
        "retrieval +20.0 points (+10.0 to +30.0; prompts: 30 better, 3 worse), "
        "perplexity x 0.990 (0.970 to 1.010; windows: 11 better, 9 worse)"
    ) in text
    short = "retrieval -1.0 points (-5.0 to +3.0; prompts: 1 better, 2 worse), perplexity x 1.040"
    assert f"at 200 tokens: {short}" in text
    assert "p = " not in text, "the interval and the counts say the same"
    assert "By perplexity: none is best." in text
    assert "ntk-convert org/model --scale 4 --out DIR" in text


def test_when_nothing_helps_it_says_so() -> None:
    found = tuning(Choice("retrieval", B, AgainstNone(NEITHER), None, AgainstNone()))
    assert found.command is None
    text = report.tuning(found)
    assert "not measurably better than none" in text
    assert "No scaling measurably helps" in text
    assert "tokens:" not in text.partition("By retrieval")[2]
    assert "ntk-convert" not in text


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (
            Comparison(0.25, 0.05, 0.45, 5, 0, 0.0625),
            "not measurably better than none",
            "(+5.0 to +45.0; prompts: 5 better, 0 worse, which may be chance, p = 0.062)",
        ),
        (
            Comparison(0.02, -0.01, 0.05, 30, 12, 0.008),
            "better than none",
            "(-1.0 to +5.0; prompts: 30 better, 12 worse, which is more than chance, p = 0.008)",
        ),
    ],
)
def test_an_interval_that_says_other_than_the_counts_is_explained(
    found: Comparison, verdict: str, words: str
) -> None:
    text = report.tuning(tuning(Choice("retrieval", B, AgainstNone(found), None, AgainstNone())))
    assert f"ntk, factor 4, {verdict}; at the target" in text
    assert words in text
    assert "decided by how many prompts or windows got better and how many worse" in text


@pytest.mark.parametrize(
    ("counts", "used_up", "advice"),
    [
        ({"prompts": 40}, (), "A longer search (--minutes) can tell"),
        ({"prompts": 40}, ("prompts",), "of prompts were used. More prompts (--prompts) can tell"),
        ({"perplexity": 4}, ("perplexity",), "of perplexity were used. More text (--text) can tell"),
        (
            {"prompts": 40, "perplexity": 60},
            ("prompts",),
            "of prompts were used. A longer search (--minutes) or more prompts (--prompts) can tell",
        ),
        ({"lines": searching.POOL}, ("lines",), "All prompts and windows were used, 100 of each kind"),
        ({"beir": 4}, ("beir",), "of beir were used. More queries (--beir) can tell"),
        ({"longembed_needle": searching.QUERIES}, ("longembed_needle",), "at most 25 and 100 of each kind"),
    ],
)
def test_what_helps_to_tell_more_is_named(
    counts: dict[str, int], used_up: tuple[str, ...], advice: str
) -> None:
    curve = Results(
        [measured(task, 1024, UNSCALED, *[1.0] * count) for task, count in counts.items()],
        {"model": {"train_length": 256}},
    )
    choice = Choice("retrieval", B, AgainstNone(NEITHER), None, AgainstNone())
    text = report.tuning(replace(tuning(choice), curve=curve, used_up=used_up))
    assert advice in text
    assert ("--minutes" in text) == ("--minutes" in advice)


def test_what_is_used_up_is_known_by_the_longest_length() -> None:
    items = [ITEM] * 5
    available = Exam({"a": {8: items * 2, 16: items}, "b": {16: items}}, {}, np.zeros((3, 16), int), (8, 16))
    curve = Results(
        [
            measured("a", 8, UNSCALED, *[0.0] * 6),
            measured("a", 16, UNSCALED, *[0.0] * 5),
            measured("b", 16, UNSCALED, *[0.0] * 4),
            measured("perplexity", 16, UNSCALED, *[0.0] * 3),
        ],
        {},
    )
    assert tuning_module._used_up(curve, available) == ["a", "perplexity"]


def test_a_worse_perplexity_never_helps() -> None:
    better = replace(RATIO, difference=0.96, better=18, worse=2)
    assert not Choice("perplexity", B, AgainstNone(None, RATIO), 256, AgainstNone()).helps
    assert Choice("perplexity", B, AgainstNone(None, better), 256, AgainstNone()).helps


@pytest.mark.parametrize(
    ("measure", "at_target"),
    [
        ("retrieval", AgainstNone(GAIN, RATIO)),
        ("perplexity", AgainstNone(LOSS, replace(RATIO, difference=0.96, better=18, worse=2))),
    ],
)
def test_what_helps_by_one_measure_and_harms_by_the_other_is_not_advised(
    measure: str, at_target: AgainstNone
) -> None:
    choice = Choice(measure, B, at_target, 256, AgainstNone())
    assert (choice.gains, choice.loses, choice.helps) == (True, True, False)
    text = report.tuning(tuning(choice))
    other = {"retrieval": "perplexity", "perplexity": "retrieval"}[measure]
    assert f"better than none, and worse by {other}" in text
    assert "harms by the other: leave the model as it is" in text
    assert "ntk-convert" not in text


def measured(task: str, length: int, scaling: Scaling, *scores: float) -> Measurement:
    metric: Any = "perplexity" if task == "perplexity" else "accuracy"
    return Measurement("model", str(scaling), task, metric, length, scores, 0.5, 0.0, 1.0)


def test_only_the_shortest_length_up_to_the_trained_one_is_pooled() -> None:
    curve = Results(
        [
            measured(task, length, scaling, *[float(scaling == B)] * count)
            for scaling in (UNSCALED, B)
            for task, length, count in (
                ("lines", 256, 4),
                ("lines", 1024, 5),
                ("prompts", 200, 3),
                ("prompts", 900, 6),
                ("topics", 700, 7),
                ("perplexity", 256, 2),
                ("perplexity", 1024, 8),
            )
        ],
        {},
    )
    choice = tuning_module._choice("retrieval", B, curve, 256)
    assert choice.short == 200
    assert choice.at_short.retrieval is not None
    assert choice.at_target.retrieval is not None
    assert choice.at_target.perplexity is not None
    assert choice.at_short.retrieval.better == 3
    assert choice.at_short.perplexity is None
    assert choice.at_target.retrieval.better == 5 + 6 + 7
    assert choice.at_target.perplexity.worse == 8
    assert tuning_module._choice("retrieval", B, curve, 199).short is None
    assert tuning_module._choice("retrieval", B, curve, 199).at_short == AgainstNone()
    assert tuning_module._choice("retrieval", UNSCALED, curve, 256).at_target == AgainstNone()


def test_the_command_says_what_was_asked() -> None:
    dynamic = Dynamic("ntk", "position", rate=2.0, train_length=256)
    words = shlex.split(command("a folder/model", dynamic, 256, "main"))
    assert words[1] == "a folder/model"
    for option, value in (
        ("--method", "ntk"),
        ("--dynamic", "position"),
        ("--rate", "2"),
        ("--train-length", "256"),
        ("--revision", "main"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--method" not in command("m", Static("ntk", 2.0), None, None)
    assert "linear" in command("m", Static("linear", 2.5), None, None)
    by_parts = command("m", Static("by-parts", 4.0, (16.0, 64.0)), 256, None, told=False)
    assert by_parts == "ntk-convert m --method by-parts --scale 4 --ramp 0.0625 0.25 --out DIR"


# With a real model


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Prompts for tiny-bloom, of 1 and 4 times its trained length."""
    rng = np.random.default_rng(0)
    vocabulary = json.loads((EXAMPLE / "tokenizer.json").read_text())["model"]["vocab"]
    keys = [word for word in vocabulary if "-" in word]
    path = tmp_path / "prompts.jsonl"
    with path.open("w") as file:
        for length in (256, 1024):
            for _ in range(40):
                names = rng.permutation(keys)[: (length - 3) // 3]
                values = rng.integers(10, 42, len(names))
                lines = [f"LINE {name} {value}" for name, value in zip(names, values, strict=True)]
                asked = int(rng.integers(len(names)))
                prompt = "\n".join([*lines, f"ASK {names[asked]}"])
                row = {"prompt": prompt, "answer": str(values[asked]), "length": length}
                file.write(json.dumps(row) + "\n")
    return path


def test_a_trained_model(run: Command, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--prompts", prompts, "--train-length", 256, "--minutes", 0.1, "--out", out)
    found = run("tune", EXAMPLE, "--target-length", 1024, *words)
    assert found.code == 0, found.err
    written = json.loads((out / "tuning.json").read_text())
    tried = {each["scaling"]: each for each in written["candidates"]}
    assert len(tried["none"]["scores"]) >= searching.FIRST_ROUND
    curve = Results.from_json(json.loads((out / "results.json").read_text()))
    assert curve.measurements[0].value > 0.7, "the model can do the task at the trained length"
    assert {each.length for each in curve.measurements} == {256, 1024}
    again = evaluate(
        [EXAMPLE], tasks=[make_task("prompts", prompts)], lengths=[256], items=curve.measurements[0].items
    )
    [short] = [each for each in again.measurements if each.length == 256]
    assert short.scores == curve.measurements[0].scores
    if written["command"]:
        words = shlex.split(written["command"])[1:]
        assert run(*words[:-1], tmp_path / "baked", "--no-verify").code == 0
        config = json.loads((tmp_path / "baked" / "config.json").read_text())
        assert config["alibi_scaling"] == written["advice"]
    else:
        assert "No scaling measurably helps" in found.out


def test_untrained_weights_are_left_as_they_are(run: Command, tmp_path: Path) -> None:
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4)
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text(" ".join(f"w{number}" for number in rng.integers(4, tiny.VOCAB_SIZE, 4000)))
    result = tune(source, 64, tasks=[], text=[text], train_length=24, minutes=0.05, seed=3)
    assert result.curve.settings == {
        "seed": 3,
        "minutes": 0.05,
        "text": {"text.txt": hashlib.sha256(text.read_bytes()).hexdigest()},
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
        },
    }
    assert [each.measure for each in result.choices] == ["perplexity"]
    assert [each.length for each in result.curve.measurements][:3] == [24, 48, 64]
    found = run(
        "tune",
        source,
        "--target-length",
        64,
        "--train-length",
        24,
        "--text",
        text,
        "--tasks",
        "",
        "--minutes",
        0.05,
    )
    assert found.code == 0, found.err
    assert "By perplexity" in found.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target-length", 64), "add --train-length"),
        (("--target-length", 64, "--train-length", 64), "not above the trained length"),
        (("--target-length", 64, "--train-length", 24, "--minutes", 0), "--minutes"),
        (("--target-length", 64, "--train-length", 24, "--minutes", "inf"), "--minutes"),
        (("--target-length", 64, "--train-length", 24, "--minutes", "nan"), "--minutes"),
        (("--target-length", (1 << 24) + 1, "--train-length", 24), "at most 16777216"),
        (("--target-length", 64, "--train-length", 24), "give longer lengths (at least"),
        ((), "--target-length"),
    ],
)
def test_what_cannot_be_tuned(
    refused: Callable[..., str], pristine: Callable[..., Path], words: tuple[Any, ...], message: str
) -> None:
    assert message in refused("tune", pristine("bloom"), *words, code=2)


def test_a_converted_repository_is_refused(run: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(EXAMPLE, "--scale", 2, "--no-verify", "--out", out).code == 0
    found = run("tune", out, "--target-length", 1024, "--train-length", 256)
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "give its source" in found.err


def test_prompts_beyond_the_target_are_of_no_use(prompts: Path) -> None:
    with pytest.raises(UsageError, match="no prompts between"):
        tune(EXAMPLE, 500, tasks=[make_task("prompts", prompts)], train_length=256)


def test_one_prompt_cannot_both_choose_and_measure(refused: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    rows = [{"prompt": "ASK", "answer": "1", "length": length} for length in (256, 256, 1024)]
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ("--target-length", 1024, "--train-length", 256, "--prompts", file)
    assert "at least two" in refused("tune", EXAMPLE, *words, code=2)


@pytest.mark.slow
def test_a_rotary_model(tmp_path: Path) -> None:
    source = rotary.rotary(tmp_path / "source", "llama")
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text(" ".join(f"w{number}" for number in rng.integers(4, tiny.VOCAB_SIZE, 4000)))
    result = tune(source, 256, tasks=[], text=[text], minutes=0.05)
    tried = [each.scaling for each in result.candidates]
    assert tried[0] == UNSCALED
    assert [each.dynamic for each in tried[1:3] if isinstance(each, Dynamic)] == ["length", "length"]
    assert all(each.loss is not None for each in result.candidates)


@pytest.mark.parametrize("command", ["eval", "tune"])
def test_a_full_disk_does_not_lose_the_result(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from converter.result import outputs

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(outputs, "write_files", full)
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number}" for number in range(4, tiny.VOCAB_SIZE)) * 20)
    words = {
        "eval": ("--lengths", 32, "--tasks", "perplexity", "--items", 3),
        "tune": ("--target-length", 48, "--tasks", "", "--minutes", 0.01),
    }[command]
    found = run(command, source, *words, "--train-length", 24, "--text", text, "--out", tmp_path / "out")
    assert found.code == 1
    assert "perplexity" in found.out
    assert "No space" in found.err
