"""MosaicBERT and DNABERT-2: recognition, refusals, and what a conversion writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from converter import convert
from converter.errors import SourceError, UnsupportedModel
from converter.families import mosaic_bert, refusals
from tests import tiny
from tests.patched import assert_logits, batch
from tests.reference import ENCODERS as REFERENCES
from tests.tiny import mosaic_bert as described

DNABERT_2 = ("model_type", "architectures", "pad_token_id")
"""Keys that the config of zhihan1996/DNABERT-2-117M lacks."""


def source(**changes: Any) -> dict[str, Any]:
    return {**described.config(12), "architectures": ["BertForMaskedLM"], **changes}


def dnabert_2() -> dict[str, Any]:
    config = source(
        auto_map={
            "AutoConfig": "configuration_bert.BertConfig",
            "AutoModel": "bert_layers.BertModel",
            "AutoModelForMaskedLM": "bert_layers.BertForMaskedLM",
            "AutoModelForSequenceClassification": "bert_layers.BertForSequenceClassification",
        }
    )
    return {key: value for key, value in config.items() if key not in DNABERT_2}


def test_recognised() -> None:
    assert refusals.check_source(source()) is mosaic_bert.FAMILY
    assert refusals.check_source(dnabert_2()) is mosaic_bert.FAMILY
    elsewhere = {"AutoModelForMaskedLM": "mosaicml/mosaic-bert-base--bert_layers.BertForMaskedLM"}
    assert refusals.check_source(source(auto_map=elsewhere)) is mosaic_bert.FAMILY
    assert refusals.check_source(source(auto_map=None)) is mosaic_bert.FAMILY


def test_other_models_are_not_taken() -> None:
    plain = {key: value for key, value in source().items() if key != "alibi_starting_size"}
    with pytest.raises(UnsupportedModel, match="learned positions"):
        refusals.check_source(plain)
    with pytest.raises(SourceError, match="model_type"):
        refusals.check_source({key: value for key, value in plain.items() if key != "model_type"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_map": {"AutoModel": "rotary_layers.BertModel"}}, "not MosaicBERT's own code"),
        ({"auto_map": {"AutoModel": "bert_layers.RotaryBertModel"}}, "not MosaicBERT's own code"),
        ({"rotary_emb_fraction": 1.0}, "rotary_emb_fraction is 1.0"),
        ({"use_rope": True}, "use_rope is True"),
        ({"rope_theta": 10000.0}, "rope_theta"),
        ({"attention_layer": "rope"}, "attention_layer is 'rope'"),
        ({"position_embedding_type": "rotary"}, "position_embedding_type is 'rotary'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"architectures": ["FlexBertForMaskedLM"]}, "FlexBertForMaskedLM"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        refusals.check_source(source(**changes))


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
    config = {**json.loads((tmp_path / "source" / "config.json").read_text()), **dnabert_2()}
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


def test_known_lengths() -> None:
    lengths = mosaic_bert.FAMILY.train_lengths
    assert lengths["mosaicml/mosaic-bert-base"] == 128
    assert lengths["mosaicml/mosaic-bert-base-seqlen-2048"] == 2048
    assert lengths["zhihan1996/DNABERT-2-117M"] == 128
    assert "buetnlpbio/birna-bert" not in lengths
