"""Staging: whose folders are removed or kept, mount points, and interruptions.

tests/test_faults.py has that all is written or nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from converter import convert, interrupts
from converter.errors import OutputError
from converter.result.staging import remove_leftovers, staged
from tests.conftest import Pristine, Run, fingerprint
from tests.messages import raises, says

ROOT = Path(__file__).parent.parent


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_place_that_was_filled_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "out"
    with pytest.raises(OutputError, match="`overwrite`"), staged(place, overwrite=False):
        place.mkdir()
        (place / "a").write_text("theirs")
    assert names(tmp_path) == ["out"]
    assert (place / "a").read_text() == "theirs"


def test_leftovers_of_ended_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    removed = [".o*t.ntk-convert-1-0badcafe", ".o*t.ntk-convert-0badcafe"]
    kept = ["other", ".o*t.ntk-convert", ".o*t2.ntk-convert-aa", ".out.ntk-convert-aa", "o*t.ntk-convert-aa"]
    for name in [*removed, *kept]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("a")
    remove_leftovers(tmp_path / "o*t")
    assert names(tmp_path) == sorted(kept)


def test_a_living_run_keeps_its_folder(tmp_path: Path) -> None:
    with staged(tmp_path / "out", overwrite=False) as first:
        (first / "a").write_text("first")
        with staged(tmp_path / "out", overwrite=False) as second:
            (second / "a").write_text("second")
            assert first.exists()
        shutil.rmtree(tmp_path / "out")
    assert (tmp_path / "out/a").read_text() == "first"


def test_a_folder_moved_aside_is_back_before_out_is_looked_at(pristine: Pristine, tmp_path: Path) -> None:
    """A killed run had moved it aside. The next run must notice it before it works for hours."""
    aside = tmp_path / ".out.ntk-convert-1-aa.old"
    aside.mkdir()
    (aside / "config.json").write_text("{}")
    with raises(OutputError, "not empty"):
        convert(pristine("bloom"), tmp_path / "out", scale=2, verify=False)
    assert names(tmp_path) == ["out"]


def test_file_systems_without_locks(
    pristine: Pristine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    (tmp_path / ".out.ntk-convert-aa").mkdir()
    convert(pristine("bloom"), tmp_path / "out", scale=2, verify=False)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [(errno.EACCES, OutputError, "umask"), (errno.EMFILE, OSError, os.strerror(errno.EMFILE))],
)
def test_a_new_folder_that_cannot_be_opened_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], said: str
) -> None:
    opened = os.open

    def fails(path: Path, *rest: int) -> int:
        if ".ntk-convert-" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(error, match=said), staged(tmp_path / "out", overwrite=False):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("taken", ["locked", "removed"])
def test_a_new_folder_that_another_run_takes_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    left = iter([taken])
    lock = fcntl.flock

    def first_fails(descriptor: int, how: int) -> None:
        match next(left, None):
            case "locked":
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
            case "removed":
                [folder] = tmp_path.iterdir()
                folder.rmdir()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", first_fails)
    with staged(tmp_path / "out", overwrite=False) as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "out/a").read_text() == "a"


def test_ctrl_c_while_the_command_line_is_imported(tmp_path: Path) -> None:
    code = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "converter.cli.conversion":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
runpy.run_module("converter", run_name="__main__")
"""
    words = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_nohup() -> None:
    """A run that ``nohup`` started goes on when its terminal is closed; another one is stopped."""
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        interrupts.listen()
        with interrupts.held() as waiting:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not waiting
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupts.came()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        interrupts.listen()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        interrupts.forget()


@pytest.mark.parametrize(
    ("mounted", "source", "out"),
    [
        # What is mounted at a/, MODEL and OUT. DATA has the folder x, and that has the checkpoint m.
        ("DATA", "a/x/m", "DATA/x/m"),
        ("DATA", "a/x/m", "DATA/x/m/out"),
        ("DATA/x/m", "a", "DATA/x/m"),
        ("DATA/x/m/last", "a", "DATA/x/m"),
    ],
)
def test_a_source_that_a_second_path_leads_to(
    pristine: Pristine, tmp_path: Path, mounted: str, source: str, out: str
) -> None:
    shutil.copytree(pristine("bloom"), tmp_path / "DATA/x/m/last")
    shutil.copytree(pristine("bloom"), tmp_path / "DATA/x/m", dirs_exist_ok=True)
    shutil.copy(tmp_path / "DATA/x/m/config.json", tmp_path / "DATA/x")  # so x may be a model, too
    (tmp_path / "a").mkdir()
    before = fingerprint(tmp_path)
    words = [sys.executable, "-m", "converter", source, "--scale", "2", "--out", out, "--overwrite"]
    script = f"mount --bind {mounted} a 2>/dev/null || exit 77; exec {shlex.join(words)}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("no bind mounts here")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    says(done.stderr, f"error: --out {out}", f"the source {source}", "name another folder")
    assert fingerprint(tmp_path) == before


def test_a_mount_point_is_refused(pristine: Pristine) -> None:
    with raises(OutputError, "mount point"):
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
    assert done.err.strip().count("\n") == 0
    says(done.err, "error: interrupted")
    assert names(tmp_path) == []
