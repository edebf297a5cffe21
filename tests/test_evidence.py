"""The examples' models, how they are trained, and what the documents say of them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import evidence
import evidence_fits
import evidence_measure
import evidence_ramps
import evidence_tables
import lines_task
import numpy as np
import pytest
import text_task
import torch
import train
from evidence_design import (
    BY_PARTS,
    EXAMPLES,
    KINDS,
    LENGTHS,
    MODELS,
    NONE,
    NTK,
    SCALE,
    STATIC_BY_PARTS,
    Model,
)
from evidence_measure import Study, replaced
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.bloom import modeling_bloom

from converter import convert
from converter.evaluation.results import Measurement, Results
from converter.evaluation.statistics import summarise

TINY_BLOOM = EXAMPLES / "tiny-bloom"


@pytest.fixture(scope="module")
def stored() -> dict[str, Results]:
    return evidence.stored()


@pytest.fixture
def results(stored: dict[str, Results]) -> Results:
    return stored[evidence.FORMULAS.name]


# --- what the documents say


@pytest.mark.parametrize("path", evidence.DOCUMENTS, ids=lambda path: path.parent.name)
def test_the_tables_are_what_the_results_give(path: Path, stored: dict[str, Results]) -> None:
    document = path.read_text(encoding="utf-8")
    emptied = evidence_tables.BLOCK.sub(r"\g<start>old\n\g<end>", document)
    assert emptied != document
    made = evidence_tables.with_tables(emptied, stored)
    assert made == document, "python examples/evidence.py --tables"


def check_cells(results: Results, prompts: Mapping[int, int], windows: int, *, compared: bool = True) -> None:
    """All follows from the scores, and they are as many as stated."""
    unscaled = {(each.model, each.length): each for each in results.measurements if each.scaling == NONE}
    for each in results.measurements:
        text = each.metric == "perplexity"
        assert each.items == (windows if text else prompts[each.length])
        about = (each.value, each.low, each.high)
        assert about == pytest.approx(summarise(each.metric, each.scores), rel=1e-5)
        if compared and each.comparison is not None:
            changes = np.subtract(each.scores, unscaled[each.model, each.length].scores)
            up, down = int((changes > 0).sum()), int((changes < 0).sum())
            assert (each.comparison.better, each.comparison.worse) == ((down, up) if text else (up, down))
            p = stats.binomtest(up, up + down).pvalue if up + down else 1.0
            assert each.comparison.p == pytest.approx(p, rel=1e-5)


@pytest.mark.parametrize("study", evidence.STUDIES.values(), ids=evidence.STUDIES)
def test_every_cell_follows_from_its_scores(study: Study, stored: dict[str, Results]) -> None:
    results = stored[study.name]
    names = [model.name for model in study.models]
    assert list(results.models) == names
    check_cells(results, study.prompts, study.windows, compared=study is evidence.FORMULAS)


def test_fitted_slopes_are_kept(stored: dict[str, Results]) -> None:
    """For every form but those of which ``fit`` said that they are no better than the stock slopes."""
    settings = stored[evidence_fits.STUDY.name].settings
    for model, forms in evidence_fits.FORMS.items():
        for form in forms:
            rows = settings["slopes"][model.name].get(form.name)
            if rows is None:
                said = settings["nothing"][model.name][form.name]
                assert said.startswith("no fitted slopes are better")
            else:
                assert {len(row) for row in rows} == {model.heads}


def test_a_ramp_by_rank_lies_between_spans() -> None:
    # 8 heads have spans of 10 to 1280 tokens, each twice the one before; trained at 256 tokens.
    start, end = evidence_ramps.by_rank(Model("lines", 8, 0), (0, 3 / 7))
    assert (start * 256, end * 256) == pytest.approx((10, 80))


@pytest.mark.parametrize("name", evidence.STUDIES)
def test_the_csv_is_what_the_results_give(name: str, stored: dict[str, Results]) -> None:
    path = evidence.STUDIES[name].stored.with_suffix(".csv")
    made = evidence_tables.as_csv(stored[name])
    assert path.read_text(encoding="utf-8") == made, "python examples/evidence.py --tables"


def test_every_table_but_the_summary_is_in_the_evidence() -> None:
    named = re.findall(r"<!-- evidence ([a-z0-9-]+):", (EXAMPLES / "evidence" / "README.md").read_text())
    assert {*named, "summary", "tiny-bloom"} == evidence_tables.TABLES.keys()


def measurement(
    model: str, scaling: str, length: int, *scores: float, metric: str = "accuracy"
) -> Measurement:
    return Measurement(model, scaling, "prompts", metric, length, scores, *summarise(metric, scores))


def test_rows_of_one_model_never_come_from_two_trainings() -> None:
    def results(about: str, *rows: Measurement) -> Results:
        return Results(list(rows), {row.model: {"from": about} for row in rows}, {about: 1}, 1.0)

    earlier = results("earlier", *(measurement(name, NTK, 256, 1.0) for name in "abc"))
    new = results("new", measurement("b", NONE, 256, 0.0), measurement("d", NONE, 256, 0.0))
    found = replaced(earlier, new, "abcd")
    shown = [(each.model, each.scaling) for each in found.measurements]
    assert shown == [("a", NTK), ("b", NONE), ("c", NTK), ("d", NONE)]
    assert [about["from"] for about in found.models.values()] == ["earlier", "new", "earlier", "new"]
    assert found.settings == {"earlier": 1, "new": 1}


def test_a_study_stores_each_model_as_it_finishes_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evidence").mkdir()
    first, second, third = models = [Model("lines", 8, seed) for seed in (1, 2, 3)]
    measured: list[str] = []

    def measure(model: Model, *_: object) -> Results:
        if model == third and len(measured) < 3:
            measured.append("stopped")
            raise KeyboardInterrupt
        measured.append(model.name)
        return Results([measurement(model.name, NONE, 256, 1.0)], {model.name: {}}, {}, 1.0)

    monkeypatch.setattr(evidence_measure, "EXAMPLES", tmp_path)
    monkeypatch.setattr(evidence_measure, "train", lambda *_: None)
    monkeypatch.setattr(evidence_measure, "measure", measure)
    study = Study("some", models, {256: 1}, 1, lambda *_: (), found=lambda _: {"more": 1})
    with pytest.raises(KeyboardInterrupt):
        study.run(tmp_path)
    assert list(study.read().models) == [first.name, second.name]
    assert "more" not in study.read().settings  # what is found of all models
    study.run(tmp_path)
    assert measured == [first.name, second.name, "stopped", third.name]
    assert list(study.read().models) == [model.name for model in models]
    assert study.read().settings["more"] == 1
    assert study.read().seconds == 3


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
    # In both: +1, +1, -1 + 1 = 0, 0 + 1, of four prompts.
    assert cells == {"2 of lines": "+3 -0, p = 0.2"}


def test_temperatures_are_compared_with_the_same_scaling_without_one() -> None:
    scores = {NONE: (0.0,) * 8, BY_PARTS: (1.0, 0.0) * 4, "tempered": (1.0,) * 8, "other": (0.0, 1.0) * 4}
    rows = [
        measurement(model, scaling, length, *found)
        for model in ("lines-8-0", "lines-8-1")
        for length in (256, 512)
        for scaling, found in scores.items()
    ]
    rows += [measurement("lines-8-2", NONE, 256, 1.0)]
    found = Results(rows, {}, {}, 0.0)
    # Four of eight prompts got better, and then also four worse: p = 0.125 and 1; with twelve, p = 0.0005.
    table = evidence_tables.by_temperature(found, ["lines-8-0", "lines-8-1"], [*scores], (256, 512))
    assert [*table] == [[length, "0.0 %", "50.0 %", "100.0 %", "50.0 %"] for length in ("1x", "2x")]
    found = replace(found, measurements=[replace(each, scores=each.scores * 3) for each in rows])
    table = evidence_tables.by_temperature(found, ["lines-8-1"], [*scores], (512,))
    assert [*table] == [["1x", "0.0 %", "50.0 %", "100.0 %*", "50.0 %"]]


def test_every_cell_was_measured(results: Results) -> None:
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
    scaling: str, results: Results, monkeypatch: pytest.MonkeyPatch
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
    [kept] = [each for each in results.measurements if (each.model, each.scaling, each.length) == wanted]
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


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_token_is_a_byte(text: str) -> None:
    tokenizer = text_task.build_tokenizer()
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert all(len(text_task.SPECIAL_TOKENS) <= each < len(text_task.TOKENS) for each in ids)
    assert tokenizer.decode(ids) == text


def test_the_corpus_is_the_librarys_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"module_{number:02}.py" for number in range(60)]
    for name in ("site-packages/other", "json/tests/test_json", "encodings/cp1", "_sysconfigdata_x"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("left out")
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n" * 300)
    monkeypatch.setattr(text_task.sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    corpus = text_task.read_corpus()
    trained_on = corpus.training.splitlines()
    assert trained_on == sorted(trained_on)
    starts = range(0, len(corpus.held_out), text_task.PIECE)
    pieces = [corpus.held_out[start : start + text_task.PIECE] for start in starts]
    held_out = [re.findall(r"# (module_..\.py)\n", piece) for piece in pieces]
    assert all(len(set(found)) == 1 and len(found) > 100 for found in held_out)
    assert 1 <= len(held_out) <= 15
    assert sorted({*trained_on, *(f"# {found[0]}" for found in held_out)}) == [f"# {name}" for name in names]
    assert not {f"# {found[0]}" for found in held_out} & {*trained_on}


def test_a_piece_of_text_is_followed_by_its_targets() -> None:
    ids = np.arange(100, 150)
    inputs, targets = text_task.training_batch(np.random.default_rng(0), ids, sequences=200, length=8)
    assert inputs.shape == targets.shape == (200, 8)
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(np.diff(inputs), np.ones((200, 7)))
    assert {inputs.min(), targets.max()} == {100, 149}


# --- training


@pytest.mark.parametrize("heads", sorted({kind.heads for kind in KINDS}))
@pytest.mark.parametrize("task", ["lines", "text"])
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


@pytest.mark.parametrize("heads", sorted({kind.heads for kind in KINDS}))
def test_a_model_with_other_slopes_is_saved_as_an_mpt(heads: int, tmp_path: Path) -> None:
    trained = train.build_model("lines", heads, 0, bias_max=5).eval()
    with torch.no_grad():
        for parameter in trained.parameters():  # biases and norms start at 0 and 1
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    record = train.Training("lines", heads, 0, steps=1, tokens=1, cpu_seconds=1, bias_max=5)
    train.save(trained, record, tmp_path / "mpt")
    convert(tmp_path / "mpt", tmp_path / "out", method="none")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert model.base_model.alibi.slopes[0][: min(heads, 8)] == [2 ** (-5 * head / 8) for head in range(1, 9)]
    ids = torch.arange(300)[None] % len(train.vocabulary("lines"))
    with torch.no_grad():
        expected, found = trained(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


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


def test_lines_that_are_not_learnt_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "MAX_CURRICULUM_STEPS", 1)
    with pytest.raises(RuntimeError, match="try another --seed"):
        train.train("lines", 8, seed=0)
