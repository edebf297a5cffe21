"""MosaicBERT and DNABERT-2: recognition, refusals, and what a conversion writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from converter import convert
from converter.errors import UnsupportedModel
from tests import tiny
from tests.patched import assert_logits, batch
from tests.reference import ENCODERS as REFERENCES

DNABERT_2 = ("model_type", "architectures", "pad_token_id")
"""Keys that the config of zhihan1996/DNABERT-2-117M lacks."""


def test_rotary_tensors_under_an_unchanged_config_are_refused(tmp_path: Path) -> None:
    """Rewritten DNABERT-2 code stores such tensors (guyiyangyoung/LLM-DNABERT2: ``encoder.rope.sin``)."""
    tiny.ENCODERS["mosaic_bert"](tmp_path / "source", 4, fmt="bin")
    file = tmp_path / "source" / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    torch.save({**state, "bert.encoder.rope.sin": torch.zeros(4, 4)}, file)
    with pytest.raises(UnsupportedModel, match="rope"):
        convert(tmp_path / "source", tmp_path / "out", method="none", verify=False)


@torch.no_grad()
def test_dnabert_2_s_config_is_completed(tmp_path: Path) -> None:
    tiny.ENCODERS["mosaic_bert"](tmp_path / "source", 12)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in DNABERT_2}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "source", tmp_path / "out", scale=4, train_length=512, verify=False)
    config, tensors = tiny.read(tmp_path / "out")
    assert config["architectures"] == ["NtkMosaicBertForMaskedLM"]
    assert config["max_position_embeddings"] == 2048
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert model.config.pad_token_id == 0
    ids, mask = batch()
    expected = REFERENCES["mosaic_bert"].logits(config, tensors, ids.numpy(), mask.numpy())
    assert_logits(model(ids, attention_mask=mask).logits, expected, mask)
