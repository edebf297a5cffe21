"""examples/serve_onnx.py under what a server meets, as a process of its own."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from converter import OnnxOptions, convert
from tests import tiny
from tests.conftest import edit_json
from tests.memory import MB, anonymous, needs_proc
from tests.patched import load

pytest.importorskip("onnxruntime")

SCRIPT = Path(__file__).parent.parent / "examples" / "serve_onnx.py"
SLOTS, LENGTH, NEW = 2, 1400, 12


class Running(NamedTuple):
    folder: Path
    port: int
    pid: int

    def ask(self, content: Any, path: str = "/generate") -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, the answer's JSON or lines of it, and the headers."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            connection.request("POST", path, body)
            response = connection.getresponse()
            lines = [json.loads(line) for line in response.read().splitlines()]
            stream = response.headers["Content-Type"] == "application/x-ndjson"
            return response.status, lines if stream else lines[0], response.headers

    def free(self) -> int:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", "/health")
            return int(json.loads(connection.getresponse().read())["free"])


@contextmanager
def started(folder: Path, *words: object) -> Iterator[Running]:
    command = [sys.executable, str(SCRIPT), str(folder), "--port", "0", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield Running(folder, int(line.split(":")[2].split("/")[0]), process.pid)
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("served")
    source = tiny.FACTORIES["bloom"](place / "source", 8)
    graph = OnnxOptions(last_logits=True, validate=False)
    convert(source, place / "out", train_length=256, verify=False, onnx=graph)
    with started(place / "out", "--slots", SLOTS, "--length", LENGTH) as running:
        yield running


def expected(folder: Path, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers generates, without the end token."""
    ids = torch.tensor([prompt])
    made = load(folder).float().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)
    return [token for token in made[0, len(prompt) :].tolist() if token != tiny.END]


def prompt(length: int, seed: int = 0) -> list[int]:
    return tiny.token_ids(1, length, seed)[0].tolist()


def test_unequal_prompts_at_the_same_time(server: Running) -> None:
    """One of them is longer than a piece, and the slots are used again for other prompts."""
    prompts = [prompt(length, length) for length in (5, 700, 60, 1, 300, 513)]

    def ask(ids: list[int]) -> list[int]:
        while True:
            status, answer, _ = server.ask({"input_ids": ids, "max_new_tokens": NEW})
            if status == 200:
                return list(answer["token_ids"])
            assert status == 503
            time.sleep(0.05)

    with ThreadPoolExecutor(SLOTS) as pool:
        found = list(pool.map(ask, prompts))
    assert found == [expected(server.folder, ids) for ids in prompts]


def test_a_stream_has_the_same_tokens_and_text(server: Running) -> None:
    request = {"prompt": "w9 w8 w20", "max_new_tokens": NEW}
    status, whole, _ = server.ask(request)
    _, lines, _ = server.ask({**request, "stream": True})
    assert status == 200
    assert whole["token_ids"] == [line["token_id"] for line in lines]
    assert whole["text"] == "".join(line["text"] for line in lines) != ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (["w4"], "must be an object"),
        ({}, "give prompt or input_ids"),
        ({"prompt": "w4", "input_ids": [4]}, "give prompt or input_ids"),
        ({"prompt": "w4", "temperature": 1}, "give prompt or input_ids"),
        ({"prompt": 4}, "must be a text"),
        ({"prompt": None}, "must be a text"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [4, True]}, "list of token ids"),
        ({"input_ids": "w4"}, "list of token ids"),
        ({"input_ids": [-1]}, "token ids are from 0"),
        ({"input_ids": [10**12]}, "token ids are from 0"),
        ({"prompt": "w4", "max_new_tokens": 0}, "from 1 on"),
        ({"prompt": "w4", "max_new_tokens": True}, "from 1 on"),
        ({"input_ids": [5] * LENGTH, "max_new_tokens": 1}, f"do not fit into {LENGTH}"),
        ({"prompt": "w4", "max_new_tokens": 10**9}, f"do not fit into {LENGTH}"),
        (b" " * (1 << 21), "at most"),
    ],
)
def test_a_bad_request_gets_one_line(server: Running, body: Any, message: str) -> None:
    try:
        status, answer, _ = server.ask(body)
    except (BrokenPipeError, ConnectionResetError):
        assert isinstance(body, bytes)  # refused before it was sent
    else:
        assert status == 400
        assert message in answer["error"]
    assert server.free() == SLOTS


def test_more_requests_than_slots(server: Running) -> None:
    """They are told to try again; the others are answered."""
    request = {"input_ids": prompt(600), "max_new_tokens": 300}
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(server.ask, [request] * 12))
    statuses = [status for status, _, _ in found]
    assert statuses.count(200) >= SLOTS
    assert statuses.count(503) >= 1
    assert {*statuses} == {200, 503}
    answers = [answer["token_ids"] for status, answer, _ in found if status == 200]
    assert all(answer == answers[0] for answer in answers)
    assert all(headers["Retry-After"] for status, _, headers in found if status == 503)
    assert server.free() == SLOTS


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(server: Running, stream: bool) -> None:
    body = json.dumps({"input_ids": prompt(9), "max_new_tokens": LENGTH - 9, "stream": stream}).encode()
    head = f"POST /generate HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        if stream:
            assert connection.recv(1 << 12)
        while server.free() == SLOTS:
            assert time.monotonic() < begun + 20, "the request was over before it could be left"
    left = time.monotonic()
    while server.free() < SLOTS:
        time.sleep(0.01)
        assert time.monotonic() < left + 5


def test_a_silent_connection_takes_no_slot(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /generate HTTP/1.0\r\nContent-Length: 100\r\n\r\n{")
        assert server.free() == SLOTS
        assert server.ask({"prompt": "w4", "max_new_tokens": 2})[0] == 200


@needs_proc
def test_memory_does_not_grow_under_load(server: Running) -> None:
    """The caches are all there is, whatever is asked."""
    lengths = (1300, 40, 700, 1100)

    def load_it() -> int:
        with ThreadPoolExecutor(6) as pool:
            requests = [{"input_ids": prompt(lengths[n % 4], n), "max_new_tokens": 4} for n in range(40)]
            assert {status for status, _, _ in pool.map(server.ask, requests)} <= {200, 503}
        return anonymous(server.pid)

    load_it()
    before = load_it()
    assert load_it() < before + 8 * MB


def test_a_length_that_the_model_does_not_have(server: Running, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(server.folder, tmp_path / "copy"))
    edit_json(folder / "config.json", {"max_position_embeddings": LENGTH - 1})
    command = [sys.executable, str(SCRIPT), str(folder), "--length", str(LENGTH), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert f"at most {LENGTH - 1} tokens" in run.stderr
    assert len(run.stderr.splitlines()) == 1
