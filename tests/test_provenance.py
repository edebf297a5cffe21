"""A damaged ``ntk_convert`` entry in config.json is one clear line in every command that reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converter import OnnxOptions, convert, export
from tests.conftest import edit_json

COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "DIR"),
    "export": ("export", "DIR"),
    "validate": ("validate", "DIR"),
    "push": ("push", "DIR", "ada/bloom-ntk"),
    "eval": ("eval", "DIR", "--tasks", "passkey", "--lengths", "64"),
    "plot": ("plot", "DIR", "--out", "pictures"),
    "convert": ("DIR", "--scale", "2", "--out", "again"),
}
ENTRIES: dict[str, tuple[Any, str]] = {
    "a word": ({"train_length": "abc"}, "ntk_convert has train_length 'abc', not a number of tokens"),
    "a boolean": ({"train_length": True}, "ntk_convert has train_length True, not a number of tokens"),
    "negative": ({"train_length": -5}, "ntk_convert has train_length -5, not a number of tokens"),
    "a fraction": ({"train_length": 4.5}, "ntk_convert has train_length 4.5, not a number of tokens"),
    "source": ({"source": 3}, "ntk_convert has source 3, not a string"),
    "a list": ([32], "ntk_convert is [32], not an object"),
}


@pytest.fixture(scope="module")
def exported(pristine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository with a graph; do not change it."""
    place = tmp_path_factory.mktemp("provenance") / "out"
    convert(pristine("bloom"), place, scale=2, train_length=32, verify=False)
    return export(place, OnnxOptions(validate=False)).path


@pytest.mark.parametrize(
    ("command", "kind"),
    [*((command, "a word") for command in COMMANDS), *(("plot", kind) for kind in ENTRIES)],
)
def test_a_damaged_entry(
    exported: Path,
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    kind: str,
) -> None:
    entry, part = ENTRIES[kind]
    folder = Path(shutil.copytree(exported, tmp_path / "out"))
    if isinstance(entry, dict):
        entry = json.loads((folder / "config.json").read_text())["ntk_convert"] | entry
    edit_json(folder / "config.json", {"ntk_convert": entry})
    monkeypatch.chdir(tmp_path)
    line = refused(*(folder if word == "DIR" else word for word in COMMANDS[command]))
    assert line == f"error: config.json: {part}; convert the original checkpoint again\n"
