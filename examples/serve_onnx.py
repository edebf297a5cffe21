"""Serve an exported graph over HTTP with onnxruntime only, in a fixed amount of memory.

    python examples/serve_onnx.py DIR [--slots 2] [--length 2048] [--port 8000]
    curl localhost:8000/generate -d '{"prompt": "a prompt", "max_new_tokens": 64, "stream": true}'

DIR is as in generate_onnx.py. Export it with --last-logits, so that a prompt does not compute the logits of
all its tokens. Each slot answers one request at a time; its cache holds --length tokens, prompt and answer.
All caches are allocated at the start. A request that finds no free slot is refused with 503, so that a
client or a load balancer can try again.

A request may have "input_ids" instead of "prompt". The answer is {"token_ids": ..., "text": ...}; with
"stream", a line with "token_id" and "text" for each token. GET /health tells how many slots are free.
"""

from __future__ import annotations

import argparse
import json
import queue
import select
import signal
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from generate_onnx import PROVIDERS, Batch, Model, text_functions

PIECE = 512
"""Tokens of a prompt that run at once: what a longer prompt needs beside its cache does not grow with it."""
LARGEST_BODY = 1 << 20
"""Bytes of a request."""
PATIENCE = 30.0
"""Seconds that a client may take to send its request or to read a part of the answer."""


class BadRequest(Exception):
    """What is wrong with a request, in one line."""


class Request:
    """A checked request.

    Args:
        body: what the client sent.
        encode: from text to tokens.
        length: most tokens of prompt and answer.

    Raises:
        BadRequest: it cannot be answered.
    """

    def __init__(self, body: bytes, encode: Callable[[str], list[int]], length: int, vocabulary: int):
        try:
            content = json.loads(body)
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise BadRequest('the body must be an object, such as {"prompt": "a prompt"}')
        unknown = content.keys() - {"prompt", "input_ids", "max_new_tokens", "stream"}
        if unknown or len(content.keys() & {"prompt", "input_ids"}) != 1:
            raise BadRequest("give prompt or input_ids, and if you like max_new_tokens and stream")
        self.stream = content.get("stream", False) is True
        self.new = content.get("max_new_tokens", 32)
        if type(self.new) is not int or self.new < 1:
            raise BadRequest("max_new_tokens must be a whole number from 1 on")
        prompt = content.get("prompt")
        if "prompt" in content and not isinstance(prompt, str):
            raise BadRequest("prompt must be a text")
        try:
            self.ids = content["input_ids"] if prompt is None else encode(prompt)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        whole = isinstance(self.ids, list) and all(type(token) is int for token in self.ids)
        if not whole or not self.ids:
            raise BadRequest("the prompt has no tokens" if whole else "input_ids must be a list of token ids")
        if not 0 <= min(self.ids) <= max(self.ids) < vocabulary:
            raise BadRequest(f"token ids are from 0 to {vocabulary - 1}")
        if len(self.ids) + self.new > length:
            raise BadRequest(
                f"{len(self.ids)} tokens of the prompt and {self.new} new ones do not fit into {length}"
            )


class Server(ThreadingHTTPServer):
    """The model, its slots, and a thread for each connection.

    Args:
        address: host and port.
        folder, provider, graph: see ``generate_onnx.Model``.
        slots: how many requests are answered at once.
        length: tokens that a slot holds.
    """

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        folder: Path,
        provider: str,
        graph: str | None,
        slots: int,
        length: int,
    ):
        longest = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(
            "max_position_embeddings"
        )
        if longest is not None and length > longest:
            raise ValueError(f"--length {length}: the model's config says at most {longest} tokens")
        # The session comes before the threads: they inherit how it treats denormal numbers.
        self.model = Model(folder, provider, graph)
        self.vocabulary = int(self.model.logits.shape[2])
        self.encode, self.decode = text_functions(folder)
        self.length, self.slots = length, slots
        self.free: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        for _ in range(slots):
            self.free.put(Batch(self.model, 1, length))
        super().__init__(address, Handler)

    def tokens(self, batch: Batch, request: Request) -> Iterator[int]:
        """The answer's tokens, one by one; greedy, without the end token."""
        batch.reset()
        for start in range(0, len(request.ids), PIECE):
            logits = batch.prefill([request.ids[start : start + PIECE]])
        for number in range(request.new):
            token = int(logits[0].argmax())
            if token in self.model.end_tokens:
                return
            yield token
            if number < request.new - 1:
                logits = batch.step(np.array([token]))


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Tells how many slots are free."""
        if self.path == "/health":
            self.answer(200, {"slots": self.server.slots, "free": self.server.free.qsize()})
        else:
            self.answer(404, {"error": "POST /generate, or GET /health"})

    def do_POST(self) -> None:
        """Generates."""
        try:
            request = self.request_of_body()
        except BadRequest as error:
            return self.answer(400, {"error": str(error)})
        try:
            batch = self.server.free.get_nowait()
        except queue.Empty:
            return self.answer(503, {"error": "all slots are busy; try again"}, **{"Retry-After": "1"})
        try:
            self.generate(batch, request)
        except OSError:
            self.close_connection = True  # the client has gone
        finally:
            self.server.free.put(batch)

    def request_of_body(self) -> Request:
        size = self.headers.get("Content-Length", "")
        if self.path != "/generate":
            raise BadRequest("POST /generate")
        if not size.isdigit() or int(size) > LARGEST_BODY:
            raise BadRequest(f"send a body of at most {LARGEST_BODY} bytes, with its Content-Length")
        try:
            body = self.rfile.read(int(size))
        except OSError:
            raise BadRequest(f"the body did not come within {PATIENCE:.0f} seconds") from None
        return Request(body, self.server.encode, self.server.length, self.server.vocabulary)

    def generate(self, batch: Batch, request: Request) -> None:
        found: list[int] = []
        shown = ""
        if request.stream:
            self.start(200, "application/x-ndjson")
        for token in self.server.tokens(batch, request):
            found.append(token)
            if self.gone():
                raise ConnectionAbortedError
            if request.stream:
                text = self.server.decode(found)
                # A character may take several tokens.
                piece = "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text[len(shown) :]
                shown += piece
                self.wfile.write(json.dumps({"token_id": token, "text": piece}).encode() + b"\n")
        if not request.stream:
            self.answer(200, {"token_ids": found, "text": self.server.decode(found)})

    def gone(self) -> bool:
        """Whether the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def answer(self, status: int, content: Any, **headers: str) -> None:
        body = json.dumps(content).encode() + b"\n"
        self.start(status, "application/json", **headers, **{"Content-Length": str(len(body))})
        self.wfile.write(body)

    def start(self, status: int, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Logs nothing; a server of your own logs what you need."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--slots", type=int, default=2, help="requests that are answered at once [2]")
    parser.add_argument("--length", type=int, default=2048, help="tokens of prompt and answer [2048]")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free [8000]")
    parser.add_argument("--provider", choices=sorted(PROVIDERS), default="cpu")
    parser.add_argument("--graph", help="the graph's file in DIR, if there are several")
    options = parser.parse_args()
    if options.slots < 1 or options.length < 2:
        parser.error("--slots must be at least 1, and --length at least 2")
    try:
        server = Server(
            (options.host, options.port),
            options.folder,
            options.provider,
            options.graph,
            options.slots,
            options.length,
        )
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        raise SystemExit(f"error: {error}") from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(
        f"http://{options.host}:{server.server_port}/generate, {options.slots} slots of {options.length} tokens",
        flush=True,
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
