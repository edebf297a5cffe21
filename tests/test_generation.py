"""``generate`` in its usual modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig, pipeline

from tests import tiny
from tests.dealt import dealt
from tests.patched import FAMILIES, Convert, batch, load

NEW = 10


def generate(model, ids, mask, **options):
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, **options)


@torch.no_grad()
def by_hand(model, ids, mask):
    """Greedy decoding without a cache; the end token is suppressed, as ``min_new_tokens`` does."""
    for _ in range(NEW):
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1].clone()
        logits[:, tiny.END] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


@pytest.mark.parametrize(("family", "scaling"), dealt(FAMILIES, ["ntk", "ntk-position", "concave"]))
def test_greedy_tokens_are_the_same_on_every_path(converted: Convert, family: str, scaling: str) -> None:
    model = load(converted(family, 12, scaling))
    ids, mask = batch(rows=2, length=40)
    expected = by_hand(model, ids, mask)
    assert torch.equal(generate(model, ids, mask), expected)
    assert torch.equal(generate(model, ids, mask, use_cache=False), expected)
    assert torch.equal(generate(model, ids, mask, cache_implementation="static"), expected)
    assert torch.equal(generate(model, ids, mask, past_key_values=DynamicCache()), expected)
    embeddings = model.get_input_embeddings()(ids)
    torch.manual_seed(0)
    new = model.generate(
        inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW
    )
    assert torch.equal(new[:, -NEW:], expected[:, -NEW:])
    # A row alone, without padding, continues as it does in the batch.
    row = ids[1][mask[1].bool()][None]
    assert torch.equal(generate(model, row, None)[0, -NEW:], expected[1, -NEW:])
    # After padding on the right, positions still count the real tokens.
    ids, mask = batch(rows=2, length=40, side="right")
    expected = by_hand(model, ids, mask)
    assert torch.equal(generate(model, ids, mask), expected)
    assert torch.equal(generate(model, ids, mask, use_cache=False), expected)


@pytest.mark.parametrize("family", ["bloom", "replit"])
def test_assisted_generation(converted: Convert, family: str) -> None:
    model = load(converted(family, 4, "ntk"))
    ids, _ = batch(rows=1, length=40)
    # Without a minimum of new tokens, which 4.57 does not combine with an assistant.
    expected = model.generate(ids, max_new_tokens=NEW)
    assistant = copy.deepcopy(model)
    with torch.no_grad():  # an assistant that is sometimes wrong
        assistant.lm_head.weight.add_(0.05 * torch.randn_like(assistant.lm_head.weight))
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, assistant_model=assistant), expected)
    # 4.57 sometimes looks up one token more than was asked for, with stock models too.
    looked_up = model.generate(ids, max_new_tokens=NEW, prompt_lookup_num_tokens=3)
    assert torch.equal(looked_up[:, : expected.shape[1]], expected)


OPTIONS: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 3, "do_sample": True},
    {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"do_sample": True, "typical_p": 0.9, "num_return_sequences": 3},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5]], "suppress_tokens": [6]},
    {"output_scores": True, "return_dict_in_generate": True, "output_attentions": True},
]


@pytest.mark.parametrize(
    ("family", "options"),
    dealt(FAMILIES, OPTIONS),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_options(converted: Convert, family: str, options: dict) -> None:
    """Every option gives what it gives without a cache, where no cache code can err."""
    model = load(converted(family, 4, "ntk"))
    ids, mask = batch(rows=2, length=40)
    cached = generate(model, ids, mask, **options)
    plain = generate(model, ids, mask, use_cache=False, **options)
    if "return_dict_in_generate" in options:
        assert len(cached.scores) == NEW
        assert cached.attentions[0][0].shape == (2, 4, 40, 40)
        assert cached.attentions[1][0].shape == (2, 4, 1, 41)
        cached, plain = cached.sequences, plain.sequences
    assert torch.equal(cached, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scaling"),
    dealt(FAMILIES, ("ntk", "ntk-position", "ntk-length", "fitted-position", "concave")),
)
def test_decoding_over_a_static_cache_is_one_graph(converted: Convert, family: str, scaling: str) -> None:
    """Without breaks, and with another prompt over as large a cache the same one."""
    model = load(converted(family, 4, scaling))
    ids, mask = batch(rows=2, length=40)
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    settings = CompileConfig(fullgraph=True, backend=keep, mode=None)
    settings._compile_all_devices = True  # generate compiles on accelerators only, unless told
    torch._dynamo.reset()
    for tokens in (NEW, NEW + 5):
        prompt = {"input_ids": ids[:, tokens - NEW :], "attention_mask": mask[:, tokens - NEW :]}
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        expected = model.generate(**prompt, **options)
        options |= {"cache_implementation": "static", "compile_config": settings}
        assert torch.equal(model.generate(**prompt, **options), expected)
    assert len(graphs) == 1


def test_text_pipeline(converted: Convert) -> None:
    folder = converted("bloom")
    generator = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    settings = GenerationConfig(max_new_tokens=5, do_sample=False)
    [answer] = generator("w10 w11 w12", generation_config=settings)
    assert answer["generated_text"].startswith("w10 w11 w12")
    assert len(answer["generated_text"].split()) > 3
