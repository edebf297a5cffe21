"""What converted models compute: every family and scaling, in every way to run it, is the reference's.

``tests/reference`` states the networks once more, in float64 and literally; see ``tests/runners.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from converter import convert
from converter.onnx import attention_packed, attention_portable
from converter.onnx.attention_portable import BLOCK
from converter.scaling.scaling import CONCAVE
from tests import tiny
from tests.dealt import dealt
from tests.onnx_graphs import PROFILES, Array, Engine, assert_close, build
from tests.patched import FAMILIES, FITTED, SCALINGS, STOCK, VARIANTS, Convert, assert_logits, batch, load
from tests.reference import ENCODERS
from tests.reference import FAMILIES as DECODERS
from tests.reference import alibi as reference
from tests.runners import HEADS, LAYERS, OUTPUTS, MakeRunner, Runner, Torch, expected

EVERY = (*SCALINGS, *FITTED, "fitted-length")
# Numbers of heads that are powers of two, and others with more and fewer heads than the next one.
DECODER_RUNS = (
    *("sdpa-16", "ort-12", "sdpa-12", "flash_attention_2-4"),
    *("sdpa-40", "portable-12", "static-12", "flex_attention-12"),
)
# Each family in each way, and each scaling with several families, in torch and in a graph. flex_attention is
# slow if it isn't compiled; it runs with heads of their own keys, and with grouped heads.
DECODER_CASES = [
    (family, EVERY[(7 * row + 2 * column) % len(EVERY)], how)
    for row, family in enumerate(FAMILIES)
    for column, how in enumerate(DECODER_RUNS)
    if not how.startswith("flex") or family in ("bloom", "replit")
]
# Each layer in each way, and each scaling in torch and in a graph.
ENCODER_RUNS = (("sdpa-12", "training-8"), ("ort-12", "portable-6"))
ENCODER_CASES = [
    ([*LAYERS][(number + place) % len(LAYERS)], scaling, hows[number % 2])
    for number, scaling in enumerate(scaling for scaling in EVERY if scaling != CONCAVE)
    for place, hows in enumerate(ENCODER_RUNS)
]
DECODED = (40, *range(41, 49))
"""A prompt, then one token at a time."""
CHUNKS = (1, 8, 20, 33, 34, 48)

# A decoder, heads, the scaling, and changes of its config.
SHAPES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    **{name: (family, 12, "ntk", changes) for name, (family, changes) in VARIANTS.items()},
    **{f"falcon-{name}": ("falcon", 4, "ntk", {"activation": name}) for name in ("relu", "silu")},
    "falcon-tanh": ("falcon", 4, "ntk", {"activation": "gelu_pytorch_tanh"}),
    # Heads whose number of channels is not a multiple of 8, such as the 86 of TurkuNLP/gpt3-finnish-xl.
    "bloom-86": ("bloom", 3, "ntk", {"hidden_size": 3 * 86}),
    "replit-10": ("replit", 12, "ntk-position", {"d_model": 12 * 10}),
    "refact-13": ("refact", 4, "linear-length", {"n_embd": 4 * 13}),
    "bloom-concave-112": ("bloom", 2, "concave", {"hidden_size": 2 * 112}),
    "refact-concave-13": ("refact", 4, "concave", {"n_embd": 4 * 13}),
    "replit-24": ("replit", 24, "ntk", {}),  # as replit-code-v1_5-3b: 24 heads over 8
    "replit-epsilon": ("replit", 4, "ntk", {"norm_eps": 0.1}),
    "replit_lm": (
        "mosaic_gpt",
        8,
        "ntk",
        {"model_type": "replit_lm", "architectures": ["ReplitLM"], "attn_qk_ln": False},
    ),
    "mpt-short": ("mpt", 4, "ntk", {"max_seq_len": 16}),  # its own limit on the length
}
ENCODER_SHAPES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    **{
        f"{name}-{variant}": (name, 12, "ntk", dict(changes))
        for name in tiny.ENCODERS
        for variant, changes in tiny.CHECKPOINTS[name].variants.items()
    },
    "jina_bert-10": ("jina_bert", 3, "ntk", {"hidden_size": 30}),
}


def rows(length: int = 48, count: int = 3, side: Any = "left") -> tuple[Array, Array]:
    """Tokens and mask of rows that are ever shorter."""
    lengths = [length - 11 * row for row in range(count)]
    return tiny.token_ids(count, length), tiny.padding_mask(lengths, side, length)


def check_decoder(run: Runner, folder: Path, family: str, relative: float = 1e-5) -> None:
    """Without padding, with padding on either side, token by token over a cache, and in chunks."""

    def check(ids: Array, mask: Array, ends: Sequence[int] = ()) -> None:
        found = run.pieces(ids, mask, ends) if ends else run.whole(ids, mask)
        assert_close(found, expected(folder, family, ids, mask, ends=ends), mask, relative)

    ids, mask = rows()
    right = expected(folder, family, ids)
    assert_close(run.whole(ids), right, relative=relative)
    assert_close(run.whole(ids, np.ones_like(ids)), right, relative=relative)
    check(*rows(side="right"))
    for side in ("left", "right"):
        ids, mask = rows(side=side)
        # Right padding leaves a hole between a short row's prompt and what it says next.
        mask[:, 40:] = 1
        check(ids, mask, DECODED)
    check(*rows(count=run.chunk_rows), CHUNKS)


def check_encoder(run: Runner, folder: Path, name: str, relative: float = 1e-5) -> None:
    ids, _ = rows()
    assert_close(run.whole(ids), expected(folder, name, ids), relative=relative)
    for side in ("left", "right"):
        ids, mask = rows(side=side)
        assert_close(run.whole(ids, mask), expected(folder, name, ids, mask), mask, relative)


@pytest.mark.parametrize(("family", "scaling", "how"), DECODER_CASES)
def test_decoders(converted: Convert, runner: MakeRunner, family: str, scaling: str, how: str) -> None:
    how, _, heads = how.rpartition("-")
    folder = converted(family, int(heads), scaling)
    check_decoder(runner(how, folder, family), folder, family)


@pytest.mark.parametrize(("layer", "scaling", "how"), ENCODER_CASES)
def test_encoders(converted: Convert, runner: MakeRunner, layer: str, scaling: str, how: str) -> None:
    how, _, heads = how.rpartition("-")
    name, changes = LAYERS[layer]
    folder = converted(name, int(heads), scaling, **changes)
    check_encoder(runner(how, folder, name), folder, name)


@pytest.mark.parametrize(
    ("shape", "how"),
    [*((shape, "sdpa") for shape in SHAPES), *dealt(SHAPES, PROFILES)],
)
def test_options_of_decoders(converted: Convert, runner: MakeRunner, shape: str, how: str) -> None:
    family, heads, scaling, changes = SHAPES[shape]
    folder = converted(family, heads, scaling, **changes)
    check_decoder(runner(how, folder, family), folder, family)


@pytest.mark.parametrize(
    ("shape", "how"),
    [*((shape, "sdpa") for shape in ENCODER_SHAPES), *dealt(ENCODER_SHAPES, PROFILES)],
)
def test_options_of_encoders(
    converted: Convert, runner: MakeRunner, tmp_path: Path, shape: str, how: str
) -> None:
    name, heads, scaling, changes = ENCODER_SHAPES[shape]
    folder = converted(name, heads, scaling, **changes)
    run = runner(how, folder, name)
    check_encoder(run, folder, name)
    # The reference reads the source's config, with its own spellings, as well.
    (source, _), (config, tensors) = tiny.read(tmp_path / "source"), tiny.read(folder)
    ids, mask = rows()
    spelled = {**source, "alibi_scaling": config["alibi_scaling"]}
    assert_close(run.whole(ids, mask), ENCODERS[name].logits(spelled, tensors, ids, mask), mask)


@pytest.mark.parametrize(
    ("name", "head", "how"),
    [
        (name, head, ("sdpa", *PROFILES)[(row + column) % 3])
        for row, name in enumerate([*FAMILIES, *LAYERS])
        for column, head in enumerate(HEADS)
    ],
)
def test_heads(converted: Convert, runner: MakeRunner, name: str, head: str, how: str) -> None:
    name, changes = LAYERS.get(name, (name, {}))
    folder = converted(name, 12, "ntk-position", head=head, num_labels=3, **changes)
    run = runner(how, folder, name, head)
    if how in PROFILES:
        assert run.outputs == OUTPUTS.get(head, ["logits"])
    for side in ("left", "right"):
        ids, mask = rows(40, 2, side)
        ids = np.where(mask == 1, ids, tiny.PAD)  # a decoder's classifier of texts looks for them
        text = head == "SequenceClassification"
        # An encoder pools the first token, padded or not: as zeros, or as whatever it is.
        if text and side == "left" and name in ENCODERS and not tiny.CHECKPOINTS[name].zeroes_padding:
            continue
        right = expected(folder, name, ids, mask, head=head)
        assert_close(run.whole(ids, mask), right, None if text else mask)


@pytest.mark.parametrize(
    ("scaling", "how"), dealt(["ntk", "ntk-length", "ntk-position", "fitted-position", "concave"], PROFILES)
)
def test_scalings_of_graphs_without_a_cache(
    converted: Convert, runner: MakeRunner, scaling: str, how: str
) -> None:
    head = "TokenClassification"
    folder = converted("bloom", 12, scaling, head=head, num_labels=3)
    run = runner(how, folder, "bloom", head)
    for side in ("left", "right"):
        ids, mask = rows(40, 2, side)
        assert_close(run.whole(ids, mask), expected(folder, "bloom", ids, mask, head=head), mask)


@pytest.mark.parametrize(("name", "how"), dealt([*FAMILIES, *tiny.ENCODERS], ("sdpa", "eager", *PROFILES)))
def test_the_matrix_notices_a_wrong_slope(
    converted: Convert, runner: MakeRunner, name: str, how: str
) -> None:
    folder, scaled = converted(name, 12, "ntk"), reference.scaled_slopes

    def wrong(*args: Any) -> Array:
        slopes = scaled(*args)
        slopes[3] *= 1.02
        return slopes

    run, check = runner(how, folder, name), check_encoder if name in ENCODERS else check_decoder
    with (
        mock.patch.object(reference, "scaled_slopes", wrong),
        pytest.raises(AssertionError, match="largest error"),
    ):
        check(run, folder, name, relative=1e-4)


@torch.no_grad()
@pytest.mark.version
@pytest.mark.parametrize("family", STOCK)
def test_unscaled_is_stock(converted: Convert, tmp_path: Path, family: str) -> None:
    model = load(converted(family, 12, "none"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
    ids, mask = batch()
    # Stock Falcon rounds its bias to bfloat16 in a float32 model; BLOOM's same function does not.
    with mock.patch.object(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor):
        assert_logits(model(ids).logits, stock(ids).logits)
        assert_logits(model(ids, attention_mask=mask).logits, stock(ids, attention_mask=mask).logits, mask)


@pytest.mark.parametrize(("name", "how"), dealt([*FAMILIES, *LAYERS], ["sdpa", "eager"]))
def test_attention_weights(converted: Convert, runner: MakeRunner, name: str, how: str) -> None:
    """They come with the same numbers, whatever the attention function."""
    name, changes = LAYERS.get(name, (name, {}))
    folder = converted(name, 12, "ntk-position", **changes)
    ids, mask = rows(40, 2)
    run = runner(how, folder, name)
    assert isinstance(run, Torch)
    output = run.run(ids, mask, output_attentions=True)
    assert_close(output.logits.numpy(), expected(folder, name, ids, mask), mask)
    config, tensors = tiny.read(folder)
    trunk = {**DECODERS, **ENCODERS}[name].trunk(config, tensors, ids, mask, attentions=True)
    assert len(output.attentions) == len(trunk.attentions)
    for weights, right in zip(output.attentions, trunk.attentions, strict=True):
        real = np.broadcast_to(mask.astype(bool)[:, None, :, None], right.shape)
        assert np.abs(weights.double().numpy() - right)[real].max() < 1e-5


# Long texts


@pytest.mark.parametrize(
    ("family", "length", "how"),
    dealt(FAMILIES, [BLOCK - 1, BLOCK, BLOCK + 1, 700], ("sdpa", *PROFILES)),
)
def test_long_texts(converted: Convert, runner: MakeRunner, family: str, length: int, how: str) -> None:
    """Around and beyond one block of queries; also as a chunk longer than one, over a cache."""
    folder = converted(family, 4, "ntk-position")
    run = runner(how, folder, family)
    ids, mask = rows(length, 2)
    right = expected(folder, family, ids, mask)
    assert_close(run.whole(ids, mask), right, mask, relative=3e-5)
    ends = (3 * length // 7, length - 1, length)
    assert_close(run.pieces(ids[1:], mask[1:], ends), right[1:], mask[1:], relative=3e-5)


LENGTHS = [1, 3 * BLOCK + 5] + [
    size + more for size in (BLOCK, attention_packed.BLOCK) for more in (-1, 0, 1)
]
PADDING = ("left", "right", "among them")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of an encoder in standard operators have ``BLOCK`` queries, though there is memory for more."""
    monkeypatch.setattr(attention_portable, "SCRATCH", 0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "length", "how"),
    dealt(tiny.ENCODERS, LENGTHS, ("sdpa", *PROFILES)),
)
def test_long_texts_of_encoders(
    converted: Convert, runner: MakeRunner, name: str, length: int, how: str
) -> None:
    folder = converted(name, 4, "ntk-position")
    ids = tiny.token_ids(1, length)
    assert_close(runner(how, folder, name).whole(ids), expected(folder, name, ids))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "where", "scaling", "how"),
    dealt(tiny.ENCODERS, PADDING, ("ntk", "ntk-position", "linear-length", "fitted-length"), PROFILES),
)
def test_rows_of_unequal_length(
    converted: Convert, runner: MakeRunner, name: str, where: Any, scaling: str, how: str
) -> None:
    """Some in several blocks of queries, and several in a block."""
    folder = converted(name, 4, scaling)
    lengths = [600, 300, 20, 7, 1]
    ids = tiny.token_ids(len(lengths), max(lengths))
    if where == "among them":
        mask = (np.random.default_rng(0).random(ids.shape) < 0.7).astype(np.int64)
    else:
        mask = tiny.padding_mask(lengths, where)
    assert_close(runner(how, folder, name).whole(ids, mask), expected(folder, name, ids, mask), mask)


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_keys_that_matter_to_nobody_are_left_out(converted: Convert, tmp_path: Path, name: str) -> None:
    """On the CPU; results stay exact, and the probabilities that are computed are fewer than all pairs."""
    folder, length = converted(name, 12, "ntk"), 1500
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(build(folder), options, ["CPUExecutionProvider"])
    ids = tiny.token_ids(1, length)
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    found = session.run(None, {value.name: feed[value.name] for value in session.get_inputs()})[0]
    assert_close(found, expected(folder, name, ids))
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    shapes = [
        shape
        for event in events
        if event.get("args", {}).get("op_name") == "Softmax" and "kernel" in event["name"]
        for shape in event["args"]["output_type_shape"][0].values()
    ]
    layers = 2
    assert 0.3 < sum(map(np.prod, shapes)) / (layers * 12 * length**2) < 0.75


# Other dtypes

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize(("family", "how", "stored"), dealt(FAMILIES, ("sdpa", *PROFILES), ("bf16", "fp16")))
def test_float32_over_half_precision_weights_is_exact(
    converted: Convert, runner: MakeRunner, how: str, family: str, stored: str
) -> None:
    folder = converted(family, 4, "ntk", dtype=TORCH[stored])
    check_decoder(runner(how, folder, family), folder, family)


@pytest.mark.parametrize(("family", "how", "stored"), dealt(FAMILIES, PROFILES, ("fp16", "fp32")))
def test_float16_graphs_are_near(
    converted: Convert, runner: MakeRunner, how: str, family: str, stored: str
) -> None:
    """Over float16 weights, and over float32 weights that the graph casts; in parts of the largest logit."""
    folder = converted(family, 12, "ntk-position", dtype=TORCH[stored])
    run = runner(how, folder, family, dtype="fp16")
    ids, mask = rows()
    mask[:, 40:] = 1
    logits = run.pieces(ids, mask, DECODED)
    assert logits.dtype == np.float16
    assert_close(logits, expected(folder, family, ids, mask), mask, relative=1e-2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *dealt(FAMILIES, ("bf16", "fp16")),
        *((name, dtype) for name in tiny.ENCODERS for dtype in ("bf16", "fp16")),
    ],
)
def test_half_precision(converted: Convert, runner: MakeRunner, name: str, dtype: str) -> None:
    """Also in plain attention, and in float32 with torch's automatic casts."""
    folder = converted(name, 12)
    half, whole = (runner("sdpa", folder, name, dtype=kind) for kind in (dtype, "fp32"))
    assert isinstance(half, Torch)
    assert isinstance(whole, Torch)
    ids, mask = rows()
    right, real = expected(folder, name, ids, mask), mask == 1
    outputs = [half.run(ids, mask).logits, half.run(ids, mask, output_attentions=True).logits]
    assert {output.dtype for output in outputs} == {TORCH[dtype]}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs.append(whole.run(ids, mask).logits)
    for output, limit in zip(outputs, [{"bf16": 0.05, "fp16": 0.01}[dtype]] * 2 + [0.05], strict=True):
        error = (output.double().numpy() - right)[real]
        assert np.linalg.norm(error) < limit * np.linalg.norm(right[real])


@pytest.mark.parametrize("how", PROFILES)
def test_positions_far_out_keep_their_precision_in_float16(
    converted: Convert, runner: MakeRunner, how: str
) -> None:
    """Near 3000, float16 has steps of 2: a position or a bias that went through it would be rounded."""
    folder = converted("bloom", 4, "ntk")
    exact, rounded = (runner(how, folder, "bloom", dtype=dtype) for dtype in ("fp32", "fp16"))
    ids, mask = tiny.token_ids(1, 3000), np.ones((1, 3000), dtype=np.int64)
    right, found = exact.whole(ids).astype(np.float64), rounded.pieces(ids, mask, (2999, 3000))
    for part in (slice(100), slice(-101, -1), slice(-1, None)):
        assert_close(found[:, part], right[:, part], relative=1e-2)


# What only graphs have


@pytest.mark.parametrize(("family", "profile", "side"), dealt(FAMILIES, PROFILES, ["left", "right"]))
def test_last_logits_are_those_of_each_row_s_last_real_token(
    converted: Convert, profile: Any, family: str, side: str
) -> None:
    folder = converted(family, 12, "ntk")
    whole = Engine(build(folder, profile, name="whole.onnx"))
    last = Engine(build(folder, profile, last_logits=True, name="last.onnx"))
    ids, mask = rows(side=side)
    ends = np.array([np.flatnonzero(row)[-1] for row in mask])
    _, past = whole.step(ids, mask)
    short, presents = last.step(ids, mask)
    assert short.shape == (3, 1, tiny.VOCAB_SIZE)
    assert_close(short, expected(folder, family, ids, mask)[np.arange(3), ends][:, None])
    for name, cache in past.items():
        assert np.array_equal(cache, presents[name])
    # A step of one token over the cache gives that token's.
    mask = np.concatenate([mask, np.ones((3, 1), dtype=np.int64)], axis=1)
    one, _ = last.step(ids[:, :1], mask, presents)
    assert_close(one, whole.step(ids[:, :1], mask, past)[0].astype(np.float64), relative=1e-6)


@pytest.mark.parametrize(("family", "dtype"), dealt(FAMILIES, ["fp32", "fp16"]))
def test_past_and_present_in_one_buffer_give_the_same(converted: Convert, family: str, dtype: str) -> None:
    """As a server runs it: the buffers are longer than their content, and the mask says how much is in."""
    engine = Engine(build(converted(family, 12, "ntk-length"), dtype=dtype))
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
        assert_close(shared, copied.astype(np.float64), mask[:, start:end], relative=1e-6)
    for name, cache in (past or {}).items():
        assert np.array_equal(buffers[name].numpy()[:, :, :40], cache)


@pytest.mark.parametrize(
    ("shape", "cached"),
    [
        ("bloom-86", 96),
        ("replit-10", 24),
        ("refact-13", 24),
        ("bloom-concave-112", 128),
        ("refact-concave-13", 32),
    ],
)
def test_heads_of_any_size(tmp_path: Path, shape: str, cached: int) -> None:
    """They are verified; onnxruntime's attention needs a multiple of 8, with the channels of the bias."""
    family, heads, scaling, changes = SHAPES[shape]
    source, out = tiny.FACTORIES[family](tmp_path / "source", heads, **changes), tmp_path / "out"
    result = convert(source, out, **SCALINGS[scaling])
    assert not any(check.skipped for check in result.checks if check.name in ("tensors", "slopes", "paths"))
    size = int(shape.rpartition("-")[2])
    for profile, channels in (("ort", cached), ("portable", size)):
        engine = Engine(build(out, profile, name=f"{profile}.onnx"))
        assert {value.shape[3] for value in engine.caches.values()} == {channels}
