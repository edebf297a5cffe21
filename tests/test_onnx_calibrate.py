"""int4 weights that are calibrated on a text (GPTQ)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from converter import OnnxOptions, convert, export
from converter.onnx.calibrate import DAMPING, gptq
from converter.onnx.rounding import BLOCK, dequantised, rounded
from converter.onnx.session import Session
from converter.texts import load_tokenizer, read_windows
from tests import tiny
from tests.onnx_graphs import graphs_report
from tests.patched import load
from tests.test_onnx_quantise import stored_weights

Array = NDArray[Any]
FAMILIES = {**tiny.FACTORIES, **tiny.ENCODERS}
QUICK = ("mpt", "jais", "jina_bert")
"""Linear layers, Conv1D, an encoder."""
WORDS = [f"w{index}" for index in range(4, tiny.VOCAB_SIZE)]


def inputs(rng: np.random.Generator, count: int, width: int) -> Array:
    """Inputs [count, width] that go together, as a layer's do."""
    return rng.normal(size=(count, width)) @ rng.normal(size=(width, width)) + rng.normal(size=width)


def by_definition(weight: Array, products: Array, scales: Array, zeros: Array) -> Array:
    """GPTQ's numbers in float64, one input after another, with the inverse of what is left of the products.

    The scales and zero points are given, since they depend on the updates before them.
    """
    damped = products + DAMPING * np.diag(products).mean() * np.eye(len(products))
    left, numbers = weight.astype(np.float64).copy(), np.zeros(weight.shape)
    for index in range(weight.shape[1]):
        inverse = np.linalg.inv(damped[index:, index:])
        scale, zero = (part[:, index // BLOCK] for part in (scales, zeros))
        numbers[:, index] = np.clip(np.round(left[:, index] / scale + zero), 0, 15)
        error = left[:, index] - (numbers[:, index] - zero) * scale
        left[:, index:] -= np.outer(error / inverse[0, 0], inverse[0])
    return numbers


@settings(max_examples=20)
@given(st.integers(0, 999), st.sampled_from([3, 32, 75, 128, 200]), st.sampled_from([1, 5, 33]))
def test_the_numbers_are_those_of_the_definition(seed: int, width: int, outputs: int) -> None:
    rng = np.random.default_rng(seed)
    x = inputs(rng, 4 * width, width).astype(np.float32)
    weight = rng.normal(size=(outputs, width)).astype(np.float32)
    products = x.T @ x
    found = [part.numpy() for part in gptq(torch.from_numpy(weight), torch.from_numpy(products.copy()))]
    numbers, scales, zeros = found
    expected = by_definition(weight, products.astype(np.float64), scales, zeros)
    # float32 may round another way where a value is in the middle, and what follows then differs too.
    assert np.mean(numbers == expected) > 0.97 or numbers.size < 200
    ours, right = (
        np.square(x.astype(np.float64) @ (weight - dequantised(each, scales, zeros)).T).sum()
        for each in (numbers, expected)
    )
    assert ours <= 1.05 * right + 1e-9


@pytest.mark.parametrize("special", ["zero weight", "zero input", "one sign", "one text token"])
def test_weights_and_inputs_with_nothing_to_choose(special: str) -> None:
    rng = np.random.default_rng(1)
    x, weight = inputs(rng, 200, 64).astype(np.float32), rng.normal(size=(8, 64)).astype(np.float32)
    if special == "zero weight":
        weight[:] = 0
    elif special == "zero input":
        x[:, ::3] = 0
    elif special == "one sign":
        weight = np.abs(weight)
    else:
        x = x[:1]
    parts = [part.numpy() for part in gptq(torch.from_numpy(weight), torch.from_numpy(x.T @ x))]
    values = dequantised(*parts)
    assert np.isfinite(values).all()
    assert np.abs(x @ (values - weight).T).max() <= 0.5 * max(np.abs(x @ weight.T).max(), 1e-9)


def text(path: Path, words: int = 12_000) -> Path:
    """A file with random words."""
    path.write_text(" ".join(np.random.default_rng(0).choice(WORDS, words)), encoding="utf-8")
    return path


def loss(folder: Path, graph: str, windows: Array, results: Array) -> float:
    """The mean square of a graph's differences from the torch model's results on windows."""
    session = Session(folder / "onnx" / graph, "cpu")
    found = session.step(windows, np.ones_like(windows))[0]
    return float(np.square(found.values - results).mean())


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in FAMILIES],
)
def test_every_family(tmp_path: Path, family: str) -> None:
    decoder = family in tiny.FACTORIES
    source = FAMILIES[family](tmp_path / "source", 8 if family != "jais" else 5)
    out, file = tmp_path / "out", text(tmp_path / "text.txt")
    options = OnnxOptions(dtype="int4", calibrate=(file,))
    convert(source, out, method="ntk", scale=2, train_length=24, verify=False)
    report = export(out, options).report
    assert report is not None
    [graph] = report.graphs
    assert graph.passed
    assert "calibrated" in next(each.detail for each in graph.structure if each.name == "stored weights")
    assert graphs_report(out).passed
    assert "calibrated on a text (GPTQ)" in (out / "README.md").read_text(encoding="utf-8")
    assert not list(out.rglob("calibrated-*"))

    model = load(out, AutoModelForCausalLM if decoder else AutoModelForMaskedLM, dtype=torch.float32)
    windows = read_windows(load_tokenizer(out, "it", None), [file], 24, 8)
    with torch.no_grad():
        output = model(torch.from_numpy(windows))
    results = (output.logits if "logits" in output else output.last_hidden_state).numpy()
    calibrated = loss(out, "model_q4.onnx", windows, results)
    export(out, OnnxOptions(dtype="int4"))
    assert calibrated < loss(out, "model_q4.onnx", windows, results)


@pytest.mark.parametrize(("dtype", "graph"), [("int4", "model_q4.onnx"), ("int4-fp16", "model_q4f16.onnx")])
def test_what_is_stored(tmp_path: Path, dtype: str, graph: str) -> None:
    """The same in both profiles and each time."""
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 5)
    file = text(tmp_path / "text.txt")
    convert(source, tmp_path / "out", method="none", train_length=24, verify=False)
    weights = load(tmp_path / "out").state_dict()
    found = []
    for profile in ("ort", "portable", "ort"):
        export(tmp_path / "out", OnnxOptions(profile, dtype, calibrate=(file,), validate=False))
        found.append(stored_weights(tmp_path / "out" / "onnx" / graph))
    half = "-fp16" * ("fp16" in dtype)
    for name, (its_dtype, values) in found[0].items():
        assert all(np.array_equal(values, other[name][1]) for other in found)
        weight = weights[name].float().numpy()
        assert its_dtype in (dtype, f"int8{half}")
        nearest = rounded(weight, 4 if its_dtype == dtype else 8, np.float16 if half else np.float32)
        assert np.allclose(values[:, : weight.shape[1]], nearest, rtol=1e-6) == (its_dtype != dtype)

    # A wrong scale is found.
    assert graphs_report(tmp_path / "out").passed
    path = tmp_path / "out" / "onnx" / graph
    model = onnx.load(path)
    name = "transformer.blocks.0.ffn.up_proj.weight_scales"
    [scales] = [tensor for tensor in model.graph.initializer if tensor.name == name]
    scales.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scales) * np.float16(1.6), name))
    path.with_name(f"{graph}_data").unlink()
    onnx.save(model, path)
    report = graphs_report(tmp_path / "out")
    assert report.failure is not None
    assert "up_proj.weight is not the checkpoint's, rounded" in report.failure
