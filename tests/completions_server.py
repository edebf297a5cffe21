"""An OpenAI-compatible server on loopback: the part of the protocol that ``eval --server`` uses.

It computes with a converted repository in transformers, in float32, one prompt at a time. ``fault`` is what
it does wrong.
"""

from __future__ import annotations

import gzip
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from converter.texts import load_tokenizer
from tests.patched import load


@dataclass
class Completions:
    """A server's state, and what it was asked."""

    folder: Path
    names: tuple[str, ...]
    context: int = 100_000
    fault: str = ""
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    paths: list[str] = field(default_factory=list)
    most: int = 0
    """Requests at once."""

    def __post_init__(self) -> None:
        self.model, self.tokenizer = load(self.folder), load_tokenizer(self.folder, "", None)
        self.ends = threading.Event()
        self._lock, self._waiting, self._met = threading.Lock(), 0, threading.Event()

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """The status and the JSON."""
        self.paths.append(path)
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "max_model_len": self.context} for name in self.names]}
        if path != "/v1/completions" or body is None or body["model"] not in self.names:
            return 404, {"error": {"message": "there is no such thing"}}
        self.asked.append(body)
        if self.fault == "once" and len(self.asked) == 1:
            return 503, {"error": {"message": "try again"}}
        if self.fault == "hangs":
            self.ends.wait(20)
        if self.fault == "rejects":
            return 400, {"error": {"message": "this is\ntoo much"}}
        if self.fault == "together":  # until two requests wait at once
            self._waiting += 1
            self.most = max(self.most, self._waiting)
            if self._waiting > 1:
                self._met.set()
            self._met.wait(20)
        with self._lock, torch.inference_mode():
            self._waiting -= self.fault == "together"
            return 200, {"choices": [self._complete(body)]}

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = torch.tensor([body["prompt"]])
        if body.get("echo"):
            scores = self.model(prompt).logits[0].log_softmax(-1)
            own = scores[:-1].gather(1, prompt[0, 1:, None])[:, 0].tolist()
            found = [None, *own, float(scores[-1].max())]
            if self.fault == "silent":
                return {"text": "", "logprobs": None}
            found[5] = {"NaN": math.nan, "positive": 0.5, "words": "-0.5"}.get(self.fault, found[5])
            return {"text": "", "logprobs": {"token_logprobs": found}}
        made = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=body["max_tokens"],
            do_sample=False,
            repetition_penalty=body.get("repetition_penalty"),
        )[0, prompt.shape[1] :]
        text = self.tokenizer.decode(made, skip_special_tokens=True)
        return {"text": None if self.fault == "null" else text}


@contextmanager
def completions(folder: Path, *names: str, **options: Any) -> Iterator[Completions]:
    """Starts a server of a converted repository, and ends it."""
    state = Completions(folder, names or (str(folder),), **options)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*state.answer(self.path, None))

        def do_POST(self) -> None:
            state.keys.add(self.headers["Authorization"])
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*state.answer(self.path, body))

        def _send(self, status: int, content: Any) -> None:
            if state.fault == "redirect":
                status = 307
            data = b"<html>" if state.fault == "page" else json.dumps(content).encode()
            kind = "text/html" if state.fault == "page" else "application/json"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if state.fault == "redirect":
                self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
            if state.fault == "packed":
                data = gzip.compress(data)
                self.send_header("Content-Encoding", "gzip")
            if state.fault in ("endless", "slow"):
                self.end_headers()
                self._go_on(data)
                return
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _go_on(self, data: bytes) -> None:
            """Sends more, until nobody listens: much of it, or a little every tenth of a second."""
            with suppress(OSError):
                while not state.ends.wait(0.1 if state.fault == "slow" else 0):
                    self.wfile.write(data if state.fault == "slow" else data * 1000)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield state
        finally:
            server.shutdown()
