"""``ntk-convert families``: what is listed is what the code takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from converter import supported
from converter.families import FAMILIES
from converter.rotary.models import MODELS
from tests import tiny
from tests.conftest import Run


def test_everything_is_listed(run: Callable[..., Run]) -> None:
    entries = run("families", "--json").json
    assert [entry["name"] for entry in entries[:-1]] == [
        *(family.name for family in FAMILIES if family.kind == "decoder"),
        *(family.name for family in FAMILIES if family.kind == "encoder"),
    ]
    assert entries[-1]["name"] == "rotary"
    for entry in entries[:-1]:
        [family] = [family for family in FAMILIES if family.name == entry["name"]]
        assert entry["train_lengths"] == dict(family.train_lengths)
        assert entry["examples"]
    assert all(f"`{name}`" in entries[-1]["recognised_by"] for name in MODELS)
    text = run("families").out
    table = run("families", "--markdown").out
    for family in FAMILIES:
        assert text.count(f"{family.title}  (alibi, {family.kind})") == 1
        assert table.count(f"| {family.title} |") == 1
        for name in family.train_lengths:
            assert name in text


def test_every_family_has_tiny_checkpoints_that_are_tested() -> None:
    from converter.families import recognise

    made = {**tiny.FACTORIES, **tiny.ENCODERS}
    names = {"replit": "mpt"}
    assert {names.get(name, name) for name in made} == {family.name for family in FAMILIES}
    assert recognise({"model_type": "ntk_mpt"}).name == "mpt"


@pytest.mark.parametrize("words", [["families"], ["families", "--json"]])
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    script = (
        "import sys\nfrom converter.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'onnx', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", script, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_as_a_library() -> None:
    entries = supported()
    assert {entry.kind for entry in entries} == {"decoder", "encoder"}
    assert [entry.name for entry in entries if not entry.onnx] == ["rotary"]
