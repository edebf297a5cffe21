"""Gradients through the fused paths, dropout, checkpointing, adapters."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from templates.ntk_alibi import Alibi, stock_slopes
from templates.ntk_attention import AlibiAttention
from templates.ntk_plan import plan_attention
from tests import tiny
from tests.patched import FAMILIES, Convert, assert_logits, batch, load
from tests.runners import BERT_LAYERS, LAYERS, auto_class

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {name: (name, {}) for name in FAMILIES} | {
    layer: (name, {**changes, **NO_DROPOUT}) for layer, (name, changes) in LAYERS.items()
}
"""Decoders, and every layer of encoders: name -> the tiny checkpoint, and changes of its config."""
DROPOUT = [
    *((name, dropout) for name in FAMILIES if (dropout := tiny.CHECKPOINTS[name].dropout)),
    *((layer, {key: 0.5}) for layer in BERT_LAYERS for key in NO_DROPOUT),
]


@pytest.fixture
def model(converted: Convert):
    """``model(name, heads, scaling)``: what loads one of ``MODELS``."""

    def make(name, heads, scaling):
        name, changes = MODELS[name]
        return partial(load, converted(name, heads, scaling, **changes), auto_class(name))

    return make


def queries(name):
    return tiny.CHECKPOINTS[MODELS[name][0]].queries


def gradients(model, ids, mask):
    model.zero_grad()
    # A row's first token is predicted at a padded position, where the output means nothing.
    first = mask.cumsum(-1) == 1
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill((mask == 0) | first, -100)).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(first, second):
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        scale = max(1.0, gradient.abs().max().item())
        assert (gradient - second[name]).abs().max().item() <= 1e-4 * scale, name


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        *((name, "ntk-position") for name in MODELS),
        *((layer, "ntk") for layer in LAYERS),
        ("falcon", "concave"),
    ],
)
def test_gradients_are_those_of_plain_attention(model, monkeypatch, name: str, scaling: str) -> None:
    make = model(name, 12, scaling)
    ids, mask = batch(rows=2, length=40)
    fused = make().train()
    if name in LAYERS:  # factors that differ between queries are computed in blocks
        module = sys.modules[type(fused).__module__.rpartition(".")[0] + ".ntk_symmetric_sdpa"]
        monkeypatch.setattr(module, "CPU_BLOCK", 16)
    loss, found = gradients(fused, ids, mask)
    plain_loss, plain = gradients(make(attn_implementation="eager").train(), ids, mask)
    assert loss == pytest.approx(plain_loss, abs=1e-4)
    assert_same_gradients(found, plain)


@pytest.mark.parametrize(
    ("name", "scaling", "reentrant"),
    [
        *((name, "ntk", number % 2 == 0) for number, name in enumerate(FAMILIES)),
        *((layer, "ntk-position", number % 2 == 0) for number, layer in enumerate(LAYERS)),
        ("bloom", "fitted-position", False),
        ("bloom", "concave", True),
    ],
)
def test_gradient_checkpointing(model, name: str, scaling: str, reentrant: bool) -> None:
    model = model(name, 4, scaling)().train()
    ids, mask = batch(rows=2, length=40)
    loss, expected = gradients(model, ids, mask)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    runs = []
    module = next(module for path, module in model.named_modules() if path.endswith(queries(name)[0]))
    module.register_forward_pre_hook(lambda *_: runs.append(1))
    again, checkpointed = gradients(model, ids, mask)
    assert len(runs) == 2, "the first layer was not run again in the backward pass"
    assert again == pytest.approx(loss, abs=1e-6)
    assert_same_gradients(checkpointed, expected)


@pytest.mark.parametrize(("name", "dropout"), DROPOUT)
def test_dropout_acts_in_training_only(model, name: str, dropout: dict) -> None:
    model = model(name, 4, "ntk")(**dropout)
    ids, mask = batch(rows=2, length=40)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
        model.train()
        first, second = (model(ids, attention_mask=mask).logits for _ in range(2))
        assert not torch.allclose(first, second, atol=1e-2)


def test_attention_dropout_keeps_the_mean() -> None:
    """Dropping weights with probability 1/2 and doubling the others changes no average."""
    config = SimpleNamespace(_attn_implementation="sdpa")
    attention = AlibiAttention(config, 4, 0.5, 0.5, 0).train()
    torch.manual_seed(0)
    states = [torch.randn(1, 4, 24, 4).expand(4000, -1, -1, -1) for _ in range(3)]
    plan = plan_attention(config, Alibi(stock_slopes(4)), 0.5, torch.zeros(4000, 24, 1))
    dropped, expected = attention.attend(*states, plan)[0], attention.eval().attend(*states, plan)[0]
    assert (dropped.mean(0) - expected[0]).abs().max() < 0.1


@pytest.mark.parametrize(
    ("name", "scaling"), [*((name, "ntk") for name in (*FAMILIES, *tiny.ENCODERS)), ("mpt", "concave")]
)
def test_lora_adapter(model, tmp_path: Path, name: str, scaling: str) -> None:
    make, decoder = model(name, 4, scaling), name in FAMILIES
    ids, mask = batch(rows=2, length=40)
    task = "CAUSAL_LM" if decoder else None
    model = get_peft_model(make(), LoraConfig(task_type=task, target_modules=[*queries(name)], r=4))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        reloaded = PeftModel.from_pretrained(make(), tmp_path / "adapter").eval()
        assert_logits(reloaded(input_ids=ids, attention_mask=mask).logits, expected, mask)
        if decoder:
            assert reloaded.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3).shape == (2, 43)
        merged = reloaded.merge_and_unload()
        assert_logits(merged(input_ids=ids, attention_mask=mask).logits, expected, mask)
