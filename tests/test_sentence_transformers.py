"""A converted JinaBERT in the real sentence-transformers: embeddings are means of the reference's states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from converter import convert
from tests import tiny
from tests.conftest import edit_json, fingerprint
from tests.dealt import dealt
from tests.patched import SCALINGS, config_of
from tests.reference import ENCODERS as REFERENCES
from tests.tiny.jina_bert import QK

TEXTS = [
    "w5 w6 w7",
    " ".join(f"w{4 + index % 90}" for index in range(70)),
    "w9",
]
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def source(folder: Path, **changes: Any) -> Path:
    """A checkpoint with what jinaai/jina-embeddings-v2 repositories have for sentence-transformers."""
    tiny.ENCODERS["jina_bert"](folder, 4, head="Model", **changes)
    (folder / "1_Pooling").mkdir()
    for name, content in {
        "modules.json": MODULES,
        "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": False},
        "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.2.2"}},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    }.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(folder: Path) -> Any:
    # Imported here: every worker collects this file, and the import takes seconds.
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")


@pytest.mark.parametrize(
    ("scaling", "changes"), dealt(["none", "ntk", "ntk-length"], [{}, QK], each=1), ids=str
)
def test_embeddings(tmp_path: Path, scaling: str, changes: dict[str, Any]) -> None:
    result = convert(source(tmp_path / "source", **changes), tmp_path / "out", **SCALINGS[scaling])
    raised = scaling == "ntk"
    assert [note.split(":")[0] for note in result.notes] == [
        "the input limit was raised to the 32768 tokens that the scaling reaches"
    ] * raised
    encoder = load(tmp_path / "out")
    assert encoder.max_seq_length == (32768 if raised else 100)
    found = encoder.encode(TEXTS)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    batch = tokenizer(TEXTS, padding=True, return_tensors="np")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert mask.sum(1).tolist() == [4, 71, 2]
    _, tensors = tiny.read(tmp_path / "out")
    hidden = REFERENCES["jina_bert"].trunk(config_of(tmp_path / "out"), tensors, ids, mask).hidden
    expected = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    if scaling == "ntk-length":
        # A row's length is its own, whatever else is in the batch.
        assert np.abs(encoder.encode(TEXTS[:1]) - found[:1]).max() < 1e-4
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max() + 1e-5

    model = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    with torch.no_grad():
        assert np.abs(model.encode(TEXTS) - found).max() < 1e-4


def test_a_text_up_to_the_reach_is_not_truncated(tmp_path: Path) -> None:
    """The limits of sentence-transformers and of the tokenizer follow a static scaling."""
    folder = source(tmp_path / "source")
    edit_json(folder / "tokenizer_config.json", {"model_max_length": 100})
    before = fingerprint(folder)
    result = convert(folder, tmp_path / "out", train_length=50, target_length=300)
    assert fingerprint(folder) == before
    assert result.notes == [
        "the input limit was raised to the 300 tokens that the scaling reaches: max_seq_length in "
        "sentence_bert_config.json from 100 and model_max_length in tokenizer_config.json from 100"
    ]
    text = " ".join(f"w{4 + index % 90}" for index in range(250))
    short, long = (load(path) for path in (_truncating(tmp_path), tmp_path / "out"))
    assert (short.max_seq_length, long.max_seq_length) == (100, 300)
    found = long.encode(text)
    assert np.abs(short.encode(text) - found).max() > 1e-2 * np.abs(found).max()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert tokenizer.model_max_length == 300
    assert len(tokenizer(text, truncation=True)["input_ids"]) == 251
    model = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    with torch.no_grad():
        assert np.abs(model.encode([text])[0] - found).max() < 1e-4


def _truncating(folder: Path) -> Path:
    """A copy of the result with the source's limits."""
    copy = folder / "truncating"
    shutil.copytree(folder / "out", copy)
    for name in ("sentence_bert_config.json", "tokenizer_config.json"):
        shutil.copy(folder / "source" / name, copy / name)
    return copy
