"""The larger model of the evidence: its data, its network, and what the page says of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import evidence_large
import lines_task
import numpy as np
import pytest
import torch
import train_large
from tokenizers import Tokenizer

from tests.test_evidence import check_cells

TEXT = "Die Zeile enthält Wörter, été и русский текст; a line = words[1:]\n    return None  # end\n" * 400


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_large.build_tokenizer({"python": [TEXT]})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small one, whose layers all compute something."""
    for name, value in {"LAYERS": 2, "WIDTH": 32, "PIECES": 800}.items():
        monkeypatch.setattr(train_large, name, value)
    torch.manual_seed(0)
    with train_large.network() as model:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        train_large.save(model, tmp_path, {})
    return tmp_path


def test_the_tables_are_what_the_results_give() -> None:
    results = evidence_large.read()
    page = evidence_large.DOCUMENT.read_text(encoding="utf-8")
    assert evidence_large.with_tables(page, results) == page, "python examples/evidence_large.py --tables"
    shown = {found["name"] for found in evidence_large.BLOCK.finditer(page)}
    assert shown == {"results", "pairs", "sinks"}
    csv = evidence_large.RESULTS.with_suffix(".csv").read_text(encoding="utf-8")
    assert evidence_large.as_csv(results) == csv
    for task in results.tasks():
        own = [each for each in results.measurements if each.task == task]
        check_cells(replace(results, measurements=own), evidence_large.PROMPTS, evidence_large.WINDOWS)


@torch.no_grad()
def test_the_attention_on_the_first_token_is_that_of_the_scaled_model(trained: Path) -> None:
    ids, start = torch.randint(800, (2, 700)), evidence_large.FIRST_QUERY
    with evidence_large.trained(trained, evidence_large.BY_PARTS, "eager") as model:
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


def test_the_words_keep_their_ids(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    assert all(vocabulary[word] == lines_task.TOKEN_IDS[word[1:-1]] for word in train_large.WORDS)
    text = "né LINE amber-otter 17 <b>" + "<LINE><amber-otter><17>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    words = [each for each in ids if each < len(lines_task.VOCABULARY)]
    assert words == [lines_task.TOKEN_IDS[word] for word in ("LINE", "amber-otter", "17")]


def test_records_stand_among_text_and_only_answers_and_text_are_targets() -> None:
    text = np.arange(10_000, 30_000)  # each place has its own token, so what follows is known
    texts = dict.fromkeys(train_large.SHARES, text)
    ids, targets, answers = train_large.text_batch(np.random.default_rng(0), texts)
    assert ids.shape == targets.shape == answers.shape == (4, 512)
    ask = lines_task.TOKEN_IDS[lines_task.ASK]
    for row, wanted, is_answer in zip(ids.tolist(), targets.tolist(), answers.tolist(), strict=True):
        known: dict[int, int] = {}
        for place, (token, target) in enumerate(zip(row, wanted, strict=True)):
            before = row[place - 1] if place else -1
            following = row[place + 1] if place + 1 < len(row) else target
            if is_answer[place]:
                assert before == ask
                assert target == known[token]
            else:
                assert target == (following if following >= 10_000 else lines_task.IGNORE)
            if before == lines_task.TOKEN_IDS[lines_task.LINE]:
                known[token] = following
        of_text = [each for each in row if each >= 10_000]
        assert np.array_equal(np.diff(of_text), np.ones(len(of_text) - 1))
        assert len(of_text) in (512, 512 - 3 * 32)
    assert answers.any(axis=1).tolist() == [True, False] * 2


def test_a_second_run_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored numbers of the training are rounded, and its own are not."""
    stored = tmp_path / "large.json"
    content = json.loads(evidence_large.RESULTS.read_text())
    stored.write_text(json.dumps(content))
    [about] = content["models"].values()
    training = about["training"] | {"seconds": about["training"]["seconds"] + 1e-6}
    (tmp_path / "training.json").write_text(json.dumps(training))
    monkeypatch.setattr(evidence_large, "RESULTS", stored)
    monkeypatch.setattr(evidence_large, "Material", lambda _: None)
    monkeypatch.setattr(evidence_large, "evaluate", pytest.fail)
    before = stored.read_bytes()
    evidence_large.measure(tmp_path)
    assert stored.read_bytes() == before
    (tmp_path / "training.json").write_text(json.dumps(training | {"steps": 1}))
    with pytest.raises(AttributeError):  # there is no material
        evidence_large.measure(tmp_path)
