"""JinaBERT: recognition, layouts, refusals, and what a conversion writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converter import convert
from converter.errors import UnsupportedModel
from converter.families import jina_bert, refusals
from tests import tiny
from tests.tiny import jina_bert as described

QK = described.code(described.QK_CODE)


def source(**changes: Any) -> dict[str, Any]:
    return {**described.config(12), "architectures": ["JinaBertForMaskedLM"], **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        QK,
        {"architectures": ["JinaBertModel"], "auto_map": None},
        {"architectures": None},
        {
            "architectures": ["JinaBertModel"],
            "auto_map": {"AutoModel": "aari1995/German_Semantic_V3b--modeling_bert.JinaBertModel"},
        },
    ],
)
def test_recognised_by_the_code_s_classes(changes: dict[str, Any]) -> None:
    assert refusals.check_source(source(**changes)) is jina_bert.FAMILY


def test_a_bert_is_not_taken() -> None:
    with pytest.raises(UnsupportedModel, match="learned positions"):
        refusals.check_source(source(architectures=["BertModel"], auto_map=None))
    with pytest.raises(UnsupportedModel, match="learned positions"):
        refusals.check_source(
            source(architectures=["XModel"], auto_map={"AutoModel": "someone/code--modeling.XModel"})
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ({"feed_forward_type": "swiglu"}, "feed_forward_type is 'swiglu'"),
        ({"emb_pooler": "cls"}, "emb_pooler is 'cls'"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"architectures": ["JinaBertForPreTraining"]}, "JinaBertForPreTraining"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        refusals.check_source(source(**changes))


@pytest.mark.parametrize(
    ("changes", "layout", "kind"),
    [
        ({}, False, "geglu"),
        ({"feed_forward_type": None}, False, "original"),
        (QK, True, "geglu"),
        ({**QK, "feed_forward_type": None}, True, "geglu"),
        ({"_name_or_path": described.QK_CODE, "auto_map": None}, True, "geglu"),
        ({"qk_post_norm": True}, True, "geglu"),
    ],
)
def test_the_layout_is_told_by_where_the_code_is(changes: dict[str, Any], layout: bool, kind: str) -> None:
    config = jina_bert.normalise(source(**changes))
    assert (config["qk_post_norm"], config["feed_forward_type"]) == (layout, kind)


def test_the_stored_names_decide(tmp_path: Path) -> None:
    """An embedding model without a prediction head, whose config names another copy of the code."""
    folder = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4, head="Model", **QK)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["JinaBertForMaskedLM"], **described.code("someone/copy")}
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "out", method="none")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["NtkJinaBertModel"]
    assert (config["qk_post_norm"], config["add_pooling_layer"]) == (True, True)


def test_what_names_tell() -> None:
    config = {"architectures": ["NtkJinaBertForMaskedLM"]}
    stored = ["bert.encoder.layer.0.attention.self.layer_norm_q.weight", "cls.predictions.bias"]
    found = jina_bert.fit(config, dict.fromkeys(stored))
    assert found == {"add_pooling_layer": False, "qk_post_norm": True}
    changes = jina_bert.fit(config, {"pooler.dense.weight": None})
    assert changes == {
        "add_pooling_layer": True,
        "architectures": ["NtkJinaBertModel"],
        "qk_post_norm": False,
    }


def test_the_length_limit_is_raised(tmp_path: Path) -> None:
    tiny.ENCODERS["jina_bert"](tmp_path / "source", 4, max_position_embeddings=512)
    convert(tmp_path / "source", tmp_path / "out", target_length=8192, train_length=512, verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert config["alibi_scaling"] == {"type": "ntk", "factor": 16.0}
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_ntk_jina_bert.NtkJinaBertForMaskedLM"
    # Old configs have the default value.
    assert config["emb_pooler"] == "mean"


def test_known_lengths() -> None:
    assert set(jina_bert.FAMILY.train_lengths.values()) == {512}
