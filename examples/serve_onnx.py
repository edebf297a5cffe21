"""Serve an exported graph over HTTP with onnxruntime only, on the loop of generate_onnx.py.

    python examples/serve_onnx.py DIR [--slots 2] [--length 2048] [--queue 4] [--port 8000] [--provider cuda]

    curl localhost:8000/generate -d '{"prompt": "a prompt", "max_new_tokens": 32}'
    curl --no-buffer localhost:8000/generate -d '{"input_ids": [5, 6, 7], "stream": true}'
    curl localhost:8000/health

A slot is the buffers of one request's caches. All slots are allocated at the start and used again, so memory
does not grow with the number of requests. A request that finds no free slot waits in the queue; if the queue
is full, the answer is 503. A prompt is run in chunks, so memory does not grow with its logits either.

A streamed answer is a line of JSON for each token. The last line has "finish"; an answer without it was cut.
"""

from __future__ import annotations

import argparse
import json
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from generate_onnx import PROVIDERS, Batch, Model, generate, text_functions

PATIENCE = 30
"""Seconds that a request waits for a slot, and the server for a client that neither writes nor reads."""
OTHERS = 32
"""Connections beside those with a slot or a place in the queue: they are answered at once, mostly 503."""
PATHS = "there are GET /health and POST /generate"
DEFAULT_LENGTH = 2048
DEFAULTS: dict[str, Any] = {"prompt": None, "input_ids": None, "max_new_tokens": 32, "stream": False}


class Refused(Exception):
    """A request that gets an error: the HTTP status, and one line that says why."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_new_tokens: int
    stream: bool


class Service:
    """A model, its slots, and what a request may ask for.

    Args:
        slots: requests that run at the same time.
        length: most tokens of a prompt and its answer; None: the context length, but at most 2048.
        waiting: requests that may wait for a slot.
        chunk: most tokens of a prompt that are run at once.

    Raises:
        ValueError: a number is too small.
        RuntimeError: ``length`` is beyond the context length.
    """

    def __init__(
        self, model: Model, folder: Path, slots: int, length: int | None, waiting: int, chunk: int = 512
    ):
        self.model = model
        self.encode, self.decode = text_functions(folder)
        longest = context_length(folder)
        self.length = min(longest or DEFAULT_LENGTH, DEFAULT_LENGTH) if length is None else length
        if longest is not None and self.length > longest:
            raise RuntimeError(f"--length {length} is beyond the context length, {longest} tokens")
        if min(slots, self.length, chunk, waiting + 1) < 1:
            raise ValueError("--slots, --length and --chunk must be at least 1, --queue at least 0")
        # With length-dynamic scaling, a prompt in chunks would not give the logits of the whole prompt.
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        whole = (config.get("alibi_scaling") or {}).get("dynamic") == "length"
        self.chunk = self.length if whole else chunk
        self.places = threading.BoundedSemaphore(slots + waiting)
        self.slots: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        for _ in range(slots):
            self.slots.put(Batch(model, 1, self.length))

    def parse(self, body: bytes) -> Request:
        """A request from its JSON; raises ``Refused`` with status 400 for one that cannot be run."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(given, dict) or not given.keys() <= DEFAULTS.keys():
            raise Refused(400, f"the body must be an object with keys among {', '.join(DEFAULTS)}")
        prompt, ids, new, stream = (DEFAULTS | given).values()
        if (prompt is None) == (ids is None):
            raise Refused(400, "give either prompt or input_ids")
        if type(new) is not int or new < 1 or type(stream) is not bool:
            raise Refused(400, "max_new_tokens must be a number of at least 1, stream true or false")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise Refused(400, "prompt must be a text")
            try:
                prompt.encode()  # JSON can have halves of a surrogate pair, which are no characters
                ids = self.encode(prompt)
            except UnicodeEncodeError:
                raise Refused(400, "prompt is not valid Unicode") from None
            except ValueError as error:
                raise Refused(400, str(error)) from None
        known = range(self.model.logits.shape[2])
        if not isinstance(ids, list) or not ids or not all(type(n) is int and n in known for n in ids):
            raise Refused(400, f"a prompt is one token or more, each an id from 0 to {known[-1]}")
        if len(ids) + new > self.length:
            raise Refused(
                400, f"{len(ids)} tokens and max_new_tokens {new} are more than the {self.length} of a slot"
            )
        return Request(ids, new, stream)

    @contextmanager
    def slot(self) -> Iterator[Batch]:
        """A free slot, or the next one that becomes free; raises ``Refused`` with status 503."""
        if not self.places.acquire(blocking=False):
            raise Refused(503, "all slots are taken and the queue is full; try again")
        try:
            batch = self.slots.get(timeout=PATIENCE)
        except queue.Empty:
            self.places.release()
            raise Refused(503, f"no slot became free within {PATIENCE} seconds; try again") from None
        try:
            batch.clear()
            yield batch
        finally:
            # In this order, so that where a slot is free, there is a place for who comes next.
            self.places.release()
            self.slots.put(batch)

    def steps(self, batch: Batch, request: Request) -> Iterator[list[int]]:
        """Runs a request in a slot; yields each token, and nothing ([]) after a chunk of the prompt."""
        last = (len(request.prompt) - 1) // self.chunk * self.chunk
        for start in range(0, last, self.chunk):
            batch.prefill([request.prompt[start : start + self.chunk]])
            yield []
        for [token] in generate(batch, [request.prompt[last:]], request.max_new_tokens):
            yield [] if token is None else [token]


def context_length(folder: Path) -> int | None:
    """The number of tokens that the scaling is made for, which the export wrote down; None if it did not."""
    path = folder / "genai_config.json"
    return json.loads(path.read_text(encoding="utf-8"))["model"]["context_length"] if path.is_file() else None


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: a connection is closed after its answer, so no idle client holds a thread."""

    server: Server
    timeout = PATIENCE
    started = False

    def do_GET(self) -> None:
        free = self.server.service.slots.qsize()
        self.send(*((200, {"free": free}) if self.path == "/health" else (404, {"error": PATHS})))

    def do_POST(self) -> None:
        # A client that has gone away is no error: its slot becomes free, and that is all.
        with suppress(ConnectionError, TimeoutError):
            try:
                request = self.server.service.parse(self.body())
                with self.server.service.slot() as batch:
                    self.run(batch, request)
            except Refused as refused:
                self.send(refused.status, {"error": str(refused)})
            except (ConnectionError, TimeoutError):
                raise
            except Exception as error:
                self.log_error("%r", error)
                self.send(500, {"error": "the model failed; the server's log says why"})

    def body(self) -> bytes:
        """The request's body; raises ``Refused`` with status 403, 404, 408, 411 or 413."""
        if self.path != "/generate":
            raise Refused(404, PATHS)
        if "Origin" in self.headers:  # a browser's; without this check, any web page could use a local server
            raise Refused(403, "requests of web pages are not answered")
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit() and len(size) < 16):
            raise Refused(411, "the header Content-Length is missing, or no number")
        left, most = int(size), (1 << 20) + 32 * self.server.service.length
        # A longer one is read nevertheless: a client that still writes would not see the answer.
        body, short, until = bytearray(), left <= most, time.monotonic() + PATIENCE
        while left > 0 and (piece := self.rfile.read1(min(left, 1 << 16))):
            left -= len(piece)
            body += piece if short else b""
            if time.monotonic() > until:  # the timeout of a connection starts again with each byte
                raise Refused(408, f"the body did not arrive within {PATIENCE} seconds")
        if not short:
            raise Refused(413, f"the body is longer than {most} bytes")
        return bytes(body)

    def run(self, batch: Batch, request: Request) -> None:
        """Generates, and sends the answer: a line for each token at once, or all in one object."""
        service, tokens, shown = self.server.service, list[int](), ""
        for new in service.steps(batch, request):
            if self.gone():
                raise ConnectionAbortedError
            tokens += new
            if new and request.stream:
                text = service.decode(tokens)
                # A token may end within a character; its text then comes with the next line.
                more = "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text[len(shown) :]
                shown += more
                self.send(200, {"token": new[0], "text": more})
        text = service.decode(tokens)
        finish = "end" if tokens[-1] in batch.model.end_tokens else "length"
        whole = {"text": text[len(shown) :]} if request.stream else {"tokens": tokens, "text": text}
        self.send(200, {**whole, "finish": finish})

    def gone(self) -> bool:
        """Whether the client has closed the connection. One that only stops reading meets the timeout."""
        ready, _, _ = select.select([self.connection], [], [], 0)
        return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)

    def send(self, status: int, content: dict[str, Any]) -> None:
        """Sends a line; before the first one, the status and the headers."""
        if not self.started:
            self.started = True
            self.send_response(status)
            self.send_header(
                "Content-Type", "application/x-ndjson" if "token" in content else "application/json"
            )
            if status == 503:
                self.send_header("Retry-After", "1")
            self.end_headers()
        self.wfile.write(json.dumps(content).encode() + b"\n")


class Server(ThreadingHTTPServer):
    """A thread for each connection, and a limit to both: further clients wait outside of this process."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], service: Service, connections: int):
        super().__init__(address, Handler)
        self.service = service
        self.connections = threading.BoundedSemaphore(connections)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()


def main() -> None:
    """Runs the script; what cannot be done ends in one line and exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--slots", type=int, default=2, help="requests at the same time")
    parser.add_argument("--length", type=int, help="most tokens of a prompt and its answer")
    parser.add_argument("--queue", type=int, default=4, help="requests that may wait for a slot")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a prompt that run at once")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--provider", choices=sorted(PROVIDERS), default="cpu")
    parser.add_argument("--graph", help="the graph's file in DIR, if there are several")
    options = parser.parse_args()
    try:
        # In this thread, before all others: the first session decides about denormal numbers for them.
        model = Model(options.folder, options.provider, options.graph)
        service = Service(model, options.folder, options.slots, options.length, options.queue, options.chunk)
        server = Server((options.host, options.port), service, options.slots + options.queue + OTHERS)
    except (RuntimeError, OSError, MemoryError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    host, port = server.server_address[:2]
    print(f"{options.slots} slots of {service.length} tokens at http://{host!s}:{port}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
