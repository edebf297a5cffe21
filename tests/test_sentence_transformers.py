"""Converted JinaBERTs in the real sentence-transformers: their vectors and scores are the reference's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from converter import convert
from tests import tiny
from tests.conftest import edit_json, fingerprint
from tests.patched import SCALINGS, TRAIN_LENGTH, config_of
from tests.reference import ENCODERS as REFERENCES
from tests.tiny.jina_bert import QK
from tests.tiny.layout import SPECIAL_TOKENS

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


@pytest.mark.parametrize(("scaling", "changes"), [("ntk", QK), ("ntk-length", {})])
def test_embeddings(tmp_path: Path, scaling: str, changes: dict[str, Any]) -> None:
    result = convert(source(tmp_path / "source", **changes), tmp_path / "out", **SCALINGS[scaling])
    encoder = load(tmp_path / "out")
    # A static scaling without a trained length multiplies the config's limit, which is 8192.
    assert encoder.max_seq_length == result.input_limit == (32768 if scaling == "ntk" else 8192)
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


@pytest.mark.parametrize(
    "options", [{"target_length": 300}, {}, {"max_length": 300}], ids=["static", "default", "chosen"]
)
def test_a_text_up_to_the_limit_is_not_truncated(tmp_path: Path, options: dict[str, Any]) -> None:
    """The limits of sentence-transformers, of the tokenizer and of ``encode`` follow the scaling."""
    folder = source(tmp_path / "source", max_position_embeddings=100)
    edit_json(folder / "tokenizer_config.json", {"model_max_length": 100})
    before = fingerprint(folder)
    result = convert(folder, tmp_path / "out", train_length=50, **options)
    assert fingerprint(folder) == before
    limit = 300 if options else 400
    assert result.input_limit == limit
    text = " ".join(f"w{4 + index % 90}" for index in range(250))
    short, long = (load(path) for path in (_truncating(tmp_path), tmp_path / "out"))
    assert (short.max_seq_length, long.max_seq_length) == (100, limit)
    found = long.encode(text)
    assert np.abs(short.encode(text) - found).max() > 1e-2 * np.abs(found).max()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert tokenizer.model_max_length == limit
    assert len(tokenizer(text, truncation=True)["input_ids"]) == 251
    model = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    with torch.no_grad():
        assert np.abs(model.encode([text])[0] - found).max() < 1e-4
        longer = text.replace(" ", " w5 ")
        assert np.abs(model.encode([longer])[0] - long.encode(longer)).max() < 1e-4


def _truncating(folder: Path) -> Path:
    """A copy of the result with the source's limits."""
    copy = folder / "truncating"
    shutil.copytree(folder / "out", copy)
    for name in ("sentence_bert_config.json", "tokenizer_config.json"):
        shutil.copy(folder / "source" / name, copy / name)
    return copy


def reranker(folder: Path) -> Path:
    """A checkpoint as jina-reranker-v1-turbo-en is stored: its config names the trunk, and no labels."""
    tiny.ENCODERS["jina_bert"](folder, 4, head="SequenceClassification", num_labels=1, **QK)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["num_labels"]
    config["architectures"] = ["JinaBertModel"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start, end = (SPECIAL_TOKENS[name] for name in ("bos_token", "eos_token"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B {end}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", {"padding_side": "right"})
    return folder


def test_a_reranker_scores_long_documents_otherwise_and_short_ones_as_before(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = tmp_path / "out"
    convert(reranker(tmp_path / "source"), folder, train_length=TRAIN_LENGTH, dynamic="length", verify=False)
    documents = [" ".join(f"w{4 + (7 * n) % 90}" for n in range(words)) for words in (3, 18, 40, 150)]
    pairs = [("w5 w6", document) for document in documents]
    batch = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(
        *map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt"
    )
    lengths = batch["attention_mask"].sum(1)
    assert lengths.tolist() == [8, 23, 45, 155]
    _, tensors = tiny.read(folder)
    scaled = config_of(folder)
    unscaled, expected = (
        REFERENCES["jina_bert"].logits(
            config,
            tensors,
            batch["input_ids"].numpy(),
            batch["attention_mask"].numpy(),
            "SequenceClassification",
        )[:, 0]
        for config in ({**scaled, "alibi_scaling": None}, scaled)
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(**batch).logits[:, 0].numpy()
    encoder = CrossEncoder(str(folder), trust_remote_code=True, device="cpu")
    scores = encoder.predict(pairs)
    limit = 1e-5 * np.abs(expected).max()
    assert np.abs(logits - expected).max() < limit
    assert np.abs(scores - 1 / (1 + np.exp(-expected))).max() < 1e-5
    changes = np.abs(expected - unscaled)
    assert (changes[lengths <= TRAIN_LENGTH] == 0).all()
    assert (changes[lengths > TRAIN_LENGTH] > 20 * limit).all()
