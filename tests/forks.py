"""Processes that start within milliseconds: forks of one that has already imported the slow modules.

``run`` and ``Popen`` work as in ``subprocess``, for ``python -m MODULE`` and ``python -c CODE``. The program
is the same from its first line on, and the process has its own id, session, folder, environment, pipes and
exit status. Only the imports are shared, which take up to four seconds of CPU time for each command line.
huggingface_hub and transformers read the environment when they are imported, so each process imports its own.

Tests of start-up itself (what is imported, and when) use ``subprocess``. Outside Linux everything does.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired
from typing import Any

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CompletedProcess", "Popen", "TimeoutExpired", "run"]

ROOT = Path(__file__).parent.parent
IMPORTED = (
    "converter.cli",
    "converter.onnx.export",
    "converter.conversion",
    "converter.publish.push",
    "httpcore2",
    "httpx2",
    "jinja2.sandbox",
    "matplotlib.figure",
    "onnx",
    "onnx_ir",
    "psutil",
    "regex",
    "safetensors.torch",
    "scipy.stats",
    "sentencepiece",
    "tokenizers",
    "torch._dynamo",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.elastic.agent.server",
    "torch.nn.attention.flex_attention",
    "tqdm.contrib.logging",
    "yaml",
)
"""What commands use and what takes long; those that are not installed are left out."""
READ_THE_ENVIRONMENT = ("huggingface_hub", "transformers")
"""These keep what the environment says when they are imported: a fork needs its own."""
PR_SET_CHILD_SUBREAPER = 36
EXECUTABLE = sys.executable
LONGEST = 1 << 20
"""Bytes of a request, most of them the environment."""


class Popen(subprocess.Popen[str]):
    """As ``subprocess.Popen``, of which ``cwd``, ``env``, ``start_new_session`` and the pipes are obeyed."""

    def _execute_child(self, *arguments: Any) -> None:
        """Has the process forked, instead of started; called by the constructor."""
        names = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        words = [os.fspath(word) for word in names["args"]]
        if words[0] != EXECUTABLE or words[1] not in ("-c", "-m"):
            super()._execute_child(*arguments)
            return
        pipes = [names[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = _server().start(
            words,
            os.fspath(names["cwd"] or Path.cwd()),
            dict(os.environ if names["env"] is None else names["env"]),
            [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)],
            new_session=bool(names["start_new_session"]),
        )
        self._child_created = True
        self._close_pipe_fds(*(names[name] for name in PIPES))


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

if not sys.platform.startswith("linux"):
    Popen = subprocess.Popen  # type: ignore[misc, assignment]


def run(
    words: Sequence[str], *, capture_output: bool = False, timeout: float | None = None, **options: Any
) -> CompletedProcess[str]:
    """As ``subprocess.run``, without ``input``."""
    check = options.pop("check", False)
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    with Popen(words, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Server:
    """The process that others are forked from, as this process sees it."""

    def __init__(self) -> None:
        # A fork's parent ends at once, and it becomes this process's child, which can then wait for it.
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        self._one_request = threading.Lock()  # a run may start workers from several threads
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def start(
        self,
        words: list[str],
        folder: str,
        environment: Mapping[str, str],
        pipes: list[int],
        *,
        new_session: bool,
    ) -> int:
        """Starts ``python -m MODULE ...`` or ``python -c CODE ...``; its process id."""
        request = {"words": words, "folder": folder, "environment": environment, "session": new_session}
        with self._one_request:
            socket.send_fds(self._socket, [json.dumps(request).encode()], pipes)
            answer = self._socket.recv(100)
        if not answer:
            raise RuntimeError(f"the process that forks others ended with {self._process.wait()}")
        return int(answer)

    def close(self) -> None:
        """Ends it; the others go on."""
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> Server:
    return Server()


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Forks a process for each request; returns in that process, with the request."""
    while True:
        data, pipes, _, _ = socket.recv_fds(requests, LONGEST, 3)
        if not data:
            sys.exit()
        reading, writing = os.pipe()
        middle = os.fork()
        if not middle:
            parent = os.getpid()
            if pid := os.fork():
                os.write(writing, str(pid).encode())
                os._exit(0)
            while os.getppid() == parent:  # some processes look at once whose child they are
                time.sleep(0.001)
            for descriptor in (reading, writing, requests.detach()):
                os.close(descriptor)
            for number, descriptor in enumerate(pipes):
                os.dup2(descriptor, number)
            for descriptor in {*pipes} - {0, 1, 2}:
                os.close(descriptor)
            return json.loads(data)
        os.waitpid(middle, 0)
        for descriptor in (writing, *pipes):
            os.close(descriptor)
        with os.fdopen(reading, "rb") as answer:
            requests.send(answer.read())


def _become(request: dict[str, Any]) -> None:
    """What the system and Python do before the first line of a program."""
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    how, what, *words = request["words"][1:]
    sys.argv[:] = [how, *words]
    if how == "-m":
        sys.path[0] = request["folder"]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""
        main = types.ModuleType("__main__")
        main.__builtins__ = builtins  # type: ignore[attr-defined]
        sys.modules["__main__"] = main
        exec(compile(what, "<string>", "exec"), vars(main))


def _ended(program: Callable[[], object]) -> int:
    """Runs a program to its end; its exit status.

    As Python does, but for taking every module and object to pieces, which takes longer than most programs.
    """
    status = 0
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status & 0xFF


if __name__ == "__main__":
    for module in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    assert not {*READ_THE_ENVIRONMENT} & sys.modules.keys()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    gc.freeze()  # forks share what is there already
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch takes its operators apart, one by one
    begun = _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(_ended(functools.partial(_become, begun)))
