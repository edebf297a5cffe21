"""Graphs of encoders: every head and scaling against the float64 reference, exports, what they refuse."""

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
from converter.exports.onnx.attention_portable import BLOCK
from converter.exports.onnx.choices import DTYPES, Profile
from converter.exports.onnx.session import stacked
from converter.exports.onnx.validation import cases
from tests import tiny
from tests.conftest import edit_json
from tests.dealt import dealt
from tests.onnx_graphs import PROFILES, TRAIN_LENGTH, assert_close, build, edit, nodes_of
from tests.patched import FITTED, SCALINGS, config_of, options_for
from tests.reference import ENCODERS as REFERENCES
from tests.test_encoders import HEADS, LAYERS, VARIANTS

Array = NDArray[Any]


def converted(folder: Path, family: str, heads: int = 4, scaling: str = "ntk", **options: Any) -> Path:
    source = tiny.ENCODERS[family](folder / "source", heads, **options)
    convert(source, folder / "out", verify=False, **options_for(scaling, heads))
    return folder / "out"


def run(path: Path, ids: Array, mask: Array | None = None) -> Array:
    """What a graph computes, [B, S or 1, any]."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    mask = np.ones_like(ids) if mask is None else mask
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return stacked(session.run(None, feed), ids.shape[1])


def expected(folder: Path, family: str, head: str, ids: Array, mask: Array | None = None) -> Array:
    _, tensors = tiny.read(folder)
    right = REFERENCES[family].logits(config_of(folder), tensors, ids, mask, head)
    return right if right.ndim == 3 else right[:, None]


@pytest.mark.parametrize(
    ("layer", "profile", "scaling"),
    [*dealt(LAYERS, PROFILES, SCALINGS), *dealt(LAYERS, PROFILES[:1], FITTED, each=1)],
)
def test_every_scaling_is_the_reference_s(tmp_path: Path, profile: Profile, layer: str, scaling: str) -> None:
    family, changes = LAYERS[layer]
    folder = converted(tmp_path, family, 12, scaling, **changes)
    graph = build(folder, profile)
    ids = tiny.token_ids(3, 48)
    for side in ("left", "right"):
        mask = tiny.padding_mask([48, 31, 7], side, 48)  # type: ignore[arg-type]
        assert_close(run(graph, ids, mask), expected(folder, family, "MaskedLM", ids, mask), mask)
    assert_close(run(graph, ids), expected(folder, family, "MaskedLM", ids))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_every_head_is_the_reference_s(tmp_path: Path, family: str, head: Any) -> None:
    folder = converted(tmp_path, family, 6, head=head, num_labels=3)
    ids, mask = tiny.token_ids(2, 30), tiny.padding_mask([30, 17], "right")
    right = expected(folder, family, head, ids, mask)
    real = mask if right.shape[1] == 30 else None
    assert_close(run(build(folder), ids, mask), right, real)
    model = onnx.load(folder / "graph.onnx", load_external_data=False)
    names = [value.name for value in model.graph.output]
    wanted = {"Model": ["last_hidden_state"], "QuestionAnswering": ["start_logits", "end_logits"]}
    assert names == wanted.get(head, ["logits"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_the_config_are_honoured(tmp_path: Path, variant: str) -> None:
    family, changes = VARIANTS[variant]
    changes = {key: value for key, value in changes.items() if value is not None}
    folder = converted(tmp_path, family, 6, **changes)
    ids, mask = tiny.token_ids(2, 30), tiny.padding_mask([30, 17], "left")
    assert_close(run(build(folder), ids, mask), expected(folder, family, "MaskedLM", ids, mask), mask)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_texts_around_and_beyond_one_block_of_queries(tmp_path: Path, family: str, length: int) -> None:
    folder = converted(tmp_path, family, 4, "ntk-position")
    ids = tiny.token_ids(1, length)
    assert_close(run(build(folder), ids), expected(folder, family, "MaskedLM", ids))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_no_bias_of_all_queries_exists(tmp_path: Path, family: str, profile: Profile) -> None:
    """The largest value of a run at 2048 tokens is a block's scores, not the square's."""
    folder = converted(tmp_path, family, 4, head="Model")
    path = build(folder, profile)
    inside: list[str] = []

    def expose(model: onnx.ModelProto) -> None:
        for node in nodes_of(model.graph):
            if node.op_type == "Loop":
                [body] = [attribute.g for attribute in node.attribute if attribute.type == 5]
                inside.extend(inner.op_type for inner in body.node)
        outer = {node.op_type for node in model.graph.node}
        assert not outer & {"Softmax", "Attention", "MultiHeadAttention"}
        model.producer_name = "checked"

    edit(path, expose)
    assert inside.count("Softmax") == 2


@pytest.mark.parametrize(("dtype", "profile"), dealt(DTYPES, PROFILES, each=1))
def test_exports_are_validated_and_need_no_genai(tmp_path: Path, profile: Profile, dtype: Any) -> None:
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 12, head="Model")
    convert(source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH, verify=False)
    result = export(tmp_path / "out", OnnxOptions(profile=profile, dtype=dtype))
    assert result.report is not None
    assert result.report.passed
    names = [check.name for check in result.report.graphs[0].providers[0].checks]
    assert names == [
        "prompt of 16",
        "prompt of 32",
        "prompt of 128",
        "left padding",
        "right padding",
        "provider",
    ]
    assert "genai_config.json" not in result.files
    assert not (tmp_path / "out" / "genai_config.json").exists()


@pytest.mark.parametrize(
    ("family", "head", "profile", "dtype"),
    [
        ("jina_bert", "MaskedLM", "portable", "native"),
        ("mosaic_bert", "MaskedLM", "ort", "int8"),
        ("mosaic_bert", "SequenceClassification", "ort", "native"),
    ],
)
def test_a_graph_of_the_trunk_of_a_model_with_a_head(
    run_cli: Any, tmp_path: Path, family: str, head: Any, profile: Profile, dtype: str
) -> None:
    """Beside a graph of the whole model: ``validate`` compares each with what it computes."""
    source = tiny.ENCODERS[family](tmp_path / "source", 12, head=head)
    out = tmp_path / "out"
    words = ["--onnx", "--onnx-task", "feature-extraction", "--onnx-profile", profile, "--onnx-dtype", dtype]
    run_cli(source, "--scale", "2", "--train-length", TRAIN_LENGTH, "--out", out, *words, "--no-verify")
    path = out / ("onnx/model_quantized.onnx" if dtype == "int8" else "model.onnx")
    model = onnx.load(path, load_external_data=False)
    assert [value.name for value in model.graph.output] == ["last_hidden_state"]
    assert not [tensor.name for tensor in model.graph.initializer if "cls." in tensor.name]
    ids, mask = tiny.token_ids(2, 30), tiny.padding_mask([30, 17], "right")
    right = expected(out, family, "Model", ids, mask)
    assert_close(run(path, ids, mask), right, mask, relative=0.05 if dtype == "int8" else 1e-5)
    card = (out / "README.md").read_text()
    assert "- task: `feature-extraction`" in card
    assert " --onnx-task feature-extraction" in card

    convert(source, tmp_path / "both", scale=2.0, train_length=TRAIN_LENGTH, verify=False)
    export(tmp_path / "both", OnnxOptions(task="feature-extraction", validate=False))
    export(tmp_path / "both", OnnxOptions(standalone=True, validate=False))
    assert run_cli("validate", tmp_path / "both").code == 0


@pytest.mark.parametrize(
    ("head", "task", "part"),
    [
        ("Model", "fill-mask", "that this checkpoint (NtkJinaBertModel) does not have; choose feature-extra"),
        ("MaskedLM", "text-classification", "choose fill-mask or feature-extraction"),
        ("MaskedLM", "text-generation", "choose fill-mask or feature-extraction"),
    ],
)
def test_a_task_that_the_checkpoint_has_no_weights_for(
    refused: Any, tmp_path: Path, head: Any, task: str, part: str
) -> None:
    """Its head would be random."""
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4, head=head)
    words = ("--onnx-task", task)
    assert part in refused(source, "--scale", "2", "--out", tmp_path / "out", "--onnx", *words)
    convert(source, tmp_path / "out", scale=2.0, verify=False)
    assert part in refused("export", tmp_path / "out", *words)


def test_a_head_that_is_named_but_not_stored(refused: Any, tmp_path: Path) -> None:
    """As Jina's embedding models name one; the tensors of ``.bin`` weights are seen when they are read."""
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4, head="Model", fmt="bin")
    edit_json(source / "config.json", {"architectures": ["JinaBertForMaskedLM"]})
    words = ("--onnx", "--onnx-task", "fill-mask", "--no-verify")
    line = refused(source, "--scale", "2", "--out", tmp_path / "out", *words)
    assert "(NtkJinaBertModel) does not have" in line


def test_a_head_that_a_decoder_does_not_have(refused: Any, tmp_path: Path, pristine: Any) -> None:
    convert(pristine("bloom"), tmp_path / "out", scale=2.0, verify=False)
    line = refused("export", tmp_path / "out", "--onnx-task", "token-classification")
    assert "(NtkBloomForCausalLM) does not have; choose text-generation or feature-extraction\n" in line


def test_a_graph_of_a_task_that_it_does_not_compute_fails(run_cli: Any, tmp_path: Path) -> None:
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4)
    convert(source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH, verify=False)
    export(tmp_path / "out", OnnxOptions(validate=False))

    def pretend(model: onnx.ModelProto) -> None:
        [entry] = model.metadata_props
        entry.value = json.dumps({**json.loads(entry.value), "task": "feature-extraction"})

    edit(tmp_path / "out" / "model.onnx", pretend)
    assert run_cli("validate", tmp_path / "out").code == 1
    assert (tmp_path / "out" / "model.onnx.failed").exists()


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_half_precision_weights_get_two_graphs(tmp_path: Path, family: str) -> None:
    source = tiny.ENCODERS[family](tmp_path / "source", 12, dtype=torch.float16)
    convert(source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH, verify=False)
    result = export(tmp_path / "out")
    assert {name for name in result.files if name.endswith(".onnx")} == {"model.onnx", "model_fp32.onnx"}
    ids, mask = tiny.token_ids(2, 40), tiny.padding_mask([40, 25], "right")
    right = expected(tmp_path / "out", family, "MaskedLM", ids, mask)
    assert_close(run(tmp_path / "out" / "model_fp32.onnx", ids, mask), right, mask)
    assert_close(run(tmp_path / "out" / "model.onnx", ids, mask), right, mask, relative=0.02)


def test_a_graph_with_another_slope_is_refused(run_cli: Any, tmp_path: Path) -> None:
    source = tiny.ENCODERS["mosaic_bert"](tmp_path / "source", 4, head="Model")
    convert(source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH, verify=False)
    export(tmp_path / "out")

    def flatten(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if list(tensor.dims) == [1, 1, 4]:
                slopes = onnx.numpy_helper.to_array(tensor) * 0.9
                tensor.CopyFrom(onnx.numpy_helper.from_array(slopes, tensor.name))
                return
        raise AssertionError("no slopes found")

    edit(tmp_path / "out" / "model.onnx", flatten)
    result = run_cli("validate", tmp_path / "out", "--json")
    assert result.code == 1
    assert (tmp_path / "out" / "model.onnx.failed").exists()
    assert not json.loads(result.out)["passed"]


@pytest.fixture
def run_cli(run: Any) -> Any:
    """The command line, under a name that ``run`` of this module does not hide."""
    return run


@pytest.mark.parametrize(
    ("head", "task"), [("MaskedLM", "fill-mask"), ("MaskedLM", "feature-extraction"), ("Model", None)]
)
@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_excerpts_of_large_encoders_pass(
    run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, head: Any, task: str | None
) -> None:
    source = tiny.ENCODERS[family](tmp_path / "source", 4, head=head, num_hidden_layers=4)
    convert(source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH, verify=False)
    for limit in ("OPERATIONS", "LOGITS"):
        monkeypatch.setattr(cases, limit, 1)
    assert run_cli("export", tmp_path / "out", *(["--onnx-task", task] if task else [])).code == 0
    [graph] = json.loads((tmp_path / "out" / "onnx_validation.json").read_text())["graphs"]
    assert "first 2 of 4 layers" in graph["extent"]
    assert ("first 64 of 97 tokens" in graph["extent"]) == (task == "fill-mask")
