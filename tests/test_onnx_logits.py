"""Graphs under onnxruntime against the independent float64 reference: torch has no part in it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from converter.exports.onnx.attention_ort import split
from converter.exports.onnx.choices import Profile
from tests import tiny
from tests.dealt import dealt
from tests.onnx_graphs import PROFILES, Array, Engine, assert_close, build, expected
from tests.patched import FAMILIES, FITTED, SCALINGS, VARIANTS, Convert, config_of

CHUNKS = (20, 33, 34, 48)
"""Where the pieces of a chunked prefill end."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALF_GRAPH = 1e-2
"""Of the largest logit: float16 has 11 bits and the errors of two layers add up."""


def rows(length: int = 48, count: int = 3, side: Any = "left") -> tuple[Array, Array]:
    """Tokens and mask of rows that are ever shorter."""
    lengths = [length - 11 * row for row in range(count)]
    return tiny.token_ids(count, length), tiny.padding_mask(lengths, side, length)


def check_all_ways(folder: Path, family: str, profile: Profile) -> None:
    """A prompt, padded batches, decoding over a padded cache and chunks, all on one session."""
    engine = Engine(build(folder, profile))
    ids, ones = tiny.token_ids(1, 48), np.ones((1, 48), dtype=np.int64)
    assert_close(engine.step(ids, ones)[0], expected(folder, family, ids))
    for side in ("left", "right"):
        ids, mask = rows(side=side)
        assert_close(engine.step(ids, mask)[0], expected(folder, family, ids, mask), mask)
        # Right padding leaves a hole between a short row's prompt and what it says next.
        mask[:, 40:] = 1
        ends = (40, *range(41, 49))
        assert_close(engine.steps(ids, mask, ends), expected(folder, family, ids, mask, ends), mask)
    # Several new tokens over a cache: GroupQueryAttention takes one row only.
    ids, mask = rows(count=1 if profile == "ort" else 2)
    assert_close(engine.steps(ids, mask, CHUNKS), expected(folder, family, ids, mask, CHUNKS), mask)


@pytest.mark.parametrize(
    ("family", "profile", "scaling", "heads"),
    [
        *dealt(FAMILIES, PROFILES, SCALINGS, [12]),
        *(
            pytest.param(family, profile, scaling, 4, marks=pytest.mark.slow)
            for family, profile, scaling in itertools.product(FAMILIES, PROFILES, ("ntk", "ntk-position"))
        ),
        *dealt(FAMILIES, PROFILES, FITTED, [12], each=1),
    ],
)
def test_every_scaling_of_every_family_is_the_reference_s(
    converted: Convert, profile: Profile, family: str, scaling: str, heads: int
) -> None:
    check_all_ways(converted(family, heads, scaling), family, profile)


@pytest.mark.parametrize(("variant", "profile"), dealt(VARIANTS, PROFILES, each=1))
def test_options_of_the_config_are_honoured(converted: Convert, profile: Profile, variant: str) -> None:
    family, changes = VARIANTS[variant]
    check_all_ways(converted(family, 12, "ntk", **changes), family, profile)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "relu", "silu"])
@pytest.mark.parametrize("profile", PROFILES)
def test_other_activations(converted: Convert, profile: Profile, activation: str) -> None:
    """The reference has the exact gelu only; torch's own functions are the others' reference."""
    functions = {
        "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
    }
    folder = converted("falcon", 4, "ntk", activation=activation)
    ids, mask = rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tests.reference.falcon.gelu_exact",
            lambda x: functions[activation](torch.from_numpy(x)).numpy(),
        )
        patch.setattr(
            "tests.onnx_graphs.config_of", lambda folder: {**config_of(folder), "activation": "gelu"}
        )
        right = expected(folder, "falcon", ids, mask)
    assert_close(Engine(build(folder, profile)).step(ids, mask)[0], right, mask)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_comparison_would_notice_another_scaling(converted: Convert, profile: Profile) -> None:
    folder = converted("bloom", 12, "ntk-position")
    ids, mask = rows()
    logits, _ = Engine(build(folder, profile)).step(ids, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.reference.alibi.query_factors", lambda scaling, row: np.full(len(row), 2.0))
        other = expected(folder, "bloom", ids, mask)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close(logits, other, mask, relative=1e-2)


@pytest.mark.parametrize(("family", "length"), dealt(FAMILIES, [255, 256, 257, 600], each=1))
def test_prompts_around_and_beyond_one_block_of_queries(converted: Convert, family: str, length: int) -> None:
    folder = converted(family, 4, "ntk-position")
    engine = Engine(build(folder, "portable"))
    ids, mask = rows(length, 2)
    ends = (length - 5, length - 1, length)
    right = expected(folder, family, ids, mask)
    assert_close(engine.step(ids, mask)[0], right, mask)
    assert_close(engine.steps(ids, mask, ends), right, mask)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_chunk_longer_than_one_block_over_a_cache(converted: Convert, profile: Profile) -> None:
    folder = converted("bloom", 4, "ntk")
    ids, mask = tiny.token_ids(1, 700), np.ones((1, 700), dtype=np.int64)
    mask[0, :9] = 0
    logits = Engine(build(folder, profile)).steps(ids, mask, (300, 700))
    assert_close(logits, expected(folder, "bloom", ids, mask), mask)


@pytest.mark.parametrize(("family", "profile", "side"), dealt(FAMILIES, PROFILES, ["left", "right"], each=1))
def test_last_logits_are_those_of_each_row_s_last_real_token(
    converted: Convert, profile: Profile, family: str, side: str
) -> None:
    folder = converted(family, 12, "ntk")
    whole = Engine(build(folder, profile, name="whole.onnx"))
    last = Engine(build(folder, profile, last_logits=True, name="last.onnx"))
    ids, mask = rows(side=side)
    ends = np.array([np.flatnonzero(row)[-1] for row in mask])
    full, past = whole.step(ids, mask)
    short, presents = last.step(ids, mask)
    assert short.shape == (3, 1, tiny.VOCAB_SIZE)
    assert_close(short[:, 0][None], full[np.arange(3), ends][None].astype(np.float64), relative=1e-6)
    right = expected(folder, family, ids, mask)[np.arange(3), ends]
    assert_close(short[:, 0][None], right[None])
    for name, cache in past.items():
        assert np.array_equal(cache, presents[name])
    # A step of one token over the cache gives that token's.
    mask = np.concatenate([mask, np.ones((3, 1), dtype=np.int64)], axis=1)
    one, _ = last.step(ids[:, :1], mask, presents)
    assert_close(one, whole.step(ids[:, :1], mask, past)[0].astype(np.float64), relative=1e-6)


@pytest.mark.parametrize(("family", "dtype"), dealt(FAMILIES, ["fp32", "fp16"], each=1))
def test_past_and_present_in_one_buffer_give_the_same(converted: Convert, family: str, dtype: str) -> None:
    """As a server runs it: the buffers are longer than their content, and the mask says how much is in."""
    folder = converted(family, 12, "ntk-length")
    engine = Engine(build(folder, dtype=dtype))
    ids, mask = rows(40, 2)
    buffers = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(np.full_like(cache, np.nan))
        for name, cache in engine.empty(2, length=64).items()
    }
    past = None
    for start, end in [(0, 30), *((at, at + 1) for at in range(30, 40))]:
        binding = engine.session.io_binding()
        binding.bind_cpu_input("input_ids", ids[:, start:end].copy())
        binding.bind_cpu_input("attention_mask", mask[:, :end].copy())
        binding.bind_output("logits")
        for name, buffer in buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
        engine.session.run_with_iobinding(binding)
        shared = binding.get_outputs()[0].numpy()
        copied, past = engine.step(ids[:, start:end], mask[:, :end], past)
        real = mask[:, start:end]
        assert_close(shared, copied.astype(np.float64), real, relative=1e-6)
    for name, cache in (past or {}).items():
        assert np.array_equal(buffers[name].numpy()[:, :, :40], cache)


@pytest.mark.parametrize(("family", "profile", "stored"), dealt(FAMILIES, PROFILES, HALF, each=1))
def test_a_float32_graph_over_half_precision_weights_is_exact(
    converted: Convert, profile: Profile, family: str, stored: str
) -> None:
    check_all_ways(converted(family, 4, "ntk", dtype=HALF[stored]), family, profile)


@pytest.mark.parametrize(("family", "profile", "stored"), dealt(FAMILIES, PROFILES, ["fp16", "fp32"], each=1))
def test_a_float16_graph_is_near(converted: Convert, profile: Profile, family: str, stored: str) -> None:
    """Over float16 weights, and over float32 weights that it casts."""
    dtype = torch.float16 if stored == "fp16" else torch.float32
    folder = converted(family, 12, "ntk-position", dtype=dtype)
    engine = Engine(build(folder, profile, "fp16"))
    ids, mask = rows()
    mask[:, 40:] = 1
    ends = (40, *range(41, 49))
    logits = engine.steps(ids, mask, ends)
    assert logits.dtype == np.float16
    assert_close(logits, expected(folder, family, ids, mask), mask, HALF_GRAPH)


@pytest.mark.parametrize("profile", PROFILES)
def test_positions_far_out_keep_their_precision_in_float16(converted: Convert, profile: Profile) -> None:
    """Near 3000, float16 has steps of 2: a position or a bias that went through it would be rounded."""
    folder = converted("bloom", 4, "ntk")
    exact, rounded = (Engine(build(folder, profile, kind, name=f"{kind}.onnx")) for kind in ("fp32", "fp16"))
    ids, mask = tiny.token_ids(1, 3000), np.ones((1, 3000), dtype=np.int64)
    right = exact.step(ids, mask)[0].astype(np.float64)
    logits, past = rounded.step(ids[:, :-1], mask[:, :-1])
    assert_close(logits[:, :100], right[:, :100], relative=HALF_GRAPH)
    assert_close(logits[:, -100:], right[:, -101:-1], relative=HALF_GRAPH)
    last, _ = rounded.step(ids[:, -1:], mask, past)
    assert_close(last, right[:, -1:], relative=HALF_GRAPH)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_padded_token_has_no_influence(converted: Convert, profile: Profile) -> None:
    engine = Engine(build(converted("mpt", 4, "ntk"), profile))
    for side in ("left", "right"):
        ids, mask = rows(side=side)
        others = np.where(mask == 1, ids, tiny.PAD)
        first, second = (engine.step(given, mask)[0][mask == 1] for given in (ids, others))
        assert np.array_equal(first, second)


def test_slopes_are_whole_in_two_channels_of_bfloat16() -> None:
    """The CPU provider cannot run bfloat16, so what its channels hold is looked at as numbers."""
    slopes = (np.random.default_rng(0).random(1000) * 2000).astype(np.float32)
    leading = split(slopes)
    rounded, rest = (torch.from_numpy(part).bfloat16() for part in (leading, slopes - leading))
    assert np.array_equal(rounded.float().numpy(), leading)
    error = np.abs(rounded.double().numpy() + rest.double().numpy() - slopes) / slopes
    assert error.max() < 2.0**-15
