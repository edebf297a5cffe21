"""Runs with faults: the source stays as it is, out is complete or not there, the next run succeeds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pristine, Refused
from tests.faults import FAULTS, KINDS, Trial, contents, scattered
from tests.messages import says

PUBLISHING = 12
"""Events at the end of a run that put its folder in place."""
QUICK = ("copy", "overwrite")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
]


def slowly(kind: str) -> Any:
    return kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", [slowly(kind) for kind in KINDS if kind != "a graph"])
def test_all_or_nothing(tmp_path: Path, kind: str) -> None:
    """At some write, rename or flush it fails or is killed, or the source changes."""
    trial = Trial(kind, tmp_path)
    points = scattered(len(trial.log))
    for index, fault in enumerate(FAULTS):
        trial.survives(fault, points[index])
    assert trial.failures == []
    assert trial.tried == len(FAULTS)


TWO_RENAMES = "staging._exchange = lambda *folders: False"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "planted"), [("copy", ""), ("overwrite", ""), ("overwrite", TWO_RENAMES)], ids=str
)
def test_each_point_of_putting_the_folder_in_place(tmp_path: Path, kind: str, planted: str) -> None:
    """Out is there at any point, unless the system cannot exchange folders."""
    trial = Trial(kind, tmp_path, planted=planted)
    for at in scattered(len(trial.log), PUBLISHING):
        for fault in FAULTS[:7]:
            trial.survives(fault, at)
    assert trial.failures == []


@pytest.mark.parametrize(
    ("kind", "code", "found"),
    [
        (
            "copy",
            "move = Path.rename\n"
            "def rename(self, to):\n"
            "    if not self.is_dir():\n"
            "        return move(self, to)\n"
            "    shutil.copytree(self, to)\n"
            "    shutil.rmtree(self)\n"
            "Path.rename = rename",
            "out is neither as before nor complete",
        ),
        (
            "overwrite",
            "staged = conversion.staged\n"
            "conversion.staged = lambda to, **how: (shutil.rmtree(to), staged(to, **how))[1]",
            "out is neither as before nor complete",
        ),
        (
            "copy",
            "do = plan.transfer\n"
            "plan.transfer = lambda read, source, *rest, **how: (os.utime(source / 'config.json'), "
            "do(read, source, *rest, **how))[1]",
            "the source was changed",
        ),
        ("copy", "staging.remove_leftovers = lambda place, **how: None", "the next run ended with"),
    ],
    ids=[
        "publishes file by file",
        "removes the old folder first",
        "touches the source",
        "leaves its folders",
    ],
)
def test_a_defect_is_found(tmp_path: Path, kind: str, code: str, found: str) -> None:
    trial = Trial(kind, tmp_path, planted=code)
    for at in (len(trial.log) - 3, len(trial.log) // 2, len(trial.log) - 1):
        trial.survives("SIGKILL", at)
    assert any(found in failure for failure in trial.failures), trial.failures


@pytest.mark.parametrize("kind", ["copy", "overwrite"])
def test_two_command_lines_at_once(tmp_path: Path, kind: str) -> None:
    trial = Trial(kind, tmp_path)
    trial.reset()
    both = [trial.start() for _ in range(2)]
    results = [(run.communicate(), run.returncode) for run in both]
    succeeded = [code for _, code in results if code == 0]
    assert len(succeeded) == 2 if kind == "overwrite" else len(succeeded) >= 1, results
    assert trial.leftovers() == []
    assert contents(trial.out) == trial.complete


def test_a_folder_that_cannot_be_written(
    pristine: Pristine, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    line = refused(pristine("bloom"), "--scale", "2", "--out", tmp_path / "out")
    says(line, "permission", str(tmp_path))
