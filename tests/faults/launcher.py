"""Starts runs of the command line within milliseconds, each in its own process.

Importing torch takes seconds, and the tests make hundreds of runs. So one process imports everything that
runs need, and forks for each run. The fork runs the same code from ``main`` on, in its own session, with its
own pipes for output. ``python -m tests.faults.launcher MODULE...`` is that process; it reads one JSON request
per line from stdin and answers each with one line.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import hook

ROOT = Path(__file__).parent.parent.parent
CAPABILITIES_V3 = 0x20080522
LIGHT = ("converter.pipeline", "converter.cli.report", "huggingface_hub", "safetensors")
MODELS = (
    *LIGHT,
    "accelerate",
    "safetensors.torch",
    "torch._dynamo",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bloom.modeling_bloom",
)
# onnxruntime is left out: its threads do not survive a fork.
ONNX = (*MODELS, "onnx", "onnx_ir")


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    """Exit code, or minus the signal that ended it."""
    out: str
    err: str
    survivors: tuple[int, ...]
    """Processes of the run that were still alive afterwards, and had to be killed."""


class Launcher:
    """A context manager for the process that forks runs.

    Args:
        modules: the modules to import.
        environment: changes to this process's environment.
        namespace: use a private mount namespace, where ``execute`` may mount a small disk; needs root.
    """

    def __init__(
        self,
        modules: Sequence[str] = LIGHT,
        environment: Mapping[str, str] | None = None,
        *,
        namespace: bool = False,
    ) -> None:
        paths = [str(ROOT), str(Path(__file__).parent / "site")]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.faults.launcher", *modules]
        self._process = subprocess.Popen(
            ["unshare", "--mount", *command] if namespace else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | variables | dict(environment or {}),
            start_new_session=True,
        )
        self.root = Path(f"/proc/{self._process.pid}/root") if namespace else Path("/")
        """The launcher's root folder, as this process names it."""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(
        self, words: Sequence[object], fault: hook.Fault | None = None, *, powerless: bool = False
    ) -> int:
        """Starts a command line; returns its process id.

        Args:
            words: the words after ``ntk-convert``.
            fault: the fault to inject.
            powerless: let file permissions restrict it even if this user is root.
        """
        environment = fault.to_environment() if fault else {}
        answer = self._ask(do="start", words=[*map(str, words)], environment=environment, powerless=powerless)
        return int(answer["pid"])

    def wait(self, pid: int, seconds: float = 120) -> Ended:
        """Waits for a run and the processes it started; kills those that take longer."""
        answer = self._ask(do="wait", pid=pid, seconds=seconds)
        survivors = tuple(_survivors(pid, 5.0))
        for survivor in survivors:
            with suppress(ProcessLookupError):
                os.kill(survivor, signal.SIGKILL)
        return Ended(int(answer["code"]), answer["out"], answer["err"], survivors)

    def run(
        self, words: Sequence[object], fault: hook.Fault | None = None, *, powerless: bool = False
    ) -> Ended:
        """``start`` and ``wait``."""
        return self.wait(self.start(words, fault, powerless=powerless))

    def execute(self, *words: object) -> int:
        """Runs a program in the launcher's namespace; returns its exit code."""
        return int(self._ask(do="execute", words=[str(word) for word in words])["code"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the launcher ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _survivors(run: int, seconds: float) -> list[int]:
    """Processes of a run that are still alive after ``seconds``; returns as soon as there are none."""
    mark = f"{hook.RUN}={run}".encode()
    end, pause = time.monotonic() + seconds, 0.01
    while True:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                # A program's name may hold anything; state, parent, group and session follow its bracket.
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                marked = mark in (folder / "environ").read_bytes().split(b"\0")
                if state != "Z" and (marked or int(session) == run):
                    found.append(int(folder.name))
        if not found or time.monotonic() > end:
            return found
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _serve() -> None:
    """The launcher's loop. It returns only in a fork, which then runs its command."""
    outputs: dict[int, list[int]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        if request["do"] == "start":
            # Pipes instead of files, because the disk may be full.
            pipes = [os.pipe(), os.pipe()]
            pid = os.fork()
            if not pid:
                _become(request, *(writing for _, writing in pipes))
                return
            for _, writing in pipes:
                os.close(writing)
            outputs[pid] = [reading for reading, _ in pipes]
            answer = {"pid": pid}
        elif request["do"] == "wait":
            code = _wait(request["pid"], request["seconds"])
            out, err = map(_read, outputs.pop(request["pid"]))
            answer = {"code": code, "out": out, "err": err}
        else:
            answer = {"code": subprocess.run(request["words"], stdout=subprocess.DEVNULL).returncode}
        print(json.dumps(answer), flush=True)
    sys.exit()


def _read(pipe: int) -> str:
    """The output of an ended process; its children may still hold the pipe open."""
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError), os.fdopen(pipe, "rb", buffering=0) as file:
        return (file.read() or b"").decode(errors="replace")
    return ""


def _wait(pid: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.002)


def _become(request: dict[str, Any], out: int, err: int) -> None:
    """Makes this process the run's first one, as a shell does before it starts a program."""
    os.setsid()
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(descriptor, number)
    os.environ.update(request["environment"], **{hook.RUN: str(os.getpid())})
    if request["powerless"]:
        _drop_rights()
    hook.install_from_environment()
    sys.argv[1:] = request["words"]


def _drop_rights() -> None:
    """Gives up root's capabilities for good; works only on Linux."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # forks share the objects that exist now
    _serve()
    from converter.cli import main

    main()
