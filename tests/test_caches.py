"""The same tokens give the same logits, whatever the cache and however they are cut."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from converter.families import recognise
from tests.dealt import dealt
from tests.patched import FAMILIES, Convert, assert_logits, batch, config_of, load

# Scalings under which a token's logits do not depend on what comes later.
CAUSAL = ("none", "ntk", "linear", "ntk-position", "linear-position")
# Tokens at a time: decoding, a few, and chunks.
STEPS = (1, 7, 25)


def in_steps(model, ids, mask, step, cache):
    """Logits of the whole batch, computed ``step`` tokens at a time."""
    logits = []
    for start in range(0, ids.shape[1], step):
        piece = ids[:, start : start + step]
        seen = None if mask is None else mask[:, : start + step]
        logits.append(model(piece, attention_mask=seen, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "scaling", "step", "kind"),
    [
        *dealt(FAMILIES, CAUSAL, STEPS, ["dynamic", "static"]),
        ("bloom", "fitted-position", 7, "dynamic"),
        ("mpt", "fitted", 7, "static"),
    ],
)
def test_steps_give_what_one_pass_gives(
    converted: Convert, family: str, scaling: str, step: int, kind: str
) -> None:
    model = load(converted(family, 12, scaling))
    for side in ("left", None):
        ids, mask = batch(rows=2, length=50, side=side or "left")
        if side is None:
            mask = None
        cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=64)
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        assert_logits(in_steps(model, ids, mask, step, cache), expected, mask)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_length_dynamic_decoding_uses_the_length_so_far(converted: Convert, family: str) -> None:
    """As published: each step is the last row of a pass over what is there at that step."""
    folder = converted(family, 12, "ntk-length")
    model = load(folder)
    layers = model.config.num_hidden_layers
    ids, mask = batch(rows=2, length=50)
    cache = DynamicCache()
    model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, use_cache=True)
    step = model(ids[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True)
    whole = model(ids, attention_mask=mask, use_cache=False)
    # The first layer's keys do not depend on the scaling, so a one-layer model agrees exactly.
    if layers > 1:
        name = recognise(config_of(folder)).layers
        setattr(model.base_model, name, getattr(model.base_model, name)[:1])
        cache = DynamicCache()
        model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, use_cache=True)
        step = model(ids[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True)
        whole = model(ids, attention_mask=mask, use_cache=False)
    assert_logits(step.logits, whole.logits[:, -1:])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_right_padded_prompts_continue(converted: Convert, family: str) -> None:
    """Padding that ends up between real tokens, in a cache, counts for nothing."""
    model = load(converted(family, 12, "ntk"))
    ids, mask = batch(rows=2, length=40, side="right")
    cache = DynamicCache()
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    for length in (1, 5, 20):
        more = ids[:, :length]
        whole = torch.cat([mask, torch.ones_like(more)], dim=1)
        copied = copy.deepcopy(cache)
        step = model(more, attention_mask=whole, past_key_values=copied, use_cache=True).logits
        for row in range(2):
            real = torch.cat([ids[row][mask[row].bool()], more[row]])[None]
            assert_logits(step[row : row + 1], model(real).logits[:, -length:])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_masks_and_caches_are_refused(converted: Convert, family: str) -> None:
    model = load(converted(family))
    ids, mask = batch(rows=2, length=40)
    cache = DynamicCache()
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="must cover the cached ones too"):
        model(ids[:, :1], attention_mask=mask[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask must be \[rows, tokens\]"):
        model(ids, attention_mask=torch.ones(2, 40, 40))
    with pytest.raises(ValueError, match="4-D attention_mask needs position_ids"):
        model(ids, attention_mask=torch.ones(2, 1, 40, 40))
    with pytest.raises(ValueError, match="must be a transformers Cache, got tuple"):
        model(ids[:, :1], past_key_values=((torch.zeros(1), torch.zeros(1)),))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(2, 40, model.config.hidden_size))
    with pytest.raises(TypeError, match="head_mask"):
        model(ids, head_mask=torch.ones(4))
