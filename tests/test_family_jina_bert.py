"""JinaBERT: recognition, layouts, refusals, and what a conversion writes."""

from __future__ import annotations

import json
from pathlib import Path

from converter import convert
from converter.families import jina_bert
from tests import tiny
from tests.tiny import jina_bert as described

QK = described.code(described.QK_CODE)


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
