"""Graphs of integer products (w8a8): each output has a scale, and so have the activations of each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import nn
from transformers.pytorch_utils import Conv1D

from converter import OnnxOptions, convert, export, validate
from converter.exports.onnx.build import build_graph
from converter.exports.onnx.quantise import quantise
from converter.result.converted import open_converted
from tests import tiny
from tests.dealt import dealt
from tests.patched import Convert, batch, load
from tests.test_onnx_quantise import CASES, FORMS, METADATA, OUTER, dequantised, root_mean_square, run

Array = NDArray[Any]
WEIGHT, ACTIVATION = 64, 127


def product(weight: Array, *, fused: bool) -> onnxruntime.InferenceSession:
    """A graph that multiplies rows with a weight [outputs, inputs], quantised."""
    rows = ir.val("rows", ir.DataType.FLOAT, ("count", weight.shape[1]))
    matrix = ir.val("weight", ir.DataType.FLOAT, weight.shape, const_value=ir.tensor(weight, name="weight"))
    node = ir.node("Gemm", [rows, matrix], {"transB": 1}, name="/layers.0/product")
    node.outputs[0].name, node.outputs[0].type = "result", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [rows],
        [node.outputs[0]],
        nodes=[node],
        initializers=[matrix],
        opset_imports={"": 21, "com.microsoft": 1},
        name="product",
    )
    quantise(graph, "w8a8", fused=fused)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


SIZES = (0.0, 2.0**-40, 1.0, 2.0**40)
"""Of the rows; all zeros too."""


def drawn(data: st.DataObject) -> tuple[int, int, int, Array, np.random.Generator]:
    """Rows, inputs and outputs; the size of each row, float32 [rows, 1]; a source of numbers."""
    count, inputs, outputs = (data.draw(st.integers(1, most)) for most in (4, 70, 40))
    sizes = [data.draw(st.sampled_from(SIZES)) for _ in range(count)]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    return count, inputs, outputs, np.array(sizes, np.float32)[:, None], rng


@given(st.data())
def test_numbers_of_8_bits_are_multiplied_exactly(data: st.DataObject) -> None:
    count, inputs, outputs, sizes, rng = drawn(data)
    numbers = rng.integers(-ACTIVATION, ACTIVATION + 1, (count, inputs))
    weights = rng.integers(-WEIGHT, WEIGHT + 1, (outputs, inputs))
    numbers[:, 0], weights[:, -1] = ACTIVATION, -WEIGHT  # the largest, so the scales are known
    weights[0] = 0
    for fused in FORMS.values():
        session = product((weights / 8).astype(np.float32), fused=fused)
        [found] = session.run(None, {"rows": numbers.astype(np.float32) * sizes})
        np.testing.assert_allclose(found, (numbers @ weights.T) / 8 * sizes.astype(np.float64), rtol=1e-5)


@given(st.data())
def test_others_are_off_by_no_more_than_half_a_step(data: st.DataObject) -> None:
    count, inputs, outputs, sizes, rng = drawn(data)
    rows = sizes * rng.standard_normal((count, inputs), np.float32)
    weight = rng.standard_normal((outputs, inputs), np.float32)
    x, w = np.abs(rows.astype(np.float64)), np.abs(weight.astype(np.float64))
    row_half, weight_half = x.max(axis=1) / ACTIVATION / 2, w.max(axis=1) / WEIGHT / 2
    bound = np.outer(row_half, w.sum(axis=1)) + np.outer(x.sum(axis=1), weight_half)
    bound += inputs * np.outer(row_half, weight_half)
    for fused in FORMS.values():
        [found] = product(weight, fused=fused).run(None, {"rows": rows})
        assert (np.abs(found - rows.astype(np.float64) @ weight.T) <= 1.001 * bound).all()


def test_the_sums_of_two_products_fit_into_16_bits(converted: Convert) -> None:
    """So processors that add two products in 16 bits compute the same; see ``LARGEST_WEIGHT``."""
    path = quantised(converted("bloom"), fused=False)
    model = onnx.load(path)
    integers = [
        numpy_helper.to_array(tensor).astype(np.int64)
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8
    ]
    assert len(integers) == 2 * 4
    assert max(np.abs(each).max() for each in integers) == WEIGHT
    assert 2 * 255 * WEIGHT < 2**15
    assert len({node.input[0] for node in model.graph.node if node.op_type == "MatMulInteger"}) == 2 * 4


def quantised(folder: Path, *, fused: bool) -> Path:
    """The path of a repository's graph in w8a8."""
    graph = build_graph(open_converted(folder), profile="ort", dtype="fp32", last_logits=False)
    target = folder / "onnx" / "model.onnx"
    target.parent.mkdir()
    quantise(graph.main, "w8a8", fused=fused)
    graph.save(target, METADATA, copy_weights=True)
    return target


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Activations rounded to 8 bits, those of each token with a scale of their own."""
    step = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / ACTIVATION
    return (values / step).round() * step


@pytest.mark.parametrize(("case", "form"), dealt(CASES, FORMS, each=1))
def test_graph_computes_the_model_with_rounded_activations(converted: Convert, case: str, form: str) -> None:
    family, heads, changes = CASES[case]
    folder = converted(family, heads, **changes)
    path = quantised(folder, fused=FORMS[form])
    model = load(folder, dtype=torch.float32)
    ids, mask = batch()
    with torch.no_grad():
        original = model(ids, attention_mask=mask).logits.numpy()
    stored = stored_weights(path, fused=FORMS[form])
    layers = 0
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if key not in stored:
            continue
        transposed = isinstance(module, Conv1D)
        outputs, inputs = reversed(module.weight.shape) if transposed else module.weight.shape
        values = torch.from_numpy(stored[key][:outputs, :inputs]).float()
        module.weight.data = (values.T if transposed else values).contiguous()
        if isinstance(module, (nn.Linear, Conv1D)) and not key.endswith(OUTER):
            layers += 1
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
    assert layers >= 8
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits.numpy()
    real = mask.numpy().astype(bool)
    found = run(path, ids, mask, exact=True)
    scale = root_mean_square(expected[real])
    # Where a float32 sum differs in its last bit, a number may be rounded to its neighbour.
    assert root_mean_square((found - expected)[real]) <= 5e-3 * scale
    assert 1e-3 * scale < root_mean_square((expected - original)[real]) < 0.1 * scale


def stored_weights(path: Path, *, fused: bool) -> dict[str, Array]:
    """Name of each quantised weight -> its values [outputs, inputs], each padding included."""
    model = onnx.load(path)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {
        name.removesuffix("_Q8"): numpy_helper.to_array(tensor).astype(np.float64)
        * numpy_helper.to_array(tensors[name.replace("_Q8", "_scales")])
        for name, tensor in tensors.items()
        if tensor.data_type == onnx.TensorProto.INT8
    }
    blocks = path.with_name("blocks.onnx")
    model.graph.ClearField("initializer")
    model.graph.initializer.extend(
        tensor for name, tensor in tensors.items() if tensor.data_type != onnx.TensorProto.INT8
    )
    onnx.save(model, blocks)
    return {name: values.T for name, values in found.items()} | {
        name: values for name, (_, values) in dequantised(blocks, fused=fused).items()
    }


def test_a_row_does_not_depend_on_the_others(converted: Convert) -> None:
    """One scale for the whole batch, as in onnxruntime's dynamic quantisation, would make it so."""
    path = quantised(converted("bloom"), fused=True)
    ids, mask = batch()
    whole = run(path, ids, mask, exact=True)
    for row in range(len(ids)):
        alone = run(path, ids[row : row + 1], mask[row : row + 1], exact=True)
        real = mask[row].numpy().astype(bool)
        np.testing.assert_allclose(whole[row][real], alone[0][real], atol=1e-5)


@pytest.mark.parametrize("case", ["mpt-rest", "jais", "bloom-half"])
def test_a_weight_that_is_read_in_several_pieces(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder = converted(*CASES[case][:2], **CASES[case][2])
    path = quantised(folder, fused=True)
    whole = [file.read_bytes() for file in sorted(path.parent.iterdir())]
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    for name in ("BAND", "PIECE"):
        monkeypatch.setattr(f"converter.exports.onnx.integers.{name}", 1)
    quantised(folder, fused=True)
    assert [file.read_bytes() for file in sorted(path.parent.iterdir())] == whole


@pytest.mark.parametrize("form", FORMS)
def test_only_the_operators_of_the_profile(converted: Convert, form: str) -> None:
    path = quantised(converted("bloom"), fused=FORMS[form])
    model = onnx.load(path, load_external_data=False)
    kinds = {(node.domain, node.op_type) for node in model.graph.node}
    wanted = ("com.microsoft", "MatMulIntegerToFloat") if FORMS[form] else ("", "MatMulInteger")
    assert wanted in kinds
    assert "Gemm" not in {op_type for _, op_type in kinds}
    onnx.checker.check_model(path)


@pytest.mark.parametrize(("family", "profile"), [("mpt", "portable"), ("jina_bert", "ort")])
def test_export_validates_it_and_finds_a_wrong_scale(tmp_path: Path, family: str, profile: Any) -> None:
    factory = tiny.FACTORIES.get(family) or tiny.ENCODERS[family]
    source = factory(tmp_path / "source", 8)
    convert(source, tmp_path / "out", scale=2, train_length=24, verify=False)
    result = export(tmp_path / "out", OnnxOptions(dtype="w8a8", profile=profile))
    assert result.report is not None
    assert "onnx/model_int8.onnx" in result.files
    path = tmp_path / "out" / "onnx" / "model_int8.onnx"
    model = onnx.load(path)
    scales = next(
        tensor
        for tensor in model.graph.initializer
        if tensor.name.endswith("_scales") and len(tensor.dims) == 1
    )
    scales.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(scales), scales.name))
    onnx.save(model, path)
    report = validate(tmp_path / "out")
    assert report.failure is not None
    assert "is not the checkpoint's, rounded" in report.failure
