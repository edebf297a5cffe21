"""The examples' models, how they are trained, and what the documents say of them."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import evidence
import evidence_concave
import evidence_curves
import evidence_encoders
import evidence_large
import evidence_tables
import lines_task
import numpy as np
import pairs_task
import pytest
import text_task
import torch
import train
import train_encoders
import train_large
from evidence_design import (
    BY_PARTS,
    EXAMPLES,
    LENGTHS,
    MODELS,
    NONE,
    NTK,
    SCALE,
    STATIC_BY_PARTS,
)
from evidence_measure import read
from safetensors.numpy import load_file
from scipy import stats
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.bloom import modeling_bloom

from converter import convert
from converter.evaluation.evaluate import evaluate
from converter.evaluation.evaluated_model import open_evaluated_model
from converter.evaluation.results import Measurement, Results
from converter.evaluation.runner import choose
from converter.evaluation.statistics import summarise
from converter.evaluation.tasks.beir import Beir
from converter.scaling.scaling import UNSCALED
from converter.verification.loaded import unround_bias

TINY_BLOOM = EXAMPLES / "tiny-bloom"


@pytest.fixture(scope="module")
def stored() -> dict[str, Results]:
    return evidence.stored()


# --- what the documents say


def test_the_tables_are_what_the_results_give(stored: dict[str, Results]) -> None:
    large, encoders = read(evidence_large.RESULTS), read(evidence_encoders.RESULTS)
    concave = read(evidence_concave.RESULTS)
    made = {
        **dict(evidence.tables(stored)),
        evidence_large.RESULTS.with_suffix(".csv"): evidence_large.as_csv(large),
        evidence_encoders.DOCUMENT: evidence_encoders.page(encoders, read(evidence_encoders.INDEX)),
        evidence_concave.RESULTS.with_suffix(".csv"): evidence_concave.as_csv(concave),
    }
    wrong = [path for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not wrong, "write them again: python examples/evidence.py --tables, and those of the other two"
    curves = read(evidence_curves.RESULTS)
    for module, results in ((evidence_large, large), (evidence_concave, concave), (evidence_curves, curves)):
        assert module.page(results) == module.DOCUMENT.read_text(encoding="utf-8")
    pages = "".join(text for path, text in made.items() if path.suffix == ".md")
    shown = re.findall(r"<!-- (?:evidence|large|concave) ([a-z0-9-]+):", pages)
    every = (evidence_tables.TABLES, evidence_large.TABLES, evidence_concave.TABLES)
    assert {*shown} == {name for each in every for name in each}


def p_of(changes: Any, *, right_or_wrong: bool) -> float:
    """The exact sign test; of a mean, the larger p of the t test and of a permutation test, drawn anew."""
    up, down = int((changes > 0).sum()), int((changes < 0).sum())
    if right_or_wrong or not up + down:
        return float(stats.binomtest(up, up + down).pvalue) if up + down else 1.0
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (20_000, len(changes)))
    drawn = np.mean(abs(signs @ changes) > abs(changes.sum()) - 1e-9)
    return max(float(stats.ttest_1samp(changes, 0).pvalue), float(drawn))


def check_cells(results: Results, prompts: Mapping[int, int], windows: int) -> None:
    """All follows from the scores, and they are as many as stated."""
    unscaled = {(each.model, each.length): each for each in results.measurements if each.scaling == NONE}
    for each in results.measurements:
        text = each.metric == "perplexity"
        assert each.items == (windows if text else prompts[each.length])
        about = (each.value, each.low, each.high)
        assert about == pytest.approx(summarise(each.metric, each.scores), rel=1e-5)
        if each.comparison is not None:
            changes = np.subtract(each.scores, unscaled[each.model, each.length].scores)
            up, down = int((changes > 0).sum()), int((changes < 0).sum())
            assert (each.comparison.better, each.comparison.worse) == ((down, up) if text else (up, down))
            p = p_of(changes, right_or_wrong=each.metric == "accuracy")
            exact = each.metric == "accuracy" or p > 0.999
            drawn = 5 * math.sqrt(p * (1 - p) * (1 / 9_999 + 1 / 20_000)) + 3e-4  # five standard errors
            assert each.comparison.p == pytest.approx(p, rel=1e-5, abs=0 if exact else drawn)
            assert each.comparison.significant == (each.comparison.p < 0.05)


def test_every_cell_follows_from_its_scores(stored: dict[str, Results]) -> None:
    for name, study in evidence.STUDIES.items():
        assert list(stored[name].models) == [model.name for model in study.models]
        check_cells(stored[name], study.prompts, study.windows)
    large, encoders = read(evidence_large.RESULTS), read(evidence_encoders.RESULTS)
    for task in large.tasks():
        own = [each for each in large.measurements if each.task == task]
        check_cells(replace(large, measurements=own), evidence_large.PROMPTS, evidence_large.WINDOWS)
    assert list(encoders.models) == [model.name for model in evidence_encoders.MODELS]
    check_cells(encoders, evidence_encoders.PAIRS, evidence_encoders.WINDOWS)
    curves = read(evidence_curves.RESULTS)
    assert list(curves.models) == [model.name for model in evidence_curves.MODELS]
    check_cells(curves, evidence_encoders.PAIRS, evidence_curves.WINDOWS)
    concave = read(evidence_concave.RESULTS)
    for model, task in {(each.model, each.task) for each in concave.measurements}:
        own = [each for each in concave.measurements if (each.model, each.task) == (model, task)]
        larger = model == evidence_concave.LARGER
        prompts = evidence_concave.LARGER_PROMPTS if larger else evidence_concave.PROMPTS
        check_cells(replace(concave, measurements=own), prompts, evidence_concave.WINDOWS)


def measurement(
    model: str, scaling: str, length: int, *scores: float, metric: str = "accuracy"
) -> Measurement:
    return Measurement(model, scaling, "prompts", metric, length, scores, *summarise(metric, scores))


def test_the_rows_of_each_model_and_their_spread() -> None:
    rows = [
        measurement(model, scaling, length, *scores)
        for length in LENGTHS
        for model, scaling, scores in [
            ("lines-8-1", BY_PARTS, (0.0,) * 8),
            ("lines-8-0", NONE, (1.0, 0.0)),
            ("lines-8-1", NONE, (1.0,) * 8),
        ]
    ]
    nothing = {"lines-8-0": {"static": "no fitted slopes are better"}}
    found = Results(rows, {"lines-8-0": {}, "lines-8-1": {}}, {"nothing": nothing}, 0.0)
    assert list(csv.reader(io.StringIO(evidence_tables.as_csv(found))))[1:] == [
        ["lines-8-0", NONE, *["50.0"] * 4],
        ["lines-8-0", "fitted, static", *["no gain"] * 4],
        ["lines-8-1", NONE, *["100.0"] * 4],
        ["lines-8-1", BY_PARTS, *["0.0*"] * 4],
    ]
    spread = evidence_tables.spread(found, "lines").splitlines()
    assert spread[2:] == [
        "| by-parts by position | 1 | 0 | 0 | 0 | 0 |",
        f"| {NONE} | 2 | 50 to 100 | 50 to 100 | 50 to 100 | 50 to 100 |",
    ]


def test_scalings_are_compared_in_all_models_that_have_both() -> None:
    ours, theirs = evidence_tables.PAIRS[0]
    rows = [
        measurement(model, scaling, length, *scores)
        for length in LENGTHS
        for model, scaling, scores in [
            ("lines-a", ours, (1.0, 1.0, 0.0, 1.0)),
            ("lines-a", theirs, (0.0, 0.0, 1.0, 1.0)),
            ("lines-b", ours, (1.0, 0.0, 1.0, 1.0)),
            ("lines-b", theirs, (1.0, 0.0, 0.0, 0.0)),
        ]
    ]
    table = evidence_tables.pairs(Results(rows, {"lines-a": {}, "lines-b": {}, "lines-c": {}}, {}, 0.0))
    cells = dict(line.split(" | ")[1:3] for line in table.splitlines()[2:])
    # In both: +1, +1, -1 + 1 = 0, 0 + 1, halved, of four prompts; 4 of 16 combinations of signs give as much.
    assert cells == {"2 of lines": "+37.5 points, p = 0.2"}


def test_every_cell_was_measured(stored: dict[str, Results]) -> None:
    results = stored[evidence.FORMULAS.name]
    for model in MODELS:
        found = [each for each in results.measurements if each.model == model.name]
        assert len(found) == len({(each.scaling, each.length) for each in found})
        scalings = {each.scaling for each in found}
        assert {STATIC_BY_PARTS, BY_PARTS} < scalings
        assert len(scalings) == 13 + 2 * (model.heads == 12 and model.bias_max is None)
        assert {each.length for each in found} == {*LENGTHS}
        assert all((each.comparison is None) == (each.scaling == NONE) for each in found)


# --- the numbers, found in another way


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [NONE, NTK])
def test_transformers_own_model_gives_the_same_answers(
    scaling: str, stored: dict[str, Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock BLOOM, its bias replaced by one of NumPy's, answers the same prompts right."""
    length, count = 1024, 25
    a = 1.0 if scaling == NONE else SCALE
    slopes = 2.0 ** -np.arange(1, 9) * a ** -(np.arange(8) / 7)

    def bias(mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
        assert heads == len(slopes)
        positions = np.arange(mask.shape[1])
        return torch.from_numpy(slopes[:, None, None] * positions).to(dtype)

    monkeypatch.setattr(modeling_bloom, "build_alibi_tensor", bias)
    model = AutoModelForCausalLM.from_pretrained(TINY_BLOOM).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY_BLOOM)
    scores = []
    for line in lines_task.prompts_as_json([length], count, seed=0).splitlines():
        row = json.loads(line)
        with torch.no_grad():
            logits = model(**tokenizer(row["prompt"], return_tensors="pt"), use_cache=False).logits
        scores.append(float(tokenizer.decode([int(logits[0, -1].argmax())]) == row["answer"]))
    wanted = ("lines-8-0", scaling, length)
    [kept] = [
        each for each in stored["results"].measurements if (each.model, each.scaling, each.length) == wanted
    ]
    # Another processor rounds differently, which may turn one close answer.
    assert sum(a != b for a, b in zip(scores, kept.scores[:count], strict=True)) <= 1


# --- prompts and text


def test_prompts_ask_for_a_line_that_they_hold() -> None:
    lengths = (32, 256)
    rows = [json.loads(line) for line in lines_task.prompts_as_json(lengths, 20, seed=3).splitlines()]
    assert [row["length"] for row in rows] == [32] * 20 + [256] * 20
    for row in rows:
        *lines, question = row["prompt"].splitlines()
        values = dict(line.removeprefix("LINE ").split() for line in lines)
        asked = question.removeprefix("ASK ")
        assert row["answer"] == values[asked]
        assert len(values) == len(lines)
        assert row["length"] - 3 < len(row["prompt"].split()) + 1 <= row["length"]
        assert row["depth"] == pytest.approx(list(values).index(asked) / (len(lines) - 1), abs=0.006)

    def prompts(lengths: list[int], items: int, seed: int) -> list[str]:
        return lines_task.prompts_as_json(lengths, items, seed).splitlines()

    # They depend on nothing but seed and length.
    assert prompts([64, 256], 5, 0)[5:] == prompts([256], 5, 0) == prompts([256], 9, 0)[:5]
    assert prompts([256], 5, 0) != prompts([256], 5, 1)


def test_a_prompt_beyond_the_keys_has_answered_questions_about_earlier_lines() -> None:
    for seed in range(5):
        row = evidence_concave.with_questions(np.random.default_rng(seed), 3000)
        *records, question = [line.split() for line in row["prompt"].splitlines()]
        values: dict[str, str] = {}
        for word, key, value in records:
            if word == lines_task.LINE:
                assert key not in values
                values[key] = value
            assert values[key] == value
        assert question == [lines_task.ASK, question[1]]
        assert row["answer"] == values[question[1]]
        assert [lines_task.ASK, question[1], row["answer"]] not in records
        assert row["depth"] == pytest.approx(list(values).index(question[1]) / (len(values) - 1), abs=0.006)
        assert 3000 - 3 < 3 * len(records) + 3 <= 3000


# --- training


@pytest.mark.parametrize(("task", "heads"), [("lines", 12), ("text", 8)])
def test_the_same_seed_gives_a_model_that_loads(
    task: Any, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"LINES_TOKENS_PER_STEP": 512, "TEXT_SEQUENCES_PER_STEP": 2, "FIRST_STAGE": (85, 704)}
    small |= {"TEXT_STEPS": 1, "TEXT_DECAY_STEPS": 1, "DECAY_STEPS": 1, "PASS_ACCURACY": 0.0}
    for name, value in small.items():
        monkeypatch.setattr(train, name, value)
    corpus = text_task.Corpus("import this\n" * 100, "held out\n")
    monkeypatch.setattr(text_task, "read_corpus", lambda: corpus)
    for name in ("one", "two"):
        train.save(*train.train(task, heads, seed=7), tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)

    record = json.loads((tmp_path / "one" / "training.json").read_text())
    assert (record["task"], record["heads"], record["seed"], record["steps"]) == (task, heads, 7, 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one").eval()
    assert (model.config.n_head, model.config.hidden_size % heads) == (heads, 0)
    text = "LINE velvet-heron 24 ASK velvet-heron" if task == "lines" else "def f():\n    return 1\n"
    inputs = AutoTokenizer.from_pretrained(tmp_path / "one")(text, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == (len(text.split()) if task == "lines" else len(text))
    assert model(**inputs).logits.shape[-1] == len(train.vocabulary(task))


@pytest.mark.parametrize(
    ("kind", "slopes"),
    [
        ({"bias_max": 5}, [2 ** (-5 * head / 8) for head in range(1, 9)]),
        ({"falcon": True}, [2.0**-head * 8**-0.5 for head in range(1, 9)]),
    ],
)
def test_a_model_with_another_bias_is_saved_in_another_family(
    kind: dict[str, Any], slopes: list[float], tmp_path: Path
) -> None:
    trained = train.build_model("lines", 12, 0, **kind).eval()
    with torch.no_grad():
        for parameter in trained.parameters():  # biases and norms start at 0 and 1
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    train.save(trained, {"task": "lines", "heads": 12, "bias_max": None, **kind}, tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "out", method="none")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert model.base_model.alibi.slopes[0][:8] == pytest.approx(slopes)
    ids = torch.arange(300)[None] % len(train.vocabulary("lines"))
    with torch.no_grad():
        expected, found = trained(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if "falcon" in kind:  # transformers' own MPT ignores the bias_max
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        unround_bias(stock.base_model)
        with torch.no_grad():
            torch.testing.assert_close(stock(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_the_embedded_checkpoint_is_what_the_script_describes() -> None:
    for name, content in (
        ("config.json", train.config("lines", 8)),
        ("generation_config.json", train.generation_config("lines")),
        ("tokenizer_config.json", train.TOKENIZER_CONFIG),
        ("tokenizer.json", json.loads(train.build_tokenizer("lines").to_str())),
    ):
        assert json.loads((TINY_BLOOM / name).read_text(encoding="utf-8")) == content
    shapes = {name: tensor.shape for name, tensor in train.build_model("lines", 8, 0).state_dict().items()}
    stored = {name: tensor.shape for name, tensor in load_file(TINY_BLOOM / "model.safetensors").items()}
    assert stored == {name: tuple(shape) for name, shape in shapes.items() if name != "lm_head.weight"}


# --- the larger model


TEXT = "Die Zeile enthält Wörter, été и русский текст; a line = words[1:]\n    return None  # end\n" * 400


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_large.build_tokenizer({"python": [TEXT]})


@torch.no_grad()
def test_the_attention_on_the_first_token_is_that_of_the_scaled_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"LAYERS": 2, "WIDTH": 32, "PIECES": 800}.items():
        monkeypatch.setattr(train_large, name, value)
    torch.manual_seed(0)
    with train_large.network() as model:
        for parameter in model.parameters():  # layers that all compute something
            torch.nn.init.normal_(parameter, std=0.3)
        train_large.save(model, tmp_path, train_large.build_tokenizer({"text": [TEXT]}), {})
    ids, start = torch.randint(800, (2, 700)), evidence_large.FIRST_QUERY
    with evidence_large.trained(tmp_path, evidence_large.BY_PARTS, "eager") as model:
        weights = model(ids, output_attentions=True, use_cache=False).attentions
        expected = [layer[:, :, start:, 0].mean((0, 2)).tolist() for layer in weights]
        assert evidence_large.first_token(model, ids) == expected
        assert model.transformer.alibi.dynamic == "position"


@pytest.mark.parametrize("length", [64, 512, 2048])
def test_a_prompt_fits_its_length_and_holds_its_answer(length: int, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        row = evidence_large.prompt(np.random.default_rng(seed), tokenizer, TEXT, length)
        tokens = tokenizer.encode(row["prompt"]).ids
        assert length - 16 <= len(tokens) + 1 <= length
        lines = re.findall(r"<LINE><([a-z-]+)>(<\d+>)", row["prompt"])
        assert len(dict(lines)) == len(lines) == length // 32
        asked = re.search(r"<ASK><([a-z-]+)>$", row["prompt"])
        assert asked is not None
        assert dict(lines)[asked[1]] == row["answer"]
        assert tokenizer.encode(row["answer"]).ids == [lines_task.TOKEN_IDS[row["answer"][1:-1]]]
        assert row["depth"] == pytest.approx(
            [key for key, _ in lines].index(asked[1]) / max(1, len(lines) - 1), abs=0.006
        )


# --- encoders


def test_a_mark_stands_before_the_pair_of_the_query(tmp_path: Path) -> None:
    queries, documents = pairs_task.draw(np.random.default_rng(0), pairs=50, length=16)
    assert len({tuple(query) for query in queries.tolist()}) == 50
    for query, document in zip(queries.tolist(), documents.tolist(), strict=True):
        assert document.count(query[1]) == 1
        place = document.index(query[1])
        assert document[place : place + 3] == query[1:4]
    task = Beir.read(pairs_task.write_beir(tmp_path / "pairs", pairs=5, length=16, seed=0))
    assert task.grades == {f"queries-{number}": {f"corpus-{number}": 1} for number in range(5)}


@pytest.mark.parametrize("curve", evidence_curves.CURVES)
def test_a_curve_is_the_formula_and_changes_nothing_that_was_trained(
    curve: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, slope = evidence_encoders.TRAINED_LENGTH, 0.25
    for tokens in (trained // 2, trained, 4 * trained):
        d = np.arange(tokens, dtype=np.float64)
        if tokens <= trained:
            expected = slope * d
        elif curve == "two lines":
            rise = (trained / 2) / (tokens - trained / 2)
            expected = slope * np.where(d < trained / 2, d, trained / 2 + rise * (d - trained / 2))
        else:
            power = int(curve.split()[1])
            end = max(trained, tokens / power)
            bend = slope * (tokens - end) / (power - 1)
            line = max(0.0, slope - power * bend / tokens)
            expected = line * d + bend * (1 - (1 - d / tokens) ** power)
        slopes, distances = torch.tensor([[[slope]]]), torch.arange(float(tokens))[None]
        found = evidence_curves.CURVES[curve](slopes, distances, tokens)
        np.testing.assert_allclose(found[0, 0].numpy(), expected, atol=2e-5)

    monkeypatch.setattr(train_encoders, "STEPS", {"pairs": 1, "masked": 1})
    train_encoders.train("pairs", 8, 0, tmp_path / "model")
    hardware = choose("cpu", "fp32", None)
    with open_evaluated_model(tmp_path / "model", hardware, train_length=trained) as subject:
        model, ids = subject.scaled(UNSCALED).base_model, torch.randint(5, 50, (2, 2 * trained))

        def states(tokens: int) -> torch.Tensor:
            with torch.no_grad():
                states: torch.Tensor = model(ids[:, :tokens]).last_hidden_state
                return states

        usual = [states(tokens) for tokens in (trained, 2 * trained)]
        with evidence_curves.curved(subject, evidence_curves.CURVES[curve]):
            torch.testing.assert_close(states(trained), usual[0], atol=1e-5, rtol=1e-5)
            assert (states(2 * trained) - usual[1]).abs().max() > 1e-3
        assert torch.equal(states(trained), usual[0])


def test_chunks_of_a_short_document_are_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_encoders, "STEPS", {"pairs": 1, "masked": 1})
    train_encoders.train("pairs", 8, 0, tmp_path / "model")
    task = Beir.read(pairs_task.write_beir(tmp_path / "pairs", pairs=12, length=128, seed=0))
    found = evidence_encoders.in_chunks(tmp_path / "model", task, 128)
    trained = evidence_encoders.TRAINED_LENGTH
    whole = evaluate([tmp_path / "model"], tasks=[task], lengths=[128], train_length=trained).measurements[0]
    assert found.scores == pytest.approx(whole.scores)
