"""Rewriting in processes of their own.

What a damaged or hostile ``.bin`` file does to the process that reads it (a crash inside torch, or the
end of a mapped file that was cut off meanwhile) ends that process and not the run; and several files are
rewritten at once.

The two sides speak JSON, one object a line: requests to the worker's stdin; to its stdout ``{"done": bytes}``
now and then, and at the end ``{"result": ...}``.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from converter.errors import SourceError
from converter.progress import Advance

# The parent's import path as it is, so that nothing in the current folder is taken for a module.
START = "import sys; sys.path[:] = sys.argv[1:]; from converter.weights.worker import main; main()"
MEMORY = 4 << 30
"""Bytes a worker may allocate beside twice its file: torch itself, and a large tensor's copy."""
LOOK = 0.2
"""Seconds between two looks at whether the other side still lives."""


@dataclass(frozen=True)
class Request:
    """One file to rewrite; see ``converter.weights.rewrite``."""

    source: str
    target: str
    dtype: str | None
    keep: list[str]
    expected: list[str]


class Worker:
    """The side of the run: one process, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def rewrite(self, request: Request, advance: Advance, check: Callable[[], object]) -> None:
        """Has one file rewritten, and waits for it.

        Args:
            request: what to do.
            advance: told the bytes done.
            check: called now and then; what it raises stops the worker.

        Raises:
            SourceError: see ``rewrite``; also if the worker died of the file.
            OSError: the disk's, such as a full one.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        name = Path(request.source).name
        check()  # before it was started, nobody could have stopped it
        try:
            process.stdin.write(json.dumps(vars(request)) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                check()
                message = json.loads(line)
                if "done" not in message:
                    _raise(message["result"])
                    return
                advance(message["done"])
        except BrokenPipeError:
            pass  # what it died of is told by its end
        check()
        raise _died(name, process.wait())

    def kill(self) -> None:
        """Ends the process, whatever it does; any thread may call this."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process and lets go of it."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                errors="surrogateescape",
                start_new_session=True,  # Ctrl-C is for the run, which then stops its workers
            )
        return self._process


def _raise(result: dict[str, Any] | None) -> None:
    if result is None:
        return
    if "errno" in result:
        raise OSError(result["errno"], os.strerror(result["errno"]), result["filename"])
    if "refused" in result:
        raise SourceError(result["refused"])
    raise RuntimeError(result["failed"])


def _died(name: str, code: int) -> SourceError:
    if code == -signal.SIGBUS:
        return SourceError(_ended_short(name))
    if code == -signal.SIGKILL:
        return SourceError(f"the process that rewrote {name} was killed, perhaps for lack of memory")
    return SourceError(f"{name} is damaged: the process that read it ended with code {code}")


def _ended_short(name: str) -> str:
    return f"{name} ended short while it was read; try again, or download it again"


def main() -> None:
    """The side of the worker: answers requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)  # whatever a library prints is no answer
    requests = os.fdopen(os.dup(0), encoding="utf-8", errors="surrogateescape")
    for line in requests:
        _answer(answers, {"result": _rewrite(Request(**json.loads(line)), answers)})


def _rewrite(request: Request, answers: IO[str]) -> dict[str, Any] | None:
    try:
        source = Path(request.source)
        _limit_memory(2 * source.stat().st_size + MEMORY)
        import torch

        from converter.weights.rewrite import rewrite

        torch.set_num_threads(1)  # one worker a core
        rewrite(
            source,
            Path(request.target),
            dtype=request.dtype,
            keep=frozenset(request.keep),
            expected=request.expected,
            advance=lambda count: _answer(answers, {"done": count}),
        )
    except SourceError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": f"{Path(request.source).name} asks for more memory than its size explains"}
    except BrokenPipeError:
        sys.exit(1)  # nobody waits for it any more
    except OSError as error:
        if error.errno == errno.EFAULT:  # what SIGBUS is for the kernel's own reading
            return {"refused": _ended_short(Path(request.source).name)}
        return {"errno": error.errno or 0, "filename": error.filename}
    except Exception:
        return {"failed": traceback.format_exc()}
    return None


def _answer(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _limit_memory(size: int) -> None:
    with suppress(ValueError, OSError):  # a lower limit than this was set by the user
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))


def _end_with(parent: int) -> None:
    """Ends this process when its run was killed, so that nobody writes to a folder that is given up."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)
