"""Rewrites a ``.bin`` file in a process of its own.

A damaged or hostile ``.bin`` file can kill the process that reads it, or take any amount of memory: torch may
crash, or a mapped file may be cut off meanwhile. That ends the worker and not the run.

The worker gets the arguments of ``rewrite`` on stdin, as JSON. The last line of its output is the SHA-256 of
the new file, or with the exit code ``FAILED`` the error, as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from converter.errors import ConverterError, SourceError

# The worker gets the parent's sys.path, so it imports nothing from the current folder by accident.
START = (
    "import sys; run, *sys.path[:] = sys.argv[1:]; from converter.weights.worker import main; main(int(run))"
)
FAILED = 64
ERRORS = {kind.__name__: kind for kind in (SourceError, OSError, RuntimeError)}
MEMORY = 4 << 30
"""Bytes a worker may allocate on top of twice its file's size: for torch itself and a large tensor's copy."""
LONGEST_MESSAGE = 300
"""Most characters of a failed worker's message that are shown."""
LOOK = 0.05
"""Seconds between two looks at the worker, and at whether the run still lives."""


def rewrite_apart(source: Path, target: Path, names: Mapping[str, Any], look: Callable[[], object]) -> str:
    """``rewrite(source, target, **names)`` in a process of its own; returns the new file's SHA-256.

    ``ignored`` among the names is the pattern's text. ``look`` is called now and then; what it raises ends
    the process. What ends the process by itself is raised as an error.
    """
    request: bytes | None = json.dumps({"source": str(source), "target": str(target), **names}).encode()
    try:
        process = subprocess.Popen(
            [sys.executable or "", "-c", START, str(os.getpid()), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so Ctrl-C reaches only the run, which then stops its workers
        )
    except OSError as error:
        raise _not_started(str(error)) from error
    with process:
        try:
            while True:
                look()
                with suppress(subprocess.TimeoutExpired):
                    said, _ = process.communicate(request, timeout=LOOK)
                    break
                request = None  # it is given only once
        finally:
            process.kill()
    lines = said.decode(errors="replace").strip().splitlines() or [f"it ended with code {process.returncode}"]
    if process.returncode:
        raise _error(process.returncode, lines[-1], source.name) from RuntimeError("\n".join(lines))
    return lines[-1]


def _error(code: int, line: str, name: str) -> Exception:
    """Why a worker that read the file ``name`` failed, by its exit code and its last line."""
    if code == FAILED:
        kind, *values = json.loads(line)
        return ERRORS[kind](*values)
    if code > 0:
        return _not_started(line)
    if code == -signal.SIGBUS:
        return SourceError(_cut_off(name))
    if code == -signal.SIGKILL:
        return SourceError(f"the process that rewrote {name} was killed, perhaps for lack of memory")
    return SourceError(f"{name} is damaged: the process that read it ended with code {code}")


def _not_started(reason: str) -> ConverterError:
    return ConverterError(
        f"the process that rewrites weights could not be started ({sys.executable}): {_one_line(reason)}"
    )


def _one_line(text: str) -> str:
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return words if len(words) <= LONGEST_MESSAGE else f"{words[:LONGEST_MESSAGE]}..."


def _cut_off(name: str) -> str:
    return f"{name} was cut off while it was read; try again, or download it again"


def main(run: int) -> None:
    """Runs the worker; it ends when the process ``run`` ends, so it never writes to an abandoned folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == run:
            time.sleep(LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    done = _rewrite(**json.load(sys.stdin))
    failed = not isinstance(done, str)
    sys.stdout.flush()
    os.write(1, f"\n{json.dumps(done) if failed else done}\n".encode())
    os._exit(FAILED if failed else 0)  # libraries that say something when they end cannot follow


def _rewrite(source: str, target: str, ignored: str | None, **names: Any) -> str | list[object]:
    """The SHA-256 of the new file, or the name and the arguments of the error."""
    path = Path(source)
    try:
        _limit_memory(2 * path.stat().st_size + MEMORY)
        import torch

        from converter.weights.rewrite import rewrite

        torch.set_num_threads(1)  # one worker per core
        pattern = None if ignored is None else re.compile(ignored)
        return rewrite(path, Path(target), ignored=pattern, **names)
    except SourceError as error:
        return ["SourceError", error.message]
    except MemoryError:
        return ["SourceError", f"{path.name} takes far more memory than its size; it may be damaged"]
    except OSError as error:
        if error.errno == errno.EFAULT:  # the kernel reads past a mapped file's end: EFAULT, not SIGBUS
            return ["SourceError", _cut_off(path.name)]
        return ["OSError", error.errno or 0, error.strerror or str(error), error.filename]
    except Exception as error:
        traceback.print_exc()
        return ["RuntimeError", _one_line(f"{type(error).__name__}: {error}")]


def _limit_memory(size: int) -> None:
    with suppress(ValueError, OSError):  # the user's own limit is lower
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))
