"""Copies and rewrites weight files: in this process, or in processes of their own.

A damaged or hostile ``.bin`` file can kill the process that reads it: torch may crash, or a mapped file may
be cut off meanwhile. That ends the worker and not the run. Workers also do several files at once.

A worker gets its jobs on stdin, as JSON. Each file gets its name, and its line in the journal, when it is
complete. Exit code 0 means that all are; with ``FAILED`` the last line of the output is the error, as JSON.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from converter.errors import ConverterError, SourceError, Unfinished
from converter.source.checkpoint import read_header
from converter.source.source import check_digest
from converter.weights import journal
from converter.weights.files import changed, copy_file
from converter.weights.finite import Scan

# The worker gets the parent's sys.path, so it imports nothing from the current folder by accident.
START = (
    "import sys; run, *sys.path[:] = sys.argv[1:]; from converter.weights.worker import main; main(int(run))"
)
FAILED = 64
ERRORS = {kind.__name__: kind for kind in (SourceError, Unfinished, OSError, RuntimeError)}
MEMORY = 4 << 30
"""Bytes a worker may allocate on top of twice its file's size: for torch itself and a large tensor's copy."""
LONGEST = 300
"""Most characters of a failed worker's message that are shown."""
LOOK = 0.05
"""Seconds between two looks at the workers, and at whether the run still lives."""


@dataclass(frozen=True)
class Job:
    """One weight file to make."""

    source: str
    target: str
    size: int
    """Of the source in bytes, when the run first looked at it."""
    how: str
    """Everything that the result depends on besides the source's bytes; in the journal."""
    digest: str | None = None
    """What the Hub says of the source; see ``check_digest``."""
    rewrite: bool = False
    """Whether it is rewritten as safetensors; see ``converter.weights.rewrite``."""
    dtype: str | None = None
    keep: Sequence[str] = ()
    expected: Sequence[str] = ()
    tied: Sequence[str] = ()
    unread: str | None = None
    """Pattern of names of tensors that may hold NaN or infinities; None lets all of them."""

    @property
    def identity(self) -> str:
        """What the journal says that the file is made from."""
        return journal.identity(Path(self.source), f"{Path(self.source).resolve()} {self.how}")

    @property
    def part(self) -> Path:
        """The file while it is not complete."""
        target = Path(self.target)
        return target.with_name(f".{target.name}.part")

    def do(self) -> None:
        """Makes the file and records it in the journal, or raises ``SourceError`` or ``OSError``."""
        source, target, made_from = Path(self.source), Path(self.target), self.identity
        unread = None if self.unread is None else re.compile(self.unread)
        self.part.unlink(missing_ok=True)
        if source.stat().st_size != self.size:
            raise changed(source.name)
        if self.rewrite:
            from converter.weights.rewrite import rewrite

            check_digest(source, self.digest)
            names = {"keep": self.keep, "expected": self.expected, "tied": self.tied}
            digest = rewrite(source, self.part, dtype=self.dtype, unread=unread, **names)
        else:
            try:
                look = bool if unread is None else Scan(read_header(source).values(), source.name, unread)
                digest = copy_file(source, self.part, self.size, look)
            except SourceError:
                check_digest(source, self.digest)  # what is wrong with a download is its digest
                raise
            check_digest(source, self.digest, digest)
        if self.identity != made_from:
            raise changed(source.name)
        with self.part.open("rb") as file:
            os.fsync(file.fileno())  # before the journal says that it is complete
        self.part.rename(target)
        journal.add(target, made_from, digest)


def run(jobs: Sequence[Job], count: int, look: Callable[[], object] = bool) -> None:
    """Does all jobs in ``count`` processes, and calls ``look`` now and then.

    An interruption or the first failure, also one that kills its process, ends all of them and is raised.
    """
    with ExitStack() as stack:
        workers = []
        for first in range(count):
            workers.append(_Worker(jobs[first::count]))
            stack.callback(workers[-1].close)
        while workers := [worker for worker in workers if not worker.done()]:
            look()
            time.sleep(LOOK)


class _Worker:
    """A process that does some jobs, as the run sees it."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.output = jobs, b""
        try:
            self.process = subprocess.Popen(
                [sys.executable or "", "-c", START, str(os.getpid()), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so Ctrl-C reaches only the run, which then stops its workers
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(json.dumps([asdict(job) for job in jobs]).encode())

    def done(self) -> bool:
        """Whether the process has done its jobs; raises the error of one that failed."""
        assert self.process.stdout is not None
        code = self.process.poll()
        while block := self.process.stdout.read(1 << 16):  # always, since a full pipe would block it
            self.output = (self.output + block)[-(1 << 16) :]
        if code:
            raise self._error(code) from RuntimeError(self.output.decode(errors="replace"))
        return code == 0

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _error(self, code: int) -> Exception:
        lines = self.output.decode(errors="replace").strip().splitlines() or [f"it ended with code {code}"]
        if code == FAILED:
            name, *values = json.loads(lines[-1])
            return ERRORS[name](*values)
        if code > 0:
            return _not_started(lines[-1])
        name = next((Path(job.source).name for job in self.jobs if not Path(job.target).exists()), "a file")
        if code == -signal.SIGBUS:
            return _cut_off(name)
        if code == -signal.SIGKILL:
            return Unfinished(f"the process that rewrote {name} was killed, perhaps for lack of memory")
        return SourceError(f"{name} is damaged: the process that read it ended with code {code}")


def _not_started(reason: str) -> ConverterError:
    return ConverterError(
        f"the process that rewrites weights could not be started ({sys.executable}): {_one_line(reason)}"
    )


def _one_line(text: str) -> str:
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."


def _cut_off(name: str) -> Unfinished:
    return Unfinished(f"{name} was cut off while it was read; try again, or download it again")


def main(run: int) -> None:
    """Runs the worker; it ends when the process ``run`` ends, so it never writes to an abandoned folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == run:
            time.sleep(LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    error = _failure([Job(**values) for values in json.load(sys.stdin)])
    if error is not None:
        sys.stdout.flush()
        os.write(1, f"\n{json.dumps(error)}\n".encode())
    os._exit(FAILED if error else 0)  # libraries that say something when they end cannot follow


def _failure(jobs: Sequence[Job]) -> list[object] | None:
    """Does the jobs; the name and the arguments of the error that ended them, if one did."""
    for job in jobs:
        name = Path(job.source).name
        try:
            if job.rewrite:
                _limit_memory(2 * job.size + MEMORY)
                import torch

                torch.set_num_threads(1)  # one worker per core
            job.do()
        except (SourceError, Unfinished) as error:
            return [type(error).__name__, str(error)]
        except MemoryError:
            return ["SourceError", f"{name} takes far more memory than its size; it may be damaged"]
        except OSError as error:
            if error.errno == errno.EFAULT:  # the kernel reads past a mapped file's end: EFAULT, not SIGBUS
                return ["Unfinished", str(_cut_off(name))]
            return ["OSError", error.errno or 0, error.strerror or str(error), error.filename]
        except Exception as error:
            traceback.print_exc()
            return ["RuntimeError", _one_line(f"{type(error).__name__}: {error}")]
    return None


def _limit_memory(size: int) -> None:
    with suppress(ValueError, OSError):  # the user's own limit is lower
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))
