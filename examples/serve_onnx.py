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
import select
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from generate_onnx import PROVIDERS, Batch, Model
from onnx_slots import Refused, Request, Service

PATIENCE = 30
"""Seconds that the server waits for a client that neither writes nor reads."""
OTHERS = 32
"""Connections beside those with a slot or a place in the queue: they are answered at once, mostly 503."""
PATHS = "there are GET /health and POST /generate"


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
        """The request's body; raises ``Refused`` with status 404, 411 or 413."""
        if self.path != "/generate":
            raise Refused(404, PATHS)
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit() and len(size) < 16):
            raise Refused(411, "the header Content-Length is missing, or no number")
        left, most = int(size), (1 << 20) + 32 * self.server.service.length
        if left <= most:
            return self.rfile.read(left)
        # Read it nevertheless: a client that still writes would not see the answer.
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
            left -= len(piece)
        raise Refused(413, f"the body is longer than {most} bytes")

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
