"""Vectors of texts in a graph are those of the real sentence-transformers, with padding on either side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from converter import OnnxOptions, convert, export
from converter.exports.onnx.choices import QUANTISED
from converter.exports.onnx.requirements import graph_pooling
from converter.source.pooling import FLAGS, MODES, Pooling
from tests import tiny
from tests.conftest import edit_json
from tests.dealt import dealt
from tests.onnx_graphs import TRAIN_LENGTH, Plant
from tests.patched import config_of
from tests.reference import ENCODERS as REFERENCES

Array = NDArray[Any]
POOLING = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}


def with_modules(folder: Path, pooling: dict[str, Any] = POOLING, *more: str) -> Path:
    """Adds the files of sentence-transformers; ``more`` are kinds of modules after the pooling."""
    modules = []
    for number, kind in enumerate(["Transformer", "Pooling", *more]):
        path = f"{number}_{kind}" if number else ""
        modules.append({"idx": number, "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


def encoder(
    folder: Path, *more: str, family: str = "jina_bert", pooling: dict[str, Any] = POOLING, **options: Any
) -> Path:
    """A converted backbone with the files of sentence-transformers."""
    source = tiny.ENCODERS[family](folder / "source", 4, **{"head": "Model", **options})
    convert(
        with_modules(source, pooling, *more),
        folder / "out",
        scale=2.0,
        train_length=TRAIN_LENGTH,
        verify=False,
    )
    return folder / "out"


def computed(path: Path, ids: Array, mask: Array) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    feed = {"input_ids": ids, "attention_mask": mask}
    feed |= {
        value.name: np.zeros_like(ids) for value in session.get_inputs() if value.name == "token_type_ids"
    }
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feed), strict=True))


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
    tmp_path: Path, mode: dict[str, Any], way: tuple[str, Any, bool]
) -> None:
    family, profile, normalised = way
    pooling = {"word_embedding_dimension": 32, **mode}
    out = encoder(tmp_path, *["Normalize"] * normalised, family=family, pooling=pooling)
    export(out, OnnxOptions(pooled=True, profile=profile, validate=False))
    ids = tiny.token_ids(3, 30)
    _, tensors = tiny.read(out)
    for side in ("left", "right"):
        mask = tiny.padding_mask([30, 17, 1], side, 30)  # type: ignore[arg-type]
        found = computed(out / "model.onnx", ids, mask)
        assert list(found) == ["last_hidden_state", "sentence_embedding"]
        states = REFERENCES[family].logits(config_of(out), tensors, ids, mask, "Model")
        right = pooled(out, states, mask, normalised=normalised)
        assert found["sentence_embedding"].dtype == np.float32
        assert np.abs(found["sentence_embedding"] - right).max() <= 1e-5 * np.abs(right).max()


@pytest.mark.parametrize(
    "dtype",
    ["fp16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("native", "bf16", *QUANTISED))],
)
def test_every_dtype_is_validated_and_checked_again(run: Any, tmp_path: Path, dtype: str) -> None:
    out = encoder(tmp_path, "Normalize")
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


def test_a_wrong_vector_is_found(run: Any, tmp_path: Path, plant: Plant) -> None:
    """The hidden states alone would pass."""

    def mutate(model: onnx.ModelProto) -> None:
        [last] = [node for node in model.graph.node if "sentence_embedding" in node.output]
        assert last.op_type == "Div"
        last.input[1] = last.input[0]

    out = encoder(tmp_path)
    plant(mutate)
    export(out, OnnxOptions(pooled=True, validate=False))
    assert "model.onnx: sentence_embedding: largest difference" in run("validate", out).err


def test_a_model_with_a_head_has_its_backbone_pooled(run: Any, tmp_path: Path) -> None:
    out = encoder(tmp_path, head="MaskedLM")
    assert run("export", out, "--pooled", "--onnx-profile", "portable").code == 0
    ids, mask = tiny.token_ids(2, 9), np.ones((2, 9), dtype=np.int64)
    assert list(computed(out / "model.onnx", ids, mask)) == ["last_hidden_state", "sentence_embedding"]
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
