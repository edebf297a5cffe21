"""examples/serve_onnx.py: the tokens of transformers, an error for what it cannot do, and bounded memory."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import tiny
from tests.memory import MB, anonymous, needs_proc
from tests.messages import Words, says
from tests.onnx_graphs import NEW, Make, exported, generated, prompts
from tests.patched import Convert

pytest.importorskip("onnxruntime")

from generate_onnx import Model
from serve_onnx import Server, Service

SCRIPT = Path(__file__).parent.parent / "examples" / "serve_onnx.py"
PROMPTS = prompts((60, 43, 12, 1, 33, 17))
LENGTH = 96
"""Tokens of a slot."""


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[Server]:
    """A server in this process, on a port that is free."""
    sizes = {"slots": 2, "length": LENGTH, "waiting": 0, "chunk": 16} | options
    server = Server(("127.0.0.1", 0), Service(Model(folder), folder, **sizes), connections=16)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def start(
    port: int, body: object, *, path: str = "/generate", **headers: str
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A request whose answer has begun; closing both is the client going away."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, headers)
    return connection, connection.getresponse()


def ask(port: int, body: object, **options: str) -> tuple[int, Any]:
    """Status and content of a whole answer; a list of lines if it is a stream."""
    connection, response = start(port, body, **options)
    lines = [json.loads(line) for line in response.read().splitlines()]
    connection.close()
    streamed = response.getheader("Content-Type") == "application/x-ndjson"
    return response.status, lines if streamed else lines[0]


def free(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())["free"]


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("scaling", ["ntk", "ntk-position"])
def test_unequal_prompts_at_the_same_time(with_graph: Make, scaling: str) -> None:
    """More than there are slots, in slots that others have used, and in chunks of 16 tokens."""
    folder = with_graph("bloom", scaling)
    bodies = [{"input_ids": prompt, "max_new_tokens": NEW} for prompt in PROMPTS]
    wanted = [generated(folder, prompt) for prompt in PROMPTS]
    with served(folder, waiting=2 * len(bodies)) as server, ThreadPoolExecutor(2 * len(bodies)) as pool:
        answers = list(pool.map(lambda body: ask(server.server_port, body), bodies * 2))
    assert [(status, answer["tokens"]) for status, answer in answers] == [(200, row) for row in wanted * 2]
    ends = ["end" if row[-1] == tiny.END else "length" for row in wanted]
    assert [answer["finish"] for _, answer in answers] == ends * 2


def test_length_dynamic_scaling_runs_a_prompt_whole(with_graph: Make) -> None:
    folder = with_graph("mpt", "ntk-length")
    prompt = PROMPTS[0]
    with served(folder) as server:
        assert server.service.chunk == LENGTH
        status, answer = ask(server.server_port, {"input_ids": prompt, "max_new_tokens": NEW})
    assert (status, answer["tokens"]) == (200, generated(folder, prompt))


def test_a_stream_of_text(with_graph: Make) -> None:
    folder = with_graph("mpt", "ntk")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "w5 w6 w7 w8 w9 w10"
    tokens = generated(folder, tokenizer(text)["input_ids"])
    with served(folder) as server:
        body = {"prompt": text, "max_new_tokens": NEW}
        status, lines = ask(server.server_port, body | {"stream": True})
        assert ask(server.server_port, body)[1]["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert status == 200
    assert [line["token"] for line in lines[:-1]] == tokens
    assert "".join(line["text"] for line in lines) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert lines[-1]["finish"] in ("end", "length")


REFUSED: dict[str, tuple[object, Words]] = {
    "no JSON": (b"{", "JSON"),
    "a misspelt key": ({"input_id": [5]}, ("object", "input_ids")),
    "no prompt": ({}, ("prompt", "input_ids")),
    "two prompts": ({"prompt": "w5", "input_ids": [5]}, ("prompt", "input_ids")),
    "half a character": ({"prompt": "w5 \ud800"}, ("prompt", "Unicode")),
    "an unknown token": ({"input_ids": [5, 97]}, ("one token or more", "from 0 to 96")),
    "a negative token": ({"input_ids": [-1]}, ("one token or more", "from 0 to 96")),
    "no new tokens": ({"input_ids": [5], "max_new_tokens": 0}, "max_new_tokens"),
    "too long": ({"input_ids": [5] * 97}, ("97 tokens", "max_new_tokens 32", "96")),
    "too long an answer": (
        {"input_ids": [5] * 90, "max_new_tokens": 7},
        ("90 tokens", "max_new_tokens 7", "96"),
    ),
}


def test_errors(with_graph: Make) -> None:
    """One clear line for each, and the server goes on."""
    folder = with_graph()
    with served(folder) as server:
        port = server.server_port
        for name, (body, words) in REFUSED.items():
            status, answer = ask(port, body)
            assert (status, answer.keys()) == (400, {"error"}), name
            says(answer["error"], words)
            assert "\n" not in answer["error"], name
        status, answer = ask(port, b" " * ((1 << 20) + 32 * LENGTH + 1))
        assert status == 413
        says(answer["error"], "1051648 bytes")
        for size in ("-1", "two", "9" * 5000):
            status, answer = ask(port, b"{}", **{"Content-Length": size})
            assert (status, "Content-Length" in answer["error"]) == (411, True), size
        assert ask(port, {}, path="/")[0] == 404
        for origin in ("https://evil.example", "null", f"http://127.0.0.1:{port}"):
            status, answer = ask(port, {"input_ids": [5]}, Origin=origin)
            assert (status, answer.keys()) == (403, {"error"})
            says(answer["error"], "web pages")
        assert free(port) == 2
        assert ask(port, {"input_ids": [5] * 90, "max_new_tokens": 6})[0] == 200


def test_a_model_that_fails(
    with_graph: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An answer that has begun ends without "finish"; the slot is free either way."""
    folder = with_graph()
    with served(folder) as server:
        steps = server.service.steps

        def failing(*given: Any) -> Iterator[list[int]]:
            for number, step in enumerate(steps(*given)):
                if number == 2:
                    raise RuntimeError("the kernel failed")
                yield step

        monkeypatch.setattr(server.service, "steps", failing)
        body = {"input_ids": [5, 6, 7], "max_new_tokens": 8}
        status, answer = ask(server.server_port, body)
        assert (status, answer.keys()) == (500, {"error"})
        says(answer["error"], "log")
        assert "kernel" not in answer["error"]
        status, lines = ask(server.server_port, body | {"stream": True})
        assert (status, len(lines), lines[-1]) == (200, 3, answer)
        eventually(lambda: free(server.server_port) == 2)
    assert "the kernel failed" in capfd.readouterr().err


def test_a_client_that_goes_away(with_graph: Make) -> None:
    """In a stream, and while it waits for a whole answer: the slot is free long before the answer ends."""
    folder = with_graph()
    long = {"input_ids": [5, 6, 7], "max_new_tokens": 4000}
    with served(folder, slots=1, length=4096) as server:
        port, service = server.server_port, server.service
        service.model.end_tokens = []
        slot = service.slots.get()
        service.slots.put(slot)
        connection, response = start(port, long | {"stream": True})
        assert response.readline()
        assert free(port) == 0
        response.close()
        connection.close()
        eventually(lambda: free(port) == 1)
        assert slot.used < 4000

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/generate", json.dumps(long))
        eventually(lambda: free(port) == 0)
        connection.close()
        eventually(lambda: free(port) == 1)
        assert slot.used < 4000
        assert ask(port, {"input_ids": [5, 6, 7], "max_new_tokens": 2})[0] == 200


def test_more_requests_than_slots(with_graph: Make) -> None:
    long = {"input_ids": [5, 6, 7], "max_new_tokens": 4000, "stream": True}
    with served(with_graph(), length=4096) as server:
        port = server.server_port
        server.service.model.end_tokens = []
        running = [start(port, long) for _ in range(2)]
        connection, response = start(port, {"input_ids": [5]})
        assert (response.status, response.getheader("Retry-After")) == (503, "1")
        says(json.loads(response.read())["error"], "queue is full", "try again")
        connection.close()
        for connection, response in running:
            assert response.readline()
            response.close()
            connection.close()
        eventually(lambda: free(port) == 2)


@contextmanager
def command(folder: Path, *options: str) -> Iterator[tuple[int, int]]:
    """The script as users run it; its process id and its port."""
    words = [sys.executable, str(SCRIPT), str(folder), "--port", "0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.terminate()


@needs_proc
def test_memory_is_bounded(with_graph: Make) -> None:
    """Under load, and with clients that go away: 200 requests take no more than the first 20."""
    folder = with_graph()
    options = ("--slots", "2", "--queue", "2", "--length", "2048", "--chunk", "64")
    with command(folder, *options) as (pid, port), ThreadPoolExecutor(6) as pool:
        before = anonymous(pid)

        def one(number: int) -> None:
            length = 10 + number * 379 % 1900
            body = {"input_ids": [5 + number % 9] * length, "max_new_tokens": 5 + number % 7, "stream": True}
            connection, response = start(port, body)
            if number % 5 == 0:
                response.readline()
            else:
                response.read()
            response.close()
            connection.close()

        list(pool.map(one, range(20)))
        first = anonymous(pid)
        peaks = []
        for number in range(20, 200, 12):
            list(pool.map(one, range(number, number + 12)))
            peaks.append(anonymous(pid))
        eventually(lambda: free(port) == 2)
    print(f"{before >> 10} kB at the start, {first >> 10} kB, then {[peak >> 10 for peak in peaks]} kB")
    assert max(peaks) - first <= 4 * MB
    assert max(peaks) - before <= 16 * MB


def test_what_cannot_be_served(converted: Convert) -> None:
    """One line each, as users see it."""
    folder = exported(converted("bloom", 4, "ntk"))
    longest = json.loads((folder / "genai_config.json").read_text())["model"]["context_length"]

    def line(*words: str) -> str:
        done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        return done.stderr

    says(line(str(folder), "--length", str(longest + 1)), f"--length {longest + 1}", f"{longest} tokens")
    says(line(str(folder), "--slots", "0"), "--slots", "--length", "--chunk")
    (folder / "genai_config.json").unlink()
    says(line(str(folder), "--length", str(10**15)), "Unable to allocate")
