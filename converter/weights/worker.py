"""Rewrites weight files in worker processes.

A damaged or hostile ``.bin`` file can kill the process that reads it: torch may crash, or a mapped file may
be cut off meanwhile. That ends the worker and not the run. Workers also rewrite several files at once.

The worker first prints a line that says it is ready. From then on both sides exchange JSON, one object per
line: the run writes requests to the worker's stdin, and the worker answers on stdout with ``{"done": bytes}``
now and then and ``{"result": ...}`` at the end.
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
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from converter.child import end_with
from converter.errors import ConverterError, SourceError, Unfinished
from converter.progress import Advance

# The worker gets the parent's sys.path, so it imports nothing from the current folder by accident.
START = (
    "import sys; run, *sys.path[:] = sys.argv[1:]; from converter.weights.worker import main; main(int(run))"
)
READY = "ntk-convert: ready"
"""The worker's first line. Ignore all output before it: a library or a start-up hook printed that."""
MEMORY = 4 << 30
"""Bytes a worker may allocate on top of twice its file's size: for torch itself and a large tensor's copy."""
LONGEST = 300
"""Most characters of a failed worker's message that are shown."""


@dataclass(frozen=True)
class Job:
    """One file to rewrite; see ``converter.weights.rewrite``."""

    source: str
    target: str
    dtype: str | None
    keep: list[str]
    expected: list[str]
    tied: list[str] = field(default_factory=list)


class Worker:
    """One worker process, as the run sees it; it starts when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._last_error: deque[str] = deque(maxlen=1)
        self._drainer: threading.Thread | None = None

    def rewrite(self, job: Job, advance: Advance, check: Callable[[], object]) -> None:
        """Lets the process rewrite one file, and waits until it is done.

        Args:
            job: what to do.
            advance: called with the number of bytes just done.
            check: called now and then; an exception that it raises ends the wait.

        Raises:
            SourceError: see ``converter.weights.rewrite``; also if reading the file killed the process.
            OSError: reading or writing failed, for example on a full disk.
            ConverterError: the process could not be started.
        """
        process = self._started(check)
        assert process.stdin is not None
        assert process.stdout is not None
        name = Path(job.source).name
        try:
            process.stdin.write(json.dumps(vars(job)) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                check()
                message = json.loads(line)
                if "done" not in message:
                    _raise(message["result"])
                    return
                advance(message["done"])
        except BrokenPipeError:
            pass  # the process died; its exit code below says why
        check()
        raise _died(name, process.wait())

    def kill(self) -> None:
        """Kills the process, whatever it is doing; any thread may call this."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process and closes its pipes."""
        process, self._process = self._process, None
        if process is not None:
            # Closing stdin flushes what is left to send, and the process may be gone already.
            with suppress(BrokenPipeError), process:
                process.kill()
                self._drain()

    def _started(self, check: Callable[[], object] = bool) -> subprocess.Popen[str]:
        """The process, ready for requests."""
        if self._process is not None:
            return self._process
        if not sys.executable:
            raise _not_started("Python does not know its own path: sys.executable is not set")
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", START, str(os.getpid()), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="surrogateescape",
                start_new_session=True,  # so Ctrl-C reaches only the run, which then stops its workers
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        # Drain stderr all the time: a full pipe would block the worker.
        self._drainer = threading.Thread(
            target=self._last_error.extend, args=(filter(str.strip, process.stderr),), daemon=True
        )
        self._drainer.start()
        check()  # the run may have stopped before there was a process to kill
        if not any(line.strip() == READY for line in process.stdout):
            check()
            code = process.wait()
            self._drain()
            raise _not_started(self._last_error[0] if self._last_error else f"it ended with code {code}")
        return process

    def _drain(self) -> None:
        if self._drainer is not None:
            self._drainer.join(timeout=1)  # a child of the worker could keep the pipe open


def _raise(result: dict[str, Any] | None) -> None:
    if result is None:
        return
    if "errno" in result:
        raise OSError(result["errno"], os.strerror(result["errno"]), result["filename"])
    if "unfinished" in result:
        raise Unfinished(result["unfinished"])
    if "refused" in result:
        raise SourceError(result["refused"])
    raise RuntimeError(result["failed"]) from RuntimeError(result["traceback"])


def _not_started(reason: str) -> ConverterError:
    return ConverterError(
        f"the process that rewrites weights could not be started ({sys.executable}): {_one_line(reason)}"
    )


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."


def _died(name: str, code: int) -> SourceError:
    if code == -signal.SIGBUS:
        return Unfinished(_ended_short(name))
    if code == -signal.SIGKILL:
        return Unfinished(f"the process that rewrote {name} was killed, perhaps for lack of memory")
    return SourceError(f"{name} is damaged: the process that read it ended with code {code}")


def _ended_short(name: str) -> str:
    return f"{name} was cut off while it was read; try again, or download it again"


def main(run: int) -> None:
    """Runs the worker: answers requests until there are no more, or until the process ``run`` has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(run)  # so the worker does not write to an abandoned folder
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    requests = os.fdopen(os.dup(0), encoding="utf-8", errors="surrogateescape")
    answers.write(f"\n{READY}\n")
    answers.flush()
    for line in requests:
        _answer(answers, {"result": _rewrite(Job(**json.loads(line)), answers)})


def _rewrite(job: Job, answers: IO[str]) -> dict[str, Any] | None:
    try:
        source = Path(job.source)
        _limit_memory(2 * source.stat().st_size + MEMORY)
        import torch

        from converter.weights.rewrite import rewrite

        torch.set_num_threads(1)  # one worker per core
        rewrite(
            source,
            Path(job.target),
            dtype=job.dtype,
            keep=frozenset(job.keep),
            expected=job.expected,
            tied=frozenset(job.tied),
            advance=lambda count: _answer(answers, {"done": count}),
        )
    except Unfinished as error:
        return {"unfinished": str(error)}
    except SourceError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": f"{Path(job.source).name} takes far more memory than its size; it may be damaged"}
    except BrokenPipeError:
        sys.exit(1)  # the run no longer reads the answers
    except OSError as error:
        if error.errno == errno.EFAULT:  # the kernel reads past a mapped file's end: EFAULT, not SIGBUS
            return {"unfinished": _ended_short(Path(job.source).name)}
        return {"errno": error.errno or 0, "filename": error.filename}
    except Exception as error:
        return {
            "failed": _one_line(f"{type(error).__name__}: {error}"),
            "traceback": traceback.format_exc(),
        }
    return None


def _answer(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _limit_memory(size: int) -> None:
    with suppress(ValueError, OSError):  # the user's own limit is lower
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))
