"""``eval`` with a Hub id: it downloads only what it needs, and records the commit in the results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub_commands import Command
from tests.hub_server import HubServer

ID = "org/tiny-bloom"


@pytest.mark.slow
def test_an_id_is_measured_as_its_folder(
    pristine: Callable[..., Path], tmp_path: Path, hub: HubServer, command: Command, work: Path
) -> None:
    source = tmp_path / "tiny-bloom"
    shutil.copytree(pristine("bloom"), source)
    (source / "modeling_own.py").write_text("raise SystemExit('run')")
    commit = hub.commit(ID, source)
    (work / "cases.jsonl").write_text(json.dumps({"prompt": "w5 w6 w7", "answer": "w8"}) + "\n")
    words = ("--tasks", "prompts", "--prompts", "cases.jsonl", "--lengths", "64", "--json")
    found = [command("eval", model, *words) for model in (ID, source)]
    assert [each.code for each in found] == [0, 0], found[0].err
    [(name, about)] = found[0].json["models"].items()
    assert (name, about["commit"]) == (ID, commit)
    assert "modeling_own.py" not in hub.downloads()
    by_id, by_folder = (each.json["measurements"][0]["scores"] for each in found)
    assert by_id == by_folder
