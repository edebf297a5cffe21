"""Inside a run: counts the file-system events in its work folder, and acts just before one of them.

Python announces every open, rename, removal and so on to audit hooks before it happens, so code in a hook
runs between two system calls. A fault "at event 17" happens between the 16th and the 17th thing that the run
does to its files, and always at the same point.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE, RUN = "NTK_CONVERT_TEST_FAULT", "NTK_CONVERT_TEST_RUN"
"""Environment variables: the fault, and the process id of the run's first process."""
PLANTED = "NTK_CONVERT_TEST_PLANTED"
"""Environment variable: the name of a defect of ``tests.faults.planted``."""
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
Change = Literal["truncate", "grow", "rewrite", "replace", "delete"]
Role = Literal["main", "worker"]
CHANGES: tuple[Change, ...] = ("truncate", "grow", "rewrite", "replace", "delete")


@dataclass(frozen=True)
class Fault:
    """What happens at an event: every action whose field is set."""

    work: str
    """Only events on paths in this folder count."""
    log: str | None = None
    """A file that gets one line for each event."""
    at: int = 0
    """Number of the event, from 1; 0 for none."""
    after: float | None = None
    """Act this many seconds after the start instead of at an event (another module does that)."""
    role: Role = "main"
    """Whose events count: those of the run's first process, or of processes that it starts."""
    signal: int | None = None
    """Signal to send to the process."""
    group: bool = False
    """Send the signal to the whole process group, like Ctrl-C in a terminal."""
    repeat: bool = False
    """Send the signal at every later event too."""
    fill: str | None = None
    """A file that grows until its file system has ``leave`` bytes left."""
    leave: int = 0
    limit: int | None = None
    """Largest size in bytes that a file can grow to (RLIMIT_FSIZE)."""
    change: str | None = None
    """File to change."""
    how: Change = "truncate"

    def to_environment(self) -> dict[str, str]:
        """The environment variables that a process of the run needs."""
        return {VARIABLE: json.dumps(asdict(self))}


def install_from_environment() -> None:
    """Watches this process if its environment asks for it."""
    if VARIABLE in os.environ:
        install(Fault(**json.loads(os.environ[VARIABLE])))


def install(fault: Fault) -> None:
    """Watches this process from now on."""
    count = 0
    lock = threading.Lock()
    inside = threading.local()
    log = None if fault.log is None else os.open(fault.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def event(name: str, path: str) -> None:
        nonlocal count
        role = "main" if os.environ.get(RUN) == str(os.getpid()) else "worker"
        if getattr(inside, "hook", False):
            return
        inside.hook = True
        try:
            with lock:
                count += 1
                number = count
            if log is not None:
                os.write(log, f"{role} {number} {name} {path}\n".encode())
            if (
                fault.at
                and role == fault.role
                and (number == fault.at or (fault.repeat and number > fault.at))
            ):
                act(fault)
        finally:
            inside.hook = False

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name in EVENTS and (path := _inside(fault.work, name, arguments)) is not None:
            event(name, path)

    def told(function: Callable[..., int], name: str) -> Callable[..., int]:
        """Python does not announce reads and writes, so this does, before and after each call."""

        def call(descriptor: int, *arguments: Any, **options: Any) -> int:
            path = "" if getattr(inside, "hook", False) else _path(descriptor)
            if not path.startswith(fault.work + "/"):
                return function(descriptor, *arguments, **options)
            event(f"os.{name}", f"begins {path}")
            done = function(descriptor, *arguments, **options)
            event(f"os.{name}", f"ended {path}")
            return done

        return call

    for name in ("copy_file_range", "sendfile", "preadv", "write"):
        if hasattr(os, name):
            setattr(os, name, told(getattr(os, name), name))
    sys.addaudithook(hook)


def act(fault: Fault) -> None:
    """Carries out the fault."""
    if fault.fill is not None:
        fill(Path(fault.fill), fault.leave)
    if fault.limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit, resource.RLIM_INFINITY))
    if fault.change is not None:
        change(Path(fault.change), fault.how)
    if fault.signal is not None and fault.group:
        os.killpg(0, fault.signal)
    elif fault.signal is not None:
        os.kill(os.getpid(), fault.signal)
        if fault.signal == signal.SIGKILL:
            signal.pause()  # it is on its way, and nothing may be done before it arrives


def fill(path: Path, leave: int) -> None:
    """Writes a file that leaves so many bytes of its file system free."""
    space = os.statvfs(path.parent)
    size = space.f_bavail * space.f_frsize - leave
    with path.open("wb") as file:
        if size > 0:
            os.posix_fallocate(file.fileno(), 0, size)


def change(path: Path, how: Change) -> None:
    """Changes a file as another program might."""
    if how == "delete":
        path.unlink()
    elif how == "replace":
        other = path.with_name("another")
        other.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        other.replace(path)
    else:
        with path.open("r+b") as file:
            size = path.stat().st_size
            if how == "truncate":
                file.truncate(size // 2)
            elif how == "grow":
                file.truncate(size + 1000)
            else:
                file.seek(size // 2)
                file.write(b"changed!")


def _inside(work: str, name: str, arguments: tuple[Any, ...]) -> str | None:
    """The path of an event, or None if the event does not count."""
    path = arguments[0]
    if isinstance(path, int) or path is None:
        return None
    text = os.fsdecode(path)
    if not text.startswith("/") and name in ("os.remove", "os.rmdir", "os.mkdir") and arguments[-1] >= 0:
        # Relative to a folder's descriptor, as in shutil.rmtree.
        text = f"{_path(arguments[-1])}/{text}"
    return text if text.startswith(work + "/") else None


def _path(descriptor: int) -> str:
    """The path that a descriptor is open on; empty if the system does not say."""
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
