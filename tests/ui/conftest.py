"""Runs these tests only where Gradio and playwright are installed, in an environment of their own.

The page runs as its README lays out a Space: its own files, with converter/ and templates/ beside them. The
Hub is ours, and Gradio stands in for the login: it takes the visitor's name from the token of the Space's
owner, so both tokens are ada's.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import Account, HubServer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-bloom"
OWNERS, LOGIN = "hf_secretOfTheOwner", "mock-oauth-token-for-local-dev"
"""The token of the Space's owner, and the one of Gradio's stand-in for a login."""
PATIENCE = 120_000
"""Milliseconds until a page has what a test waits for."""

if importlib.util.find_spec("gradio") is None or importlib.util.find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]


@dataclass
class Site:
    """A running page, and the Hub that it uses."""

    url: str
    hub: HubServer
    cache: Path
    log: Path

    @property
    def folders(self) -> set[Path]:
        """The folders of the pages that are open and were used; Gradio has folders beside them."""
        return set(self.cache.glob(f"{'?' * 32}/{'?' * 32}"))


@contextmanager
def running(place: Path, command: str, folder: Path, **environment: str) -> Iterator[Site]:
    """Starts the page by a command in a folder; its files go to ``place``."""
    (place / "cache").mkdir()
    with HubServer() as hub, socket.socket() as found, (place / "log").open("wb") as log:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        hub.accounts = {OWNERS: Account("ada"), LOGIN: Account("ada")}
        hub.commit("ada/tiny-bloom", MODEL)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GRADIO_"))}
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=kept
            | {
                "GRADIO_SERVER_PORT": str(port),
                "GRADIO_TEMP_DIR": str(place / "cache"),
                "HF_ENDPOINT": hub.endpoint,
                "HF_HOME": str(place / "home"),
                "HF_HUB_DISABLE_XET": "1",
                "HF_TOKEN": OWNERS,
                "NO_PROXY": "127.0.0.1",
                "PYTHONUNBUFFERED": "1",
            }
            | environment,
        )
        try:
            site = Site(f"http://127.0.0.1:{port}", hub, place / "cache", place / "log")
            wait(lambda: "Running on" in site.log.read_text() or process.poll() is not None)
            yield site
            assert process.poll() is None, site.log.read_text()
        finally:
            process.terminate()
            process.wait()


def wait(until: Callable[[], object]) -> None:
    """Waits until something is so."""
    end = time.monotonic() + PATIENCE / 1000
    while not until():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The page as a Space, for results of up to 1 MB."""
    place = tmp_path_factory.mktemp("space")
    for name in ("converter", "templates"):
        shutil.copytree(ROOT / name, place / "space" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples" / "space", place / "space", dirs_exist_ok=True)
    command = f"exec {shlex.quote(sys.executable)} app.py"
    with running(place, command, place / "space", SPACE_ID="owner/page", NTK_MAX_GB="0.001") as site:
        yield site


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu"]
        started = driver.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """``visit(site, **options)``: a page of a new visitor, ready to be used."""
    contexts = []

    def call(site: Site, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        contexts[-1].set_default_timeout(PATIENCE)
        page = contexts[-1].new_page()
        page.goto(site.url)
        page.get_by_label("A Hub id").wait_for()
        return page

    yield call
    for context in contexts:
        context.close()


@contextmanager
def held(hub: HubServer) -> Iterator[threading.Event]:
    """Holds downloads of weights; yields what is set when there is one."""
    asked, go = threading.Event(), threading.Event()

    def hold(request: Any) -> None:
        if request.host == "storage" and request.method == "GET":
            asked.set()
            go.wait(PATIENCE / 1000)

    hub.before = hold
    try:
        yield asked
    finally:
        go.set()
        hub.before = None
