"""Graphs without a cache: encoders, backbones, classifiers, question answering, and vectors of texts.

Vectors are those of the real sentence-transformers, with padding on either side.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from converter import OnnxOptions, export
from converter.onnx.options import DTYPES, Profile
from converter.onnx.requirements import graph_pooling
from converter.source.open import open_folder
from converter.source.sentence_transformers import FLAGS, MODES, Pooling
from tests import tiny
from tests.conftest import Pristine, RunCli, edit_json
from tests.messages import says
from tests.onnx_graphs import (
    POOLING,
    PROFILES,
    TRAIN_LENGTH,
    Array,
    Make,
    Plant,
    assert_close,
    build,
    exported,
    nodes_of,
    with_modules,
)
from tests.patched import config_of
from tests.reference import ENCODERS as REFERENCES
from tests.run_graphs import outputs
from tests.runners import Graph, expected

LABELS = {"num_labels": 3, "pad_token_id": tiny.PAD}
BACKBONE = "feature-extraction"


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


ENCODER = ("jina_bert", 12, {"head": "Model"})
CLASSIFIER = ("bloom", 4, {"head": "SequenceClassification", **LABELS})
ODD = ("bloom", 3, {"hidden_size": 3 * 86})
"""A language model, whose past and present may be one buffer, with 86 channels in each of 3 heads."""


@pytest.mark.parametrize(
    ("model", "dtype", "profile", "task"),
    [
        *((ENCODER, dtype, profile, None) for dtype, profile in zip(DTYPES, cycle(PROFILES), strict=False)),
        (("jina_bert", 3, {"head": "Model", "hidden_size": 30}), "native", "ort", None),
        (CLASSIFIER, "fp16", "ort", None),
        (CLASSIFIER, "int4", "portable", None),
        (("bloom", 4, {"head": "Model"}), "w8a8", "portable", BACKBONE),
        (("bloom", 4, {}), "native", "portable", BACKBONE),
        (("refact", 4, {}), "native", "ort", BACKBONE),
        (("mosaic_bert", 12, {"head": "SequenceClassification"}), "int8", "ort", BACKBONE),
        slow(("bloom", 4, {"head": "TokenClassification", **LABELS}), "native", "portable", None),
        slow(("bloom", 4, {"head": "QuestionAnswering"}), "bf16", "ort", None),
        (ODD, "int4", "ort", None),
        *(slow(ODD, "fp16", profile, None) for profile in PROFILES),
    ],
    ids=str,
)
def test_exports_are_validated(
    repository: Make, model: tuple[str, int, Any], dtype: Any, profile: Profile, task: str | None
) -> None:
    name, heads, changes = model
    folder = repository(name, num_heads=heads, **changes)
    result = export(folder, OnnxOptions(profile=profile, dtype=dtype, task=task))
    assert result.report is not None
    assert result.report.passed
    if "head" in changes or task:
        for graph in result.report.graphs:
            names = [check.name for check in graph.providers[0].checks]
            assert names[3:] == ["left padding", "right padding", "provider"]
        assert not (folder / "genai_config.json").exists()
    for file in folder.rglob("genai_config.json"):
        genai = json.loads(file.read_text(encoding="utf-8"))
        assert genai["model"]["decoder"]["head_size"] == 96


# Backbones


def test_an_encoder_s_backbone(run: RunCli, pristine: Pristine, tmp_path: Path) -> None:
    """Beside a graph of the whole model: ``validate`` compares each with what it computes."""
    source, out = pristine("jina_bert", num_heads=12, head="MaskedLM"), tmp_path / "out"
    words = ["--onnx", "--onnx-task", BACKBONE, "--onnx-profile", "portable", "--no-verify"]
    run(source, "--scale", 2, "--train-length", TRAIN_LENGTH, "--out", out, *words)
    path = out / "model.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    assert [value.name for value in graph.output] == ["last_hidden_state"]
    assert not [tensor.name for tensor in graph.initializer if "cls." in tensor.name]
    ids, mask = tiny.token_ids(2, 30), tiny.padding_mask([30, 17], "right")
    right = expected(out, "jina_bert", ids, mask, head="Model")
    assert_close(Graph(path, 1).whole(ids, mask), right, mask)
    card = (out / "README.md").read_text()
    assert f"task `{BACKBONE}`" in card

    exported(out, standalone=True)
    assert run("validate", out).code == 0


def test_no_bias_of_all_queries_exists(repository: Make) -> None:
    """Attention is inside a loop over blocks of queries, in each of the two layers."""
    graph = onnx.load(build(repository("jina_bert", head="Model")), load_external_data=False).graph
    loops = [node for node in nodes_of(graph) if node.op_type == "Loop"]
    bodies = [
        attribute.g
        for node in loops
        for attribute in node.attribute
        if attribute.type == onnx.AttributeProto.GRAPH
    ]
    assert sum(node.op_type == "Softmax" for body in bodies for node in body.node) == 2
    outer = {node.op_type for node in graph.node}
    assert not outer & {"Softmax", "Attention", "MultiHeadAttention"}


# Vectors of texts


def pooled(folder: Path, states: Array, mask: Array, *, normalised: bool) -> Array:
    """What sentence-transformers computes of hidden states."""
    # Imported here: every worker collects this file, and the import takes seconds.
    from sentence_transformers.models import Normalize
    from sentence_transformers.models import Pooling as Theirs

    module = Theirs.load(str(folder / "1_Pooling"))
    features = {"token_embeddings": torch.from_numpy(states), "attention_mask": torch.from_numpy(mask)}
    features = module(features)
    features = Normalize()(features) if normalised else features
    found: Array = features["sentence_embedding"].numpy()
    return found


@pytest.mark.parametrize(
    ("settings", "family", "profile", "normalised"),
    [
        (dict.fromkeys(FLAGS, True), "jina_bert", "ort", False),
        (dict.fromkeys(FLAGS, True), "mosaic_bert", "portable", True),
        ({"pooling_mode": ["cls", "mean"]}, "jina_bert", "portable", True),
        ({}, "jina_bert", "ort", True),
    ],
    ids=["all", "all, normalised", "two", "none"],
)
def test_vectors_are_those_of_sentence_transformers(
    repository: Make, settings: dict[str, Any], family: str, profile: Profile, *, normalised: bool
) -> None:
    """Of all ways to pool, joined to one vector."""
    pooling = {"word_embedding_dimension": 32, **settings}
    out = with_modules(repository(family, head="Model"), pooling, *["Normalize"] * normalised)
    exported(out, profile, pooled=True)
    ids = tiny.token_ids(3, 30)
    _, tensors = tiny.read(out)
    for side in ("left", "right"):
        mask = tiny.padding_mask([30, 17, 1], side, 30)  # type: ignore[arg-type]
        found = outputs(str(out / "model.onnx"), ids, mask)
        assert list(found) == ["last_hidden_state", "sentence_embedding"]
        states = REFERENCES[family].logits(config_of(out), tensors, ids, mask, "Model")
        right = pooled(out, states, mask, normalised=normalised)
        assert found["sentence_embedding"].dtype == np.float32
        assert np.abs(found["sentence_embedding"] - right).max() <= 1e-5 * np.abs(right).max()


def test_a_pooling_that_modules_json_names_and_nobody_stored(repository: Make) -> None:
    """The user says it, and modules.json whether the vector is scaled."""
    out = with_modules(repository("jina_bert", head="Model"), POOLING, "Normalize")
    (out / "1_Pooling/config.json").unlink()
    assert export(out, OnnxOptions("portable", pooled=True, pooling="cls")).report is not None
    ids, mask = tiny.token_ids(2, 12), np.ones((2, 12), dtype=np.int64)
    found = outputs(str(out / "model.onnx"), ids, mask)
    first = found["last_hidden_state"][:, 0]
    right = first / np.linalg.norm(first, axis=1, keepdims=True)
    assert np.abs(found["sentence_embedding"] - right).max() < 1e-6


@pytest.mark.parametrize(
    "dtype",
    ["fp16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("bf16", "w8a8"))],
)
def test_every_dtype_is_validated_and_checked_again(run: Any, repository: Make, dtype: str) -> None:
    out = with_modules(repository("jina_bert", head="Model"), POOLING, "Normalize")
    result = export(out, OnnxOptions(pooled=True, dtype=dtype))
    assert result.report is not None
    checks = [check for graph in result.report.graphs for check in graph.providers[0].checks]
    found = [check for check in checks if check.name == "sentence_embedding"]
    assert len(found) == len(result.report.graphs)
    assert all(check.passed and check.difference for check in found)
    assert "mean, scaled to unit length" in (out / "README.md").read_text()
    assert run("validate", out).code == 0
    # A graph of another way to pool is wrong, whatever it computes.
    edit_json(
        out / "1_Pooling/config.json", {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    )
    pooled = ('"mean, scaled to unit length"', '"cls, scaled to unit length"')
    says(run("validate", out).err, *pooled, "export it again")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_pooling_that_is_given(run: Any, repository: Make, pooling: str) -> None:
    """The repository has no files that say how to pool."""
    out = repository("mosaic_bert", head="Model")
    done = run("export", out, "--pooled", "--pooling", pooling)
    assert done.code == 0, done.err
    ids, mask = tiny.token_ids(3, 30), tiny.padding_mask([30, 17, 1], "right", 30)
    states, vectors = outputs(str(out / "model.onnx"), ids, mask).values()
    means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    right = means if pooling == "mean" else states[:, 0]
    assert np.abs(vectors - right).max() <= 1e-5 * np.abs(right).max()
    assert f"each text: {pooling}" in (out / "README.md").read_text()
    assert run("validate", out).code == 0
    # Files that say otherwise make the graph wrong.
    with_modules(out, {"word_embedding_dimension": 32, "pooling_mode": "max"})
    assert "pooling" in run("validate", out).err


def test_a_wrong_vector_is_found(run: Any, repository: Make, plant: Plant) -> None:
    """The hidden states alone would pass."""

    def mutate(model: onnx.ModelProto) -> None:
        [last] = [node for node in model.graph.node if "sentence_embedding" in node.output]
        assert last.op_type == "Div"
        last.input[1] = last.input[0]

    out = with_modules(repository("jina_bert", head="Model"))
    plant(mutate)
    exported(out, pooled=True)
    assert "model.onnx: sentence_embedding" in run("validate", out).err


def test_settings_of_sentence_transformers_in_old_and_new_spellings(tmp_path: Path) -> None:
    def read(settings: dict[str, Any], *more: str) -> Pooling:
        return graph_pooling(open_folder(with_modules(tmp_path, settings, *more)), None)

    for flag, mode in FLAGS.items():
        assert read({"word_embedding_dimension": 32, flag: True}) == Pooling((mode,), normalised=False)
        assert read({"pooling_mode": mode}, "Normalize") == Pooling((mode,), normalised=True)
    assert read(dict.fromkeys(FLAGS, True)).modes == MODES
    # A new key makes old ones void, and none at all means the mean.
    assert read({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}).modes == ("cls",)
    assert read({"pooling_mode_mean_tokens": False}).modes == ("mean",)


def test_vectors_of_a_decoder_s_backbone(repository: Make) -> None:
    """As SGPT's: later tokens count more."""
    pooling = {"word_embedding_dimension": 32, "pooling_mode": "weightedmean"}
    out = with_modules(repository("bloom", head="Model"), pooling, "Normalize")
    result = export(out, OnnxOptions(pooled=True))
    assert result.report is not None
    assert "sentence_embedding" in [check.name for check in result.report.graphs[0].providers[0].checks]
    assert Graph(out / "model.onnx", 1).outputs == ["last_hidden_state", "sentence_embedding"]
