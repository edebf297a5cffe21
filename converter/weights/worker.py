"""Rewriting in processes of their own.

What a damaged or hostile ``.bin`` file does to the process that reads it (a crash inside torch, or the
end of a mapped file that was cut off meanwhile) ends that process and not the run; and several files are
rewritten at once.

The worker says when it is ready, in a line of its own. From then on the two sides speak JSON, one object a
line: requests to the worker's stdin; to its stdout ``{"done": bytes}`` now and then, and at the end
``{"result": ...}``.
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

# The parent's import path as it is, so that nothing in the current folder is taken for a module.
START = (
    "import sys; run, *sys.path[:] = sys.argv[1:]; from converter.weights.worker import main; main(int(run))"
)
READY = "ntk-convert: ready"
"""What a worker says before anything else; what stands before it was said by others."""
MEMORY = 4 << 30
"""Bytes a worker may allocate beside twice its file: torch itself, and a large tensor's copy."""
LONGEST = 300
"""Characters of what a worker says when it fails."""


@dataclass(frozen=True)
class Request:
    """One file to rewrite; see ``converter.weights.rewrite``."""

    source: str
    target: str
    dtype: str | None
    keep: list[str]
    expected: list[str]
    tied: list[str] = field(default_factory=list)


class Worker:
    """The side of the run: one process, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said: deque[str] = deque(maxlen=1)
        self._listener: threading.Thread | None = None

    def rewrite(self, request: Request, advance: Advance, check: Callable[[], object]) -> None:
        """Has one file rewritten, and waits for it.

        Args:
            request: what to do.
            advance: told the bytes done.
            check: called now and then; what it raises stops the worker.

        Raises:
            SourceError: see ``rewrite``; also if the worker died of the file.
            OSError: the disk's, such as a full one.
            ConverterError: there is no worker, for a reason that the file has no part in.
        """
        process = self._started(check)
        assert process.stdin is not None
        assert process.stdout is not None
        name = Path(request.source).name
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
            # To close its stdin sends what was not sent, and it may not be there to take it.
            with suppress(BrokenPipeError), process:
                process.kill()
                self._listen_out()

    def _started(self, check: Callable[[], object] = bool) -> subprocess.Popen[str]:
        """The process, ready for requests."""
        if self._process is not None:
            return self._process
        if not sys.executable:
            raise _not_started("Python does not know its own program, sys.executable")
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", START, str(os.getpid()), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="surrogateescape",
                start_new_session=True,  # Ctrl-C is for the run, which then stops its workers
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        # Always listened to: nobody may have to wait before a full pipe.
        self._listener = threading.Thread(
            target=self._said.extend, args=(filter(str.strip, process.stderr),), daemon=True
        )
        self._listener.start()
        check()  # before it was started, nobody could have stopped it
        if not any(line.strip() == READY for line in process.stdout):
            check()
            code = process.wait()
            self._listen_out()
            raise _not_started(self._said[0] if self._said else f"it ended with code {code}")
        return process

    def _listen_out(self) -> None:
        if self._listener is not None:
            self._listener.join(timeout=1)  # a process of its own could keep the pipe open


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
    return f"{name} ended short while it was read; try again, or download it again"


def main(run: int) -> None:
    """The side of the worker: answers requests until there are no more, or the process ``run`` has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(run)  # so that nobody writes to a folder that is given up
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)  # whatever a library prints is no answer
    requests = os.fdopen(os.dup(0), encoding="utf-8", errors="surrogateescape")
    answers.write(f"\n{READY}\n")
    answers.flush()
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
            tied=frozenset(request.tied),
            advance=lambda count: _answer(answers, {"done": count}),
        )
    except Unfinished as error:
        return {"unfinished": str(error)}
    except SourceError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": f"{Path(request.source).name} asks for more memory than its size explains"}
    except BrokenPipeError:
        sys.exit(1)  # nobody waits for it any more
    except OSError as error:
        if error.errno == errno.EFAULT:  # what SIGBUS is for the kernel's own reading
            return {"unfinished": _ended_short(Path(request.source).name)}
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
    with suppress(ValueError, OSError):  # a lower limit than this was set by the user
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))
