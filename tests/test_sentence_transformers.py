"""Converted JinaBERTs in the real sentence-transformers: their vectors and scores are the reference's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
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


# Files that sentence-transformers 6 saved

NEW = "sentence_transformers."
NEW_TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def by_newer(folder: Path) -> dict[str, Any]:
    """What sentence-transformers 6.2 saves of a Transformer, a Pooling, a Dense and a Normalize."""
    listed = [
        ("", "base.modules.transformer.Transformer"),
        ("1_Pooling", "sentence_transformer.modules.pooling.Pooling"),
        ("2_Dense", "base.modules.dense.Dense"),
        ("3_Normalize", "base.modules.normalize.Normalize"),
    ]
    names = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    files = {
        "modules.json": [
            {"idx": at, "name": str(at), "path": path, "type": f"{NEW}{kind}"}
            for at, (path, kind) in enumerate(listed)
        ],
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": NEW_TEXT,
            "module_output_name": "token_embeddings",
        },
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "6.2.0", "transformers": "5.24.0"},
            "default_prompt_name": None,
            "model_type": "SentenceTransformer",
            "prompts": {"document": "", "query": ""},
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {
            "embedding_dimension": 32,
            "pooling_mode": "mean",
            "include_prompt": True,
        },
        "2_Dense/config.json": {
            "in_features": 32,
            "out_features": 8,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
            **names,
        },
        "3_Normalize/config.json": names,
    }
    write(folder, files)
    generator = torch.Generator().manual_seed(0)
    weights = {"linear.weight": torch.randn(8, 32, generator=generator), "linear.bias": torch.zeros(8)}
    save_file(weights, folder / "2_Dense/model.safetensors", metadata={"format": "pt"})
    return files


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_what_sentence_transformers_6_saved_loads_on_every_version(tmp_path: Path) -> None:
    folder, out = source(tmp_path / "source"), tmp_path / "out"
    by_newer(folder)
    result = convert(folder, out, train_length=TRAIN_LENGTH, dynamic="length")
    assert not any("sentence-transformers" in note for note in result.notes)
    assert [module["type"] for module in json.loads((out / "modules.json").read_text())] == [
        f"{NEW}models.{kind}" for kind in ("Transformer", "Pooling", "Dense", "Normalize")
    ]
    left = {"module_input_name", "module_output_name", "transformer_task", "modality_config"}
    for name in ("sentence_bert_config.json", *(f"{path}/config.json" for path in ("1_Pooling", "2_Dense"))):
        assert not left & json.loads((out / name).read_text()).keys()
    assert json.loads((out / "1_Pooling/config.json").read_text())["word_embedding_dimension"] == 32
    found = load(out).encode(TEXTS)

    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    batch = tokenizer(TEXTS, padding=True, return_tensors="np")
    mask = batch["attention_mask"]
    _, tensors = tiny.read(out)
    hidden = REFERENCES["jina_bert"].trunk(config_of(out), tensors, batch["input_ids"], mask).hidden
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    dense = load_file(out / "2_Dense/model.safetensors")
    expected = np.tanh(mean @ dense["linear.weight"].double().numpy().T)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(found - expected).max() < 1e-5


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer_task": ("sentence_bert_config.json", {"transformer_task": "fill-mask"}),
    "module_input_name": ("2_Dense/config.json", {"module_input_name": "token_embeddings"}),
    "pooling_mode": ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}),
}


@pytest.mark.parametrize("key", OTHERS)
def test_what_only_sentence_transformers_6_loads_stays_with_a_note(tmp_path: Path, key: str) -> None:
    folder, out = source(tmp_path / "source"), tmp_path / "out"
    name, values = OTHERS[key]
    files = by_newer(folder)
    write(folder, {name: {**files[name], **values}})
    result = convert(folder, out, train_length=TRAIN_LENGTH, verify=False)
    [note] = [note for note in result.notes if "needs version 6" in note]
    assert f"{key} of {name}" in note
    assert json.loads((out / name).read_text())[key] == values[key]


def test_a_module_that_chooses_may_come_later(tmp_path: Path) -> None:
    folder = source(tmp_path / "source")
    files = by_newer(folder)
    later = {**files["modules.json"][2], "type": f"{NEW}models.Asym"}
    write(folder, {"modules.json": [*files["modules.json"][:2], later]})
    convert(folder, tmp_path / "out", train_length=TRAIN_LENGTH, verify=False)


def test_several_poolings_keep_their_order(tmp_path: Path) -> None:
    folder, out = source(tmp_path / "source"), tmp_path / "out"
    files = by_newer(folder)
    write(
        folder, {"1_Pooling/config.json": {**files["1_Pooling/config.json"], "pooling_mode": ["cls", "mean"]}}
    )
    write(folder, {"modules.json": files["modules.json"][:2]})
    convert(folder, out, train_length=TRAIN_LENGTH, verify=False)
    settings = json.loads((out / "1_Pooling/config.json").read_text())
    assert settings["pooling_mode_cls_token"] is settings["pooling_mode_mean_tokens"] is True
    assert "pooling_mode" not in settings
    vectors = load(out).encode(TEXTS)
    assert vectors.shape == (3, 64)
    only_first = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    ids = AutoTokenizer.from_pretrained(out, trust_remote_code=True)(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        first = only_first(**ids).last_hidden_state[0, 0].numpy()
    assert np.abs(vectors[0, :32] - first).max() < 1e-5


def test_the_activation_of_a_reranker_that_sentence_transformers_6_saved(tmp_path: Path) -> None:
    """Version 6 saves it apart from config.json, where older ones look for it."""
    from sentence_transformers import CrossEncoder

    folder, out = reranker(tmp_path / "source"), tmp_path / "out"
    task = {"text": {"method": "forward", "method_output_name": "logits"}}
    files = {
        "modules.json": by_newer(source(tmp_path / "other"))["modules.json"][:1],
        "sentence_bert_config.json": {
            "transformer_task": "sequence-classification",
            "modality_config": task,
            "module_output_name": "scores",
        },
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.linear.Identity",
        },
    }
    write(folder, files)
    result = convert(folder, out, train_length=TRAIN_LENGTH, dynamic="length", verify=False)
    assert not any("needs version 6" in note for note in result.notes)
    pairs = [("w5 w6", "w7"), ("w5 w6", "w8 w9")]
    batch = AutoTokenizer.from_pretrained(out, trust_remote_code=True)(
        *map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt"
    )
    model = AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(**batch).logits[:, 0].numpy()
    scores = CrossEncoder(str(out), trust_remote_code=True, device="cpu").predict(pairs)
    assert np.abs(scores - logits).max() < 1e-5
