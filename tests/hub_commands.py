"""Runs the command line as a process against the Hub on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import Run
from tests.hub_server import HubServer

ROOT = Path(__file__).parent.parent
TOKEN = "hf_secretSECRETsecret"

Command = Callable[..., Run]

AS_USERS_DO = ("-m", "converter")
UNVERIFIED = (
    "-c",
    "import converter.verification; converter.verification.verify = lambda *_: []\n"
    "from converter.cli import main; main()",
)
"""Starts the command line without verification, which takes seconds, to test the steps after it."""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working directory of the commands."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that uses ``hub``."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith("HF_") and not name.upper().endswith("_PROXY")
    }
    return own | {
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def command(hub: HubServer, environment: dict[str, str], work: Path) -> Iterator[Command]:
    """``command(*words, start=..., **environment)``: runs the command line as a process that uses ``hub``.

    The token must not appear in anything that it prints or writes. With ``fresh``, the process is a new
    interpreter, not a fork.
    """

    def call(*words: object, start: Sequence[str] = AS_USERS_DO, fresh: bool = False, **more: str) -> Run:
        done = (subprocess.run if fresh else forks.run)(
            [sys.executable, *start, *map(str, words)],
            cwd=work,
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "secret" not in (done.stdout + done.stderr).lower()
        return Run(done.returncode, done.stdout, done.stderr)

    yield call
    for path in work.rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes().lower()
    assert {request.token for request in hub.requests if request.host == "storage"} <= {None}


@pytest.fixture
def here(run: Command, work: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``here(*words)``: runs the command line in this process, for commands refused before any request."""
    monkeypatch.chdir(work)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the Hub was asked")

    def call(*words: object) -> Run:
        done = run(*words)
        assert "secret" not in (done.out + done.err).lower()
        return done

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    return call
