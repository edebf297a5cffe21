"""The cache that grows in place holds what transformers' own cache holds, whatever is done with it."""

from __future__ import annotations

import copy
import inspect
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, QuantizedLayer

from templates.ntk_cache import LEAST_ROOM, GrowingLayer, grow
from tests.messages import raises
from tests.patched import FAMILIES, Convert, assert_logits, batch, load

ROWS, HEADS, SIZE, NARROW = 2, 3, 4, 3


def pickled(layer: DynamicLayer) -> DynamicLayer:
    return pickle.loads(pickle.dumps(layer))


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.sampled_from([1, 1, 1, 7, LEAST_ROOM + 1])),
    st.tuples(st.just("crop"), st.integers(1, 9)),
    st.tuples(st.just("reorder"), st.booleans()),
    st.tuples(st.just("repeat"), st.just(2)),
    st.tuples(st.just("select"), st.booleans()),
    st.tuples(
        st.just("copy"), st.sampled_from([copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
    ),
    st.tuples(st.just("to"), st.just(torch.float64)),
    st.tuples(st.just("reset"), st.none()),
)


def cropped(layer: DynamicLayer, tokens: int) -> None:
    """transformers 4.57 takes the tokens that stay; newer releases those that go, as a negative number."""
    stay = max(layer.get_seq_length() - tokens, 0)
    layer.crop(
        stay if "max_length" in inspect.signature(layer.crop).parameters else stay - layer.get_seq_length()
    )


def apply(layer: DynamicLayer, name: str, argument: Any, states: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """The layer after one operation; the layer itself, or a copy of it."""
    if name == "update":
        layer.update(*states)
    elif not layer.get_seq_length():
        return layer
    elif name == "crop":
        cropped(layer, argument)
    elif name in ("reorder", "select"):
        rows = torch.arange(layer.keys.shape[0])
        rows = rows.flip(0) if argument else rows // 2
        (layer.reorder_cache if name == "reorder" else layer.batch_select_indices)(rows)
    elif name == "repeat":
        layer.batch_repeat_interleave(argument)
    elif name == "to":  # as offloading does
        layer.keys, layer.values = layer.keys.to(argument).float(), layer.values.to(argument).float()
    elif name == "reset":
        layer.keys = layer.values = None
        layer.is_initialized = False
    elif name == "copy":
        copied = argument(layer)
        assert type(copied) is DynamicLayer
        cache = DynamicCache()
        cache.layers = [copied]
        if isinstance(layer, GrowingLayer):
            grow(cache, 1)
        return cache.layers[0]
    return layer


@torch.no_grad()
@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATIONS, min_size=1, max_size=12))
def test_it_is_the_stock_layer_after_any_operations(operations: list[tuple[str, Any]]) -> None:
    """What it returned earlier also stays as it was: someone may have kept it.

    Values end in zeros, which it may be given or not.
    """
    generator = torch.Generator().manual_seed(0)
    stock, growing, kept = DynamicLayer(), GrowingLayer(), []
    for name, argument in operations:
        # A layer that was cropped to nothing keeps its rows.
        rows = ROWS if stock.keys is None else stock.keys.shape[0]
        shape = (rows, HEADS, argument if name == "update" else 1, SIZE)
        keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        values[..., NARROW:] = 0
        width = NARROW if torch.rand(1, generator=generator) < 0.5 else SIZE
        stock = apply(stock, name, argument, (keys, values))
        growing = apply(growing, name, argument, (keys, values[..., :width]))
        assert growing.get_seq_length() == stock.get_seq_length()
        if stock.get_seq_length():
            for ours, theirs in ((growing.keys, stock.keys), (growing.values, stock.values)):
                assert torch.equal(ours, theirs)
                kept.append((ours, theirs.clone()))
    for ours, then in kept:
        assert torch.equal(ours, then)


@torch.no_grad()
def test_a_token_is_written_in_place() -> None:
    layer = GrowingLayer()
    states = torch.randn(1, HEADS, 10, SIZE)
    layer.update(states, states)
    layer.update(states, states)
    places = {layer.keys.data_ptr()}
    for _ in range(LEAST_ROOM):
        layer.update(states[:, :, :1], states[:, :, :1])
        places.add(layer.keys.data_ptr())
    assert len(places) == 1
    layer.update(states[:, :, :1], states[:, :, :1])
    assert layer.keys.data_ptr() not in places


@torch.no_grad()
def test_other_rows_are_an_error_as_in_the_stock_layer() -> None:
    layer, states = GrowingLayer(), torch.randn(3, HEADS, 10, SIZE)
    layer.update(states, states)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer.update(states[:1], states[:1])


def test_it_leaves_training_and_inference_mode_alone() -> None:
    states = torch.randn(1, HEADS, 10, SIZE)
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(states, states)
        layer.update(states, states)
    with torch.no_grad():
        layer.update(states, states)  # a tensor of inference mode cannot be written here
        layer.update(states, states)
    weight = torch.ones(1, requires_grad=True)
    total = torch.zeros(())
    for _ in range(3):
        keys, values = layer.update(states * weight, states)
        total = total + (keys * values).sum() * weight.sum()
    total.backward()
    assert weight.grad is not None
    assert layer.keys.shape[-2] == 70


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_given_it(converted: Convert, family: str) -> None:
    """In generate and in plain calls, with a cache or without one, and with one that is not empty."""
    model = load(converted(family))
    ids, mask = batch(rows=2, length=20)
    made = model(ids, attention_mask=mask, use_cache=True).past_key_values
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True)
    given = [DynamicCache(), DynamicCache(config=model.config), pickle.loads(pickle.dumps(made))]
    longer = torch.cat([mask, mask[:, -1:]], dim=1)
    expected = model(ids[:, :1], attention_mask=longer, past_key_values=made).logits
    for cache in given[:2]:
        model(ids, attention_mask=mask, past_key_values=cache)
    for cache in given:
        assert_logits(model(ids[:, :1], attention_mask=longer, past_key_values=cache).logits, expected)
    for cache in (made, generated.past_key_values, *given):
        assert [type(layer).__name__ for layer in cache.layers] == ["GrowingLayer"] * 2


def test_a_saved_cache_needs_no_code_of_the_repository(converted: Convert, tmp_path: Path) -> None:
    model = load(converted("bloom"))
    ids, _ = batch(rows=1, length=20)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    torch.save(cache, tmp_path / "cache.pt")
    with zipfile.ZipFile(tmp_path / "cache.pt") as archive:
        [stored] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        operations = [*pickletools.genops(archive.read(stored))]
    named = {argument for operation, argument, _ in operations if operation.name == "GLOBAL"}
    assert "transformers.cache_utils DynamicLayer" in named
    assert {name.split(".")[0].split()[0] for name in named} == {"transformers", "torch", "collections"}
    keys = torch.load(tmp_path / "cache.pt", weights_only=False).layers[0].keys
    assert keys.shape == (1, 4, 20, 16)
    assert keys.untyped_storage().nbytes() == keys.nbytes


class Rounded(QuantizedLayer):
    """A quantised layer as transformers has them, with 8 bits for each group of channels."""

    def __init__(self) -> None:
        super().__init__(residual_length=8)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, tensors: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return tensors[0] * tensors[1]


@torch.no_grad()
@pytest.mark.parametrize("family", ["bloom", "replit"])
def test_other_caches_are_left_alone(converted: Convert, family: str) -> None:
    model = load(converted(family, 12, "ntk-position"))
    ids, mask = batch(rows=2, length=50)
    offloaded = DynamicCache()
    offloaded.offloading, offloaded.only_non_sliding = True, True
    offloaded.prefetch = offloaded.offload = lambda *_: None
    for cache in (
        offloaded,
        StaticCache(config=model.config, max_cache_len=64),
        Cache(layers=[Rounded() for _ in range(2)]),
    ):
        grow(cache, 2)
        assert not any(isinstance(layer, GrowingLayer) for layer in cache.layers)
    # A quantised cache holds keys without the channels, which it would round.
    quantised = Cache(layers=[Rounded() for _ in range(2)])
    logits = [
        model(
            ids[:, start:end], attention_mask=mask[:, :end], past_key_values=quantised, use_cache=True
        ).logits
        for start, end in ((0, 40), *((token, token + 1) for token in range(40, 50)))
    ]
    assert quantised.layers[0]._quantized_keys[0].shape[-1] == model.config.head_dim - 8
    expected = model(ids, attention_mask=mask).logits
    error = (torch.cat(logits, dim=1) - expected)[mask.bool()].norm() / expected[mask.bool()].norm()
    assert error < 0.02
    with raises(ValueError, "quantised cache", "positions"):
        model(ids, position_ids=torch.arange(50)[None] % 25, past_key_values=Cache(layers=[Rounded()] * 2))
    model(
        ids, position_ids=torch.arange(50)[None], past_key_values=Cache(layers=[Rounded() for _ in range(2)])
    )
    with raises(ValueError, "quantised cache", "positions"):
        model(ids[:, :1], position_ids=torch.tensor([[7]]), past_key_values=Cache(layers=[Rounded()] * 2))
    seen, positions = torch.ones(1, 1, 50, 50).bool().tril(), torch.arange(50)[None]
    with raises(ValueError, "quantised cache"):
        model(ids, attention_mask=seen, position_ids=positions, past_key_values=Cache(layers=[Rounded()] * 2))
