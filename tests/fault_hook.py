"""Inside a run: counts what it does to its files, and lets a fault happen at one event (tests/faults.py)."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARD = "model-00002-of-00004.safetensors"
SIGNALS = {
    **{name: signal.Signals[name] for name in ("SIGKILL", "SIGTERM", "SIGHUP")},
    "Ctrl-C": signal.SIGINT,
}
EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
GROWS = {"open", "write", "fsync", "os.mkdir", "os.rename", "os.link", "os.symlink"}
"""Events that fail on a broken or full disk."""


def install(work: str, log: str | None, at: int, fault: str) -> None:
    """Watches this process from now on, and lets ``fault`` happen at event number ``at``."""
    number, acting = 0, False

    def event(name: str, path: str) -> None:
        nonlocal number, acting
        if acting or not path.startswith(work + "/") or path.startswith(work + "/source/"):
            return
        number += 1
        acting = True
        try:
            if log is not None:
                with Path(log).open("a") as file:
                    file.write(f"{name} {path}\n")
            if at and (number == at or (number > at and fault in ("Ctrl-C, held down", "disk full"))):
                act(name, fault, work)
        finally:
            acting = False

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name in EVENTS and isinstance(arguments[0], (str, bytes, os.PathLike)):
            event(name, os.path.abspath(os.fsdecode(arguments[0])))  # noqa: PTH100
        elif name == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            event(name, arguments[0])

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        """Python does not announce these calls."""

        def call(descriptor: int, *rest: Any) -> Any:
            if not acting:
                event(function.__name__, os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
            return function(descriptor, *rest)

        return call

    os.write, os.fsync = told(os.write), told(os.fsync)
    sys.addaudithook(hook)


def act(name: str, fault: str, work: str) -> None:
    """Lets a fault happen at an event of this name."""
    if fault in ("one failure", "disk full"):
        if name in GROWS and (fault != "disk full" or name in ("open", "write", "os.mkdir")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault == "source cut":
        os.truncate(f"{work}/source/{SHARD}", 100)
    elif fault == "source replaced":
        path = Path(work, "source", SHARD)
        path.with_name("another").write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        path.with_name("another").replace(path)
    else:
        sent = SIGNALS[fault.partition(",")[0]]
        os.kill(os.getpid(), sent)
        if sent == signal.SIGKILL:
            signal.pause()  # it is on its way, and nothing may be done before it arrives
