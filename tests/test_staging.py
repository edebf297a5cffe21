"""Staging writes all or nothing, whatever ends a block. tests/test_faults.py ends runs from outside."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from converter import convert
from converter.errors import OutputError
from converter.result import staging
from converter.result.staging import remove_leftovers, staged
from converter.weights.files import copy_file
from converter.weights.journal import Finished, Journal, identity
from tests.conftest import Run, fingerprint

Pristine = Callable[..., Path]


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


def test_half_of_an_old_folder_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is killed while it removes the old folder; the new one is already in place."""
    place = tmp_path / "out"
    place.mkdir()
    (place / "a").write_text("old")
    rmtree = shutil.rmtree

    class Killed(BaseException):
        pass

    def half(path: Path, *_: object, **__: object) -> None:
        if path.exists():
            (path / "a").unlink(missing_ok=True)
            raise Killed

    with pytest.raises(Killed), staged(place, overwrite=True) as folder:
        (folder / "b").write_text("new")
        monkeypatch.setattr(shutil, "rmtree", half)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert names(place) == ["b"]
    place.rename(tmp_path / "elsewhere")
    remove_leftovers(place)
    assert names(tmp_path) == ["elsewhere"]


def test_a_folder_moved_aside_is_back_before_out_is_looked_at(pristine: Pristine, tmp_path: Path) -> None:
    """A killed run had moved it aside. The next run must notice it before it works for hours."""
    aside = tmp_path / ".out.ntk-convert-1-aa.old"
    aside.mkdir()
    (aside / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="exists and is not empty"):
        convert(pristine("bloom"), tmp_path / "out", scale=2, verify=False)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("resume", [False, True])
def test_file_systems_without_locks(
    pristine: Pristine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    other = tmp_path / f".out.ntk-convert-{dead_pid()}-otherhost"
    ours = tmp_path / f".out.ntk-convert-{dead_pid()}-{staging._host()}aa"
    for folder in (other, ours):
        folder.mkdir()
    source = pristine("bloom", sharded=True)
    name = min(path.name for path in source.glob("*.safetensors"))
    digest = copy_file(source / name, ours / name)
    made_from = identity(source / name, "bytes, not checked")
    Journal(ours).add(Finished(name, (ours / name).stat().st_size, digest, made_from))
    result = convert(source, tmp_path / "out", scale=2, verify=False, resume=resume)
    assert result.weights.get("kept") == (1 if resume else None)
    # A run on another machine may still be alive, so its folder is kept.
    assert names(tmp_path) == [other.name, "out"]


def test_a_mount_point_is_refused(pristine: Pristine) -> None:
    with pytest.raises(OutputError, match="is a mount point"):
        convert(pristine("bloom"), "/proc", scale=2, overwrite=True)


def test_an_interruption_that_a_library_made_something_else_of(
    pristine: Pristine, run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of an import reaches the importing code as an ImportError."""

    def broken(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None

    monkeypatch.setattr("converter.verification.verify", broken)
    done = run(pristine("bloom"), "--scale", "2", "--out", tmp_path / "out")
    assert (done.code, done.out) == (1, "")
    assert done.err.strip().startswith("error: interrupted; 1 finished weight file is kept in ")
    assert run(pristine("bloom"), "--scale", "2", "--out", tmp_path / "out", "--no-verify").code == 0
    assert names(tmp_path) == ["out"]
