"""Quantised graphs: what they store, and that they compute the model with the stored weights."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from converter import OnnxOptions, convert, validate
from converter.exports.onnx.build import build_graph
from converter.exports.onnx.graph import Graph
from converter.exports.onnx.quantise import quantise
from converter.exports.onnx.rounding import BLOCK, Bits
from converter.result.converted import open_converted
from tests import tiny
from tests.dealt import dealt
from tests.patched import VARIANTS, Convert, batch, load

FORMS = {"fused": True, "standard": False}
# Widths that fill blocks of 32, that leave a rest, and an odd number of blocks; tied heads and not.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bloom": ("bloom", 4, {}),
    "bloom-half": ("bloom", 4, {"dtype": torch.float16}),
    "bloom-untied": ("bloom", 12, {"tie_word_embeddings": False}),
    "mpt-rest": ("mpt", 5, {}),
    "falcon": ("falcon", 8, {"dtype": torch.bfloat16}),
    "falcon-rest": ("falcon", 8, VARIANTS["falcon-no-bias"][1]),
    "refact": ("refact", 8, {}),
    "jais": ("jais", 5, {}),
}
# The only family whose linear layers are stored [inputs, outputs].
BY_COLUMN = "transformer.h."
OUTER = ("word_embeddings.weight", "wte.weight", "lm_head.weight")
METADATA = {"made": "here"}


def float_graph(folder: Path) -> Graph:
    """A repository's graph in float32."""
    return build_graph(open_converted(folder), profile="ort", dtype="fp32", last_logits=False)


def quantised(folder: Path, bits: Bits, *, fused: bool) -> Path:
    """The path of a repository's graph, quantised."""
    graph = float_graph(folder)
    target = folder / "onnx" / "model.onnx"
    target.parent.mkdir()
    quantise(graph.main, f"int{bits}", fused=fused)
    graph.save(target, METADATA, copy_weights=True)
    return target


def run(path: Path, ids: torch.Tensor, mask: torch.Tensor, *, exact: bool) -> NDArray[np.float32]:
    """Logits of a first pass on the CPU.

    Args:
        path: of the graph.
        ids, mask: the input.
        exact: without rounded activations.
    """
    options = onnxruntime.SessionOptions()
    if exact:
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 1
        path = path.with_name("exact.onnx")
        onnx.save(model, path)
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    for value in session.get_inputs()[2:]:
        feed[value.name] = np.zeros((len(ids), value.shape[1], 0, value.shape[3]), np.float32)
    return session.run(["logits"], feed)[0]


def numbers(tensor: onnx.TensorProto, folder: Path, bits: int) -> NDArray[np.float64]:
    """What a tensor stores, one number each and flat along the last axis; low halves of bytes first."""
    if tensor.data_type == onnx.TensorProto.UINT4:
        return numpy_helper.to_array(tensor, str(folder)).astype(np.float64)
    assert tensor.data_type == onnx.TensorProto.UINT8
    stored = numpy_helper.to_array(tensor, str(folder))
    stored = stored.reshape(len(stored), -1)
    if bits == 8:
        return stored.astype(np.float64)
    return np.stack([stored % 16, stored // 16], axis=-1).reshape(len(stored), -1).astype(np.float64)


def dequantised(path: Path, *, fused: bool) -> dict[str, tuple[int, NDArray[np.float64]]]:
    """Name of each quantised weight -> its bits and [outputs, inputs, padding included]."""
    model = onnx.load(path, load_external_data=False)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {}
    for name, tensor in stored.items():
        weight, _, bits_text = name.rpartition("_Q")
        if not bits_text.isdigit():
            continue
        bits = int(bits_text)
        scales = numpy_helper.to_array(stored[f"{weight}_scales"], str(path.parent)).astype(np.float64)
        packed, zeros = (numbers(stored[key], path.parent, bits) for key in (name, f"{weight}_zero_points"))
        if fused:
            assert tensor.data_type == onnx.TensorProto.UINT8
        else:
            wanted = onnx.TensorProto.UINT4 if bits == 4 else onnx.TensorProto.UINT8
            assert tensor.data_type == stored[f"{weight}_zero_points"].data_type == wanted
            packed, zeros, scales = packed.T, zeros.T, scales.T
        blocks = np.arange(packed.shape[1]) // BLOCK
        found[weight] = bits, (packed - zeros[:, blocks]) * scales[:, blocks]
    return found


@pytest.mark.parametrize(("case", "bits", "form"), dealt(CASES, [4, 8], FORMS, each=1))
def test_graph_computes_the_model_with_the_stored_weights(
    converted: Convert, case: str, bits: Bits, form: str
) -> None:
    family, heads, changes = CASES[case]
    folder = converted(family, heads, **changes)
    path = quantised(folder, bits, fused=FORMS[form])
    model = load(folder, dtype=torch.float32)
    ids, mask = batch()
    with torch.no_grad():
        original = model(ids, attention_mask=mask).logits.numpy()
    weights = {
        name: tensor.T if family == "jais" and name.startswith(BY_COLUMN) else tensor
        for name, tensor in model.state_dict().items()
        if tensor.dim() == 2
    }
    stored = dequantised(path, fused=FORMS[form])
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(stored) == set(weights) - tied
    for name, (its_bits, values) in stored.items():
        assert its_bits == (8 if name.endswith(OUTER) else bits)
        outputs, inputs = weights[name].shape
        real = values[:, :inputs]
        assert len(values) == outputs
        # No further off than half a step, which is at most the range of a block over the number of steps.
        step = np.ptp(np.pad(weights[name].numpy(), ((0, 0), (0, 1))), axis=1).max() / (2**its_bits - 1)
        assert np.abs(real - weights[name].numpy()).max() <= step
        weights[name].copy_(torch.from_numpy(np.ascontiguousarray(real)))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits.numpy()

    real_tokens = mask.numpy().astype(bool)
    largest = np.abs(expected[real_tokens]).max()
    exact = run(path, ids, mask, exact=True)
    assert np.abs(exact - expected)[real_tokens].max() <= 1e-4 * largest
    # As it is used: activations rounded to 8 bits cost less than 4-bit weights.
    error = root_mean_square((run(path, ids, mask, exact=False) - expected)[real_tokens])
    assert error <= 0.05 * root_mean_square(expected[real_tokens])
    assert root_mean_square((expected - original)[real_tokens]) > 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", ["mpt-rest", "jais"])
def test_a_weight_that_is_quantised_in_several_bands(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, case: str, bits: Bits
) -> None:
    """As in real models, whose weights are larger than one band; the file is the same."""
    folder = converted(*CASES[case][:2])
    path = quantised(folder, bits, fused=False)
    whole = [file.read_bytes() for file in sorted(path.parent.iterdir())]
    shutil.rmtree(path.parent)
    monkeypatch.setattr("converter.exports.onnx.forms.BAND", 1)
    quantised(folder, bits, fused=False)
    assert [file.read_bytes() for file in sorted(path.parent.iterdir())] == whole


def root_mean_square(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize("form", FORMS)
def test_only_the_operators_of_the_profile(converted: Convert, form: str) -> None:
    folder = converted("bloom")
    path = quantised(folder, 4, fused=FORMS[form])
    float_graph(folder).save(folder / "plain.onnx", METADATA)
    plain, model = (onnx.load(file, load_external_data=False) for file in (folder / "plain.onnx", path))
    kinds = {(node.domain, node.op_type) for node in model.graph.node}
    assert (("com.microsoft", "MatMulNBits") in kinds) == FORMS[form]
    added = kinds - {(node.domain, node.op_type) for node in plain.graph.node}
    assert FORMS[form] or all(domain == "" for domain, _ in added)
    assert "Gemm" not in {op_type for _, op_type in kinds}
    assert model.graph.input == plain.graph.input
    assert model.graph.output == plain.graph.output
    assert {entry.key: entry.value for entry in model.metadata_props} == METADATA
    onnx.checker.check_model(path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_onnxruntime_unpacks_no_weight(converted: Convert, bits: Bits, form: str) -> None:
    """All products, that of a head that shares its table too, run on quantised weights."""
    path = quantised(converted("bloom"), bits, fused=FORMS[form])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_name("optimised.onnx"))
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(path.with_name("optimised.onnx"), load_external_data=False).graph.node
    kinds = [node.op_type for node in nodes]
    assert kinds.count("MatMulNBits") == 2 * 4 + 1
    assert "MatMul" not in kinds
    # That of the rows which the embedding looks up.
    assert kinds.count("DequantizeLinear") == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_size(converted: Convert, bits: Bits, form: str) -> None:
    folder = converted("bloom", 16)
    path = quantised(folder, bits, fused=FORMS[form])
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.onnx", "model.onnx_data"]
    width, layers = 128, 2
    in_layers, outside = layers * 12 * width**2, tiny.VOCAB_SIZE * width
    overhead = 4 + bits / 8  # of a block: scale and zero point
    wanted = in_layers * (bits / 8 + overhead / BLOCK) + outside * (1 + 5 / BLOCK)
    # Beyond: norms, biases, and alignment of each tensor.
    size = path.with_name("model.onnx_data").stat().st_size
    assert wanted <= size <= wanted + 4 * 32 * width + 60 * 4096


def test_importing_the_quantiser_leaves_logging_alone(converted: Convert) -> None:
    before = list(logging.getLogger().handlers), logging.getLogger().level
    quantised(converted("bloom"), 8, fused=True)
    assert (list(logging.getLogger().handlers), logging.getLogger().level) == before


@pytest.mark.parametrize(
    ("profile", "dtype", "family", "vocabulary"),
    [
        ("ort", "int8", "bloom", 12_000),
        pytest.param("portable", "int4", "bloom", 12_000, marks=pytest.mark.slow),
        *(
            pytest.param(profile, dtype, family, vocabulary, marks=pytest.mark.slow)
            for profile in ("ort", "portable")
            for dtype in ("int8", "int4")
            for family, vocabulary in (("bloom", 250_880), ("mpt", 50_432), ("falcon", 50_304))
        ),
    ],
)
def test_validation_of_a_real_vocabulary(
    tmp_path: Path, profile: Any, dtype: str, family: str, vocabulary: int
) -> None:
    """Validation runs the first tokens of such a vocabulary, so it shortens the quantised table and head."""
    source = tiny.FACTORIES[family](tmp_path / "source", 8, vocab_size=vocabulary)
    onnx_options = OnnxOptions(dtype=dtype, profile=profile)
    result = convert(source, tmp_path / "out", scale=2, train_length=2048, verify=False, onnx=onnx_options)
    assert result.onnx is not None
    assert result.onnx.report is not None
    [graph] = result.onnx.report.graphs
    assert f"of {vocabulary} tokens of the vocabulary" in graph.extent
    assert graph.passed
    assert validate(tmp_path / "out").passed


@pytest.mark.parametrize(
    ("family", "head", "dtype", "profile"),
    [
        ("jina_bert", "MaskedLM", "int4", "ort"),
        ("mosaic_bert", "SequenceClassification", "int8", "portable"),
    ],
)
def test_graphs_are_compared_with_the_model_of_the_stored_weights(
    tmp_path: Path, family: str, head: Any, dtype: str, profile: Any
) -> None:
    """4 bits lose half of a narrow random model. That is no mistake of the graph, and the report says it."""
    source = tiny.ENCODERS[family](tmp_path / "source", 3, head=head, seed=3)
    onnx_options = OnnxOptions(dtype=dtype, profile=profile)
    result = convert(source, tmp_path / "out", scale=2, train_length=24, verify=False, onnx=onnx_options)
    assert result.onnx is not None
    assert result.onnx.report is not None
    [graph] = result.onnx.report.graphs
    [loss] = [check.difference for check in graph.structure if check.name == "quantised weights"]
    assert loss is not None
    assert (loss > 0.5) == (dtype == "int4")
    assert (
        f"the quantised weights themselves change the results by {loss:.1e}"
        in (tmp_path / "out" / "README.md").read_text()
    )

    # A wrong scale of one weight is a mistake, and smaller than what 4 bits lose.
    [path] = (tmp_path / "out" / "onnx").iterdir()
    model = onnx.load(path)
    scales = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("dense.weight_scales"))
    scales.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(scales), scales.name))
    onnx.save(model, path)
    report = validate(tmp_path / "out")
    assert report.failure is not None
    assert "is not the checkpoint's, rounded" in report.failure
