"""Configs of published checkpoints are taken, or refused for the right reason.

``published/FAMILY.json`` has those that could be seen whole or nearly so: the config key by key, where it was
seen, and which keys could not be seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converter import ConverterError, recipes
from converter.families import FAMILIES

FOLDER = Path(__file__).parent / "published"
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))
}
ENTRIES = [(family, entry) for family, entries in PUBLISHED.items() for entry in entries]

# What each refusal must say. Some of these models could be converted; that is not done yet.
REFUSED = {
    "quantised: ssbuild/baichuan2-13b-chat-int4": "is quantised",
    "quantised: unrahul/bloom-1b7-nf4": "is quantised",
    "cerebras/Cerebras-GPT-Intermediate (muP checkpoints)": "has no ALiBi",
    "jinaai/jina-embeddings-v2-base-en@first (JBert)": "first revision",
    "jinaai/jina-clip-v1": "a text encoder with ALiBi and an image encoder",
    "Maxscha/bert-test-base (third party)": "not MosaicBERT's own code",
    "krutrim-ai-labs/Krutrim-1-instruct": "does not say which activation",
    "wtang06/mpt-125m-c4 (no ALiBi)": "alibi is False",
    "insilicomedicine/precious3-gpt-multi-modal": "Custom_MPTForCausalLM",
    "liuhaotian/LLaVA-Lightning-MPT-7B-preview": "an MPT with a projector for images",
}
LENGTHS = {name: length for family in FAMILIES for name, length in family.train_lengths.items()}


def test_every_family_has_published_configs() -> None:
    assert {family.name for family in FAMILIES} == PUBLISHED.keys()
    ids = [entry["id"] for _, entry in ENTRIES]
    assert len(ids) == len(set(ids))
    assert REFUSED.keys() <= set(ids)


@pytest.mark.parametrize(("family", "entry"), ENTRIES, ids=[entry["id"] for _, entry in ENTRIES])
def test_a_published_config(family: str, entry: dict[str, Any]) -> None:
    if entry["id"] in REFUSED or "output_logits_scale" in entry["config"]:
        with pytest.raises(ConverterError, match=REFUSED.get(entry["id"], "output_logits_scale")):
            recipes.of_source(entry["config"])
        return
    recipe = recipes.of_source(entry["config"])
    assert recipe.name == family
    assert recipe.geometry.num_heads % recipe.geometry.num_kv_heads == 0
    assert all(slope > 0 for slope in recipe.stock({}))


@pytest.mark.parametrize(("family", "entry"), ENTRIES, ids=[entry["id"] for _, entry in ENTRIES])
def test_a_trained_length_that_a_source_states(family: str, entry: dict[str, Any]) -> None:
    """The converter's table agrees with it."""
    if entry["id"] in LENGTHS and entry["train_length"] is not None:
        assert LENGTHS[entry["id"]] == entry["train_length"], family
