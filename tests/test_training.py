"""Gradients through the folded path, dropout, checkpointing, adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from templates.ntk_alibi import Alibi, stock_slopes
from templates.ntk_attention import AlibiAttention
from templates.ntk_plan import plan_attention
from tests import tiny
from tests.patched import FAMILIES, Convert, assert_logits, batch, load

DROPOUT = {name: tiny.CHECKPOINTS[name].dropout for name in FAMILIES if tiny.CHECKPOINTS[name].dropout}
QUERIES = {name: tiny.CHECKPOINTS[name].queries for name in FAMILIES}


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


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_plain_attention(converted: Convert, family: str) -> None:
    folder = converted(family, 12, "ntk-position")
    ids, mask = batch(rows=2, length=40)
    loss, fused = gradients(load(folder).train(), ids, mask)
    plain_loss, plain = gradients(load(folder, attn_implementation="eager").train(), ids, mask)
    assert loss == pytest.approx(plain_loss, abs=1e-4)
    assert_same_gradients(fused, plain)


@pytest.mark.parametrize(
    ("family", "scaling", "reentrant"),
    [
        *((family, "ntk", reentrant) for family in FAMILIES for reentrant in (True, False)),
        ("bloom", "fitted-position", True),
    ],
)
def test_gradient_checkpointing(converted: Convert, family: str, scaling: str, reentrant: bool) -> None:
    model = load(converted(family, 4, scaling)).train()
    ids, mask = batch(rows=2, length=40)
    loss, expected = gradients(model, ids, mask)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    runs = []
    module = next(module for name, module in model.named_modules() if name.endswith(QUERIES[family][0]))
    module.register_forward_pre_hook(lambda *_: runs.append(1))
    again, checkpointed = gradients(model, ids, mask)
    assert len(runs) == 2, "the first layer was not run again in the backward pass"
    assert again == pytest.approx(loss, abs=1e-6)
    assert_same_gradients(checkpointed, expected)


@pytest.mark.parametrize("family", DROPOUT)
def test_dropout_acts_in_training_only(converted: Convert, family: str) -> None:
    model = load(converted(family, 4, "ntk"), **DROPOUT[family])
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
    query, key, value = (torch.randn(1, 4, 24, 4) for _ in range(3))
    plan = plan_attention(config, Alibi(stock_slopes(4)), 0.5, torch.zeros(1, 24, 1))
    mean = sum(attention.attend(query, key, value, plan)[0] for _ in range(4000)) / 4000
    expected = attention.eval().attend(query, key, value, plan)[0]
    assert (mean - expected).abs().max() < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_adapter(converted: Convert, tmp_path: Path, family: str) -> None:
    folder = converted(family, 4, "ntk")
    ids, mask = batch(rows=2, length=40)
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=[*QUERIES[family]], r=4)
    model = get_peft_model(load(folder), settings)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        reloaded = PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
        assert_logits(reloaded(ids, attention_mask=mask).logits, expected, mask)
        assert reloaded.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3).shape == (2, 43)
        assert_logits(reloaded.merge_and_unload()(ids, attention_mask=mask).logits, expected, mask)


def test_the_trainer_runs(converted: Convert, tmp_path: Path) -> None:
    model = load(converted("bloom", 4, "ntk"))
    ids, mask = batch(rows=2, length=40)
    rows = [{"input_ids": i, "attention_mask": m, "labels": i} for i, m in zip(ids, mask, strict=True)]
    arguments = TrainingArguments(
        tmp_path / "run",
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
