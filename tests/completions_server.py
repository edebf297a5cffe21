"""An OpenAI-compatible server on loopback: the part of the protocol that ``eval --server`` uses.

It computes with a converted repository in transformers, in float32, one prompt at a time. ``fault`` is what
it does wrong.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    most: int = 0
    """Requests at once."""

    def __post_init__(self) -> None:
        self.model, self.tokenizer = load(self.folder), load_tokenizer(self.folder, "", None)
        self.ends = threading.Event()
        self._lock, self._waiting, self._met = threading.Lock(), 0, threading.Event()

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """The status and the JSON."""
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
            return {"text": "", "logprobs": {"token_logprobs": found}}
        made = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=body["max_tokens"],
            do_sample=False,
            repetition_penalty=body.get("repetition_penalty"),
        )[0, prompt.shape[1] :]
        return {"text": self.tokenizer.decode(made, skip_special_tokens=True)}


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
            data = b"<html>" if state.fault == "page" else json.dumps(content).encode()
            kind = "text/html" if state.fault == "page" else "application/json"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield state
        finally:
            server.shutdown()
