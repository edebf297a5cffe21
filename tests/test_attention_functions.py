"""One attention for every attention function of transformers: positions, documents, padding, caches.

FlashAttention itself needs a GPU. A function with its calling convention stands in for it on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
    masking_utils,
)
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.masking_utils import flash_attention_mask

from tests import tiny
from tests.conftest import edit_json
from tests.dealt import dealt
from tests.patched import FAMILIES, Convert, assert_logits, batch, config_of, load
from tests.reference import FAMILIES as REFERENCES
from tests.test_generation import by_hand, generate

FLASH = "stand_in"
SCALED = ("ntk", "ntk-length", "ntk-position")
FUNCTIONS = ("eager", "sdpa", FLASH, "flex_attention")
DOCUMENTS = (17, 1, 22)


def flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: ARG001
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attends as FlashAttention does: no mask, the last query sees the last key, documents by bounds."""
    assert attention_mask is None
    assert dropout == 0.0 or module.training
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))  # [B, tokens, heads, size]
    groups = query.shape[2] // key.shape[2]
    assert module.is_causal
    assert module.num_key_value_groups == groups

    def one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scaling
        queries, keys = scores.shape[1:]
        seen = torch.ones(queries, keys).tril(keys - queries).bool()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype)

    if cu_seq_lens_q is None:
        return torch.stack([one(*row) for row in zip(query, key, value, strict=True)]), None
    assert cu_seq_lens_q.dtype == cu_seq_lens_k.dtype == torch.int32
    assert max_length_q == max_length_k == int(cu_seq_lens_q.diff().max())
    bounds = zip(cu_seq_lens_q.tolist(), cu_seq_lens_q.tolist()[1:], strict=False)
    flat = [states.flatten(0, 1) for states in (query, key, value)]
    output = torch.cat([one(*(states[start:end] for states in flat)) for start, end in bounds])
    return output.view(query.shape), None


@pytest.fixture(autouse=True)
def _flex_not_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers compiles flex_attention and its masks, for half a minute and again for other shapes."""

    def not_compiled(*arguments: Any, _compile: bool = False, **options: Any) -> Any:
        return create_block_mask(*arguments, **options)

    if "compiled" not in request.node.name:
        monkeypatch.setattr(masking_utils, "create_block_mask", not_compiled)
        monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda _: flex_attention)
        # One line of advice: to compile it.
        monkeypatch.setattr(flex_module, "_warn_once", lambda *_, **__: None, raising=False)


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    AttentionInterface.register(FLASH, flash)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
    yield
    AttentionInterface._global_mapping.pop(FLASH)
    AttentionMaskInterface._global_mapping.pop(FLASH)


def reference(folder: Any, family: str, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    _, tensors = tiny.read(folder)
    mask = torch.ones_like(ids) if mask is None else mask
    return REFERENCES[family].logits(config_of(folder), tensors, ids.numpy(), mask.numpy())


@torch.no_grad()
@pytest.mark.parametrize(("family", "scaling", "function"), dealt(FAMILIES, SCALED, FUNCTIONS, each=1))
def test_every_function_gives_the_reference(
    converted: Convert, family: str, scaling: str, function: str
) -> None:
    """In one pass, with padding on either side, and in chunks and tokens over a cache."""
    folder = converted(family, 12, scaling)
    model = load(folder, attn_implementation=function)
    for side in ("left", "right", None):
        ids, mask = batch(rows=2, length=40, side=side or "left")
        mask = None if side is None else mask
        expected = reference(folder, family, ids, mask)
        assert_logits(model(ids, attention_mask=mask).logits, expected, mask)
    ids, mask = batch(rows=2, length=40)
    greedy = by_hand(load(folder), ids, mask)
    for options in ({}, {"cache_implementation": "static"}, {"num_beams": 1, "use_cache": False}):
        if scaling != "ntk-length" or "use_cache" in options:
            assert torch.equal(generate(model, ids, mask, **options), greedy)
    if scaling != "ntk-length":
        expected = reference(folder, family, ids, mask)
        for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=48)):
            steps = [
                model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
                for start, end in ((0, 20), (20, 33), (33, 34), (34, 40))
            ]
            assert_logits(torch.cat(steps, dim=1), expected, mask)


@torch.no_grad()
@pytest.mark.slow
def test_compiled_flex_attention(converted: Convert) -> None:
    """As transformers runs it. Grouped heads, padding, and tokens over a cache."""
    if pick_vec_isa().bit_width() < 512:
        # With 256 bits, plain causal attention of random numbers gives NaN (torch 2.13).
        pytest.skip("torch's compiled flex_attention reads memory that nobody wrote, without AVX-512")
    folder = converted("replit", 12, "ntk-position")
    model = load(folder, attn_implementation="flex_attention")
    ids, mask = batch(rows=2, length=40)
    expected = reference(folder, "replit", ids, mask)
    assert_logits(model(ids, attention_mask=mask).logits, expected, mask)
    cache = DynamicCache()
    steps = [
        model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        for start, end in ((0, 20), (20, 39), (39, 40))
    ]
    assert_logits(torch.cat(steps, dim=1), expected, mask)


def packed(rows: int) -> tuple[torch.Tensor, torch.Tensor, list[list[torch.Tensor]]]:
    """Token ids and positions, both [rows, tokens], and the documents of each row; rows differ in order."""
    ids, _ = batch(rows=rows, length=sum(DOCUMENTS))
    orders = [DOCUMENTS if row % 2 == 0 else DOCUMENTS[::-1] for row in range(rows)]
    positions = torch.stack([torch.cat([torch.arange(size) for size in order]) for order in orders])
    return ids, positions, [list(row.split(list(order))) for row, order in zip(ids, orders, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize(("family", "scaling", "function"), dealt(FAMILIES, SCALED, FUNCTIONS, each=1))
def test_documents_in_a_row_do_not_see_each_other(
    converted: Convert, family: str, scaling: str, function: str
) -> None:
    model = load(converted(family, 12, scaling), attn_implementation=function)
    for rows in (1, 2):
        ids, positions, documents = packed(rows)
        output = model(ids, position_ids=positions)
        assert output.past_key_values is None
        expected = torch.stack(
            [torch.cat([model(document[None]).logits[0] for document in row]) for row in documents]
        )
        assert_logits(output.logits, expected)
        # A mask of ones says nothing else, and weights of attention are computed on another path.
        assert_logits(
            model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits, expected
        )
        assert_logits(model(ids, position_ids=positions, output_attentions=True).logits, expected)
    # Padding before, between and after the documents.
    ids, positions, documents = packed(1)
    pieces, mask = [torch.zeros(3, dtype=torch.long)], [0] * 3
    places = [torch.ones(3, dtype=torch.long)]
    for number, document in enumerate(documents[0]):
        pieces += [document, torch.full((2,), tiny.PAD)]
        places += [torch.arange(len(document)), torch.full((2,), number)]
        mask += [1] * len(document) + [0, 0]
    logits = model(
        torch.cat(pieces)[None], position_ids=torch.cat(places)[None], attention_mask=torch.tensor([mask])
    ).logits[:, torch.tensor(mask).bool()]
    assert_logits(logits, expected[:1])


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
    dealt(FAMILIES, ("ntk", "ntk-position"), ("eager", "sdpa", "flex_attention"), each=1),
)
def test_own_masks(converted: Convert, family: str, scaling: str, function: str) -> None:
    """A mask of four dimensions and positions: each path of a tree is a row of the reference."""
    folder = converted(family, 12, scaling)
    model = load(folder, attn_implementation=function)
    ids, positions, visible, paths = tree()
    expected = torch.empty(40, model.config.vocab_size, dtype=torch.double)
    for path in paths:
        expected[path] = torch.as_tensor(reference(folder, family, ids[:, path], None)[0])
    for mask in (visible, added(visible)):
        found = model(ids, position_ids=positions, attention_mask=mask).logits
        assert_logits(found, expected[None])
    # Rows with masks of their own, over caches, in several steps.
    rows, later = ids.repeat(2, 1), positions.repeat(2, 1)
    plain = torch.ones(40, 40).tril().bool()
    both = torch.stack([visible[0], plain[None]])
    later[1] = torch.arange(40)
    expected = torch.stack([expected, torch.as_tensor(reference(folder, family, ids, None)[0])])
    for cache, size in (
        (DynamicCache(), 0),
        (StaticCache(config=model.config, max_cache_len=48), 48),
    ):
        steps = []
        for start, end in ((0, 25), (25, 39), (39, 40)):
            mask = both[:, :, start:end, :end]
            mask = torch.nn.functional.pad(mask, (0, max(0, size - end)))
            steps.append(
                model(
                    rows[:, start:end],
                    position_ids=later[:, start:end],
                    attention_mask=mask,
                    past_key_values=cache,
                ).logits
            )
        assert_logits(torch.cat(steps, dim=1), expected)


@torch.no_grad()
def test_own_masks_in_half_precision(converted: Convert) -> None:
    """A float32 mask has numbers that half precision does not."""
    folder = converted("bloom", 4, "ntk-position")
    ids, positions, visible, _ = tree()
    expected = load(folder)(ids, position_ids=positions, attention_mask=visible).logits
    for function in ("sdpa", "eager"):
        model = load(folder, attn_implementation=function, dtype=torch.bfloat16)
        for mask in (visible, added(visible)):
            found = model(ids, position_ids=positions, attention_mask=mask).logits.float()
            assert (found - expected).norm() / expected.norm() < 0.02


@torch.no_grad()
def test_own_masks_that_cannot_work(converted: Convert) -> None:
    model = load(converted("bloom", 4, "ntk-position"))
    ids, positions, visible, _ = tree()
    for changes, message in (
        ({"position_ids": None}, "a 4-D attention_mask needs position_ids"),
        ({"position_ids": positions[:, 1:]}, r"position_ids must be \[1, 40\], got \[1, 39\]"),
        ({"attention_mask": visible[..., 1:]}, r"must be \[1, 1, 40, 40\] here, got \[1, 1, 40, 39\]"),
        ({"attention_mask": visible.expand(-1, 4, -1, -1)}, r"got \[1, 4, 40, 40\]"),
        ({"attention_mask": visible.expand(3, -1, -1, -1)}, r"got \[3, 1, 40, 40\]"),
        ({"attention_mask": visible.long()}, "must hold booleans or floats, got torch.int64"),
        (
            {"attention_mask": visible[0]},
            r"must be \[rows, tokens\], got \[1, 40, 40\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **{"position_ids": positions, "attention_mask": visible, **changes})
    model.config._attn_implementation = FLASH
    with pytest.raises(ValueError, match=f"{FLASH} takes no 4-D attention_mask; use one of: sdpa"):
        model(ids, position_ids=positions, attention_mask=visible)


@torch.no_grad()
def test_own_masks_do_not_say_lengths(converted: Convert) -> None:
    model = load(converted("mpt", 4, "ntk-length"))
    ids, positions, visible, _ = tree()
    with pytest.raises(ValueError, match="convert the model with --dynamic position"):
        model(ids, position_ids=positions, attention_mask=visible)


def test_padding_free_training(converted: Convert) -> None:
    """The collator of transformers gives the loss of the documents one by one."""
    model = load(converted("bloom", 4, "ntk-position"))
    _, _, [documents] = packed(1)
    documents = [document for document in documents if len(document) > 1]
    inputs = DataCollatorWithFlattening()([{"input_ids": document.tolist()} for document in documents])
    assert "attention_mask" not in inputs
    loss = model(**inputs).loss
    parts = [(len(d) - 1, model(d[None], labels=d[None]).loss) for d in documents]
    expected = sum(count * part for count, part in parts) / sum(count for count, _ in parts)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()


@torch.no_grad()
def test_positions_are_the_caller_s(converted: Convert) -> None:
    model = load(converted("bloom", 4, "ntk-position"))
    ids, mask = batch(rows=2, length=40)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask).logits
    assert_logits(model(ids, attention_mask=mask, position_ids=positions).logits, expected, mask)
    plain = model(ids).logits
    assert_logits(model(ids, position_ids=torch.arange(40)[None]).logits, plain)
    # Later positions have flatter slopes.
    assert not torch.allclose(model(ids, position_ids=torch.arange(100, 140)[None]).logits, plain, atol=1e-2)
    # What is written at padded tokens means nothing.
    assert_logits(model(ids, attention_mask=mask, position_ids=mask.cumsum(-1) - 1).logits, expected, mask)
    cache = model(ids[:, :30], use_cache=True).past_key_values
    later = model(ids[:, 30:], position_ids=torch.arange(30, 40)[None], past_key_values=cache)
    assert_logits(later.logits, plain[:, 30:])


@torch.no_grad()
def test_places_in_the_cache_are_not_positions(converted: Convert) -> None:
    """Chunked prefill of transformers 4.57 passes them, and they count padded tokens too."""
    model = load(converted("bloom", 4, "ntk-position"))
    ids, mask = batch(rows=2, length=40, side="left")
    expected, places = model(ids, attention_mask=mask).logits, torch.arange(40)[None]
    cache = DynamicCache()
    for first, last in ((0, 25), (25, 40)):
        found = model(
            ids[:, first:last],
            attention_mask=mask[:, :last],
            position_ids=places[:, first:last],
            past_key_values=cache,
        )
        assert_logits(found.logits, expected[:, first:last], mask[:, first:last])


@torch.no_grad()
def test_positions_that_make_no_sense(converted: Convert) -> None:
    model = load(converted("bloom"))
    ids, mask = batch(rows=2, length=8)
    cache = model(ids, use_cache=True).past_key_values
    rows = torch.arange(8).repeat(2, 1)
    jump, back, negative = rows.clone(), rows.clone(), rows - 1
    jump[1, 5:] += 1
    back[1, 5:] = torch.tensor([1, 2, 3])
    again = rows % 4
    for positions, message in (
        (jump, "token 5 of row 1 is at 6; positions rise by one"),
        (back, "token 5 of row 1 is at 1"),
        (negative, "token 0 of row 0 is at -1"),
        (rows[:, :7], r"must be \[2, 8\], got \[2, 7\]"),
        (rows[0], r"must be \[2, 8\], got \[8\]"),
        (rows[None], r"must be \[2, 8\], got \[1, 2, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, position_ids=positions)
        with pytest.raises(ValueError, match=message):
            model(ids, position_ids=positions, attention_mask=torch.ones_like(mask))
    for given in (cache, DynamicCache()):
        with pytest.raises(ValueError, match="documents in one row cannot share a cache"):
            model(ids, position_ids=again, past_key_values=given)
    with pytest.raises(ValueError, match="cu_seq_lens_q needs position_ids"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 4, 8]))


@torch.no_grad()
def test_continuous_batching_refuses_what_it_would_get_wrong(converted: Convert) -> None:
    ids, _ = batch(rows=1, length=8)
    keywords = {"position_ids": torch.arange(8)[None], "cache": object(), "use_cache": False}
    with pytest.raises(ValueError, match="convert the model with --dynamic position"):
        load(converted("bloom", 4, "ntk-length"))(ids, **keywords)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_says_what_a_cache_holds(converted: Convert, family: str) -> None:
    """Caches that are made before the first token, and other engines, read it."""
    folder = converted(family, 12)
    # A source may have values of its own, which are those of its own heads.
    edit_json(folder / "config.json", {"head_dim": 5, "num_key_value_heads": 3})
    model = load(folder)
    cache = model(batch(rows=1, length=8)[0], use_cache=True).past_key_values
    config = model.config
    assert (
        cache.layers[0].keys.shape
        == cache.layers[0].values.shape
        == (
            1,
            config.num_key_value_heads,
            8,
            config.head_dim,
        )
    )
    assert "head_dim" not in config.to_dict()


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
    packed_ids, positions, _ = packed(2)
    for ids_, keywords in (
        (ids, {"attention_mask": mask}),
        (packed_ids.cuda(), {"position_ids": positions.cuda()}),
    ):
        ours, theirs = (each(ids_, **keywords).logits.float() for each in (model, sdpa))
        real = keywords.get("attention_mask", torch.ones_like(ids_)).bool()
        assert (ours - theirs)[real].norm() / theirs[real].norm() < 0.02
    cache = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
    step = model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits.float()
    whole = sdpa(ids, attention_mask=mask).logits.float()[:, -1:]
    assert (step - whole).norm() / whole.norm() < 0.02
