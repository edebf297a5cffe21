"""``tune``: what it tries, how it chooses, and what it says."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import report
from converter.errors import UsageError
from converter.evaluation import search as searching
from converter.evaluation.candidates import candidates, command, ladder
from converter.evaluation.evaluate import evaluate
from converter.evaluation.results import Comparison, Results
from converter.evaluation.search import NONE, Candidate
from converter.evaluation.tasks import make_task
from converter.evaluation.tune import Choice, Tuning, tune
from converter.scaling import Scaling
from tests import tiny
from tests.conftest import Run

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-bloom"
Command = Callable[..., Run]


@given(st.integers(1, 5000), st.integers(2, 40000))
def test_what_is_tried(trained: int, more: int) -> None:
    target = trained + more
    found = candidates(trained, target)
    assert found[0] == NONE
    assert len(set(found)) == len(found)
    factors = [each.factor for each in found if each.method == "ntk" and each.factor]
    assert target / trained in factors
    assert all(1 < factor <= 2 * target / trained for factor in factors)
    lengths = ladder(trained, target)
    assert (lengths[0], lengths[-1]) == (trained, target)
    assert all(1 < after / before <= 2 for before, after in pairwise(lengths))


# The search, on models whose answers are known


class Script:
    """A subject whose scores and losses are drawn from each scaling's own probability and loss."""

    def __init__(self, right: dict[Scaling, float], loss: dict[Scaling, float] | None = None) -> None:
        rng = np.random.default_rng(0)
        chance = rng.random(400)
        self.scores = {each: (chance < share).astype(float) for each, share in right.items()}
        noise = rng.normal(0, 0.02, 400)
        self.losses = {each: mean + noise for each, mean in (loss or {}).items()}
        self.asked: list[Scaling] = []


A, B, C = (Scaling("ntk", factor=float(factor)) for factor in (2, 4, 8))


def run_search(script: Script, monkeypatch: pytest.MonkeyPatch, rounds: int) -> list[Candidate]:
    """``search`` over the script's scalings, as if the time sufficed for so many rounds."""

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
    pool = searching.Pool({}, {"task": [None] * 400}, np.empty((0, 0), dtype=np.int64), None, 64)  # type: ignore[arg-type, list-item]
    return searching.search(None, pool, list(script.scores), Time(60.0), int)  # type: ignore[arg-type]


def test_the_best_is_found_and_the_worst_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({NONE: 0.5, A: 0.6, B: 0.9, C: 0.1})
    found = run_search(script, monkeypatch, rounds=7)
    by_scaling = {each.scaling: each for each in found}
    assert searching.finalists(found) == {"retrieval": B}
    assert by_scaling[C].dropped
    assert not by_scaling[NONE].dropped
    assert len(by_scaling[C].scores) < len(by_scaling[B].scores) == len(by_scaling[NONE].scores)
    assert script.asked.count(C) < script.asked.count(B)


def test_the_best_by_either_measure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({NONE: 0.2, A: 0.1, B: 0.9, C: 0.1}, {NONE: 2.0, A: 1.8, B: 2.4, C: 3.0})
    found = run_search(script, monkeypatch, rounds=7)
    assert searching.finalists(found) == {"retrieval": B, "perplexity": A}
    assert [each.scaling for each in found if each.dropped] == [C]


def test_of_equals_the_mildest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_search(Script({NONE: 0.5, A: 0.5, B: 0.5}), monkeypatch, rounds=4)
    assert searching.finalists(found) == {"retrieval": NONE}


def test_one_round_is_done_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_search(Script({NONE: 0.5, A: 0.5}), monkeypatch, rounds=0)
    assert [len(each.scores) for each in found] == [searching.FIRST_ROUND] * 2


# What is said

GAIN = Comparison(0.2, 0.1, 0.3, 30, 3, 1e-6)
COST = Comparison(-0.01, -0.05, 0.03, 1, 2, 1.0)
NEITHER = Comparison(0.02, -0.1, 0.14, 6, 5, 1.0)
RATIO = Comparison(1.04, 1.02, 1.06, 2, 18, 4e-4)


def tuning(*choices: Choice) -> Tuning:
    advice = next((each.scaling for each in choices if each.helps), NONE)
    words = command("org/model", advice, None, None) if advice != NONE else None
    found = [Candidate(NONE, (0.0, 1.0), (2.0,)), Candidate(B, (1.0, 1.0), (2.1,))]
    return Tuning("model", 256, 1024, found, choices, Results([], {}), advice, words, 12.0)


def test_a_choice_that_helps_is_recommended_with_its_cost() -> None:
    text = report.tuning(
        tuning(
            Choice("retrieval", B, GAIN, 256, COST, RATIO), Choice("perplexity", NONE, None, 256, None, None)
        )
    )
    assert "By retrieval: ntk, factor 4, better than none (+20.0 points, +10.0 to +30.0, p = 1e-06)" in text
    assert "at 256 tokens: retrieval -1.0 points, -5.0 to +3.0, p = 1, perplexity x 1.040" in text
    assert "By perplexity: none is best." in text
    assert "ntk-convert org/model --scale 4 --out DIR" in text


def test_when_nothing_helps_it_says_so() -> None:
    found = tuning(Choice("retrieval", B, NEITHER, 256, COST, None))
    assert found.command is None
    text = report.tuning(found)
    assert "not measurably better than none" in text
    assert "No scaling measurably helps" in text
    assert "ntk-convert" not in text


def test_a_worse_perplexity_never_helps() -> None:
    assert not Choice("perplexity", B, RATIO, 256, None, None).helps
    assert Choice("perplexity", B, replace(RATIO, difference=0.96, better=18, worse=2), 256, None, None).helps


def test_the_command_says_what_was_asked() -> None:
    dynamic = Scaling("ntk", dynamic="position", rate=2.0, train_length=256)
    words = shlex.split(command("a folder/model", dynamic, 256, "main"))
    assert words[1] == "a folder/model"
    for option, value in (
        ("--dynamic", "position"),
        ("--rate", "2"),
        ("--train-length", "256"),
        ("--revision", "main"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--method" not in words
    assert "linear" in command("m", Scaling("linear", factor=2.5), None, None)


# The real thing


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Prompts that tiny-bloom understands, of 1 and 4 times its trained length."""
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
    assert tried["none"]["accuracy"] > 0.5, "the model cannot do the task"
    curve = Results.from_json(json.loads((out / "results.json").read_text()))
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
    source = tiny.bloom(tmp_path / "source", 4)
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text(" ".join(f"w{number}" for number in rng.integers(4, tiny.VOCAB_SIZE, 4000)))
    result = tune(source, 64, tasks=[], text=[text], train_length=24, minutes=0.05)
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
        (("--target-length", 64, "--train-length", 24), "does not fit"),
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
