"""``fit``: gradients of the exponents, what is learned from, when it stops, how it is judged and written."""

from __future__ import annotations

import hashlib
import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lines_task
import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from converter import convert, evaluate, fit
from converter.errors import NoGain, UsageError
from converter.evaluation import optimizer
from converter.evaluation.batches import IGNORE, AnsweredPrompt, answers, masked_tokens, next_tokens
from converter.evaluation.losses import masked_positions
from converter.evaluation.optimizer import Optimisation, optimise
from converter.evaluation.paired_test import PairedTest, check_gain, paired_test
from converter.evaluation.split import TextSplit
from converter.evaluation.statistics import fewest_shown, items_to_show
from converter.evaluation.tasks import make_task
from converter.evaluation.tasks.beir import Beir
from converter.evaluation.trainable import TrainableAlibi, attached, losses, memory
from converter.scaling.scaling import Scaling, read_scaling
from tests import tiny
from tests.conftest import Refused, RunCli, edit_json
from tests.dealt import quick
from tests.messages import raises, says
from tests.patched import FAMILIES, TRAIN_LENGTH, config_of, fitted_scaling, load
from tests.reference import ENCODERS as ENCODER_REFERENCES
from tests.reference import FAMILIES as REFERENCES

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-bloom"
TARGET = 4 * TRAIN_LENGTH
EXPONENTS = [[-1.0, 0.0, 2.0, 2.0], [2.0, -1.0, 0.0, 2.0]]
"""Of the model that writes the text, so that there is something to find."""


# --- gradients


def reference_loss(logits: Any, batch: Any) -> float:
    """The mean cross entropy in NumPy float64."""
    likelihood, targets = log_softmax(np.asarray(logits, dtype=np.float64), axis=-1), batch.targets.numpy()
    rows, columns = np.nonzero(targets != IGNORE)
    return -float(likelihood[rows, columns, targets[rows, columns]].mean())


@pytest.mark.parametrize("name", quick([*FAMILIES, *tiny.ENCODERS], "bloom", "mpt", "jina_bert"))
def test_gradients_are_the_slopes_of_the_reference_s_loss(name: str, tmp_path: Path) -> None:
    """Finite differences of the NumPy reference, which knows nothing of folding and checkpoints."""
    decoder = name in FAMILIES
    dynamic = "position" if decoder and FAMILIES.index(name) % 2 == 0 else None
    # Baichuan2's normalised head computes in float32 whatever the model's dtype.
    changes = {"norm_head": False} if name == "baichuan" else {}
    source = (tiny.FACTORIES if decoder else tiny.ENCODERS)[name](tmp_path / "source", 4, **changes)
    value = fitted_scaling(4, 2, dynamic)
    convert(source, tmp_path / "out", slopes=value, train_length=TRAIN_LENGTH, verify=False)
    auto_class = AutoModelForCausalLM if decoder else AutoModelForMaskedLM
    model = load(tmp_path / "out", auto_class, alibi_scaling=None).double()
    ids = tiny.token_ids(2, 40)
    batch = next_tokens(ids) if decoder else masked_tokens(ids, masked_positions(ids), tiny.UNKNOWN)
    form = read_scaling(value)
    assert form.scaled
    alibi = TrainableAlibi(tuple(model.base_model.alibi.slopes[0]), form, model.device, torch.float64)
    own = model.base_model.alibi
    with attached(model, alibi):
        loss = losses(model, batch).mean()
        loss.backward()
        first = alibi.exponents.detach().clone()
        with torch.no_grad():
            alibi.exponents += 0.5
            assert losses(model, batch).mean() != loss, "slopes of an earlier pass"
            alibi.exponents.copy_(first)
    assert model.base_model.alibi is own
    assert memory(model, 2, 80) == 2 * memory(model, 2, 40) > 0
    assert all(parameter.grad is None for parameter in model.parameters())

    config, (_, tensors) = config_of(tmp_path / "out"), tiny.read(tmp_path / "out")

    def at(**changes: list[list[float]]) -> float:
        changed = {**config, "alibi_scaling": {**value, **changes}}
        more = () if decoder else ("MaskedLM",)
        logits = (REFERENCES if decoder else ENCODER_REFERENCES)[name].logits
        return reference_loss(logits(changed, tensors, batch.ids.numpy(), None, *more), batch)

    assert loss.item() == pytest.approx(at(), abs=1e-5)
    step = 1e-3
    for (key, numbers), places in zip(
        alibi.parameters().items(), (((0, 1), (0, 3), (1, 2)), ((0, 3), (1, 1))), strict=True
    ):
        found = numbers.grad
        assert found is not None
        largest = float(found.abs().max())
        for layer, head in places:
            up, down = ([list(row) for row in value[key]] for _ in range(2))
            up[layer][head] += step
            down[layer][head] -= step
            expected = (at(**{key: up}) - at(**{key: down})) / (2 * step)
            assert float(found[layer, head]) == pytest.approx(expected, abs=2e-3 * largest)


# --- what is learned from


def test_what_is_predicted() -> None:
    batch = answers([AnsweredPrompt((5, 6, 7, 8), 3), AnsweredPrompt((4, 9), 1)])
    assert batch.ids.tolist() == [[5, 6, 7, 8], [4, 9, 0, 0]]
    assert batch.targets.tolist() == [[IGNORE, IGNORE, 8, IGNORE], [9, IGNORE, IGNORE, IGNORE]]
    assert next_tokens(np.array([[5, 6, 7]])).targets.tolist() == [[6, 7, IGNORE]]


def test_masked_tokens_are_predicted() -> None:
    ids = tiny.token_ids(50, 4)
    split = TextSplit(ids, ids, ids, 2, (4,), lambda _: 50, mask=1)
    [batch] = split.batches(ids)
    hidden = batch.targets != IGNORE
    assert hidden.any(dim=1).all()
    assert (batch.ids[hidden] == 1).all()
    assert torch.equal(torch.where(hidden, batch.targets, batch.ids), torch.from_numpy(ids))


# --- the optimizer


class Known:
    """A split whose loss is known: the parts are not read."""

    name, training_tokens, validation, test = "known", 10**9, None, None

    def draw_batch(self, _: Any) -> Any:
        return next_tokens(np.zeros((1, 2), dtype=np.int64))

    def batches(self, _: Any) -> Sequence[Any]:
        return []


@pytest.fixture
def down(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Optimisation]:
    """``down(seen, steps)``: an optimisation that sees these validation losses, one after another."""
    form = Scaling("fitted", 4.0, exponents=((0.0, 0.0),), temperatures=((0.0, 0.0),))

    def run(seen: Sequence[Any], steps: int, seconds: float = math.inf) -> Optimisation:
        given = iter(seen)

        def row_losses(*_: Any) -> tuple[float, ...]:
            loss = next(given)
            if isinstance(loss, BaseException):
                raise loss
            return (loss,)

        alibi = TrainableAlibi((0.5, 0.1), form, torch.device("cpu"))
        monkeypatch.setattr(
            optimizer, "losses", lambda *_: sum(map(torch.sum, alibi.parameters().values()))[None]
        )
        monkeypatch.setattr(optimizer, "row_losses", row_losses)
        model: Any = torch.nn.Module()
        model.base_model = torch.nn.Module()
        model.base_model.alibi = None
        return optimise(model, alibi, [Known()], steps=steps, seconds=seconds)

    return run


TURNING = [2.0, 1.5, *[1.6] * 9]


@pytest.mark.parametrize(
    ("seen", "steps", "stopped", "best"),
    [
        (TURNING, 10, 10, 1),  # never before 60 steps
        (TURNING, 60, 60, 6),
        (TURNING, 100, 70, 10),  # the first evaluation gained, 60 more steps nothing
        (TURNING, 200, 80, 20),
        (TURNING, 400, 160, 40),  # 60 steps would be less than three evaluations
        ([2.0, 1.5, 1.6], 2, 2, 1),  # not the last
        ([2.0, *[2.1] * 9, 1.0], 40, 40, 40),  # a late gain
        ([2.0, math.nan, math.inf, 1.9, 2.0], 4, 4, 3),  # what is no number is never the best
    ],
)
def test_the_validation_part_decides_which_step_is_best_and_when_to_stop(
    seen: list[float], steps: int, stopped: int, best: int, down: Callable[..., Optimisation]
) -> None:
    found = down(seen, steps)
    assert (found.steps, found.best.step) == (stopped, best)
    assert found.ended == ("steps" if stopped == steps else "converged")
    [[ours, _]], [[last, _]] = found.best.scaling.exponents, found.points[-1].scaling.exponents
    assert last <= ours < 0
    assert (last == ours) == (best == stopped or ours == -1.0)


def test_when_the_time_is_up(down: Callable[..., Optimisation]) -> None:
    found = down([2.0, 1.5], steps=10, seconds=0.0)
    assert (found.ended, found.steps, found.best.step) == ("time", 1, 1)
    assert down([2.0, 1.5], steps=1, seconds=0.0).ended == "steps"


def test_ctrl_c_keeps_the_best_so_far_and_numbers_stay_in_their_range(
    down: Callable[..., Optimisation],
) -> None:
    found = down([2.0, 1.5, KeyboardInterrupt()], steps=10)
    assert found.ended == "interrupted"
    assert found.best.losses == (1.5,)
    found = down(range(100, 0, -1), steps=60)  # and numbers stay in their range
    assert found.points[-1].scaling.exponents == found.points[-1].scaling.temperatures == ((-1.0, -1.0),)
    with pytest.raises(KeyboardInterrupt):
        down([KeyboardInterrupt()], steps=10)


# --- the whole, with text that the model writes itself under other slopes


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny BLOOM, and text that it writes with the slopes of ``EXPONENTS``: rows of ``TARGET`` tokens."""
    folder = tmp_path_factory.mktemp("fitting")
    source = tiny.FACTORIES["bloom"](folder / "source", 4)
    convert(
        source,
        folder / "writer",
        slopes={"type": "fitted", "factor": TARGET / TRAIN_LENGTH, "exponents": EXPONENTS},
        verify=False,
    )
    torch.manual_seed(0)
    ids = load(folder / "writer").generate(
        input_ids=torch.from_numpy(tiny.token_ids(80, 1)),
        do_sample=True,
        top_k=0,
        min_new_tokens=TARGET - 1,
        max_new_tokens=TARGET - 1,
        suppress_tokens=list(range(tiny.PAD + 1)),
    )
    assert ids.shape == (80, TARGET)
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(f"w{token}" for token in row) for row in ids.tolist()))
    return source, text


def command(source: Path, text: Path) -> list[Any]:
    words = ["fit", source, "--target-length", TARGET, "--train-length", TRAIN_LENGTH, "--text", text]
    return [*words, "--batch-size", 16, "--device", "cpu"]


OPTIONS = {"train_length": TRAIN_LENGTH, "steps": 20, "device": "cpu", "batch_size": 16}


def test_what_was_changed_is_found_again(written: tuple[Path, Path]) -> None:
    source, text = written
    found = fit(source, TARGET, text=[text], static=True, **OPTIONS)
    exponents = np.array(found.scaling.exponents)
    assert exponents.shape == (2, 4)
    assert np.corrcoef(exponents.ravel(), np.ravel(EXPONENTS))[0, 1] > 0.5
    verdict, at_trained = found.judged
    assert (verdict.measure, verdict.length, verdict.items) == ("text", TARGET, 26)
    assert (at_trained.length, at_trained.items) == (TRAIN_LENGTH, 4 * 26)
    assert verdict.verdict == "helps"
    assert verdict.after < verdict.before
    assert found.looks[0].scaling.exponents == ((0.0,) * 4,) * 2
    assert found.scaling.temperatures is None
    bare = {key: value for key, value in found.slopes.items() if key != "fitted"}
    assert read_scaling(bare) == found.scaling


def test_the_command_line_and_python_and_the_seed_that_decides(
    written: tuple[Path, Path], run: RunCli, tmp_path: Path
) -> None:
    source, text = written
    out = tmp_path / "out"
    words = command(source, text)
    result = run(*words, "--steps", 6, "--static", "--shared", "--temperatures", "--out", out, "--json")
    assert result.code == 0, result.err
    says(result.err, "fitting 8 numbers", "weights")
    assert result.json["verdict"] == "helps"
    found = result.json["fit"]
    assert [verdict["length"] for verdict in found["fitted"]["judged"]] == [TARGET, TRAIN_LENGTH]
    assert len(found["exponents"]) == len(found["temperatures"]) == 1
    assert any(found["temperatures"][0])
    kept = json.loads((out / "slopes.json").read_text(encoding="utf-8"))
    assert kept["fitted"]["text"] == {"text.txt": hashlib.sha256(text.read_bytes()).hexdigest()}
    scaling = config_of(out)["alibi_scaling"]
    assert scaling == {key: value for key, value in kept.items() if key != "fitted"}
    assert scaling["factor"] == TARGET / TRAIN_LENGTH
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    options = {**OPTIONS, "steps": 6, "shared": True, "static": True, "temperatures": True}
    again, other = (fit(source, TARGET, text=text, seed=seed, **options).scaling for seed in (0, 1))
    assert again.to_json() == scaling != other.to_json()
    convert(source, tmp_path / "again", slopes=out / "slopes.json", verify=False)
    assert config_of(tmp_path / "again")["alibi_scaling"] == scaling


@pytest.mark.parametrize("evaluations", [4, 0])
def test_ctrl_c_writes_the_best_so_far_or_nothing(
    evaluations: int, written: tuple[Path, Path], run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pressed while the validation loss is computed for the fourth time, at step 6; or in the first step."""
    name = "row_losses" if evaluations else "losses"
    real, calls = getattr(optimizer, name), []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == max(1, evaluations):
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(optimizer, name, interrupted)
    result = run(*command(*written), "--steps", 20, "--static", "--out", tmp_path / "out")
    if evaluations:
        assert result.code == 0, result.err
        says(result.err, "6 steps", "interrupted")
        assert config_of(tmp_path / "out")["alibi_scaling"]["type"] == "fitted"
    else:
        assert result.code == 1
        line = result.err.splitlines()[-1]
        assert line.startswith("error: ")
        says(line, "interrupted", "nothing was written")
        assert not list(tmp_path.iterdir())


def test_text_that_a_model_does_not_understand_is_refused(refused: Refused, tmp_path: Path) -> None:
    """Random words, which a trained model predicts worse than guessing."""
    vocabulary = list(json.loads((EXAMPLE / "tokenizer.json").read_text())["model"]["vocab"])[4:]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(vocabulary, 16 * 300)))
    words = ["fit", EXAMPLE, "--train-length", 256, "--target-length", 300, "-q", "--text", text]
    message = refused(*words, "--out", tmp_path / "out", code=2)
    says(message, "tiny-bloom", "--text", "its loss is 1", "at 256 tokens", "6.6", "give text")


def test_text_that_tells_nothing_changes_nothing(
    written: tuple[Path, Path], refused: Refused, tmp_path: Path
) -> None:
    """It is what the model writes with its own slopes."""
    source, _ = written
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "suppress_tokens": list(range(tiny.PAD + 1))}
    length = {"min_new_tokens": TARGET - 1, "max_new_tokens": TARGET - 1}
    stock = AutoModelForCausalLM.from_pretrained(source)
    ids = stock.generate(torch.from_numpy(tiny.token_ids(20, 1)), **options, **length)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{token}" for token in ids.flatten().tolist()))
    words = [*command(source, text), "-q"]
    message = refused(*words, "--steps", 6, "--out", tmp_path / "out")
    says(message, "no fitted slopes are better")


def test_answers_are_learned(written: tuple[Path, Path], tmp_path: Path) -> None:
    source, text = written
    rows = [line.split() for line in text.read_text().splitlines()]
    half = TARGET // 2  # one token less in all, for the start that the tokenizer adds to a prompt
    prompts = [{"prompt": " ".join(row[:half]), "answer": " ".join(row[half:-1])} for row in rows]
    prompts += [{"prompt": " ".join(row[:9]), "answer": " ".join(row[9:20])} for row in rows[:24]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts)))
    said: list[str] = []
    options = {**OPTIONS, "prompts": [make_task("prompts", file)], "say": said.append}
    found = fit(source, TARGET, static=True, **options)
    verdict, near = found.judged
    assert (verdict.measure, verdict.length, verdict.items) == ("prompts", TARGET, 26)
    assert (near.measure, near.length, near.items) == ("prompts", 21, 8)  # they judge harm
    assert verdict.verdict == "helps"
    says(said[1], "26 prompts", "8 of them get better", "8 within the trained length")


def paired(changes: Sequence[float], measure: str = "text") -> PairedTest:
    stock = np.linspace(1, 2, len(changes))
    return paired_test(measure, 8, tuple(stock), tuple(stock + np.array(changes)))


SPREAD = np.linspace(0.9, 1.1, 20)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ([*(-1.0 * SPREAD), *(0.001 * SPREAD)], "helps"),
        ([*(1.0 * SPREAD), *(-0.001 * SPREAD)], "does not help"),
        ([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6], "helps"),
        ([-0.1, -0.2, -0.3, -0.4, -0.5], "cannot tell"),
        ([-0.1, math.nan, -0.2], "does not help"),
        # Prompts that were right already say nothing, though most of them got a little worse.
        ([*(-0.8 * SPREAD[:8]), *(1e-5 * SPREAD), *(1e-6 * SPREAD)], "helps"),
        ([*(-0.8 * SPREAD[:4]), *(1e-5 * SPREAD)], "cannot tell"),
        ([-1.2] * 5 + [0.001] * 10, "cannot tell"),  # as seen: p = 0.06
        ([-1.2] * 13 + [0.001] * 27, "helps"),  # the same of more
        ([0.001, -0.001] * 10, "does not help"),
        ([0.0] * 20, "does not help"),
        ([0.1, -0.1], "cannot tell"),
    ],
)
def test_what_is_a_gain(changes: Sequence[float], verdict: str) -> None:
    found = paired(changes)
    assert found.verdict == verdict
    assert found.harms == (verdict == "does not help" and not np.mean(changes) <= 0)
    assert found.needed >= 6
    assert found.needed_for_gain > found.items
    if verdict == "cannot tell":
        assert found.needed > found.items


@pytest.mark.parametrize(
    ("changes", "text", "prompts"),
    [
        ([*(-0.5 * SPREAD), 6.0], "cannot tell", "helps"),
        ([*(-0.5 * SPREAD), 60.0], "cannot tell", "cannot tell"),  # the mean loss rises
        ([*(-0.5 * SPREAD), math.inf], "does not help", "does not help"),
    ],
)
def test_one_prompt_does_not_outweigh_all_others(changes: Sequence[float], text: str, prompts: str) -> None:
    assert paired(changes).verdict == text
    assert paired(changes, "prompts").verdict == prompts
    assert paired(changes, "prompts").harms == (prompts == "does not help")


def test_what_is_written() -> None:
    better, equal, worse = (paired(change * SPREAD) for change in (-0.1, 0.0, 0.1))
    check_gain([better, equal], [], "")
    check_gain([better], [equal], "")
    # Harm outweighs gain, and a gain within the trained length is none.
    for gain, harm in (
        ([better, worse], []),
        ([better], [worse]),
        ([equal], []),
        ([worse], []),
        ([equal], [better]),
    ):
        with raises(NoGain, "no fitted slopes are better", "nothing was written", "9 steps") as caught:
            check_gain(gain, harm, "9 steps")
        assert isinstance(caught.value, NoGain)
        assert caught.value.verdict == "does not help"
    few = paired([-1.2] * 5 + [0.001] * 10)
    with raises(NoGain, "cannot tell", f"and {few.needed} the ", f"give about {3 * few.needed}") as caught:
        check_gain([few, equal], [], "9 steps")
    assert isinstance(caught.value, NoGain)
    assert caught.value.verdict == "cannot tell"
    assert few.seen == pytest.approx((1.2 * 5 - 0.001 * 10) / 15)
    assert few.needed_for_gain > few.needed
    says(
        caught.value,
        f"{few.needed_for_gain} windows",
        "a gain of 2 % of perplexity",
        "32.9 % of perplexity that were seen",
    )
    with raises(NoGain, "cannot tell", "at most", "give"):
        check_gain([replace(few, needed=10**6)], [], "9 steps")


@pytest.mark.parametrize("items", [6, 15, 40])
def test_the_gain_that_is_promised_is_shown(items: int) -> None:
    """In about four of five trials."""
    rng, share = np.random.default_rng(0), fewest_shown(items) / items
    shown = [
        paired(-rng.uniform(0.5, 1.5, items) * (rng.random(items) < share)).verdict == "helps"
        for _ in range(50)
    ]
    assert np.mean(shown) > 0.65
    assert np.mean(shown) < 0.95 or share == 1
    assert items_to_show(math.sqrt(share * (1 - share)), share) <= items


@pytest.mark.slow
def test_a_trained_model_finds_more(tmp_path: Path) -> None:
    """At a length beyond the one that it was fitted to."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines_task.prompts_as_json([768], 120, seed=1), encoding="utf-8")
    prompts = [make_task("prompts", file)]
    options = {"train_length": 256, "steps": 20, "device": "cpu", "batch_size": 4}
    found = fit(EXAMPLE, 768, prompts=prompts, **options)
    assert found.judged[0].after < 0.8 * found.judged[0].before
    convert(EXAMPLE, tmp_path / "out", slopes=found.slopes, train_length=256, verify=False)
    file.write_text(lines_task.prompts_as_json([1024], 40, seed=2), encoding="utf-8")
    results = evaluate(
        [EXAMPLE, tmp_path / "out"], tasks=[make_task("prompts", file)], lengths=[1024], items=40
    )
    stock, fitted = results.measurements
    assert fitted.value > stock.value


def test_an_encoder_is_fitted_to_masked_tokens(
    written: tuple[Path, Path], run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its random weights are sure of what is wrong.
    monkeypatch.setattr("converter.evaluation.fit.WORSE_THAN_GUESSING", math.inf)
    source = tiny.ENCODERS["mosaic_bert"](tmp_path / "source", 4)
    options = {**OPTIONS, "steps": 1}
    with raises(UsageError, "no token that masks"):
        fit(source, TARGET, text=[written[1]], **options)
    edit_json(source / "tokenizer_config.json", {"mask_token": "w5"})
    # Its random weights predict nothing, so the fit comes to its end without a gain.
    result = run(*command(source, written[1]), "--steps", 1, "--out", tmp_path / "out", "--json")
    assert (result.code, result.json["verdict"]) == (1, "does not help")
    assert "text at 24 tokens" in result.err
    assert not (tmp_path / "out").exists()
    with raises(UsageError, "encoder", "answers"):
        fit(source, TARGET, prompts=[make_task("passkey")], **options)
    with raises(UsageError, "answers are text"):
        fit(source, TARGET, prompts=[Beir({}, {}, {})], **options)


# --- refusals


def test_too_little_memory_is_said_before_it_starts(
    written: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1 kB")
    monkeypatch.setattr("converter.evaluation.runner.MEMORY", tmp_path / "meminfo")
    with raises(UsageError, "96 tokens", "1.0 kB are free"):
        fit(written[0], TARGET, text=[written[1]], **OPTIONS)
