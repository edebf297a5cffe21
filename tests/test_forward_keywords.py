"""Keywords of ``forward``: a misspelt one is an error, and what transformers and peft pass is not."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

from tests import tiny
from tests.messages import raises
from tests.patched import Convert, batch, load
from tests.runners import HEADS, auto_class

Warnings = Callable[[], list[str]]

DECODERS = ("bloom", "replit")
MODELS = (*DECODERS, *tiny.ENCODERS)
LABELS: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "Model": lambda ids: {},
    "LanguageModel": lambda ids: {"labels": ids},
    "SequenceClassification": lambda ids: {"labels": ids[:, 0] % 2},
    "TokenClassification": lambda ids: {"labels": ids % 2},
    "QuestionAnswering": lambda ids: {"start_positions": ids[:, 0] * 0, "end_positions": ids[:, 0] * 0 + 1},
}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Warnings]:
    """``warnings()``: what the converted code has warned about since the last call."""
    transformers_logging.warning_once.cache_clear()
    caplog.set_level(logging.WARNING)

    def take() -> list[str]:
        own = [record for record in caplog.records if record.name.startswith("transformers_modules")]
        caplog.clear()
        return [record.getMessage() for record in own]

    yield take
    transformers_logging.warning_once.cache_clear()


def every_model(folder: Path, family: str) -> Iterator[tuple[str, Any]]:
    """The repository's trunk and heads; those that it has no weights for start at random."""
    for head in (None, *HEADS):
        model = auto_class(family, head).from_pretrained(folder, trust_remote_code=True)
        yield head or "LanguageModel", model.eval()


REFUSED = {"atention_mask": "attention_mask", "attention_masks": "attention_mask", "input_id": "input_ids"}
"""Keywords that are misspelt -> what they should be."""
NOT_SERVED = ("head_mask", "is_causal", "encoder_hidden_states", "sequence_id")
IGNORED = (
    "cache_position",
    "num_items_in_batch",
    "output_router_logits",
    "skip_logits",
    "tokenizer",
    "other",
)


@torch.no_grad()
@pytest.mark.parametrize("family", MODELS)
def test_keywords_that_would_change_the_result(converted: Convert, family: str) -> None:
    """Misspelt ones, and those of stock models that are not served here."""
    folder = converted(family, scaling="none")
    ids, mask = batch(rows=2, length=20, side="right")
    wrong = {name: f"'{right}'" for name, right in REFUSED.items()} | dict.fromkeys(NOT_SERVED, "")
    if family in tiny.ENCODERS:
        wrong["past_key_values"] = ""
    for head, model in every_model(folder, family):
        model.config.pad_token_id = tiny.PAD
        for name, hint in wrong.items():
            for labels in ({}, LABELS[head](ids)):
                with raises(TypeError, f"{type(model.base_model).__name__}.forward()", f"'{name}'", hint):
                    model(ids, attention_mask=mask, **{name: mask}, **labels)


@torch.no_grad()
@pytest.mark.parametrize("family", MODELS)
def test_other_keywords_change_nothing(converted: Convert, family: str, warnings: Warnings) -> None:
    folder = converted(family, scaling="none")
    ids, mask = batch(rows=2, length=20, side="right")
    positions = torch.arange(20)
    for head, model in every_model(folder, family):
        warnings()
        model.config.pad_token_id = tiny.PAD
        plain = model(ids, attention_mask=mask, **LABELS[head](ids))
        keywords = {
            **dict.fromkeys(IGNORED, torch.tensor(40)),
            **dict.fromkeys((*REFUSED, *NOT_SERVED)),
            "position_ids": positions[None],
            "token_type_ids": torch.zeros_like(ids),
        }
        if head == "LanguageModel":
            del keywords["num_items_in_batch"]  # the loss divides by it
        if head == "LanguageModel" and family in DECODERS:
            keywords |= {"ignore_index": -100, "shift_labels": None}
        output = model(ids, attention_mask=mask, **keywords, **LABELS[head](ids))
        assert all(
            torch.equal(output[name], plain[name]) for name in plain if torch.is_tensor(plain[name])
        ), head
        assert warnings() == [], head
        # The Trainer drops columns that forward does not name, among them the mask.
        columns = {"input_ids", "attention_mask", "inputs_embeds", *LABELS[head](ids)}
        if family in tiny.ENCODERS:
            columns.add("token_type_ids")
        assert columns <= inspect.signature(model.forward).parameters.keys(), head


@pytest.mark.parametrize("family", DECODERS)
def test_generate_warns_of_nothing(converted: Convert, family: str, warnings: Warnings) -> None:
    model = load(converted(family))
    ids, mask = batch(rows=2, length=20)
    warnings()
    for options in (
        {},
        {"num_beams": 2},
        {"do_sample": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True},
    ):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, **options)
        assert warnings() == [], options
    model.generate(ids[:1], max_new_tokens=4, assistant_model=model)
    model.generate(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, max_new_tokens=4)
    assert warnings() == []


def with_virtual_tokens(model: Any, kind: Any) -> Any:
    settings = {"num_layers": 2, "num_attention_heads": 4, "token_dim": model.config.hidden_size}
    return get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings))


def test_peft_passes_nothing_unknown(converted: Convert) -> None:
    """With tokens of its own before the prompt; LoRA is in test_training.py."""
    folder = converted("bloom")
    model = with_virtual_tokens(load(folder), PromptTuningConfig)
    ids, mask = batch(rows=2, length=20)
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    # PEFT 0.21 does not know transformers 5.24's name of the cache, and adds its tokens again at each step.
    made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, use_cache=False)
    assert made.shape == (2, 23)
    # The keys of a learned prefix have no channels for positions.
    model = with_virtual_tokens(load(folder), PrefixTuningConfig)
    with raises(ValueError, "Prefix tuning", "use LoRA"):
        model(input_ids=ids, attention_mask=mask, labels=ids)


@pytest.mark.parametrize("family", ["bloom", pytest.param("jina_bert", marks=pytest.mark.slow)])
def test_the_trainer_warns_of_nothing(
    converted: Convert, tmp_path: Path, family: str, warnings: Warnings
) -> None:
    """With every column of the data, and with the number of items that it passes for the loss."""
    folder = converted(family, scaling="none")
    ids, _ = batch(rows=4, length=20)
    arguments = TrainingArguments(
        tmp_path / "run",
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    for head, model in every_model(folder, family):
        if head == "Model":
            continue
        model.config.pad_token_id = tiny.PAD
        labels = LABELS[head](ids)
        rows = [
            {
                "input_ids": row,
                "attention_mask": torch.ones_like(row),
                "token_type_ids": torch.zeros_like(row),
            }
            | {name: label[index] for name, label in labels.items()}
            for index, row in enumerate(ids)
        ]
        warnings()
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.evaluate()
        assert warnings() == [], head
