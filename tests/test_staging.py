"""All or nothing, whatever ends a run: errors, signals, kills, and other runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converter.errors import OutputError
from converter.staging import remove_leftovers, staged
from tests.conftest import fingerprint

ROOT = Path(__file__).parent.parent
BIG = 1 << 30
"""Bytes of a tensor that takes a second to copy; sparse, so that writing it takes none."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    place = tmp_path / "out"
    with staged(place, overwrite=False) as folder:
        (folder / "a").write_text("new")
        assert folder.parent == place.parent
        assert not place.exists()
    assert names(tmp_path) == ["out"]
    assert (place / "a").read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_exception_leaves_everything_as_it_was(
    tmp_path: Path, error: type[BaseException], overwrite: bool
) -> None:
    place = tmp_path / "out"
    if overwrite:
        place.mkdir()
        (place / "a").write_text("old")
    before = fingerprint(tmp_path)
    with pytest.raises(error), staged(place, overwrite=overwrite) as folder:
        (folder / "a").write_text("new")
        raise error
    assert fingerprint(tmp_path) == before
    assert names(tmp_path) == ["out"] * overwrite


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with staged(tmp_path / "out", overwrite=False) as folder:
        (folder / "a").write_text("new")
    assert names(tmp_path / "out") == ["a"]


def test_overwrite_replaces_all_of_the_old_folder(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "old").write_text("old")
    with staged(place, overwrite=True) as folder:
        (folder / "new").write_text("new")
        assert names(place) == ["old"]
    assert names(place) == ["new"]
    assert names(tmp_path) == ["out"]


def test_a_place_that_was_filled_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "out"
    with pytest.raises(OutputError, match="--overwrite"), staged(place, overwrite=False):
        place.mkdir()
        (place / "a").write_text("theirs")
    assert names(tmp_path) == ["out"]
    assert (place / "a").read_text() == "theirs"


def test_the_old_folder_comes_back_if_the_new_one_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "a").write_text("old")
    rename, calls = Path.rename, []

    def failing(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == 3:  # staging (occupied), old aside, staging
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt), staged(place, overwrite=True) as folder:
        (folder / "a").write_text("new")
    assert names(tmp_path) == ["out"]
    assert (place / "a").read_text() == "old"


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_dead_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = [
        "other",
        ".out.ntk-convert",
        ".out2.ntk-convert-1-aa",
        ".outx.ntk-convert-1-aa",
        "out.ntk-convert-1-aa",
    ]
    for name in [
        *kept,
        f".out.ntk-convert-{dead_pid()}-0badcafe",
        f".out.ntk-convert-{os.getpid()}-0badcafe",
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("a")
    remove_leftovers(tmp_path / "out")
    assert names(tmp_path) == sorted(kept)


def test_names_with_wildcards(tmp_path: Path) -> None:
    for name in (".o*t.ntk-convert-1-aa", ".out.ntk-convert-1-aa"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path / "o*t")
    assert names(tmp_path) == [".out.ntk-convert-1-aa"]


def test_a_folder_moved_aside_by_a_killed_run_comes_back(tmp_path: Path) -> None:
    aside = tmp_path / ".out.ntk-convert-1-aa.old"
    aside.mkdir()
    (aside / "a").write_text("old")
    remove_leftovers(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    aside.mkdir()
    remove_leftovers(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_a_living_run_keeps_its_folder(tmp_path: Path) -> None:
    with staged(tmp_path / "out", overwrite=False) as first:
        (first / "a").write_text("first")
        with staged(tmp_path / "out", overwrite=False) as second:
            (second / "a").write_text("second")
            assert first.exists()
        shutil.rmtree(tmp_path / "out")
    assert (tmp_path / "out/a").read_text() == "first"


def test_two_overwriting_runs_at_once(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "a").write_text("old")
    with staged(place, overwrite=True) as first, staged(place, overwrite=True) as second:
        (first / "a").write_text("first")
        (second / "a").write_text("second")
    assert names(tmp_path) == ["out"]
    assert (place / "a").read_text() == "first"  # the outer block ends last


# The command line, ended from outside


def start(source: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "converter", str(source), "--scale", "2", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def staging_folders(parent: Path) -> list[Path]:
    return list(parent.glob(".out.ntk-convert-*"))


def wait_for_staging(process: subprocess.Popen[str], parent: Path) -> Path:
    while process.poll() is None:
        if folders := staging_folders(parent):
            return folders[0]
        time.sleep(0.002)
    raise AssertionError(f"it ended before it could be stopped: {process.communicate()}")


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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
@pytest.mark.parametrize("overwrite", [False, True])
def test_stopped_while_copying(
    big_source: Path, tmp_path: Path, sent: signal.Signals, overwrite: bool
) -> None:
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        (out / "a").write_text("old")
        (out / "config.json").write_text("{}")
    weights = big_source / "model.safetensors"
    before = fingerprint(out), weights.stat().st_size, weights.stat().st_mtime_ns
    process = start(big_source, out, "--no-verify", *["--overwrite"] * overwrite)
    staging = wait_for_staging(process, tmp_path)
    while not (staging / "model.safetensors").exists():
        assert process.poll() is None
    process.send_signal(sent)
    _, err = process.communicate()
    assert process.returncode == (-sent if sent == signal.SIGKILL else 1)
    assert out.exists() == overwrite
    assert (fingerprint(out), weights.stat().st_size, weights.stat().st_mtime_ns) == before
    if sent == signal.SIGKILL:
        assert staging_folders(tmp_path) == [staging]
    else:
        assert err.strip() == "error: interrupted; nothing was written"
        assert staging_folders(tmp_path) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fmt", "arguments", "delays"),
    # Copying is over at once and verification takes seconds; conversion begins by importing torch.
    [("safetensors", [], (0.0, 0.6, 2.0)), ("bin", ["--no-verify"], (0.0, 0.5, 1.0))],
)
def test_killed_at_many_points_then_run_again(
    pristine: Callable[..., Path], tmp_path: Path, fmt: str, arguments: list[str], delays: tuple[float, ...]
) -> None:
    """From the staging folder's first moment to verification; the next run cleans up and succeeds."""
    source, out = pristine("bloom", fmt=fmt, sharded=True), tmp_path / "out"
    before = fingerprint(source)
    for delay in delays:
        process = start(source, out, *arguments)
        wait_for_staging(process, tmp_path)
        time.sleep(delay)
        process.kill()
        process.communicate()
        if out.exists():  # it was faster, and what it published is whole
            assert {"README.md", "config.json", "model.safetensors.index.json"} <= {
                path.name for path in out.iterdir()
            }
            shutil.rmtree(out)
        assert len(staging_folders(tmp_path)) <= 1  # each run removed the one before
    process = start(source, out, *arguments)
    printed, err = process.communicate()
    assert process.returncode == 0, err
    assert printed == f"{out}\n"
    assert names(tmp_path) == ["out"]
    assert fingerprint(source) == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_command_lines_at_once(pristine: Callable[..., Path], tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    runs = [start(pristine("bloom"), out, "--no-verify", *["--overwrite"] * overwrite) for _ in range(2)]
    results = [(run.communicate(), run.returncode) for run in runs]
    succeeded = [code for _, code in results if code == 0]
    assert len(succeeded) == 2 if overwrite else len(succeeded) >= 1, results
    assert names(tmp_path) == ["out"]
    assert (out / "config.json").exists()
