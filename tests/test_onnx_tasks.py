"""Graphs without a cache: encoders, backbones, classifiers, question answering, and vectors of texts.

Vectors are those of the real sentence-transformers, with padding on either side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from converter import OnnxOptions, export
from converter.exports.onnx.choices import DTYPES, QUANTISED, Profile
from converter.exports.onnx.requirements import graph_pooling
from converter.result.converted import open_converted
from converter.source.sentence_transformers import FLAGS, MODES, Pooling
from tests import tiny
from tests.conftest import Pristine, Run, edit_json
from tests.dealt import dealt
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
from tests.patched import FAMILIES, config_of
from tests.reference import ENCODERS as REFERENCES
from tests.run_graphs import outputs
from tests.runners import Graph, expected

LABELS = {"num_labels": 3, "pad_token_id": tiny.PAD}
ODD = {"hidden_size": 3 * 86}
"""86 channels in each of 3 heads."""
BACKBONE = "feature-extraction"


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
    repository: Make, name: str, heads: int, changes: Any, dtype: Any, profile: Profile, task: str | None
) -> None:
    folder = repository(name, num_heads=heads, **changes)
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
def test_half_precision_weights_get_two_graphs(repository: Make, family: str) -> None:
    folder = repository(family, num_heads=12, dtype=torch.float16)
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
def test_a_language_model_s_backbone(repository: Make, tmp_path: Path, family: str, profile: Profile) -> None:
    """Validated, or, where the reference of the backbone has a norm that its graph has not, compared."""
    folder = repository(family)
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
    run: Callable[..., Run],
    pristine: Pristine,
    tmp_path: Path,
    family: str,
    head: Any,
    profile: Profile,
    dtype: str,
) -> None:
    """Beside a graph of the whole model: ``validate`` compares each with what it computes."""
    source, out = pristine(family, num_heads=12, head=head), tmp_path / "out"
    words = ["--onnx", "--onnx-task", BACKBONE, "--onnx-profile", profile, "--onnx-dtype", dtype]
    run(source, "--scale", 2, "--train-length", TRAIN_LENGTH, "--out", out, *words, "--no-verify")
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

    exported(out, standalone=True)
    assert run("validate", out).code == 0


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_no_bias_of_all_queries_exists(repository: Make, family: str, profile: Profile) -> None:
    """Attention is inside a loop over blocks of queries, in each of the two layers."""
    graph = onnx.load(build(repository(family, head="Model"), profile), load_external_data=False).graph
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


WAYS = [("jina_bert", "ort", False), ("mosaic_bert", "portable", True), ("jina_bert", "portable", True)]


@pytest.mark.parametrize(
    ("mode", "way"),
    dealt([*[{flag: True} for flag in FLAGS], {"pooling_mode": ["cls", "mean"]}, {}], WAYS, each=1),
    ids=str,
)
def test_vectors_are_those_of_sentence_transformers(
    repository: Make, mode: dict[str, Any], way: tuple[str, Any, bool]
) -> None:
    family, profile, normalised = way
    pooling = {"word_embedding_dimension": 32, **mode}
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


@pytest.mark.parametrize(
    "dtype",
    ["fp16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("native", "bf16", *QUANTISED))],
)
def test_every_dtype_is_validated_and_checked_again(run: Any, repository: Make, dtype: str) -> None:
    out = with_modules(repository("jina_bert", head="Model"), POOLING, "Normalize")
    result = export(out, OnnxOptions(pooled=True, dtype=dtype))
    assert result.report is not None
    checks = [check for graph in result.report.graphs for check in graph.providers[0].checks]
    found = [check for check in checks if check.name == "sentence_embedding"]
    assert len(found) == len(result.report.graphs)
    assert all(check.passed and check.difference for check in found)
    assert "one vector of each text: mean, scaled to unit length" in (out / "README.md").read_text()
    assert run("validate", out).code == 0
    # A graph of another way to pool is refused, whatever it computes.
    edit_json(
        out / "1_Pooling/config.json", {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    )
    result = run("validate", out)
    assert result.code == 1
    assert 'was made for the pooling {"modes": ["mean"], "normalised": true}' in result.err
    assert 'sentence-transformers say {"modes": ["cls"], "normalised": true}; export it again' in result.err
    (out / "modules.json").unlink()
    assert "makes one vector of each text, but --pooled needs modules.json" in run("validate", out).err


def test_a_wrong_vector_is_found(run: Any, repository: Make, plant: Plant) -> None:
    """The hidden states alone would pass."""

    def mutate(model: onnx.ModelProto) -> None:
        [last] = [node for node in model.graph.node if "sentence_embedding" in node.output]
        assert last.op_type == "Div"
        last.input[1] = last.input[0]

    out = with_modules(repository("jina_bert", head="Model"))
    plant(mutate)
    exported(out, pooled=True)
    assert "model.onnx: sentence_embedding: largest difference" in run("validate", out).err


def test_a_model_with_a_head_has_its_backbone_pooled(run: Any, repository: Make) -> None:
    out = with_modules(repository("jina_bert", head="MaskedLM"))
    assert run("export", out, "--pooled", "--onnx-profile", "portable").code == 0
    ids, mask = tiny.token_ids(2, 9), np.ones((2, 9), dtype=np.int64)
    assert list(outputs(str(out / "model.onnx"), ids, mask)) == ["last_hidden_state", "sentence_embedding"]
    assert run("validate", out).code == 0


def test_settings_of_sentence_transformers_in_old_and_new_spellings(tmp_path: Path) -> None:
    def read(settings: dict[str, Any], *more: str) -> Pooling:
        return graph_pooling(with_modules(tmp_path, settings, *more))

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
