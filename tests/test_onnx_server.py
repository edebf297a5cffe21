"""examples/serve_onnx.py: the tokens of transformers, whatever else runs, through OpenAI's client."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter import convert
from tests import tiny
from tests.conftest import RunCli, edit_json
from tests.memory import MB, anonymous, needs_proc
from tests.messages import Words, says
from tests.onnx_graphs import NEW, Make, expected, exported, generated, prompts
from tests.patched import Convert

pytest.importorskip("onnxruntime")
pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import openai
import serve_onnx
import uvicorn
from answer_text import AnswerText
from generate_onnx import Model
from onnx_batching import Request
from serve_onnx import Service, application, listen, load_tokenizer, main

SCRIPT = Path(__file__).parent.parent / "examples" / "serve_onnx.py"
PROMPTS = prompts((60, 43, 12, 1, 33, 17))
EXAMPLE = SCRIPT.parent / "tiny-bloom"
LENGTH = 96
"""Tokens of a row."""
LONG = 4000
"""Tokens that take much longer than the rest of a test."""


class Running:
    """A server in this process, and OpenAI's client for it."""

    def __init__(self, service: Service, url: str):
        self.service = service
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def complete(self, prompt: Any, **options: Any) -> Any:
        asked = {"temperature": 0, "max_tokens": NEW} | options
        return self.client.completions.create(model=self.service.name, prompt=prompt, **asked)

    def chat(self, content: str, **options: Any) -> Any:
        asked = {"temperature": 0, "max_tokens": NEW} | options
        messages: Any = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model=self.service.name, messages=messages, **asked)

    def post(self, body: object, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, str]:
        """Status, headers and content of an answer to what OpenAI's client would not send."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    @property
    def free(self) -> int:
        """Rows that no request has."""
        with urllib.request.urlopen(f"{self.url}/health") as answer:
            return int(json.load(answer)["free"])


def message(content: str) -> str:
    """The line of an error."""
    line: str = json.loads(content)["error"]["message"]
    assert "\n" not in line
    return line


@contextmanager
def served(
    folder: Path, *, endless: bool = False, send_buffer: int | None = None, **options: Any
) -> Iterator[Running]:
    """Serves a folder on a port that is free.

    Args:
        endless: answers have no end token.
        send_buffer: bytes that the kernel keeps for a client that does not read; by default megabytes.
    """
    sizes = {"rows": 2, "length": LENGTH, "waiting": 0, "chunk": 16} | options
    model = Model(folder, threads=1)
    if endless:
        model.end_tokens = []
    service = Service(model, folder, load_tokenizer(folder, False), **sizes)
    with listen("127.0.0.1", 0) as listening:
        if send_buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = uvicorn.Server(uvicorn.Config(application(service), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        eventually(lambda: server.started)
        try:
            yield Running(service, f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join()


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def text_of(folder: Path, prompt: list[int], tokens: list[int]) -> str:
    """The text of tokens behind a prompt; it begins with the space between the two."""
    tokenizer = load_tokenizer(folder, False)
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + tokens))
    text: str = whole[len(before) :]
    return text


@pytest.mark.parametrize(
    ("family", "scaling"),
    [("bloom", "ntk"), ("jais", "ntk-position"), ("mpt", "ntk-length"), ("falcon", "concave")],
)
def test_requests_of_different_lengths_together(with_graph: Make, family: str, scaling: str) -> None:
    """More than there are rows, in rows that others have used, and prompts in chunks of 16 tokens."""
    folder = with_graph(family, scaling)
    right = [generated(folder, prompt) for prompt in PROMPTS]
    with served(folder, rows=4, waiting=20) as server, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(server.complete, PROMPTS * 2))
        assert server.free == 4
    texts = [text_of(folder, prompt, row) for prompt, row in zip(PROMPTS, right, strict=True)]
    assert [each.choices[0].text for each in answers] == texts * 2
    ends = ["stop" if row[-1] == tiny.END else "length" for row in right]
    assert [each.choices[0].finish_reason for each in answers] == ends * 2
    used = [(each.usage.prompt_tokens, each.usage.completion_tokens) for each in answers]
    assert used == [(len(prompt), len(row)) for prompt, row in zip(PROMPTS, right, strict=True)] * 2


def test_log_probabilities_beside_other_requests(with_graph: Make) -> None:
    """Of the prompt and of the answer, those of the reference in float64."""
    folder = with_graph("bloom", "ntk-position")
    with (
        served(folder, endless=True, length=192) as server,
        server.complete([5, 6, 7], max_tokens=189, stream=True) as other,
    ):
        next(iter(other))
        choice = server.complete(PROMPTS[0], echo=True, logprobs=0).choices[0]
    tokens = load_tokenizer(folder, False).convert_tokens_to_ids(choice.logprobs.tokens)
    assert tokens[: len(PROMPTS[0])] == PROMPTS[0]
    assert len(tokens) == len(PROMPTS[0]) + NEW
    logits = expected(folder, "bloom", np.array([tokens]))[0, :-1]
    right = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = choice.logprobs.token_logprobs
    assert found[0] is None
    assert np.abs(np.array(found[1:]) - right[range(len(right)), tokens[1:]]).max() < 1e-4


def test_evaluated_as_a_server(tmp_path: Path, run: RunCli) -> None:
    """The table of ``eval --server`` is that of the model here; and the server is found to scale."""
    folder, text = tmp_path / "model", tmp_path / "text"
    convert(EXAMPLE, folder, train_length=256, verify=False)
    prompts = [json.loads(line) for line in EXAMPLE.with_suffix(".jsonl").read_text().splitlines()]
    kept = [each for each in prompts if each["length"] == 256][:4]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, kept)))
    text.write_text(" ".join(each["prompt"] for each in kept))
    asked = ("--prompts", tmp_path / "prompts.jsonl", "--text", text, "--lengths", "512", "--json")
    with served(exported(folder), rows=4, waiting=4, length=1024, chunk=128) as server:
        found = run("eval", folder, "--server", server.url, *asked)
        assert found.code == 0, found.err
        there = found.json
    here = run("eval", folder, *asked).json
    for found, right in zip(there["measurements"], here["measurements"], strict=True):
        assert found["value"] == pytest.approx(right["value"], rel=1e-3)
    [model] = there["models"].values()
    assert model["server"]["scales"].startswith("yes")


def test_a_request_joins_while_another_runs(with_graph: Make) -> None:
    with (
        served(with_graph(), endless=True, length=4096) as server,
        server.complete([5, 6, 7], max_tokens=LONG, stream=True) as long,
    ):
        next(iter(long))
        assert server.complete([8, 9], max_tokens=3).usage.completion_tokens == 3
        assert server.free == 1, "the long one still runs"


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_is_the_whole_answer(converted: Convert, kind: str) -> None:
    folder = exported(converted("mpt", 4, "ntk"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    text = "w5 w6 w7 w8 w9 w10"
    # A chat's template writes the special tokens itself.
    prompt = load_tokenizer(folder, False)(text, add_special_tokens=kind == "completion")["input_ids"]
    tokens = generated(folder, prompt)
    with served(folder) as server:
        if kind == "chat":
            whole = server.chat(text).choices[0].message.content
            chunks = list(server.chat(text, stream=True, stream_options={"include_usage": True}))
            parts = [each.choices[0].delta.content or "" for each in chunks[:-1]]
            assert chunks[0].choices[0].delta.role == "assistant"
        else:
            whole = server.complete(text).choices[0].text
            chunks = list(server.complete(text, stream=True, stream_options={"include_usage": True}))
            parts = [each.choices[0].text for each in chunks[:-1]]
    assert len(parts) > 3
    assert "".join(parts) == whole == text_of(folder, prompt, tokens)
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].usage.completion_tokens == len(tokens)


def test_texts_to_stop_at(with_graph: Make) -> None:
    folder = with_graph()
    with served(folder, endless=True, length=4096) as server:
        words = server.complete(PROMPTS[1]).choices[0].text.split()
        stop = words[4]
        choice = server.complete(PROMPTS[1], max_tokens=LONG, stop=[stop, "never"]).choices[0]
        eventually(lambda: server.free == 2)
    before = words[: words.index(stop)]
    assert (choice.text.split(), choice.finish_reason) == (before, "stop")


def test_a_seed_gives_the_same_answer(with_graph: Make) -> None:
    with served(with_graph(), endless=True) as server:

        def answer(seed: int) -> str:
            text: str = server.complete([5, 6, 7], temperature=1.5, seed=seed, max_tokens=40).choices[0].text
            return text

        assert answer(1) == answer(1) != answer(2)


@pytest.mark.parametrize(
    ("temperature", "top_p", "right"),
    [
        (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]),
        (0.5, 1.0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (1.0, 0.79, [0.625, 0.375, 0, 0]),
        (1.0, 0.81, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (0.0, 1.0, [1, 0, 0, 0]),
    ],
)
def test_sampling(temperature: float, top_p: float, right: list[float]) -> None:
    """Of 20,000 tokens, each is as frequent as its probability says."""
    request = Request([1], 1, print, temperature=temperature, top_p=top_p, seed=0)
    logits = np.log([0.15, 0.5, 0.05, 0.3])
    drawn = np.bincount([request.sample(logits) for _ in range(20_000)], minlength=4) / 20_000
    assert np.abs(np.sort(drawn)[::-1] - right).max() < 0.015
    assert drawn.argmax() == 1


@pytest.mark.parametrize(
    ("tokens", "stop", "shown"),
    [
        ("a b c", (), ["a", "b", "c"]),
        ("a s t o p b", ("stop",), ["a", "", "", "", ""]),
        ("a s t a b", ("stop",), ["a", "", "", "sta", "b"]),
        ("a s t", ("stop",), ["a", "", "", "st"]),
        ("a b a b c", ("abc", "x"), ["", "", "ab", "", ""]),
        ("xstopy", ("stop",), ["x"]),
        ("a \N{REPLACEMENT CHARACTER} b", (), ["a", "", "\N{REPLACEMENT CHARACTER}b"]),
        ("a \N{REPLACEMENT CHARACTER}", (), ["a", "", "\N{REPLACEMENT CHARACTER}"]),
        ("ab", ("b", "a"), [""]),
    ],
)
def test_text_is_held_back_while_a_stop_may_begin(
    tokens: str, stop: tuple[str, ...], shown: list[str]
) -> None:
    pieces = tokens.split()
    text = AnswerText(lambda ids: "".join(pieces[each] for each in ids), stop)
    found = []
    for number in range(len(pieces)):
        if not text.stopped:
            found.append(text.add(number))
    if not text.stopped:
        rest = text.end()
        if rest:
            found.append(rest)
    assert found == shown


REFUSED: dict[str, tuple[object, Words]] = {
    "no JSON": (b"{", "JSON"),
    "no object": ([5], "object"),
    "no prompt": ({}, ("prompt", "required")),
    "an unknown option": ({"prompt": "w5", "promt": 1}, ("promt", "not supported", "drop it")),
    "several answers": ({"prompt": "w5", "n": 2}, ("n 2", "not supported")),
    "several prompts": ({"prompt": ["w5", "w6"]}, ("several prompts", "one request for each")),
    "several prompts of tokens": ({"prompt": [[5], [6]]}, ("several prompts", "one request for each")),
    "digits as tokens": ({"prompt": [["5", "6"]]}, ("a text or a list of token ids")),
    "no prompt but a number": ({"prompt": 5}, ("a text or a list of token ids")),
    "a number as a text": ({"prompt": [5], "max_tokens": "5"}, "max_tokens"),
    "other log-probabilities": ({"prompt": "w5", "logprobs": 5}, ("logprobs", "0")),
    "a streamed echo": ({"prompt": "w5", "echo": True, "stream": True}, ("echo", "not streamed")),
    "an empty stop": ({"prompt": "w5", "stop": ""}, ("stop", "empty")),
    "half a character": (b'{"prompt": "w5 \\ud800"}', "JSON"),
    "an unknown token": ({"prompt": [5, 97]}, ("one token or more", "from 0 to 96")),
    "a negative token": ({"prompt": [-1]}, ("one token or more", "from 0 to 96")),
    "an empty prompt": ({"prompt": []}, "one token or more"),
    "negative tokens": ({"prompt": [5], "max_tokens": -1}, ("max_tokens", "0")),
    "too hot": ({"prompt": [5], "temperature": 3}, ("temperature", "2")),
    "too long": ({"prompt": [5] * 97}, ("97 tokens", "max_tokens 16", "96")),
    "too long an answer": ({"prompt": [5] * 90, "max_tokens": 7}, ("90 tokens", "max_tokens 7", "96")),
}


def test_what_is_refused(with_graph: Make) -> None:
    """One clear line for each, and the server goes on."""
    with served(with_graph()) as server:
        for name, (body, words) in REFUSED.items():
            status, _, content = server.post(body)
            assert status == 400, name
            says(message(content), words)
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            server.client.completions.create(model="other", prompt="w5")
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            server.chat("w5")
        status, _, content = server.post(b" " * ((1 << 20) + 32 * LENGTH + 1))
        assert status == 413
        says(message(content), "1051648 bytes")
        for origin in ("https://evil.example", "null", server.url):
            status, _, content = server.post({"prompt": [5]}, Origin=origin)
            assert status == 403
            says(message(content), "web pages")
        assert server.post({}, "/v1/nothing")[0] == 404
        assert server.free == 2
        assert server.client.models.retrieve(server.service.name).id == server.service.name
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            server.client.models.retrieve("other")


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": [5] * 90, "max_tokens": 6},
        {"prompt": ["w5 w6"]},
        {"prompt": [[5, 6]]},
        {"prompt": [5], "temperature": 2.3e-308},
        {"prompt": [5], "temperature": 1, "top_p": 1e-300, "seed": -5},
        {"prompt": [5], "n": 1, "best_of": None, "repetition_penalty": 1.0, "top_k": -1, "user": "x"},
        {"prompt": [5], "min_tokens": 0, "stop_token_ids": [], "stream_options": {"include_usage": None}},
        {"prompt": [5], "max_tokens": 0, "echo": True, "logprobs": 0},
    ],
)
def test_what_is_accepted(with_graph: Make, asked: dict[str, Any]) -> None:
    with served(with_graph()) as server:
        status, _, content = server.post({"max_tokens": 4, **asked})
    assert status == 200, content


def test_parts_of_messages(converted: Convert) -> None:
    folder = exported(converted("mpt", 4, "ntk"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    parts = [{"type": "text", "text": "w5 w6 "}, {"type": "text", "text": "w7"}]
    asked = {"temperature": 0, "logprobs": False, "tool_choice": "none"}
    with served(folder) as server:
        messages = [{"role": "user", "content": parts, "name": "ada"}]
        status, _, content = server.post({"messages": messages, **asked}, "/v1/chat/completions")
        assert status == 200, content
        whole = server.chat("w5 w6 w7", max_tokens=None).choices[0].message.content
        assert json.loads(content)["choices"][0]["message"]["content"] == whole
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        status, _, content = server.post({"messages": messages}, "/v1/chat/completions")
        assert status == 400
        says(message(content), "parts of the type text")


def test_an_echo_is_one_text(with_graph: Make) -> None:
    """An answer begins with the space that is between it and the prompt."""
    with served(with_graph()) as server:
        text = server.complete(PROMPTS[1], echo=True).choices[0].text
        assert text.split(" ")[: len(PROMPTS[1])] == [f"w{token}" for token in PROMPTS[1]]
        assert len(text.split(" ")) > len(PROMPTS[1])
        assert server.complete([5], max_tokens=0, echo=True, logprobs=0).choices[0].text == "w5"


def test_a_graph_without_the_logits_of_prompts(with_graph: Make) -> None:
    folder = with_graph("bloom", "ntk", last_logits=True)
    with served(folder) as server:
        with pytest.raises(openai.BadRequestError, match="without --last-logits"):
            server.complete([5, 6], echo=True, logprobs=0)
        right = text_of(folder, PROMPTS[0], generated(folder, PROMPTS[0]))
        assert server.complete(PROMPTS[0]).choices[0].text == right


def test_a_template_that_fails(converted: Convert) -> None:
    folder = exported(converted("mpt", 4, "ntk"))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with served(folder) as server, pytest.raises(openai.BadRequestError, match="no system message"):
        server.chat("w5")


def test_a_model_that_fails(
    with_graph: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An answer that has begun ends without [DONE]; the row is free either way."""
    with served(with_graph(), endless=True) as server:
        batch = server.service.batcher.batch
        step, steps = batch.step, []

        def failing(tokens: Any) -> Any:
            steps.append(tokens)
            if len(steps) % 3 == 0:
                raise RuntimeError("the kernel failed")
            return step(tokens)

        monkeypatch.setattr(batch, "step", failing)
        with pytest.raises(openai.InternalServerError, match="the server's log"):
            server.complete([5, 6, 7])
        status, _, content = server.post({"prompt": [5, 6, 7], "stream": True})
        assert status == 200
        *_, last = content.strip().split("\n\n")
        says(message(last.removeprefix("data: ")), "log")
        eventually(lambda: server.free == 2)
    assert "the kernel failed" in capfd.readouterr().err


@pytest.mark.parametrize("fails", ["prefill", "logits"])
def test_a_failure_ends_only_its_own_request(
    with_graph: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: str
) -> None:
    with served(with_graph(), endless=True, length=4096) as server:
        batch = server.service.batcher.batch
        prefill = batch.prefill

        def failing(row: int, tokens: Any) -> Any:
            logits = prefill(row, tokens)
            if tokens == [8, 9]:
                if fails == "prefill":
                    raise RuntimeError("the kernel failed")
                logits[:] = np.nan
            return logits

        monkeypatch.setattr(batch, "prefill", failing)
        with server.complete([5, 6, 7], max_tokens=LONG, stream=True) as other:
            parts = iter(other)
            next(parts)
            with pytest.raises(openai.InternalServerError, match="the server's log"):
                server.complete([8, 9])
            *_, last = parts
        assert last.choices[0].finish_reason == "length"
    assert {"prefill": "the kernel failed", "logits": "no numbers"}[fails] in capfd.readouterr().err


def test_the_end_of_the_thread_ends_all(with_graph: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, and /health says it."""
    with served(with_graph(), endless=True, length=4096) as server:
        batcher = server.service.batcher
        monkeypatch.setattr(batcher, "_step", lambda: 1 / 0)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="the server's log"):
                server.complete([5, 6, 7], max_tokens=LONG)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url}/health")


BODY = {"prompt": [5, 6, 7], "max_tokens": LONG}


@contextmanager
def sent(server: Running, body: object) -> Iterator[socket.socket]:
    """A request whose answer is not read."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + content)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(with_graph: Make, stream: bool) -> None:
    """The row is free long before the answer would have ended."""
    with served(with_graph(), endless=True, rows=1, length=LONG + 96) as server:
        batcher = server.service.batcher
        with sent(server, {**BODY, "stream": stream}):
            eventually(lambda: bool(batcher.running) and batcher.running[0].generated > 0)
            [request] = batcher.running
            assert server.free == 0
        eventually(lambda: server.free == 1 and not batcher.running)
        assert request.generated < LONG
        assert server.complete([5, 6, 7], max_tokens=2).usage.completion_tokens == 2


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux ends such connections")
def test_a_client_that_does_not_read(with_graph: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place becomes free, although it does not close its connection; it keeps no server from ending."""
    monkeypatch.setattr(serve_onnx, "PATIENCE", 1)
    with (
        served(with_graph(), endless=True, send_buffer=4096, rows=1, length=LONG + 96) as server,
        sent(server, {**BODY, "stream": True}),
    ):
        eventually(lambda: server.free == 0)
        eventually(lambda: server.free == 1)
        assert server.complete([5, 6, 7], max_tokens=2).usage.completion_tokens == 2


def test_more_requests_than_places(with_graph: Make) -> None:
    """The next one waits, the one after it is told to try again, and who waits too long as well."""
    sizes = {"rows": 1, "waiting": 1, "length": LONG + 96}
    with served(with_graph(), endless=True, **sizes) as server, ThreadPoolExecutor(1) as pool:
        waiting = server.service.batcher.waiting
        with server.complete([5, 6, 7], max_tokens=LONG, stream=True) as running:
            next(iter(running))
            waits = pool.submit(server.complete, [8, 9], max_tokens=2)
            eventually(lambda: bool(waiting))
            status, headers, content = server.post({"prompt": [5]})
            assert (status, headers["Retry-After"]) == (503, "1")
            says(message(content), "queue is full", "try again")
            assert not waits.done()
        assert waits.result().usage.completion_tokens == 2
        with server.complete([5, 6, 7], max_tokens=LONG, stream=True) as running:
            next(iter(running))
            late = pool.submit(server.post, {"prompt": [5]})
            eventually(lambda: bool(waiting))
            waiting[0].waits_until = 0
            status, _, content = late.result()
        assert status == 503
        says(message(content), "no row became free", "try again")


@contextmanager
def command(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The script as users run it, and its address."""
    words = [sys.executable, str(SCRIPT), str(folder), "--port", "0", "--threads", "1", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield process, line.split()[-1]
        finally:
            process.kill()


def test_sigterm_ends_the_server_after_its_answers(with_graph: Make, tmp_path: Path) -> None:
    """Also that of a request which still waits for its row."""
    folder = tmp_path / "model"
    shutil.copytree(with_graph("mpt", "ntk"), folder)
    edit_json(folder / "generation_config.json", {"eos_token_id": [10**6]})
    with (
        command(folder, "--rows", "1", "--length", "1024") as (process, url),
        ThreadPoolExecutor(1) as pool,
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": str(folder), "prompt": [5, 6, 7], "max_tokens": 1000}
        with client.completions.create(**asked, stream=True) as answer:
            parts = iter(answer)
            next(parts)
            waits = pool.submit(client.completions.create, **{**asked, "max_tokens": 2})
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            *_, last = parts
        assert last.choices[0].finish_reason == "length"
        assert waits.result().usage.completion_tokens == 2
        assert process.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"{url}/health")
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.slow
@needs_proc
def test_memory_is_bounded(with_graph: Make) -> None:
    """Under load, and with clients that go away, whose places become free a little later."""
    folder = with_graph()
    sizes = ("--rows", "2", "--queue", "16", "--length", "2048", "--chunk", "64")
    with command(folder, *sizes) as (process, url), ThreadPoolExecutor(6) as pool:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def one(number: int) -> None:
            prompt = [5 + number % 9] * (10 + number * 379 % 1900)
            asked: dict[str, Any] = {"model": str(folder), "prompt": prompt, "max_tokens": 5 + number % 7}
            with client.completions.create(**asked, stream=True) as answer:
                for _ in answer:
                    if number % 5 == 0:
                        break

        list(pool.map(one, range(20)))
        first = anonymous(process.pid)
        peaks = []
        for number in range(20, 200, 12):
            list(pool.map(one, range(number, number + 12)))
            peaks.append(anonymous(process.pid))
    print(f"{first >> 10} kB after 20, then {[peak >> 10 for peak in peaks]} kB")
    assert max(peaks) - first <= 8 * MB


def test_what_cannot_be_served(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line each, with exit code 1."""
    folder = exported(converted("bloom", 4, "ntk"))
    longest = json.loads((folder / "genai_config.json").read_text())["model"]["context_length"]

    def line(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder), *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        # Python prints a text to stderr and exits with 1.
        assert isinstance(stopped.value.code, str)
        assert "\n" not in stopped.value.code
        assert capfd.readouterr().out == ""
        return stopped.value.code

    says(line("--length", str(longest + 1)), f"--length {longest + 1}", f"{longest} tokens")
    says(line("--rows", "0"), "--rows", "--length", "--chunk")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        says(line("--port", str(taken.getsockname()[1])), "in use")
    (folder / "genai_config.json").unlink()
    says(line("--length", str(10**15)), "Unable to allocate")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    says(line(), "tokenizer", "does not load")
