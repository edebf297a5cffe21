"""Graphs of decoders that do not generate: trunks, classifiers and question answering, without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from converter import OnnxOptions, convert, export
from converter.exports.onnx.choices import Profile
from converter.exports.onnx.session import stacked
from converter.result.converted import open_converted
from tests import tiny
from tests.conftest import edit_json
from tests.dealt import dealt
from tests.onnx_graphs import PROFILES, TRAIN_LENGTH, assert_close, build
from tests.patched import FAMILIES, FITTED, SCALINGS, config_of, options_for
from tests.reference import FAMILIES as REFERENCES
from tests.test_onnx_pooled import with_modules

Array = NDArray[Any]
HEADS = ("Model", "SequenceClassification", "TokenClassification", "QuestionAnswering")
OUTPUTS = {"Model": ["last_hidden_state"], "QuestionAnswering": ["start_logits", "end_logits"]}
LABELS = 3


def converted(
    folder: Path, family: str, head: Any, scaling: str = "ntk", heads: int = 4, **options: Any
) -> Path:
    source = tiny.FACTORIES[family](folder / "source", heads, head=head, **options)
    edit_json(source / "config.json", {"pad_token_id": tiny.PAD})
    convert(source, folder / "out", verify=False, **options_for(scaling, heads))
    return folder / "out"


def run(path: Path, ids: Array, mask: Array) -> tuple[list[str], Array]:
    """Names of the outputs, and what they hold together, [B, S or 1, any]."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask"]
    results = session.run(None, {"input_ids": ids, "attention_mask": mask})
    assert {result.dtype for result in results} == {np.dtype(np.float32)}
    return [value.name for value in session.get_outputs()], stacked(results, ids.shape[1])


def expected(folder: Path, family: str, head: str, ids: Array, mask: Array) -> Array:
    """The reference's hidden states, and the head on them."""
    _, tensors = tiny.read(folder)
    hidden = REFERENCES[family].trunk(config_of(folder), tensors, ids, mask).hidden
    if head == "Model":
        return hidden
    name = {"SequenceClassification": "score", "TokenClassification": "classifier"}.get(head, "qa_outputs")
    scores = hidden @ tensors[f"{name}.weight"].T.astype(np.float64)
    if head != "SequenceClassification":
        return scores + tensors[f"{name}.bias"]
    last = [np.flatnonzero(row != tiny.PAD)[-1] for row in ids]
    return scores[np.arange(len(ids)), last][:, None]


def rows(length: int = 40) -> list[tuple[Array, Array]]:
    """Batches without padding and with padding on either side; the padded tokens have the padding's id."""
    ids = tiny.token_ids(3, length)
    ids[ids == tiny.PAD] += 1
    masks = [np.ones_like(ids)]
    masks += [tiny.padding_mask([length, length - 9, 3], side, length) for side in ("left", "right")]
    return [(np.where(mask == 1, ids, tiny.PAD), mask) for mask in masks]


def check(folder: Path, family: str, head: str, profile: Profile) -> None:
    graph = build(folder, profile)
    for ids, mask in rows():
        names, found = run(graph, ids, mask)
        assert names == OUTPUTS.get(head, ["logits"])
        right = expected(folder, family, head, ids, mask)
        assert_close(found, right, mask if right.shape[1] > 1 else None)


@pytest.mark.parametrize(("family", "head", "profile"), dealt(FAMILIES, HEADS, PROFILES, each=1))
def test_every_head_of_every_family_is_the_reference_s(
    tmp_path: Path, family: str, head: str, profile: Profile
) -> None:
    check(converted(tmp_path, family, head, "ntk-position", 12, num_labels=LABELS), family, head, profile)


@pytest.mark.parametrize(("scaling", "profile"), dealt([*SCALINGS, *FITTED], PROFILES, each=1))
def test_every_scaling_is_the_reference_s(tmp_path: Path, scaling: str, profile: Profile) -> None:
    folder = converted(tmp_path, "bloom", "TokenClassification", scaling, 12, num_labels=LABELS)
    check(folder, "bloom", "TokenClassification", profile)


def norm_is_the_head_s(folder: Path, trunk: Path) -> bool:
    """Whether the last norm belongs to the models with a head, so that a trunk is stored without it.

    Args:
        folder: a converted language model.
        trunk: a checkpoint of its trunk.
    """
    below = open_converted(folder).family.below
    stored, whole = ({below(name) for name in tiny.read(place)[1]} for place in (trunk, folder))
    return bool(whole - stored - {"lm_head.weight"})


@pytest.mark.parametrize(("family", "profile"), dealt(FAMILIES, PROFILES, each=1))
def test_a_trunk_of_a_language_model_longer_than_a_block(
    tmp_path: Path, family: str, profile: Profile
) -> None:
    folder = converted(tmp_path, family, "CausalLM", "ntk-position")
    trunk = tiny.FACTORIES[family](tmp_path / "trunk", 4, head="Model")
    validate = norm_is_the_head_s(folder, trunk)
    options = OnnxOptions(task="feature-extraction", profile=profile, validate=validate)
    result = export(folder, options)
    if result.report is not None:  # the reference of the trunk has the norm, and its graph has none
        assert result.report.passed
        return
    for ids, mask in rows(300):
        _, found = run(folder / "model.onnx", ids, mask)
        assert_close(found, expected(folder, family, "Model", ids, mask), mask)


@pytest.mark.parametrize(
    ("head", "dtype", "profile"),
    [
        ("SequenceClassification", "fp16", "ort"),
        ("Model", "w8a8", "portable"),
        *(
            pytest.param(head, dtype, profile, marks=pytest.mark.slow)
            for head, dtype, profile in [
                ("TokenClassification", "native", "portable"),
                ("QuestionAnswering", "bf16", "ort"),
                ("SequenceClassification", "int4", "portable"),
                ("TokenClassification", "int8", "ort"),
                ("QuestionAnswering", "w8a8", "ort"),
            ]
        ),
    ],
)
def test_exports_are_validated(tmp_path: Path, head: str, dtype: str, profile: Profile) -> None:
    folder = converted(tmp_path, "bloom", head, num_labels=LABELS)
    task = "feature-extraction" if head == "Model" else None
    result = export(folder, OnnxOptions(dtype=dtype, profile=profile, task=task))
    assert result.report is not None
    assert result.report.passed
    for graph in result.report.graphs:
        names = [check.name for check in graph.providers[0].checks]
        assert names[3:] == ["left padding", "right padding", "provider"]
    assert not (folder / "genai_config.json").exists()
    assert "no cache" in (folder / "README.md").read_text()
    # One file: nothing is beside it.
    assert not [name for name in result.files if name.endswith("_data")]


def test_vectors_of_a_decoder_s_trunk(tmp_path: Path) -> None:
    """As SGPT's: later tokens count more."""
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4, head="Model")
    with_modules(source, {"word_embedding_dimension": 32, "pooling_mode": "weightedmean"}, "Normalize")
    convert(source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH, verify=False)
    result = export(tmp_path / "out", OnnxOptions(pooled=True))
    assert result.report is not None
    assert "sentence_embedding" in [check.name for check in result.report.graphs[0].providers[0].checks]
    model = onnx.load(tmp_path / "out/model.onnx", load_external_data=False)
    assert [value.name for value in model.graph.output] == ["last_hidden_state", "sentence_embedding"]


def test_a_classifier_without_padding_is_refused(refused: Any, tmp_path: Path) -> None:
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 4, head="SequenceClassification")
    edit_json(source / "config.json", {"pad_token_id": None})
    words = ("--scale", 2, "--train-length", TRAIN_LENGTH, "--out", tmp_path / "out", "--onnx")
    assert refused(source, *words).endswith("convert the source with --set pad_token_id=N\n")
