"""The small encoders of the evidence: their data, how they are trained, and what the page says of them."""

from __future__ import annotations

from pathlib import Path

import evidence_encoders
import numpy as np
import pairs_task
import pytest
import train_encoders
from safetensors.numpy import load_file

from converter.evaluation.embeddings import MEAN
from converter.evaluation.evaluate import evaluate
from converter.evaluation.subject import open_subject
from converter.evaluation.tasks.beir import Beir
from tests.test_evaluation import CPU
from tests.test_evidence import check_cells


def test_the_page_is_what_the_results_give() -> None:
    results, index = map(evidence_encoders.read, (evidence_encoders.RESULTS, evidence_encoders.INDEX))
    page = evidence_encoders.DOCUMENT.read_text(encoding="utf-8")
    assert evidence_encoders.with_tables(page, results, index) == page
    assert {len(each.scores) for each in index.measurements} == {evidence_encoders.IN_INDEX}
    assert {about["ntk, length-dynamic"]["128"] for about in index.models.values()} == {1}
    assert list(results.models) == [model.name for model in evidence_encoders.MODELS]
    check_cells(results, evidence_encoders.PAIRS, evidence_encoders.WINDOWS)


def test_a_mark_stands_before_the_pair_of_the_query(tmp_path: Path) -> None:
    queries, documents = pairs_task.draw(np.random.default_rng(0), pairs=50, length=16)
    assert len({tuple(query) for query in queries.tolist()}) == 50
    for query, document in zip(queries.tolist(), documents.tolist(), strict=True):
        assert document.count(query[1]) == 1
        place = document.index(query[1])
        assert document[place : place + 3] == query[1:4]
    task = Beir.read(pairs_task.write_beir(tmp_path / "pairs", pairs=5, length=16, seed=0))
    assert task.grades == {f"queries-{number}": {f"corpus-{number}": 1} for number in range(5)}


@pytest.mark.parametrize("task", ["pairs", "masked"])
def test_the_same_seed_gives_an_encoder_that_loads(
    task: train_encoders.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_encoders, "STEPS", {"pairs": 2, "masked": 2})
    monkeypatch.setattr(train_encoders, "PAIRS_PER_STEP", 3)
    monkeypatch.setattr(train_encoders, "ROWS_PER_STEP", 2)
    corpus = train_encoders.text_task.Corpus("import this\n" * 100, "")
    monkeypatch.setattr(train_encoders.text_task, "read_corpus", lambda: corpus)
    for name in ("one", "two"):
        train_encoders.train(task, 8, 7, tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
    with open_subject(tmp_path / "one", CPU, train_length=128) as subject:
        assert subject.pooling == MEAN
        assert subject.predicts_masked == (task == "masked")
        ids = subject.tokenizer("word01 mark <unk>")["input_ids"]
        assert len(ids) == (5 if task == "pairs" else len("word01 mark ") + 1)
        if task == "masked":
            assert subject.mask == train_encoders.vocabulary("masked").index("<mask>")


def test_chunks_of_a_short_document_are_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_encoders, "STEPS", {"pairs": 1, "masked": 1})
    train_encoders.train("pairs", 8, 0, tmp_path / "model")
    task = Beir.read(pairs_task.write_beir(tmp_path / "pairs", pairs=12, length=128, seed=0))
    found = evidence_encoders.in_chunks(tmp_path / "model", task, 128)
    trained = evidence_encoders.TRAINED_LENGTH
    whole = evaluate([tmp_path / "model"], tasks=[task], lengths=[128], train_length=trained).measurements[0]
    assert found.scores == pytest.approx(whole.scores)
