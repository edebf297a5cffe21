"""A converted repository behind ``transformers serve``, and OpenAI's client for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent.parent / "examples" / "serve.py"
PACKAGES = ("fastapi", "uvicorn", "openai")
"""What the server and its client need and transformers does not install."""
# A small cache: by default, the server takes more than half of the machine's memory.
SIZES = ("--cb-num-blocks", "16", "--cb-max-batch-tokens", "256")


@contextmanager
def served(repository: Path, log: Path) -> Iterator[Any]:
    """Starts a server with continuous batching, and ends it."""
    options = ["--continuous-batching", "--device", "cpu", "--attn-implementation", "sdpa", *SIZES]
    with client_of([str(SCRIPT), str(repository), *options], log, HF_HUB_OFFLINE="1") as client:
        yield client


@contextmanager
def client_of(words: Sequence[str], log: Path, **environment: str) -> Iterator[Any]:
    """Starts a Python program that serves OpenAI's API, and ends it; ``log`` is the file for what it prints.

    Raises:
        RuntimeError: it did not start within five minutes; a busy machine takes one.
    """
    from openai import OpenAI

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    command, url = [sys.executable, *words, "--host", "127.0.0.1", "--port", port], f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
    try:
        wait(server, f"{url}/health", log)
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Returns when the server answers."""
    until = time.monotonic() + 300
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start ({server.poll()}):\n{log.read_text()[-2000:]}")


def complete(client: Any, repository: Path, prompt: str, tokens: int) -> str:
    """The text that follows a prompt, greedily, from one request over HTTP."""
    answer = client.completions.create(model=str(repository), prompt=prompt, max_tokens=tokens, temperature=0)
    return answer.choices[0].text
