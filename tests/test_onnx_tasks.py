"""Graphs without a cache: encoders, backbones, classifiers and question answering. Exports and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from converter import OnnxOptions, convert, export
from converter.exports.onnx.choices import DTYPES, Profile
from converter.result.converted import open_converted
from tests import tiny
from tests.conftest import Run
from tests.dealt import dealt
from tests.onnx_graphs import PROFILES, TRAIN_LENGTH, assert_close, build, nodes_of
from tests.patched import FAMILIES, Convert
from tests.runners import Graph, expected
from tests.test_onnx_pooled import with_modules

OPTIONS: dict[str, Any] = {"scale": 2.0, "train_length": TRAIN_LENGTH, "verify": False}
WORDS = ("--scale", 2, "--train-length", TRAIN_LENGTH)
LABELS = {"num_labels": 3, "pad_token_id": tiny.PAD}
ODD = {"hidden_size": 3 * 86}
"""86 channels in each of 3 heads."""
BACKBONE = "feature-extraction"


@pytest.fixture
def model(tmp_path: Path) -> Convert:
    """``model(name, heads=4, **options)``: a converted tiny checkpoint with a short trained length."""

    def make(name: str, heads: int = 4, **options: Any) -> Path:
        source = (tiny.FACTORIES | tiny.ENCODERS)[name](tmp_path / "source", heads, **options)
        convert(source, tmp_path / "out", **OPTIONS)
        return tmp_path / "out"

    return make


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "heads", "changes", "dtype", "profile", "task"),
    [
        *(
            pytest.param("jina_bert", 12, {"head": "Model"}, *each.values, None, marks=each.marks)
            for each in dealt(DTYPES, PROFILES, each=1)
        ),
        ("jina_bert", 3, {"head": "Model", "hidden_size": 30}, "native", "ort", None),
        ("bloom", 4, {"head": "SequenceClassification", **LABELS}, "fp16", "ort", None),
        ("bloom", 4, {"head": "Model"}, "w8a8", "portable", BACKBONE),
        slow("bloom", 4, {"head": "TokenClassification", **LABELS}, "native", "portable", None),
        slow("bloom", 4, {"head": "QuestionAnswering"}, "bf16", "ort", None),
        slow("bloom", 4, {"head": "SequenceClassification", **LABELS}, "int4", "portable", None),
        slow("bloom", 4, {"head": "TokenClassification", **LABELS}, "int8", "ort", None),
        slow("bloom", 4, {"head": "QuestionAnswering"}, "w8a8", "ort", None),
        # Language models, whose past and present may be one buffer, with heads of an odd size
        ("bloom", 3, ODD, "int4", "ort", None),
        *(slow("bloom", 3, ODD, dtype, "ort", None) for dtype in ("fp16", "int8")),
        *(slow("bloom", 3, ODD, dtype, "portable", None) for dtype in ("fp16", "int8", "int4")),
    ],
)
def test_exports_are_validated(
    model: Convert, name: str, heads: int, changes: Any, dtype: Any, profile: Profile, task: str | None
) -> None:
    folder = model(name, heads, **changes)
    result = export(folder, OnnxOptions(profile=profile, dtype=dtype, task=task))
    assert result.report is not None
    assert result.report.passed
    if "head" in changes:
        for graph in result.report.graphs:
            names = [check.name for check in graph.providers[0].checks]
            assert names[3:] == ["left padding", "right padding", "provider"]
        assert not (folder / "genai_config.json").exists()
        if name == "bloom":
            assert "no cache" in (folder / "README.md").read_text()
    for file in folder.rglob("genai_config.json"):
        genai = json.loads(file.read_text(encoding="utf-8"))
        assert genai["model"]["decoder"]["head_size"] == 96


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_half_precision_weights_get_two_graphs(model: Convert, family: str) -> None:
    folder = model(family, 12, dtype=torch.float16)
    result = export(folder)
    assert {name for name in result.files if name.endswith(".onnx")} == {"model.onnx", "model_fp32.onnx"}
    ids, mask = tiny.token_ids(2, 40), tiny.padding_mask([40, 25], "right")
    right = expected(folder, family, ids, mask)
    for name, relative in (("model_fp32.onnx", 1e-5), ("model.onnx", 0.02)):
        assert_close(Graph(folder / name, 1).whole(ids, mask), right, mask, relative)


# Backbones


def norm_is_the_head_s(folder: Path, backbone: Path) -> bool:
    """Whether the last norm belongs to the models with a head, so that a backbone is stored without it."""
    below = open_converted(folder).family.below
    stored, whole = ({below(name) for name in tiny.read(place)[1]} for place in (backbone, folder))
    return bool(whole - stored - {"lm_head.weight"})


@pytest.mark.parametrize(("family", "profile"), dealt(FAMILIES, PROFILES, each=1))
def test_a_language_model_s_backbone(model: Convert, tmp_path: Path, family: str, profile: Profile) -> None:
    """Validated, or, where the reference of the backbone has a norm that its graph has not, compared."""
    folder = model(family)
    backbone = tiny.FACTORIES[family](tmp_path / "backbone", 4, head="Model")
    validate = norm_is_the_head_s(folder, backbone)
    result = export(folder, OnnxOptions(task=BACKBONE, profile=profile, validate=validate))
    if result.report is not None:
        assert result.report.passed
        return
    graph = Graph(folder / "model.onnx", 1)
    ids = tiny.token_ids(3, 300)  # more than a block
    for side in ("left", "right"):
        mask = tiny.padding_mask([300, 291, 3], side)  # type: ignore[arg-type]
        assert_close(graph.whole(ids, mask), expected(folder, family, ids, mask, head="Model"), mask)


@pytest.mark.parametrize(
    ("family", "head", "profile", "dtype"),
    [
        ("jina_bert", "MaskedLM", "portable", "native"),
        ("mosaic_bert", "MaskedLM", "ort", "int8"),
        ("mosaic_bert", "SequenceClassification", "ort", "native"),
    ],
)
def test_an_encoder_s_backbone(
    run: Callable[..., Run], tmp_path: Path, family: str, head: Any, profile: Profile, dtype: str
) -> None:
    """Beside a graph of the whole model: ``validate`` compares each with what it computes."""
    source = tiny.ENCODERS[family](tmp_path / "source", 12, head=head)
    out = tmp_path / "out"
    words = ["--onnx", "--onnx-task", BACKBONE, "--onnx-profile", profile, "--onnx-dtype", dtype]
    run(source, *WORDS, "--out", out, *words, "--no-verify")
    path = out / ("onnx/model_quantized.onnx" if dtype == "int8" else "model.onnx")
    graph = onnx.load(path, load_external_data=False).graph
    assert [value.name for value in graph.output] == ["last_hidden_state"]
    assert not [tensor.name for tensor in graph.initializer if "cls." in tensor.name]
    ids, mask = tiny.token_ids(2, 30), tiny.padding_mask([30, 17], "right")
    right = expected(out, family, ids, mask, head="Model")
    assert_close(Graph(path, 1).whole(ids, mask), right, mask, relative=0.05 if dtype == "int8" else 1e-5)
    card = (out / "README.md").read_text()
    assert f"- task: `{BACKBONE}`" in card
    assert f" --onnx-task {BACKBONE}" in card

    convert(source, tmp_path / "both", **OPTIONS)
    export(tmp_path / "both", OnnxOptions(task=BACKBONE, validate=False))
    export(tmp_path / "both", OnnxOptions(standalone=True, validate=False))
    assert run("validate", tmp_path / "both").code == 0


def test_vectors_of_a_decoder_s_backbone(tmp_path: Path) -> None:
    """As SGPT's: later tokens count more."""
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4, head="Model")
    with_modules(source, {"word_embedding_dimension": 32, "pooling_mode": "weightedmean"}, "Normalize")
    convert(source, tmp_path / "out", **OPTIONS)
    result = export(tmp_path / "out", OnnxOptions(pooled=True))
    assert result.report is not None
    assert "sentence_embedding" in [check.name for check in result.report.graphs[0].providers[0].checks]
    assert Graph(tmp_path / "out/model.onnx", 1).outputs == ["last_hidden_state", "sentence_embedding"]


# Size


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_no_bias_of_all_queries_exists(model: Convert, family: str, profile: Profile) -> None:
    """Attention is inside a loop over blocks of queries, in each of the two layers."""
    graph = onnx.load(build(model(family, head="Model"), profile), load_external_data=False).graph
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
