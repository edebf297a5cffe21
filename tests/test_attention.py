"""What one forward pass may be given beside tokens: positions, documents, own masks, caches, shared heads.

The packages of FlashAttention need a GPU; ``tests/flash_stand_in.py`` stands in for them on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, StaticCache

from templates import ntk_alibi, ntk_attention
from templates.ntk_alibi import Alibi, fold, key_channels, stock_slopes
from templates.ntk_attention import AlibiAttention
from templates.ntk_config import FOLDED_CHANNELS
from templates.ntk_plan import plan_attention
from tests import flash_stand_in, tiny
from tests.conftest import edit_json
from tests.dealt import dealt
from tests.messages import Words, raises
from tests.onnx_graphs import Array, assert_close
from tests.patched import FAMILIES, Convert, assert_logits, batch, load
from tests.runners import FUNCTIONS, MakeRunner, Torch, expected
from tests.test_continuous_batching import OLD, batched, prompts

DYNAMIC = ("ntk-length", "ntk-position", "concave")
DOCUMENTS = (17, 1, 22)


def packed(rows: int) -> tuple[Array, Array, list[list[Array]]]:
    """Token ids and positions, both [rows, tokens], and the documents of each row; rows differ in order."""
    ids = tiny.token_ids(rows, sum(DOCUMENTS))
    orders = [DOCUMENTS if row % 2 == 0 else DOCUMENTS[::-1] for row in range(rows)]
    positions = np.stack([np.concatenate([np.arange(size) for size in order]) for order in orders])
    ends = [np.cumsum(order)[:-1] for order in orders]
    return ids, positions, [np.split(row, end) for row, end in zip(ids, ends, strict=True)]


@pytest.mark.parametrize(("family", "scaling", "function"), dealt(FAMILIES, DYNAMIC, FUNCTIONS))
def test_documents_in_a_row_do_not_see_each_other(
    converted: Convert, runner: MakeRunner, family: str, scaling: str, function: str
) -> None:
    folder = converted(family, 12, scaling)
    run = runner(function, folder, family)
    assert isinstance(run, Torch)

    def alone(documents: list[Array]) -> Array:
        return np.concatenate([expected(folder, family, document[None])[0] for document in documents])

    for rows in (1, 2):
        ids, positions, documents = packed(rows)
        right = np.stack([alone(row) for row in documents])
        assert run.run(ids, position_ids=positions).past_key_values is None
        # A mask of ones says nothing else, and weights of attention are computed on another path.
        for options in ({}, {"mask": np.ones_like(ids)}, {"output_attentions": True}):
            assert_close(run.whole(ids, position_ids=positions, **options), right)
    # Padding before, between and after the documents.
    [documents] = packed(1)[2]
    pieces, places, mask = [np.zeros(3, dtype=np.int64)], [np.ones(3, dtype=np.int64)], [0] * 3
    for number, document in enumerate(documents):
        pieces += [document, np.full(2, tiny.PAD)]
        places += [np.arange(len(document)), np.full(2, number)]
        mask += [1] * len(document) + [0, 0]
    ids, positions, real = np.concatenate(pieces)[None], np.concatenate(places)[None], np.array([mask])
    found = run.whole(ids, real, position_ids=positions)[:, np.array(mask) == 1]
    assert_close(found, alone(documents)[None])


def tree() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[int]]]:
    """Three continuations behind one prompt: ids and positions [1, 40], what each token sees, and the paths.

    The visible keys are bool [1, 1, 40, 40]. A path is the places of the prompt and of one continuation,
    whose tokens take turns with those of the others.
    """
    prompt, branches = 19, 3
    ids, _ = batch(rows=1, length=40)
    places = torch.arange(40)
    paths = [[*range(prompt), *range(prompt + branch, 40, branches)] for branch in range(branches)]
    positions, visible = places.clone(), torch.zeros(40, 40).bool()
    for path in paths:
        positions[path] = torch.arange(len(path))
        visible[torch.tensor(path)[:, None], torch.tensor(path)] = True
    return ids, positions[None], (visible & (places[:, None] >= places))[None, None], paths


def added(visible: torch.Tensor) -> torch.Tensor:
    """The mask as stock models take it: numbers to add to the scores."""
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "scaling", "function"),
    dealt(FAMILIES, ("ntk", "ntk-position", "concave"), ("eager", "sdpa", "flex_attention")),
)
def test_own_masks(converted: Convert, runner: MakeRunner, family: str, scaling: str, function: str) -> None:
    """A mask of four dimensions and positions: each path of a tree is a row of the reference."""
    folder = converted(family, 12, scaling)
    run = runner(function, folder, family)
    assert isinstance(run, Torch)
    model = run.model
    ids, positions, visible, paths = tree()
    right = np.empty((1, 40, model.config.vocab_size))
    for path in paths:
        right[0, path] = expected(folder, family, ids.numpy()[:, path])[0]
    for mask in (visible, added(visible)):
        assert_logits(model(ids, position_ids=positions, attention_mask=mask).logits, right)
    # Rows with masks of their own, over caches, in several steps.
    rows, later = ids.repeat(2, 1), torch.cat([positions, torch.arange(40)[None]])
    both = torch.cat([visible, torch.ones(1, 1, 40, 40).tril().bool()])
    right = np.concatenate([right, expected(folder, family, ids.numpy())])
    for cache, size in (
        (DynamicCache(), 0),
        (StaticCache(config=model.config, max_cache_len=48), 48),
    ):
        steps = [
            model(
                rows[:, start:end],
                position_ids=later[:, start:end],
                attention_mask=F.pad(both[:, :, start:end, :end], (0, max(0, size - end))),
                past_key_values=cache,
            ).logits
            for start, end in ((0, 25), (25, 39), (39, 40))
        ]
        assert_logits(torch.cat(steps, dim=1), right)


@torch.no_grad()
def test_own_masks_in_half_precision(converted: Convert) -> None:
    """A float32 mask has numbers that half precision does not."""
    folder = converted("bloom", 4, "ntk-position")
    ids, positions, visible, _ = tree()
    right = load(folder)(ids, position_ids=positions, attention_mask=visible).logits
    for function in ("sdpa", "eager"):
        model = load(folder, attn_implementation=function, dtype=torch.bfloat16)
        for mask in (visible, added(visible)):
            found = model(ids, position_ids=positions, attention_mask=mask).logits.float()
            assert (found - right).norm() / right.norm() < 0.02


@torch.no_grad()
def test_positions_are_the_caller_s(converted: Convert) -> None:
    model = load(converted("bloom", 4, "ntk-position"))
    ids, mask = batch(rows=2, length=40)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    right = model(ids, attention_mask=mask).logits
    assert_logits(model(ids, attention_mask=mask, position_ids=positions).logits, right, mask)
    plain = model(ids).logits
    assert_logits(model(ids, position_ids=torch.arange(40)[None]).logits, plain)
    # Later positions have flatter slopes.
    assert not torch.allclose(model(ids, position_ids=torch.arange(100, 140)[None]).logits, plain, atol=1e-2)
    # What is written at padded tokens means nothing.
    assert_logits(model(ids, attention_mask=mask, position_ids=mask.cumsum(-1) - 1).logits, right, mask)
    cache = model(ids[:, :30], use_cache=True).past_key_values
    later = model(ids[:, 30:], position_ids=torch.arange(30, 40)[None], past_key_values=cache)
    assert_logits(later.logits, plain[:, 30:])
    # Chunked prefill of transformers 4.57 passes places in the cache, which count padded tokens too.
    cache, places = DynamicCache(), torch.arange(40)[None]
    for chunk in (slice(25), slice(25, 40)):
        found = model(
            ids[:, chunk],
            attention_mask=mask[:, : chunk.stop],
            position_ids=places[:, chunk],
            past_key_values=cache,
        )
        assert_logits(found.logits, right[:, chunk], mask[:, chunk])


# What a model refuses: keywords of ``forward``, words of the message. Two rows of 40 tokens are the input.
ROWS = torch.arange(40).repeat(2, 1)
SQUARE = torch.ones(2, 1, 40, 40).bool()


def moved(places: slice, values: Any) -> torch.Tensor:
    positions = ROWS.clone()
    positions[1, places] = values
    return positions


INPUTS: list[tuple[dict[str, Any], Words]] = [
    ({"attention_mask": torch.ones(2, 40, 40)}, ("[rows, tokens]", "[2, 40, 40]")),
    ({"attention_mask": SQUARE}, ("attention_mask", "position_ids")),
    ({"attention_mask": SQUARE, "position_ids": ROWS[:, 1:]}, ("[2, 40]", "[2, 39]")),
    (
        {"attention_mask": SQUARE[..., 1:], "position_ids": ROWS},
        ("[2, 1, 40, 40]", "[2, 1, 40, 39]"),
    ),
    ({"attention_mask": SQUARE.expand(-1, 4, -1, -1), "position_ids": ROWS}, "[2, 4, 40, 40]"),
    ({"attention_mask": SQUARE[:1].expand(3, -1, -1, -1), "position_ids": ROWS}, "[3, 1, 40, 40]"),
    ({"attention_mask": SQUARE.long(), "position_ids": ROWS}, "torch.int64"),
    ({"past_key_values": ((torch.zeros(1), torch.zeros(1)),)}, ("Cache", "tuple")),
    ({"inputs_embeds": torch.zeros(2, 40, 32)}, ("input_ids", "inputs_embeds")),
    (
        {"position_ids": moved(slice(5, None), torch.arange(6, 41))},
        "token 5 of row 1 is at 6",
    ),
    ({"position_ids": moved(slice(5, 8), torch.tensor([1, 2, 3]))}, "token 5 of row 1 is at 1"),
    ({"position_ids": ROWS - 1}, "token 0 of row 0 is at -1"),
    ({"position_ids": ROWS[:, :7]}, ("[2, 40]", "[2, 7]")),
    ({"position_ids": ROWS[0]}, ("[2, 40]", "got [40]")),
    ({"position_ids": ROWS[None]}, ("[2, 40]", "[1, 2, 40]")),
    ({"position_ids": ROWS % 4, "past_key_values": DynamicCache()}, ("documents", "share a cache")),
    ({"cu_seq_lens_q": torch.tensor([0, 40, 80])}, ("cu_seq_lens_q", "position_ids")),
    ({"head_mask": torch.ones(4)}, "head_mask"),
]


@torch.no_grad()
@pytest.mark.parametrize("family", ["bloom", "replit"])
def test_inputs_that_make_no_sense(converted: Convert, family: str) -> None:
    model = load(converted(family, 4, "ntk-position"))
    ids, mask = batch(rows=2, length=40)
    for options, words in INPUTS:
        with raises((ValueError, TypeError), words):
            model(ids, **options)
        if "position_ids" in options and "attention_mask" not in options:
            with raises(ValueError, words):
                model(ids, attention_mask=torch.ones_like(mask), **options)
    cache = model(ids, use_cache=True).past_key_values
    with raises(ValueError, "cover the cached ones"):
        model(ids[:, :1], attention_mask=mask[:, :1], past_key_values=cache)
    with raises(ValueError, "documents", "share a cache"):
        model(ids, position_ids=ROWS % 4, past_key_values=cache)
    model.config._attn_implementation = "flash_attention_2"
    with raises(ValueError, "flash_attention_2", "attention_mask", "use one of: sdpa"):
        model(ids, position_ids=ROWS, attention_mask=SQUARE)


@torch.no_grad()
def test_lengths_that_cannot_be_told(converted: Convert) -> None:
    """Neither an own mask nor continuous batching says how long a sequence is."""
    model = load(converted("mpt", 4, "ntk-length"))
    ids, positions, visible, _ = tree()
    for options in ({"attention_mask": visible}, {"cache": object(), "use_cache": False}):
        with raises(ValueError, "--dynamic position"):
            model(ids, position_ids=positions, **options)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_says_what_a_cache_holds(converted: Convert, family: str) -> None:
    """Caches that are made before the first token, and other engines, read it."""
    folder = converted(family, 12)
    # A source may have values of its own, which are those of its own heads.
    edit_json(folder / "config.json", {"head_dim": 5, "num_key_value_heads": 3})
    model = load(folder)
    layer = model(batch(rows=1, length=8)[0], use_cache=True).past_key_values.layers[0]
    expected = (1, model.config.num_key_value_heads, 8, model.config.head_dim)
    assert layer.keys.shape == layer.values.shape == expected
    assert "head_dim" not in model.config.to_dict()


@torch.no_grad()
@pytest.mark.slow
def test_compiled_flex_attention(converted: Convert) -> None:
    """As transformers runs it. Grouped heads, padding, and tokens over a cache."""
    if pick_vec_isa().bit_width() < 512:
        # With 256 bits, plain causal attention of random numbers gives NaN (torch 2.13).
        pytest.skip("torch's compiled flex_attention reads memory that nobody wrote, without AVX-512")
    folder = converted("replit", 12, "ntk-position")
    run = Torch(load(folder, attn_implementation="flex_attention"))
    ids, mask = (tensor.numpy() for tensor in batch(rows=2, length=40))
    right = expected(folder, "replit", ids, mask)
    assert_close(run.whole(ids, mask), right, mask)
    assert_close(run.pieces(ids, mask, (20, 39, 40)), right, mask)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "implementation", "scaling"),
    dealt(["bloom", "replit"], flash_stand_in.IMPLEMENTATIONS, ["ntk", *DYNAMIC]),
)
def test_what_flash_attention_is_called_with(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, family: str, implementation: str, scaling: str
) -> None:
    """As the packages of versions 2 and 3 take it, which have no mask; test_numbers.py has more numbers."""
    folder = converted(family, 12, scaling)
    calls = flash_stand_in.install(monkeypatch, implementation)
    run = Torch(load(folder))
    run.model.config._attn_implementation = implementation
    layers = run.model.config.num_hidden_layers
    ids, positions, documents = packed(2)
    for mask in (None, *(tiny.padding_mask([40, 29], side) for side in ("left", "right"))):
        assert_close(run.whole(ids, mask), expected(folder, family, ids, mask), mask)
        assert (len(calls.plain), calls.varlen) == (layers, [])
        calls.plain.clear()
    right = [[expected(folder, family, document[None])[0] for document in row] for row in documents]
    found = run.whole(ids, position_ids=positions, use_cache=False)
    assert_close(found, np.stack([np.concatenate(row) for row in right]))
    assert (calls.plain, calls.varlen) == ([], [[0, 17, 18, 40, 62, 63, 80]] * layers)


@pytest.mark.skipif(OLD, reason="transformers 4.57 has another function for this, which needs a GPU")
def test_continuous_batching(converted: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = flash_stand_in.install(monkeypatch, "flash_attention_2")
    model = load(converted("refact", 12, "ntk-position"))
    rows = prompts()[:3]
    expected = [output.generated_tokens for output in batched(model, rows)]
    model.config._attn_implementation = "flash_attention_2"
    outputs = batched(model, rows)
    assert [output.error for output in outputs] == [None] * len(rows)
    assert [output.generated_tokens for output in outputs] == expected
    assert calls.varlen
    assert not calls.plain


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("function", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("family", ["bloom", "replit"])
def test_flash_attention(converted: Convert, family: str, function: str) -> None:
    """On a GPU: padded, packed and cached, against sdpa in the same dtype on the same device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder = converted(family, 4, "ntk-position")
    options = {"dtype": torch.bfloat16, "device_map": "cuda"}
    try:
        model = load(folder, attn_implementation=function, **options)
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])
    sdpa = load(folder, **options)
    ids, mask = (tensor.cuda() for tensor in batch(rows=2, length=60))
    packed_ids, positions = (torch.from_numpy(array).cuda() for array in packed(2)[:2])
    for ids_, keywords in (
        (ids, {"attention_mask": mask}),
        (packed_ids, {"position_ids": positions}),
    ):
        ours, theirs = (each(ids_, **keywords).logits.float() for each in (model, sdpa))
        real = keywords.get("attention_mask", torch.ones_like(ids_)).bool()
        assert (ours - theirs)[real].norm() / theirs[real].norm() < 0.02
    cache = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
    step = model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits.float()
    whole = sdpa(ids, attention_mask=mask).logits.float()[:, -1:]
    assert (step - whole).norm() / whole.norm() < 0.02


# Key and value heads that several query heads share are not copied where the kernel takes them.

HEADS, SIZE, SCALE = 12, 16, 0.25
SDPA = SimpleNamespace(_attn_implementation="sdpa", head_dim=SIZE + FOLDED_CHANNELS)
# New tokens and cached ones: the kernel's causal mask, a mask, and none.
STEPS = {"prefill": (40, 0), "chunk": (24, 40), "decode": (1, 40)}


def states(groups: int, new: int, cached: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(HEADS, new), (groups, new), (groups, new), (groups, cached), (groups, cached)]
    return [torch.randn(2, heads, size, SIZE, generator=generator).to(dtype) for heads, size in sizes]


def attend(parts: list[torch.Tensor]) -> torch.Tensor:
    query, key, value, old_key, old_value = parts
    cache = DynamicCache()
    if old_key.shape[2]:
        positions = torch.arange(old_key.shape[2])[None]
        cache.update(fold(old_key, key_channels(positions, None)), F.pad(old_value, (0, FOLDED_CHANNELS)), 0)
    hidden = torch.zeros(2, query.shape[2], 1, dtype=query.dtype)
    plan = plan_attention(SDPA, Alibi(stock_slopes(HEADS)), SCALE, hidden, past_key_values=cache)
    return AlibiAttention(SDPA, HEADS, SCALE, 0.0, 0).attend(query, key, value, plan, cache)[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The key heads that the kernel was given, and whether it was told that they are shared."""
    found: list[tuple[int, bool]] = []
    sdpa = F.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
        found.append((key.shape[1], enable_gqa))
        return sdpa(query, key, value, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return found


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 4, HEADS])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_heads_give_what_copies_give(
    step: str, groups: int, dtype: torch.dtype, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = states(groups, *STEPS[step], dtype)
    shared = attend(parts)
    takes = ntk_attention.CPU_KERNEL_TAKES_GROUPS
    monkeypatch.setattr(ntk_attention, "CPU_KERNEL_TAKES_GROUPS", False)
    copied = attend(parts)
    if groups < HEADS:
        # transformers gives copies to a kernel with a mask.
        grouped = takes and step != "chunk"
        assert calls[0] == (groups if grouped else HEADS, grouped)
        assert calls[1][0] == HEADS
    torch.testing.assert_close(shared, copied, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("step", STEPS)
def test_it_is_a_fused_kernel_that_takes_them(step: str) -> None:
    """torch's fallback would write out the attention weights, and be slower than copying the heads."""
    parts = states(4, *STEPS[step])
    with profile(activities=[ProfilerActivity.CPU]) as record:
        attend(parts)
    names = {event.key for event in record.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names


def test_training_copies_them(calls: list[Any]) -> None:
    """The CPU kernel sums a group's gradients in half precision; over copies they are as exact as ever."""
    parts = states(1, 64, 0, torch.bfloat16)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        query, key, value = (part.to(dtype, copy=True).requires_grad_() for part in parts[:3])
        output = attend([query, key, value, *(part.to(dtype) for part in parts[3:])])
        output.double().square().sum().backward()
        found.append([part.grad.double() for part in (query, key, value)])
    assert calls[0][0] == HEADS
    for half, exact in zip(*found, strict=True):
        assert (half - exact).norm() / exact.norm() < 0.01


def test_kernels_that_the_user_switched_off_stay_off() -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with torch.no_grad(), ntk_alibi.sdpa_kernels(torch.device("cuda"), 1):
            assert not torch.backends.cuda.flash_sdp_enabled()
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize(
    ("device", "queries", "grad", "without"),
    [
        ("cuda", 1, False, True),
        ("cuda", 1 << 14, False, False),
        ("cuda", 1, True, False),
        ("cpu", 1, False, False),
    ],
)
def test_cudnn_plans_for_long_prompts_and_training_only(
    device: str, queries: int, *, grad: bool, without: bool
) -> None:
    """On an H100 each new length costs 45 ms, which made decoding several times slower."""
    for allowed in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        try:
            with torch.set_grad_enabled(grad), ntk_alibi.sdpa_kernels(torch.device(device), queries):
                assert torch.backends.cuda.cudnn_sdp_enabled() == (allowed and not without)
                assert torch.backends.cuda.math_sdp_enabled()
            assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
