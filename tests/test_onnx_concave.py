"""Graphs of a concave penalty: what each key costs, on both sides of every limit, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from converter.config import Geometry
from converter.onnx.alibi import Alibi, Cache, Tokens
from converter.onnx.attention_ort import OrtAttention
from converter.onnx.attention_portable import PortableAttention
from converter.onnx.export import export
from converter.onnx.graph import COMPUTE, Graph, Value
from converter.onnx.options import OnnxOptions, Profile
from converter.result.converted import open_converted
from converter.scaling.scaling import POWER, Scaling
from tests import tiny
from tests.conftest import Pristine
from tests.dealt import dealt
from tests.onnx_graphs import (
    PROFILES,
    Array,
    Engine,
    Plant,
    assert_close,
    build,
    converted_copy,
    expected,
    exported,
    graphs_report,
)
from tests.patched import FAMILIES, TRAIN_LENGTH, Convert
from tests.reference.alibi import concave_penalties
from tests.test_onnx_validation import where

SLOPES = (2**-0.5, 2**-2, 2**-4, 2**-8)
SIZE = 8
"""Channels of a head."""
SCALE = 64**-0.5
NATS = 30.0
"""Keys that cost more have no weight."""
TIMES = (0.5, 1, 1.01, 1.5, 2, 3, 4.7, 4.8, 8, 12)
"""Multiples of the trained length; float16 has far keys from 4.76 on."""


class Layer:
    """Attention alone, over a cache, under onnxruntime; its queries and keys have no content."""

    def __init__(self, profile: Profile, dtype: str, train_length: int):
        heads = len(SLOPES)
        # The CPU has few kernels for bfloat16, so the channels are float32 and rounded here.
        self.bfloat16 = dtype == "bf16"
        self.graph = graph = Graph(COMPUTE[dtype], widened=self.bfloat16)
        ids = graph.input("ids", ir.DataType.INT64, ["rows", "new"])
        mask = graph.input("mask", ir.DataType.INT64, ["rows", "total"])
        scaling = Scaling("concave", dynamic="position", train_length=train_length, power=POWER)
        geometry = Geometry(num_layers=1, num_heads=heads, num_kv_heads=heads, head_dim=SIZE)
        form = OrtAttention if profile == "ort" else PortableAttention
        self.attention = form(Tokens(graph, ids, mask), Alibi(SLOPES, scaling), geometry, SCALE)

    def run(self, outputs: Sequence[tuple[Value, int]], feed: dict[str, Array]) -> list[Array]:
        """Those values, in float32; each comes with the number of its dimensions."""
        graph = self.graph
        for number, (value, dimensions) in enumerate(outputs):
            shape = [f"dimension_{number}_{axis}" for axis in range(dimensions)]
            graph.output(graph.cast(value, ir.DataType.FLOAT), f"output_{number}", ir.DataType.FLOAT, shape)
        content = ir.to_proto(graph.model()).SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        found = session.run(None, feed)
        if self.bfloat16:
            found = [torch.from_numpy(each).bfloat16().float().numpy() for each in found]
        return found

    def channels(self, tokens: int) -> list[Array]:
        """Those of queries [tokens, heads, any] and of keys [tokens, heads, any]."""
        assert isinstance(self.attention, OrtAttention)
        ids = np.zeros((1, tokens), dtype=np.int64)
        outputs = [(self.attention.query_channels[0], 3), (self.attention.key_channels, 3)]
        return self.run(outputs, {"ids": ids, "mask": np.ones_like(ids)})

    def outputs(self, keys: Array, values: Array) -> Array:
        """Of one token after cached keys and values [1, heads, tokens, any]: [heads, SIZE]."""
        graph, heads = self.graph, len(SLOPES)
        shape = [1, heads, "cached", self.attention.head_size]
        past = Cache(*(graph.input(name, ir.DataType.FLOAT, shape) for name in ("keys", "values")))
        state = graph.input("state", ir.DataType.FLOAT, [1, heads, SIZE])
        output, present = self.attention(state, state, state, past, 0)
        one, total = np.zeros((1, 1), dtype=np.int64), keys.shape[2] + 1
        feed = {"ids": one, "mask": np.ones((1, total), dtype=np.int64), "keys": keys, "values": values}
        state = np.zeros((1, heads, SIZE), dtype=np.float32)
        outputs = [(output, 2), (present.key, 4), (present.value, 4)]
        return self.run(outputs, {**feed, "state": state})[0].reshape(heads, SIZE)


def lengths(train_length: int, most: float) -> list[int]:
    """Numbers of tokens up to ``most`` times the trained length."""
    return [int(times * train_length) for times in (*(times for times in TIMES if times < most), most)]


@pytest.mark.parametrize(("dtype", "most", "limit"), [("bf16", 32, 5e-4), ("fp16", 14.6, 1e-3)])
def test_channels_in_half_precision(dtype: str, most: float, limit: float) -> None:
    """In exact products of what is rounded; kernels round more."""
    train_length = 2048
    tokens = lengths(train_length, most)
    queries, keys = Layer("ort", dtype, train_length).channels(tokens[-1])
    for n in tokens:
        scores = np.einsum("hc,jhc->hj", queries[n - 1], keys[:n], dtype=np.float64) * SCALE
        for head, slope in enumerate(SLOPES):
            right = concave_penalties(slope, n, train_length, POWER, np.arange(n, dtype=np.float64))
            found = scores[head, -1] - scores[head, ::-1]
            assert np.abs(found - right)[right <= NATS].max() < limit


def test_the_first_queries_have_no_curve() -> None:
    """Powers of how much longer the trained length is than their texts are not finite."""
    queries, _ = Layer("ort", "fp32", 65536).channels(2)
    assert np.isfinite(queries).all()
    assert not queries[..., 6:12].any()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("train_length", "limit"), [(2048, 1e-3), (8192, 3e-3)])
def test_attention_in_float32(profile: Profile, train_length: int, limit: float) -> None:
    """By the probabilities of keys at eight distances, which their values show."""
    tokens, heads = lengths(train_length, 16), len(SLOPES)
    cached = None
    if profile == "ort":
        _, channels = Layer(profile, "fp32", train_length).channels(tokens[-1])
        content = np.zeros((tokens[-1], heads, SIZE), dtype=np.float32)
        cached = np.concatenate([content, channels], axis=-1).transpose(1, 0, 2)[None]
    for n in (n for n in tokens if n > train_length):
        distance = np.arange(n, dtype=np.float64)
        right = [concave_penalties(slope, n, train_length, POWER, distance) for slope in SLOPES]
        chosen = [np.searchsorted(row, np.linspace(1, NATS, SIZE), side="right") - 1 for row in right]
        layer = Layer(profile, "fp32", train_length)
        shape = (1, heads, n - 1, layer.attention.head_size)
        keys = np.zeros(shape, dtype=np.float32) if cached is None else cached[:, :, : n - 1]
        values = np.zeros(shape, dtype=np.float32)
        for head, row in enumerate(chosen):
            values[0, head, n - 1 - row, np.arange(SIZE)] = 1
        found = -np.log(layer.outputs(keys, values))
        for head, row in enumerate(chosen):
            more, wanted = found[head] - found[head, 0], right[head][row] - right[head][row[0]]
            assert np.abs(more - wanted).max() < limit


@pytest.mark.parametrize(("family", "profile", "dtype"), dealt(FAMILIES, PROFILES, ("fp32", "fp16")))
def test_far_beyond_the_trained_length(converted: Convert, family: str, profile: Profile, dtype: str) -> None:
    """At eight times that length: whole, in chunks, and with padding on either side."""
    folder = converted(family, 12, "concave")
    engine = Engine(build(folder, profile, dtype))
    relative = {"fp32": 1e-5, "fp16": 1e-2}[dtype]
    ids = tiny.token_ids(1, 8 * TRAIN_LENGTH)
    right, mask = expected(folder, family, ids), np.ones_like(ids)
    assert_close(engine.step(ids, mask)[0], right, relative=relative)
    assert_close(engine.steps(ids, mask, (1, 20, 29, 110, 120, 191, 192)), right, relative=relative)
    ids = tiny.token_ids(2, 8 * TRAIN_LENGTH)
    for side in ("left", "right"):
        mask = tiny.padding_mask([192, 150], side)
        found, _ = engine.step(ids, mask)
        assert_close(found, expected(folder, family, ids, mask), mask, relative)


@pytest.mark.parametrize(("family", "profile"), dealt(("bloom", "refact"), PROFILES))
def test_the_same_bits_up_to_the_trained_length(
    pristine: Pristine, tmp_path: Path, family: str, profile: Profile
) -> None:
    """As without a scaling: whole, in chunks, and with padding."""
    engines = []
    for method in ("none", "concave"):
        folder = converted_copy(pristine(family), tmp_path / method, method=method, train_length=TRAIN_LENGTH)
        engines.append(Engine(build(folder, profile)))
    ids = tiny.token_ids(2, TRAIN_LENGTH)
    mask = tiny.padding_mask([TRAIN_LENGTH, 15], "left")
    stock, concave = (engine.step(ids, mask)[0] for engine in engines)
    assert np.array_equal(stock[mask == 1], concave[mask == 1])
    ends = (9, 23, 24)
    stock, concave = (engine.steps(ids[:1], mask[:1], ends) for engine in engines)
    assert np.array_equal(stock, concave)


def test_float16_beyond_its_range(converted: Convert) -> None:
    """Never wrong numbers: what it is said to hold is right, and what it does not is NaN."""
    folder, longest = converted("bloom", 4, "concave"), 352
    assert open_converted(folder).scaling.float16_length == 322
    ids = tiny.token_ids(1, 400)
    for profile in PROFILES:
        engine = Engine(build(folder, profile, "fp16", name=f"{profile}.onnx"))
        for length in (longest, longest + 1, 400):
            found, _ = engine.step(ids[:, :length], np.ones((1, length), dtype=np.int64))
            if profile == "portable" or length == longest:
                assert_close(found, expected(folder, "bloom", ids[:, :length]), relative=1e-2)
            else:
                assert np.isnan(found[:, -1]).all()


@pytest.mark.parametrize(
    ("profile", "dtype", "limited"),
    [
        ("ort", "fp16", True),
        ("ort", "int8-fp16", True),
        ("ort", "fp32", False),
        ("ort", "bf16", False),
        ("portable", "fp16", False),
    ],
)
def test_what_is_told_of_float16(converted: Convert, profile: Profile, dtype: str, limited: bool) -> None:
    """In the card."""
    folder = converted("bloom", 4, "concave")
    exported(folder, profile, dtype=dtype)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert ("up to 322 tokens: more give NaN" in card) == limited


@pytest.mark.parametrize(
    ("family", "profile", "dtype"),
    dealt(FAMILIES, PROFILES, ("fp32", "fp16", "bf16", "int8", "int4", "int8-fp16", "w8a8")),
)
def test_exports_are_validated(
    pristine: Pristine, tmp_path: Path, family: str, profile: Profile, dtype: str
) -> None:
    folder = converted_copy(pristine(family), tmp_path / "out", method="concave", train_length=32)
    report = export(folder, OnnxOptions(profile, dtype=dtype)).report
    assert report is not None
    assert report.passed
    assert "prompt of 256" in [check.name for check in report.graphs[0].providers[0].checks]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_graph_with_another_curve_is_noticed(
    pristine: Pristine, plant: Plant, tmp_path: Path, profile: Profile
) -> None:
    """One that is 2 % lower."""
    folder = converted_copy(pristine("bloom"), tmp_path / "out", method="concave", train_length=32)
    plant(where((), 7.0, 1.02))
    exported(folder, profile)
    assert (graphs_report(folder).failure or "").startswith("model.onnx: prompt of 256")
