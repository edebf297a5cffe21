"""``ntk-convert families``: what is listed is what the code takes."""

from __future__ import annotations

from converter import supported
from converter.families import FAMILIES
from converter.rotary.models import MODELS
from tests.conftest import Refused, RunCli


def test_everything_is_listed(run: RunCli) -> None:
    entries = run("families", "--json").json["families"]
    assert [entry["name"] for entry in entries[:-1]] == [
        *(family.name for family in FAMILIES if family.kind == "decoder"),
        *(family.name for family in FAMILIES if family.kind == "encoder"),
    ]
    assert entries[-1]["name"] == "rotary"
    for entry in entries[:-1]:
        [family] = [family for family in FAMILIES if family.name == entry["name"]]
        assert entry["train_lengths"] == dict(family.train_lengths)
        assert [tuple(group["ids"]) for group in entry["checkpoints"]] == [
            group.ids for group in family.checkpoints
        ]
        assert entry["examples"]
    assert all(f"`{name}`" in entries[-1]["recognised_by"] for name in MODELS)
    text = run("families").out
    table = run("families", "--markdown").out
    for family in FAMILIES:
        assert text.count(f"{family.title}  (alibi, {family.kind})") == 1
        assert table.count(f"| {family.title} |") == 1


def test_a_part_of_a_name(run: RunCli) -> None:
    [entry] = run("families", "JINA-reranker", "--json").json["families"]
    assert entry["name"] == "jina_bert"
    [group] = entry["checkpoints"]
    assert group["ids"] == ["jinaai/jina-reranker-v1-tiny-en", "jinaai/jina-reranker-v1-turbo-en"]
    assert entry["train_lengths"] == {}
    [storyteller] = supported("storywriter")
    assert storyteller.train_lengths == {"mosaicml/mpt-7b-storywriter": 65536}
    assert [entry.name for entry in supported("mpt")] == ["mpt", "mosaic_gpt"]
    assert [entry.name for entry in supported("llama")] == ["rotary"]
    assert "Refact-1.6B" in run("families", "refact", "--markdown").out


def test_no_such_name(refused: Refused) -> None:
    assert "'gpt2-xl'" in refused("families", "gpt2-xl", code=2)
