"""Runs with faults: the source stays as it is, out is complete or not there, the next run succeeds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.conftest import fingerprint
from tests.faults import FAULTS, KINDS, Trial, scattered

ROOT = Path(__file__).parent.parent
BIG = 8 << 30
"""Bytes of a tensor that takes seconds to copy; sparse, so that writing it takes none."""
PUBLISHING = 12
"""Events at the end of a run that put its folder in place."""
QUICK = ("copy", "overwrite", "resume")
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copy", "overwrite"])
def test_each_point_of_putting_the_folder_in_place(tmp_path: Path, kind: str) -> None:
    trial = Trial(kind, tmp_path)
    for at in scattered(len(trial.log), PUBLISHING):
        for fault in FAULTS[:6]:
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
            "staged = pipeline.staged\n"
            "pipeline.staged = lambda to, **how: (shutil.rmtree(to), staged(to, **how))[1]",
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


def start(source: Path, out: Path, *arguments: str) -> forks.Popen:
    words = [str(source), "--scale", "2", "--out", str(out), *arguments]
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup may have started the tests
    code += f"from converter.cli import main; main({words!r})"
    pipes = {"stdout": forks.PIPE, "stderr": forks.PIPE}
    return forks.Popen([sys.executable, "-c", code], text=True, cwd=ROOT, **pipes)


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_command_lines_at_once(pristine: Callable[..., Path], tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    both = [start(pristine("bloom"), out, "--no-verify", *["--overwrite"] * overwrite) for _ in range(2)]
    results = [(run.communicate(), run.returncode) for run in both]
    succeeded = [code for _, code in results if code == 0]
    assert len(succeeded) == 2 if overwrite else len(succeeded) >= 1, results
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").exists()


def test_a_folder_that_cannot_be_written(
    pristine: Callable[..., Path],
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    line = refused(pristine("bloom"), "--scale", "2", "--out", tmp_path / "out")
    assert f"no permission to write in {tmp_path}" in line


# In the middle of copying, where nothing can be counted


@pytest.fixture(scope="module")
def big_source(pristine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BLOOM whose vocabulary is a sparse file of ``BIG`` bytes."""
    folder = tmp_path_factory.mktemp("big")
    shutil.copytree(pristine("bloom"), folder, dirs_exist_ok=True)
    header: dict[str, Any] = {"big": {"dtype": "U8", "shape": [BIG], "data_offsets": [0, BIG]}}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + BIG)
    return folder


@pytest.mark.parametrize(
    ("sent", "overwrite"),
    [
        *((signal.SIGKILL, overwrite) for overwrite in (False, True)),
        *((signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, False)),
    ],
)
def test_stopped_while_copying(
    big_source: Path, tmp_path: Path, sent: signal.Signals, overwrite: bool
) -> None:
    out, weights = tmp_path / "out", big_source / "model.safetensors"
    if overwrite:
        out.mkdir()
        (out / "vocab.txt").write_text("old")
        (out / "config.json").write_text("{}")
    before = fingerprint(out), weights.stat().st_size, weights.stat().st_mtime_ns
    process = start(big_source, out, "--no-verify", *["--overwrite"] * overwrite)
    while not (found := list(tmp_path.glob(".out.ntk-convert-*/.model.safetensors.part"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(sent)
    _, err = process.communicate()
    assert process.returncode == (-sent if sent == signal.SIGKILL else 1)
    assert out.exists() == overwrite
    assert (fingerprint(out), weights.stat().st_size, weights.stat().st_mtime_ns) == before
    left = list(tmp_path.glob(".out.ntk-convert-*"))
    if sent == signal.SIGKILL:
        assert left == [found[0].parent]
    else:
        assert err.strip() == "error: interrupted; nothing was written"
        assert left == []
