"""The concave penalty: its formula, its channels in every dtype, and what is refused.

What every scaling must do (padding, caches, chunks, all families) is in the tables of the other modules.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from converter.scaling.scaling import Scaling
from templates.ntk_alibi import Alibi, stock_slopes
from templates.ntk_concave import check_float16, concave_key_channels, concave_query_channels
from templates.ntk_plan import plan_attention
from tests import tiny
from tests.conftest import Pristine, Refused, RunCli
from tests.messages import raises
from tests.onnx_graphs import assert_close
from tests.patched import TRAIN_LENGTH, Convert, load
from tests.reference.alibi import concave_penalties
from tests.runners import MakeRunner, expected

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
MULTIPLES = (0.5, 1.01, 2, 4.7, 4.8, 8, 13, 16)
"""How many trained lengths the queries see; float16 changes its channels at 4.76, and ends at 13.45."""


def concave(trained: int) -> Alibi:
    scaling = {"type": "concave", "train_seq_len": trained, "dynamic": "position", "power": 8}
    return Alibi(stock_slopes(16), scaling)


# The formula


@given(st.floats(1e-5, 1.0), st.integers(2, 4096), st.floats(0.01, 64.0))
def test_the_formula(slope: float, trained: int, multiple: float) -> None:
    """The converter's penalty is the reference's, and has the properties that the documentation names."""
    tokens, power = max(2, round(multiple * trained)), 8
    scaling = Scaling("concave", dynamic="position", train_length=trained, power=power)
    [penalty] = scaling.penalties((slope,), tokens)
    distances = np.linspace(0, tokens - 1, 50)
    found = np.array([penalty.at(distance) for distance in distances])
    wanted = concave_penalties(slope, tokens, trained, power, distances)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    stock = slope * distances
    if tokens <= trained:
        np.testing.assert_array_equal(found, stock)
    assert np.all(np.diff(found) >= 0)  # far beyond power * L, far keys cost the same but for a rounding
    assert np.all(np.diff(found, 2) < 1e-9 * found[-1])
    assert np.all(found <= stock * (1 + 1e-9))
    # The penalty starts as the stock one, and ends at what the end of the trained length costs there.
    assert penalty.at(1e-6 * tokens) == pytest.approx(slope * 1e-6 * tokens, rel=1e-3)
    if trained <= tokens <= power * trained:
        assert penalty.at(tokens) == pytest.approx(slope * trained, rel=1e-9)


@pytest.mark.parametrize(
    ("tokens", "distance", "share"),
    # With L = 1: at d = L / 4 and at d = L.
    [
        (2, 0.25, 0.80),
        (8, 0.25, 0.90),
        (2, 1, 0.57),
        (3, 1, 0.51),
        (8, 1, 0.66),
        (16, 1, 0.81),
        (64, 1, 0.95),
    ],
)
def test_the_share_of_the_stock_penalty_that_the_documentation_tells(
    tokens: int, distance: float, share: float
) -> None:
    trained = 2048
    [penalty] = Scaling("concave", dynamic="position", train_length=trained, power=8).penalties(
        (1.0,), tokens * trained
    )
    assert penalty.at(distance * trained) / (distance * trained) == pytest.approx(share, abs=0.006)


# The channels


@pytest.mark.parametrize(
    ("dtype", "trained", "limit"),
    [
        *((SINGLE, 2048, 1e-3), (BRAIN, 2048, 1e-3), (HALF, 2048, 1e-3)),
        *((SINGLE, 8192, 3e-3), (BRAIN, 8192, 3e-3), (HALF, 8192, 3e-3)),
    ],
)
def test_channels(dtype: torch.dtype, trained: int, limit: float) -> None:
    """Their product, summed in float32 as kernels do, is the penalty of keys within 30 nats."""
    alibi, scale = concave(trained), 64**-0.5
    worst = 0.0
    for multiple in MULTIPLES:
        tokens = round(multiple * trained)
        if dtype == HALF and multiple > 13.4:
            continue
        last = torch.tensor([[tokens - 1]])
        keys = concave_key_channels(alibi, torch.arange(tokens)[None], None, dtype)[0, 0]
        queries = concave_query_channels(alibi, last, scale, dtype)[0, 0, :, 0]
        scores = (queries.to(dtype).float() @ keys.to(dtype).float().T * scale).double().numpy()
        distances = np.arange(tokens - 1, -1, -1, dtype=np.float64)
        for slope, of_head in zip(alibi.slopes[0], scores, strict=True):
            wanted = concave_penalties(slope, tokens, trained, 8, distances)
            near = wanted < 30
            worst = max(worst, np.abs(of_head[-1] - of_head - wanted)[near].max())
    assert worst < limit


@pytest.mark.parametrize("trained", [2, 2048, 65536])
def test_the_first_queries_have_no_curve(trained: int) -> None:
    """Powers of how much longer the trained length is than their texts are not finite."""
    channels = concave_query_channels(concave(trained), torch.tensor([[-1, 0, trained - 1]]), 0.1, SINGLE)
    assert channels.isfinite().all()
    assert not channels[..., 8:].any()


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
def test_padded_keys_have_no_curve(dtype: torch.dtype) -> None:
    real = torch.tensor([[False, True, True]])
    channels = concave_key_channels(concave(2), torch.tensor([[0, 0, 1]]), real, dtype)
    assert not channels[0, 0, 0, 8:].any()
    assert channels[0, 0, 1:, 8:].any()


def test_what_float16_holds() -> None:
    alibi = concave(2048)
    check_float16(alibi, int(13.4 * 2048), 1 / 8)
    with raises(ValueError, "27554 tokens", "28672", "bfloat16"):
        check_float16(alibi, 14 * 2048, 1 / 8)
    steep = concave(65536)  # the numbers of its queries leave float16's range beyond the trained length
    check_float16(steep, 65536, 1 / 256)
    with raises(ValueError, "65536 tokens", "bfloat16"):
        check_float16(steep, 65537, 1 / 256)


# The model


@torch.no_grad()
@pytest.mark.parametrize("family", tiny.FACTORIES)
def test_within_the_trained_length_nothing_changes(converted: Convert, family: str) -> None:
    """Bit for bit, in prompts and in decoding, with padded rows."""
    folder = converted(family, 12, "concave")
    ids = torch.from_numpy(tiny.token_ids(2, TRAIN_LENGTH + 1))
    mask = torch.from_numpy(tiny.padding_mask([TRAIN_LENGTH + 1, TRAIN_LENGTH - 6], "left", TRAIN_LENGTH + 1))
    found = []
    for options in ({}, {"alibi_scaling": None}):
        model, cache, logits = load(folder, **options), DynamicCache(), []
        for start, end in itertools.pairwise((0, 11, *range(12, TRAIN_LENGTH + 2))):
            step = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            logits.append(step.logits)
        found.append((torch.cat(logits, dim=1), model(ids[:, :-1], attention_mask=mask[:, :-1]).logits))
    (steps, prompt), (stock_steps, stock_prompt) = found
    assert torch.equal(steps[:, :-1], stock_steps[:, :-1])
    assert torch.equal(prompt, stock_prompt)
    assert not torch.equal(steps[0, -1], stock_steps[0, -1])


@pytest.mark.parametrize("family", ["bloom", "falcon"])  # whose bias depends on the head size
def test_far_beyond_the_trained_length(converted: Convert, runner: MakeRunner, family: str) -> None:
    """A prompt, chunks and decoding give the reference's logits at 11 times the trained length."""
    folder, length = converted(family, 4, "concave"), 11 * TRAIN_LENGTH
    ids, mask = tiny.token_ids(2, length), tiny.padding_mask([length, length - 70], "left", length)
    wanted = expected(folder, family, ids, mask)
    run = runner("sdpa", folder, family)
    assert_close(run.whole(ids, mask), wanted, mask)
    ends = (TRAIN_LENGTH - 1, 2 * TRAIN_LENGTH, 8 * TRAIN_LENGTH, *range(length - 3, length + 1))
    assert_close(run.pieces(ids, mask, ends), wanted, mask)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_half_precision_and_automatic_casts(converted: Convert, dtype: torch.dtype) -> None:
    """On both sides of the length at which the channels of float16 change."""
    folder = converted("bloom", 8, "concave")
    ids = torch.from_numpy(tiny.token_ids(1, 7 * TRAIN_LENGTH))
    whole = load(folder)
    wanted = whole(ids).logits
    found = [load(folder, dtype=dtype)(ids, output_attentions=eager).logits for eager in (False, True)]
    with torch.autocast("cpu", dtype=dtype):
        found.append(whole(ids).logits)
    for logits in found:
        difference = (logits.float() - wanted).norm() / wanted.norm()
        assert difference < (0.01 if dtype == HALF else 0.05)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
def test_gradients(converted: Convert, dtype: torch.dtype) -> None:
    """They are finite, also where the channels hold large numbers."""
    model = load(converted("bloom", 8, "concave"), dtype=dtype).train()
    ids = torch.from_numpy(tiny.token_ids(1, 9 * TRAIN_LENGTH))
    model(ids, labels=ids).loss.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


@torch.no_grad()
def test_positions_that_are_given(converted: Convert) -> None:
    """Padded tokens at -1, and positions far out, are as right as those that are counted."""
    model = load(converted("bloom", 4, "concave"))
    ids = torch.from_numpy(tiny.token_ids(2, 4 * TRAIN_LENGTH))
    mask = torch.from_numpy(tiny.padding_mask([4 * TRAIN_LENGTH, 80], "left", 4 * TRAIN_LENGTH))
    wanted = model(ids, attention_mask=mask).logits[mask.bool()]
    positions = mask.cumsum(-1) - 1
    found = model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    assert (found - wanted).abs().max() < 1e-5
    # The same keys behind others that nothing sees.
    visible = torch.ones(1, 1, 4 * TRAIN_LENGTH, 4 * TRAIN_LENGTH).tril().bool()
    visible[..., : 3 * TRAIN_LENGTH] = False
    visible |= torch.eye(4 * TRAIN_LENGTH).bool()
    row, places = ids[:1], torch.arange(4 * TRAIN_LENGTH)[None]
    behind = model(row, attention_mask=visible, position_ids=places).logits[:, 3 * TRAIN_LENGTH :]
    alone = model(row[:, 3 * TRAIN_LENGTH :], position_ids=places[:, 3 * TRAIN_LENGTH :]).logits
    assert (alone - behind).abs().max() < 1e-4


def test_documents_in_float16_count_by_themselves(converted: Convert) -> None:
    """Their row may be longer than what float16 holds."""
    model = load(converted("bloom", 4, "concave"), dtype=HALF)
    ids = torch.from_numpy(tiny.token_ids(1, 16 * TRAIN_LENGTH))
    places = torch.arange(2 * TRAIN_LENGTH).repeat(8)[None]
    with torch.no_grad():
        found = model(ids, position_ids=places, use_cache=False).logits
        alone = model(ids[:, : 2 * TRAIN_LENGTH]).logits
    assert (found[:, : 2 * TRAIN_LENGTH] - alone).abs().max() < 0.01


@pytest.mark.parametrize(("dtype", "cast"), [(HALF, BRAIN), (BRAIN, HALF), (SINGLE, HALF)], ids=str)
def test_channels_have_the_dtype_of_automatic_casts(dtype: torch.dtype, cast: torch.dtype) -> None:
    alibi, tokens = concave(TRAIN_LENGTH), 12 * TRAIN_LENGTH
    config = SimpleNamespace(_attn_implementation="sdpa", head_dim=32)
    with torch.autocast("cpu", dtype=cast):
        plan = plan_attention(config, alibi, 0.25, torch.zeros(1, tokens, 1, dtype=dtype))
    assert plan.key_channels.dtype == plan.query_channels[0].dtype == cast
    scores = 0.25 * (plan.query_channels[0][0, :, -1].float() @ plan.key_channels[0, 0].float().T)
    distances = np.arange(tokens - 1, -1, -1, dtype=np.float64)
    for slope, of_head in zip(alibi.slopes[0], scores.double().numpy(), strict=True):
        wanted = concave_penalties(slope, tokens, TRAIN_LENGTH, 8, distances)
        near = wanted < 30
        assert np.abs(of_head[-1] - of_head - wanted)[near].max() < 1e-3


def test_exported_with_any_length_and_without_memory(converted: Convert) -> None:
    folder = converted("bloom", 4, "concave")
    model = load(folder, use_cache=False)
    ids = torch.from_numpy(tiny.token_ids(1, 40))
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(model, (ids,), dynamic_shapes={"input_ids": {1: length}}, strict=False)
    for tokens in (10, 7 * TRAIN_LENGTH):
        other = torch.from_numpy(tiny.token_ids(1, tokens))
        with torch.no_grad():
            assert (exported.module()(other).logits - model(other).logits).abs().max() < 1e-4
    assert model.to("meta")(ids.to("meta")).logits.shape == (1, 40, tiny.VOCAB_SIZE)


def test_evaluation_refuses_texts_that_float16_does_not_hold(
    pristine: Pristine, run: RunCli, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    words_of_text = (f"w{4 + number % (tiny.VOCAB_SIZE - 4)}" for number in range(9000))
    text.write_text(" ".join(words_of_text), encoding="utf-8")
    words = ("--train-length", "24", "--text", text, "--dtype", "fp16")
    evaluated = ("eval", pristine("bloom"), "--methods", "concave", "--lengths", "24,384", *words)
    for asked in (evaluated, ("tune", pristine("bloom"), "--target-length", "384", *words)):
        result = run(*asked)
        assert (result.code, result.out) == (2, "")
        assert "give --dtype bf16" in result.err.splitlines()[-1]


def test_a_text_too_long_for_float16(converted: Convert) -> None:
    model = load(converted("bloom", 4, "concave"), dtype=HALF)
    with pytest.raises(ValueError, match="bfloat16"):
        model(torch.from_numpy(tiny.token_ids(1, 14 * TRAIN_LENGTH)))


@pytest.mark.parametrize(
    "changes",
    [
        {"power": 4},
        {"power": None},
        {"dynamic": "length"},
        {"train_seq_len": 0},
        {"rate": 1.0},
        {"factor": 2},
    ],
    ids=str,
)
def test_a_config_that_the_code_cannot_honour(changes: dict[str, object]) -> None:
    scaling = {"type": "concave", "train_seq_len": 64, "dynamic": "position", "power": 8, **changes}
    with pytest.raises(ValueError, match="alibi_scaling"):
        Alibi(stock_slopes(4), scaling)


def test_encoders_and_rotary_models_have_none(pristine: Pristine, refused: Refused, tmp_path: Path) -> None:
    for name, words in (("jina_bert", "decoders"), ("llama", "ALiBi only")):
        words_given = ("--method", "concave", "--train-length", "64", "--out", tmp_path / "out")
        line = refused("convert", pristine(name), *words_given, code=2)
        assert words in line
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="decoders only"):
        concave(64).slopes_at(torch.tensor([[0]]))
