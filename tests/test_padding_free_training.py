"""Rows of several documents, whose positions start again, give what a padded batch gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from tests import flash_stand_in, tiny
from tests.dealt import dealt
from tests.messages import raises
from tests.patched import FAMILIES, Convert, assert_logits, load
from tests.test_forward_keywords import Warnings, warnings
from tests.test_training import assert_same_gradients

__all__ = ["warnings"]

LENGTHS = (9, 40, 1, 26)
SCALINGS = ("ntk-position", "ntk-length", "concave")
FUNCTIONS = ("sdpa", "eager", "flash_attention_2")


def documents() -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(tiny.token_ids(4, 40), LENGTHS, strict=True)]


def padded() -> dict[str, torch.Tensor]:
    """The documents as rows, padded on the right. Nothing predicts a first token, so it has no label."""
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents()):
        ids[row, : len(document)], mask[row, : len(document)] = torch.tensor(document), 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(**options: bool) -> dict[str, Any]:
    """The documents in one row, as transformers' collator writes them."""
    return DataCollatorWithFlattening(**options)([{"input_ids": document} for document in documents()])


def loss_and_gradients(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("family", "scaling", "attention"), dealt(FAMILIES, SCALINGS, FUNCTIONS))
def test_padding_free_training(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, family: str, scaling: str, attention: str
) -> None:
    model = load(converted(family, 12, scaling))
    expected, gradients = loss_and_gradients(model, padded())
    if attention.startswith("flash"):
        flash_stand_in.install(monkeypatch, attention)
    model.config._attn_implementation = attention
    for options in ({}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}):
        output, found = loss_and_gradients(model, packed(**options))
        assert output.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
        rows = expected.logits[padded()["attention_mask"].bool()]
        assert_logits(output.logits, rows[None].detach())
        assert_same_gradients(found, gradients)


def test_the_trainer(converted: Convert, tmp_path: Path, warnings: Warnings) -> None:
    """Padding-free training takes the steps of padded training, and warns of nothing."""
    folder = converted("bloom", 12, "ntk-position")
    arguments = TrainingArguments(
        tmp_path / "run",
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )

    def losses(data: Any, **collator: Any) -> list[float]:
        trainer = Trainer(load(folder), arguments, train_dataset=data, **collator)
        warnings()
        trainer.train()
        assert warnings() == []
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    rows = [dict(zip(padded(), values, strict=True)) for values in zip(*padded().values(), strict=True)]
    data = [{"input_ids": document} for document in documents()]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    assert losses(data, data_collator=collator) == pytest.approx(losses(rows), abs=1e-4)


@torch.no_grad()
def test_documents_without_positions_are_refused(converted: Convert) -> None:
    """Without positions nothing would part them; where both are given, they must agree."""
    model = load(converted("bloom"))
    inputs = packed(return_flash_attn_kwargs=True, return_seq_idx=True)
    del inputs["labels"]
    for names in (("seq_idx",), ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")):
        with raises(ValueError, names[0], "position_ids"):
            model(inputs["input_ids"], **{name: inputs[name] for name in names})
    whole = torch.arange(inputs["input_ids"].shape[1])[None]
    with raises(ValueError, "cu_seq_lens_q and position_ids"):
        model(**inputs | {"position_ids": whole})
    with raises(ValueError, "cu_seq_lens_q and position_ids"):
        model(**inputs | {"cu_seq_lens_q": torch.tensor([0, 50, 76])})
    assert model(**inputs).past_key_values is None
