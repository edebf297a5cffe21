"""An audit hook that watches a run: it may write only to its own places and run only our own code.

A hook cannot be removed, so it needs a separate process. It sees what Python does. Files that a library
writes by itself are found by comparing the surrounding folders before and after (``worker.py``).
"""

# ruff: noqa: PTH115, PTH117, PTH118 -- paths are strings here, as in the events
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTED = "hostile.executed"
"""The event that the code in a hostile source raises, to show that it ran."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Event -> the positions of the arguments (path, folder descriptor) that name what it changes.
CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    **{f"os.{name}": ((0, 1),) for name in ("rmdir", "remove")},
    **{f"os.{name}": ((0, 2),) for name in ("mkdir", "chmod")},
    **{f"os.{name}": ((0, 3),) for name in ("chown", "utime")},
    **{f"os.{name}": ((0, None),) for name in ("truncate", "setxattr", "mkfifo", "mknod")},
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "shutil.rmtree": ((0, 1),),
}
STARTS = (
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile"),
    *("pty.spawn", "subprocess.Popen"),
)
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto", "urllib.Request")


class Guard:
    """Records violations while ``watching``."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._allowed: tuple[str, ...] = ()
        self._hostile = ""
        self._watching = False
        sys.addaudithook(self._hook)

    @contextmanager
    def watching(self, *, writable: list[Path], hostile: Path) -> Iterator[None]:
        """Watches this process while the block runs.

        Args:
            writable: files and folders that may be written; a path that ends in ``*`` means all paths with
                that prefix.
            hostile: the folder whose code must not run.
        """
        self._allowed = tuple(os.path.realpath(path) for path in writable)
        self._hostile = os.path.realpath(hostile) + os.sep
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def take(self) -> list[str]:
        """The violations since the last call."""
        found, self._found = self._found, []
        return found

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        self._watching = False  # the code below raises events too
        try:
            found = self._violation(event, args)
            if found is not None:
                self._found.append(found)
        finally:
            self._watching = True

    def _violation(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "open":
            path, mode, flags = args
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            return self._write(event, path, None) if writes or (flags or 0) & WRITING else None
        if event in CHANGES:
            for at, folder in CHANGES[event]:
                descriptor = args[folder] if folder is not None and folder < len(args) else None
                found = self._write(event, args[at], descriptor)
                if found:
                    return found
            return None
        if event in STARTS:
            converters = event in ("subprocess.Popen", "os.posix_spawn") and ours(args[1])
            return None if converters else _told(event, args)
        if event in CONNECTS:
            return None if args and _local_socket(args) else _told(event, args)
        if event in ("exec", "compile"):
            name = args[0].co_filename if event == "exec" else args[1]
            return _told(event, (name,)) if self._is_hostile(name) else None
        if event == "ctypes.dlopen":
            return _told(event, args) if self._is_hostile(args[0]) else None
        return _told(event, args) if event == EXECUTED else None

    def _is_hostile(self, path: object) -> bool:
        if not isinstance(path, (str, bytes)) or os.fsdecode(path).startswith("<"):  # <string> and the like
            return False
        return os.path.realpath(os.fsdecode(path)).startswith(self._hostile)

    def _write(self, event: str, path: object, folder: int | None) -> str | None:
        if isinstance(path, int):
            if event == "open":  # the descriptor was seen when it was opened
                return None
            path = os.readlink(f"/proc/self/fd/{path}")
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        name = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0 and not os.path.isabs(name):
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        # Links are followed as the system does: in folders always, in the file itself when it is opened.
        folder_of, base = os.path.split(name)
        place = os.path.realpath(name) if event == "open" else os.path.join(os.path.realpath(folder_of), base)
        if place == os.devnull or any(_within(place, allowed) for allowed in self._allowed):
            return None
        return f"{event} {place}"


def ours(command: object) -> bool:
    """Whether a command line starts the converter's own worker."""
    from converter.weights.worker import START

    words = [os.fsdecode(word) for word in command] if isinstance(command, (list, tuple)) else []
    return words[:3] == [sys.executable, "-c", START]


def _within(place: str, allowed: str) -> bool:
    if allowed.endswith("*"):
        return place.startswith(allowed[:-1])
    return place == allowed or place.startswith(allowed + os.sep)


def _local_socket(args: tuple[Any, ...]) -> bool:
    """Whether a socket is local: one without an address is a pair between two of our processes.

    Port 0 of this machine means any port; urllib3 binds it on import, to find out whether IPv6 works.
    """
    if args[1:] in ((("::1", 0),), (("127.0.0.1", 0),)):
        return True
    return len(args) > 1 and args[1] in ("", b"")


def _told(event: str, args: tuple[Any, ...]) -> str:
    return f"{event} {args!r}"[:300]
