"""Quantised graphs: what they store, and that they compute the model with the stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import nn
from transformers.pytorch_utils import Conv1D

from converter import OnnxOptions, convert, export
from converter.onnx.files import standalone_graph
from converter.onnx.graph import Graph
from converter.onnx.options import Profile
from converter.onnx.quantise import Quantiser
from converter.onnx.rounding import BLOCK, Bits, Stored, pack, quantisation_parameters
from converter.onnx.rounding import quantised as rounded_numbers
from converter.onnx.rounding import rounded as rounded_weight
from tests import tiny
from tests.onnx_graphs import PROFILES, Engine, exported, graphs_report
from tests.patched import Convert, batch, load

Array = NDArray[Any]
DTYPES = ("int4", "int8", "int4-fp16", "int8-fp16", "w8a8")
WEIGHT, ACTIVATION = 64, 127
"""The largest numbers of w8a8."""
# Widths that fill blocks of 32, that leave a rest, and an odd number of blocks; tied heads and not.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bloom": ("bloom", 4, {}),
    "bloom-half": ("bloom", 4, {"dtype": torch.float16}),
    "bloom-untied": ("bloom", 12, {"tie_word_embeddings": False}),
    "mpt-rest": ("mpt", 5, {}),
    "falcon": ("falcon", 8, {"dtype": torch.bfloat16}),
    "refact": ("refact", 8, {}),
    "jais": ("jais", 5, {}),
}
OUTER = ("word_embeddings.weight", "wte.weight", "lm_head.weight")


def quantised(folder: Path, dtype: str, profile: Profile = "ort") -> Path:
    """The path of a repository's graph, quantised."""
    return exported(folder, profile, dtype=dtype) / standalone_graph(dtype)


def run(path: Path, ids: torch.Tensor, mask: torch.Tensor, *, exact: bool) -> Array:
    """Logits of a first pass on the CPU; ``exact``: MatMulNBits does not round activations."""
    if exact:
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 1
        path = path.with_name("exact.onnx")
        onnx.save(model, path)
    return Engine(path).step(ids.numpy(), mask.numpy())[0]


def numbers(stored: Array, bits: int) -> NDArray[np.float64]:
    """What MatMulNBits stores, one number each and flat along the last axis; low halves of bytes first."""
    assert stored.dtype == np.uint8
    stored = stored.reshape(len(stored), -1)
    if bits == 8:
        return stored.astype(np.float64)
    return np.stack([stored % 16, stored // 16], axis=-1).reshape(len(stored), -1).astype(np.float64)


def stored_weights(path: Path) -> dict[str, tuple[str, Array]]:
    """Name of each quantised weight -> its dtype as an export names it, and [outputs, inputs and padding]."""
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    found = {}
    for name, tensor in tensors.items():
        weight, _, bits = name.rpartition("_Q")
        if not bits.isdigit():
            continue
        scales = tensors[f"{weight}_scales"].astype(np.float64)
        if tensor.dtype == np.int8:
            found[weight] = "w8a8", (tensor * scales).T
            continue
        packed, zeros = (numbers(each, int(bits)) for each in (tensor, tensors[f"{weight}_zero_points"]))
        blocks = np.arange(packed.shape[1]) // BLOCK
        half = "-fp16" * (tensors[f"{weight}_scales"].dtype == np.float16)
        found[weight] = f"int{bits}{half}", (packed - zeros[:, blocks]) * scales[:, blocks]
    return found


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Activations rounded to 8 bits, those of each token with a scale of their own."""
    step = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / ACTIVATION
    return (values / step).round() * step


def root_mean_square(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "dtype", "profile"),
    [
        ("bloom", "int4", "ort"),
        ("bloom-half", "w8a8", "portable"),
        ("bloom-untied", "int8", "portable"),
        ("mpt-rest", "int4", "portable"),
        ("mpt-rest", "w8a8", "ort"),
        ("falcon", "int8", "ort"),
        ("refact", "w8a8", "portable"),
        ("jais", "int4", "ort"),
        ("bloom", "int4-fp16", "ort"),
        ("falcon", "int8-fp16", "portable"),
        ("mpt-rest", "int4-fp16", "portable"),
        ("jais", "int8-fp16", "ort"),
    ],
)
def test_graph_computes_the_model_with_the_stored_weights(
    converted: Convert, case: str, dtype: str, profile: Profile
) -> None:
    family, heads, changes = CASES[case]
    folder = converted(family, heads, **changes)
    path = quantised(folder, dtype, profile)
    model = load(folder, dtype=torch.float32)
    ids, mask = batch()
    real = mask.numpy().astype(bool)

    def results() -> Array:
        logits: Array = model(ids, attention_mask=mask).logits.numpy()[real]
        return logits

    original = results()
    weights = {name: value for name, value in model.state_dict().items() if value.dim() == 2}
    columns = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    stored = stored_weights(path)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(stored) == set(weights) - tied
    for name, (its_dtype, values) in stored.items():
        assert its_dtype == (
            dtype.replace("int4", "int8").replace("w8a8", "int8") if name.endswith(OUTER) else dtype
        )
        weight = weights[name].T if name in columns else weights[name]
        outputs, inputs = weight.shape
        found = values[:outputs, :inputs]
        # No further off than half a step, which is at most the range of a block over the number of steps.
        steps = WEIGHT if its_dtype == "w8a8" else 2 ** int(its_dtype[3]) - 1
        span = np.ptp(np.pad(weight.numpy(), ((0, 0), (0, 1))), axis=1).max()
        assert np.abs(found - weight.numpy()).max() <= span / steps
        weight.copy_(torch.from_numpy(np.ascontiguousarray(found)))
    if dtype == "w8a8":
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D) and not f"{name}.weight".endswith(OUTER):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
    expected = results()
    scale = root_mean_square(expected)
    error = root_mean_square(run(path, ids, mask, exact=True)[real] - expected)
    # Where a float32 sum differs in its last bit, w8a8 may round a number to its neighbour.
    limits = {"w8a8": 5e-3, "int4-fp16": 5e-3, "int8-fp16": 5e-3}
    assert error <= limits.get(dtype, 1e-5) * scale
    # As it is used: activations rounded to 8 bits cost less than 4-bit weights.
    assert root_mean_square(run(path, ids, mask, exact=False)[real] - expected) <= 0.05 * scale
    assert 1e-3 * scale < root_mean_square(expected - original) < (0.5 if "int4" in dtype else 0.1) * scale


@pytest.mark.parametrize(
    ("case", "dtype"), [("mpt-rest", "int4"), ("jais", "int8-fp16"), ("jais", "w8a8"), ("bloom-half", "w8a8")]
)
def test_a_weight_that_is_quantised_in_several_pieces(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, case: str, dtype: str
) -> None:
    """As in real models, whose weights are larger than one piece; the file is the same."""
    folder = converted(*CASES[case][:2], **CASES[case][2])
    path = quantised(folder, dtype)
    whole = [file.read_bytes() for file in sorted(path.parent.iterdir())]
    for name in ("BAND", "PIECE"):
        monkeypatch.setattr(f"converter.onnx.rounding.{name}", 1)
    quantised(folder, dtype)
    assert [file.read_bytes() for file in sorted(path.parent.iterdir())] == whole


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operators(converted: Convert, dtype: str, profile: Profile) -> None:
    """All products run on quantised weights, and CUDA has each operator."""
    folder = converted("bloom")
    path = quantised(folder, dtype, profile)
    exported(folder, profile, dtype="fp16" if "fp16" in dtype else "fp32")
    plain, model = (onnx.load(file, load_external_data=False).graph for file in (folder / "model.onnx", path))
    kinds = [f"{node.domain}.{node.op_type}".lstrip(".") for node in model.node]
    others = {f"{node.domain}.{node.op_type}".lstrip(".") for node in plain.node}
    blocks, layers = "com.microsoft.MatMulNBits", 2 * 4
    integers = {"ort": "com.microsoft.MatMulIntegerToFloat", "portable": "MatMulInteger"}[profile]
    assert kinds.count(blocks) == (1 if dtype == "w8a8" else layers + 1)
    assert kinds.count(integers) == (layers if dtype == "w8a8" else 0)
    assert not {"Gemm", "com.microsoft.FusedMatMul", "DequantizeLinear"} & set(kinds)
    added = {name for name in set(kinds) - others if "." in name}
    assert added <= {blocks, integers}
    # With a level, float16 is computed wrong by onnxruntime 1.22 on the CPU.
    products = [node for node in model.node if node.op_type == "MatMulNBits"]
    levels = {attribute.name for node in products for attribute in node.attribute}
    assert ("accuracy_level" in levels) == ("fp16" not in dtype)
    # No bias in the product, which some versions of onnxruntime for CUDA refuse.
    assert all(len(node.input) == 4 for node in products)
    assert (model.input, model.output) == (plain.input, plain.output)
    onnx.checker.check_model(path, full_check=True)
    # The sums of two products fit into 16 bits, which is all that some processors add them in.
    stored = [numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
    largest = [np.abs(each.astype(np.int64)).max() for each in stored if each.dtype == np.int8]
    assert len(largest) == (layers if dtype == "w8a8" else 0)
    assert 2 * 255 * max(largest, default=0) < 2**15


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_rounded_as_by_onnxruntime(bits: Bits) -> None:
    """To the byte; among values of float16, many lie between two numbers."""
    from onnxruntime.quantization import matmul_nbits_quantizer as theirs

    config = theirs.DefaultWeightOnlyQuantConfig(block_size=BLOCK, bits=bits)
    for shift in (-2, 0, 2):  # blocks of one sign too
        weight = np.random.default_rng(0).normal(shift, size=(500, 8 * BLOCK)).astype(np.float16)
        right = theirs.DefaultWeightOnlyQuantizer(config).qbits_block_quant(
            np.ascontiguousarray(weight.T.astype(np.float32))
        )
        stored = Stored(ir.tensor(weight), by_column=False, bits=bits)
        parameters = quantisation_parameters(stored)
        packed = np.concatenate([pack(piece, bits) for piece in rounded_numbers(stored, parameters)])
        made = (packed, parameters.scales, pack(parameters.zeros, bits))
        for found, wanted in zip(made, right, strict=True):
            assert np.array_equal(found, wanted.reshape(found.shape))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-7, 1e-5, 1.0, 1e4])
def test_scales_of_float16(bits: Bits, size: float) -> None:
    """Their rounding costs less than a step, or nearly nothing where they are denormal numbers."""
    for shift in (-2, 0, 2):
        weight = (size * np.random.default_rng(0).normal(shift, size=(64, 4 * BLOCK))).astype(np.float32)
        blocks = weight.reshape(64, 4, BLOCK).astype(np.float64)
        steps = (blocks.max(-1).clip(min=0) - blocks.min(-1).clip(max=0)) / (2**bits - 1)
        found = rounded_weight(weight, bits, np.float16).reshape(blocks.shape)
        bound = 0.6 * steps + 2**bits * 2.0**-25
        assert (np.abs(found - blocks).max(-1) <= bound).all()


# Products of integers


def product(weight: Array, *, fused: bool) -> onnxruntime.InferenceSession:
    """A graph that multiplies rows with a weight [outputs, inputs], quantised."""
    graph = Graph(ir.DataType.FLOAT)
    rows = graph.input("rows", ir.DataType.FLOAT, ("count", weight.shape[1]))
    result = Quantiser(graph, "w8a8", fused=fused).product(rows, ir.tensor(weight, name="weight"))
    graph.output(result, "result", ir.DataType.FLOAT, ("count", weight.shape[0]))
    model = ir.to_proto(graph.model())
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


SIZES = (0.0, 2.0**-40, 1.0, 2.0**40)
"""Of the rows; all zeros too."""


DRAWN = (
    *(st.integers(1, most) for most in (70, 40)),
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    st.integers(0, 2**32),
)


@settings(max_examples=40)
@given(*DRAWN)
def test_numbers_of_8_bits_are_multiplied_exactly(
    inputs: int, outputs: int, scales: list[float], seed: int
) -> None:
    rng, sizes = np.random.default_rng(seed), np.array(scales, np.float32)[:, None]
    values = rng.integers(-ACTIVATION, ACTIVATION + 1, (len(sizes), inputs))
    weights = rng.integers(-WEIGHT, WEIGHT + 1, (outputs, inputs))
    values[:, 0], weights[:, -1] = ACTIVATION, -WEIGHT  # the largest, so the scales are known
    weights[0] = 0
    for fused in (False, True):
        session = product((weights / 8).astype(np.float32), fused=fused)
        [found] = session.run(None, {"rows": values.astype(np.float32) * sizes})
        np.testing.assert_allclose(found, (values @ weights.T) / 8 * sizes.astype(np.float64), rtol=1e-5)


def test_a_row_does_not_depend_on_the_others(converted: Convert) -> None:
    """One scale for the whole batch, as in onnxruntime's dynamic quantisation, would make it so."""
    path = quantised(converted("bloom"), "w8a8")
    ids, mask = batch()
    whole = run(path, ids, mask, exact=True)
    for row in range(len(ids)):
        alone = run(path, ids[row : row + 1], mask[row : row + 1], exact=True)
        real = mask[row].numpy().astype(bool)
        np.testing.assert_allclose(whole[row][real], alone[0][real], atol=1e-5)


# Validation


@pytest.mark.parametrize(
    ("family", "head", "dtype", "profile"),
    [
        ("jina_bert", "MaskedLM", "int4", "ort"),
        ("jina_bert", "MaskedLM", "int8-fp16", "portable"),
        ("bloom", "CausalLM", "int4-fp16", "ort"),
        ("mosaic_bert", "SequenceClassification", "int8", "portable"),
        ("mpt", "CausalLM", "w8a8", "portable"),
    ],
)
def test_graphs_are_compared_with_the_model_of_the_stored_weights(
    tmp_path: Path, family: str, head: Any, dtype: str, profile: Profile
) -> None:
    """4 bits lose much of a narrow random model. That is no mistake of the graph, and the report says it."""
    factory = tiny.FACTORIES.get(family) or tiny.ENCODERS[family]
    source = factory(tmp_path / "source", 3, head=head, seed=3)
    onnx_options = OnnxOptions(dtype=dtype, profile=profile)
    out = tmp_path / "out"
    convert(source, out, scale=2, train_length=24, verify=False)
    report = export(out, onnx_options).report
    assert report is not None
    [graph] = report.graphs
    [loss] = [check.difference for check in graph.structure if check.name == "quantised weights"]
    assert loss is not None
    assert (loss > 0.1) == ("int4" in dtype)

    # A wrong scale of one weight is a mistake, and smaller than what 4 bits lose.
    path = out / standalone_graph(dtype)
    model = onnx.load(path)
    path.with_name(f"{path.name}_data").unlink(missing_ok=True)
    scales = next(
        tensor
        for tensor in model.graph.initializer
        if tensor.name.endswith(".weight_scales") and (len(tensor.dims) == 1) == (dtype == "w8a8")
    )
    scales.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(scales), scales.name))
    onnx.save(model, path)
    report = graphs_report(out)
    assert report.failure is not None
    assert "is not the checkpoint's, rounded" in report.failure
