"""Serve an exported graph with OpenAI's API. Requests are batched while they run.

    pip install pydantic starlette uvicorn transformers
    python examples/serve_onnx.py DIR [--rows 4] [--length 2048] [--threads 4] [--provider cuda]

    curl localhost:8000/v1/completions -d '{"prompt": "a prompt", "max_tokens": 32, "temperature": 0}'

There are /v1/completions, /v1/chat/completions for models with a chat template, /v1/models and /health. DIR
holds an ONNX graph of the profile ort, and a tokenizer that transformers loads.

The caches of all rows are allocated at the start, so memory does not grow with the number of requests. A
request that finds no free row waits in the queue; if the queue is full, the answer is 503. After SIGTERM the
server takes no more requests, answers those that it has, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from answer_text import AnswerText
from generate_onnx import PROVIDERS, Model
from onnx_batching import Batcher, Busy, Event, Failed, Finished, PromptDone, Request, Token
from openai_protocol import (
    Answer,
    BadRequest,
    ChatBody,
    CompletionBody,
    error_object,
    model_object,
    parse,
    usage,
)
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PATIENCE = 30
"""Seconds that a request waits for a row, and the server for a body, or for a client that reads nothing."""
DEFAULT_LENGTH = 2048
LOOK = 0.5
"""Seconds after which the server looks again whether a client is still there."""


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Service:
    """A model with its tokenizer, and what a request may ask for.

    Args:
        name: what requests call the model; None: the folder.
        rows: requests that run at the same time.
        length: most tokens of a prompt and its answer; None: the context length, but at most 2048.
        waiting: requests that may wait for a row.
        chunk: most tokens of a prompt that are run at once.

    Raises:
        ValueError: a number is too small.
        RuntimeError: ``length`` is beyond the context length.
    """

    def __init__(
        self,
        model: Model,
        folder: Path,
        tokenizer: Any,
        *,
        name: str | None = None,
        rows: int,
        length: int | None = None,
        waiting: int,
        chunk: int = 512,
    ):
        self.model = model
        self.name = name or str(folder)
        self.tokenizer = tokenizer
        self.length = row_length(folder, length)
        if min(rows, self.length, chunk, waiting + 1) < 1:
            raise ValueError("--rows, --length and --chunk must be at least 1, --queue at least 0")
        self.rows = rows
        self.places = rows + waiting
        self.taken = 0
        """Requests that run or wait."""
        if scales_by_length(folder):
            # A prompt in chunks would not give the logits of the whole prompt.
            chunk = self.length
        self.batcher = Batcher(model, rows, self.length, chunk)

    def check_name(self, name: str) -> None:
        """Raises ``BadRequest`` with status 404 for another model's name."""
        if name != self.name:
            raise BadRequest(f"there is no model {name!r}, but {self.name!r}", 404)

    def check_places(self) -> None:
        """Raises ``BadRequest`` with status 503 if as many requests run and wait as may."""
        if self.taken == self.places:
            raise BadRequest("all rows are taken and the queue is full; try again", 503)

    def decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def request(self, body: CompletionBody | ChatBody, tell: Callable[[Event], object]) -> Request:
        """What the batcher runs; raises ``BadRequest`` for what it cannot."""
        if body.model is not None:
            self.check_name(body.model)
        prompt = self._prompt(body)
        most = body.most_tokens
        if most is None:
            most = max(self.length - len(prompt), 1)
        if len(prompt) + most > self.length:
            raise BadRequest(
                f"{len(prompt)} tokens of the prompt and max_tokens {most} are more than the {self.length} "
                "of a row"
            )
        logprobs = prompt_logprobs = False
        if isinstance(body, CompletionBody):
            logprobs = body.logprobs is not None
            prompt_logprobs = logprobs and body.echo
        if prompt_logprobs and self.model.logits.shape[1] == 1:
            raise BadRequest(
                "the graph has no logits of the prompt, which echo with logprobs needs; export again without "
                "--last-logits"
            )
        return Request(
            prompt,
            most,
            tell,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            waits_until=time.monotonic() + PATIENCE,
        )

    def _prompt(self, body: CompletionBody | ChatBody) -> list[int]:
        """The prompt's tokens."""
        if isinstance(body, ChatBody):
            ids = self._chat_prompt(body)
        elif isinstance(body.prompt, str):
            ids = self.tokenizer(body.prompt)["input_ids"]
        else:
            ids = body.prompt
        vocabulary = self.model.logits.shape[2]
        if not ids or not all(0 <= token < vocabulary for token in ids):
            raise BadRequest(f"a prompt is one token or more, each an id from 0 to {vocabulary - 1}")
        return ids

    def _chat_prompt(self, body: ChatBody) -> list[int]:
        if not self.tokenizer.chat_template:
            raise BadRequest("this model has no chat template; use /v1/completions")
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise BadRequest(f"the chat template does not take these messages: {error}") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def row_length(folder: Path, asked: int | None) -> int:
    """Tokens of a row; raises ``RuntimeError`` for more than the scaling is made for."""
    longest = context_length(folder)
    if asked is None:
        return min(longest or DEFAULT_LENGTH, DEFAULT_LENGTH)
    if longest is not None and asked > longest:
        raise RuntimeError(f"--length {asked} is beyond the context length, {longest} tokens")
    return asked


def context_length(folder: Path) -> int | None:
    """The number of tokens that the scaling is made for, which the export wrote down; None if it did not."""
    path = folder / "genai_config.json"
    if not path.is_file():
        return None
    length: int = json.loads(path.read_text(encoding="utf-8"))["model"]["context_length"]
    return length


def scales_by_length(folder: Path) -> bool:
    """Whether a token's penalty depends on the tokens behind it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scaling = config.get("alibi_scaling") or {}
    return scaling.get("dynamic") == "length"


class Completion:
    """One answer, as it is generated."""

    def __init__(self, service: Service, body: CompletionBody | ChatBody):
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        self.events = events
        self.service = service
        self.request = service.request(
            body, tell=lambda event: loop.call_soon_threadsafe(events.put_nowait, event)
        )
        self.text = AnswerText(service.decode, body.stop, after=self.request.prompt)
        self.tokens: list[int] = []
        """Of the answer."""
        self.logprobs: list[float | None] = []
        """Of the answer's tokens, and before them of the prompt's, where they are asked for."""
        self.finish_reason: str | None = None
        self._looked = time.monotonic()
        """When the server last looked whether the client is there."""

    @property
    def usage(self) -> dict[str, int]:
        return usage(len(self.request.prompt), len(self.tokens))

    async def parts(self, client: HttpRequest) -> AsyncGenerator[str, None]:
        """The text as it grows; "" first, when the prompt was run.

        Raises:
            BadRequest: with status 503, there is no place or no row; with 500, the model failed.
            ClientGoneError: the client has left.
        """
        service = self.service
        service.check_places()
        service.taken += 1
        service.batcher.submit(self.request)
        try:
            while self.finish_reason is None:
                yield self._take(await self._next_event(client))
        finally:
            self.request.cancelled = True
            service.taken -= 1

    async def _next_event(self, client: HttpRequest) -> Event:
        while True:
            if time.monotonic() > self._looked + LOOK:
                self._looked = time.monotonic()
                if await client.is_disconnected():
                    raise ClientGoneError
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self.events.get(), LOOK)

    def _take(self, event: Event) -> str:
        """Takes over what an event says; the text that it adds."""
        match event:
            case PromptDone(logprobs):
                if self.request.prompt_logprobs:
                    self.logprobs += [None, *logprobs]
                return ""
            case Token(token, logprob):
                self.tokens.append(token)
                self.logprobs.append(logprob)
                text = self.text.add(token)
                if self.text.stopped:
                    self.finish_reason = "stop"
                return text
            case Finished(reason):
                text = self.text.end()
                self.finish_reason = "stop" if self.text.stopped else reason
                return text
            case Busy():
                raise BadRequest(f"no row became free within {PATIENCE} seconds; try again", 503)
            case Failed():
                raise BadRequest("the model failed; the server's log says why", 500)


async def read_body(request: HttpRequest, most: int) -> bytes:
    """A request's body, of at most so many bytes; raises ``BadRequest`` with status 403, 408 or 413."""
    if "origin" in request.headers:  # a browser's; without this check, any web page could use a local server
        raise BadRequest("requests of web pages are not answered", 403)
    content = bytearray()

    async def read() -> None:
        async for part in request.stream():
            # A longer one is read to its end: a client that still writes would not see the answer.
            if len(content) <= most:
                content.extend(part)

    try:
        await asyncio.wait_for(read(), PATIENCE)
    except asyncio.TimeoutError:
        raise BadRequest(f"the body did not arrive within {PATIENCE} seconds", 408) from None
    if len(content) > most:
        raise BadRequest(f"the body is longer than {most} bytes", 413)
    return bytes(content)


async def whole_answer(completion: Completion, body: CompletionBody | ChatBody, client: HttpRequest) -> Any:
    service = completion.service
    text = "".join([part async for part in completion.parts(client)])
    tokens = completion.tokens
    if isinstance(body, CompletionBody) and body.echo:
        text = service.decode(completion.request.prompt) + text
        tokens = [*completion.request.prompt, *tokens]
    logprobs = None
    if completion.request.logprobs:
        names = service.tokenizer.convert_ids_to_tokens(tokens)
        logprobs = {"tokens": names, "token_logprobs": completion.logprobs}
    answer = Answer(service.name, chat=isinstance(body, ChatBody))
    return answer.whole(text, completion.finish_reason, logprobs, completion.usage)


async def streamed_answer(
    completion: Completion, body: CompletionBody | ChatBody, client: HttpRequest
) -> AsyncGenerator[str, None]:
    """The lines of an answer in server-sent events; the first one when the prompt was run.

    A stream that breaks off has no line ``[DONE]``.
    """
    answer = Answer(completion.service.name, chat=isinstance(body, ChatBody))
    begun = False
    try:
        async with aclosing(completion.parts(client)) as parts:
            async for part in parts:
                if part or not begun:
                    yield line(answer.chunk(part, None, first=not begun))
                begun = True
    except BadRequest as error:
        if not begun:
            raise
        yield line(error_object(str(error), error.status))
        return
    yield line(answer.chunk("", completion.finish_reason))
    if body.stream_options.include_usage:
        yield line(answer.usage_chunk(completion.usage))
    yield "data: [DONE]\n\n"


def line(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


async def completions(client: HttpRequest) -> Response:
    return await complete(client, CompletionBody)


async def chat_completions(client: HttpRequest) -> Response:
    return await complete(client, ChatBody)


async def complete(client: HttpRequest, kind: type[CompletionBody | ChatBody]) -> Response:
    service: Service = client.app.state.service
    body = parse(kind, await read_body(client, (1 << 20) + 32 * service.length))
    service.check_places()
    completion = Completion(service, body)
    if not body.stream:
        return JSONResponse(await whole_answer(completion, body, client))
    lines = streamed_answer(completion, body, client)
    # What is refused before the first line has a status of its own.
    first = await anext(lines)

    async def all_lines() -> AsyncIterator[str]:
        async with aclosing(lines):
            yield first
            async for each in lines:
                yield each

    return StreamingResponse(all_lines(), media_type="text/event-stream")


async def models(client: HttpRequest) -> Response:
    service: Service = client.app.state.service
    return JSONResponse({"object": "list", "data": [model_object(service.name, service.length)]})


async def model(client: HttpRequest) -> Response:
    service: Service = client.app.state.service
    service.check_name(client.path_params["name"])
    return JSONResponse(model_object(service.name, service.length))


async def health(client: HttpRequest) -> Response:
    """The number of free rows; status 503 if the graph does not run any more."""
    service: Service = client.app.state.service
    status = 200 if service.batcher.thread.is_alive() else 503
    return JSONResponse({"free": max(service.rows - service.taken, 0)}, status)


async def refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse(error_object(str(error), error.status), error.status, headers)


async def no_route(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_object(error.detail, error.status_code), error.status_code)


async def gone(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def application(service: Service) -> Starlette:
    """The web application; its end is the end of the service."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.batcher.close()

    made = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
        ],
        exception_handlers={BadRequest: refused, ClientGoneError: gone, HTTPException: no_route},
        lifespan=lifespan,
    )
    made.state.service = service
    return made


def main() -> None:
    """Runs the script; what cannot be done ends in one line and exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", help="requests call the model so, too")
    parser.add_argument("--rows", type=int, default=4, help="requests at the same time [%(default)s]")
    parser.add_argument("--length", type=int, help="most tokens of a prompt and its answer")
    parser.add_argument("--queue", type=int, default=64, help="requests that may wait [%(default)s]")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a prompt that run at once")
    parser.add_argument("--threads", type=int, help="threads of the CPU; by default one for each core")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--provider", choices=sorted(PROVIDERS), default="cpu")
    parser.add_argument("--graph", help="the graph's file in DIR, if there are several")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="load a tokenizer whose code is in DIR"
    )
    options = parser.parse_args()
    folder = Path(options.folder)
    try:
        # In this thread, before all others: the first session decides about denormal numbers for them.
        model = Model(folder, options.provider, options.graph, options.threads)
        service = Service(
            model,
            folder,
            load_tokenizer(folder, options.trust_remote_code),
            name=options.folder,
            rows=options.rows,
            length=options.length,
            waiting=options.queue,
            chunk=options.chunk,
        )
        listening = listen(options.host, options.port)
    except (RuntimeError, OSError, OverflowError, MemoryError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    host, port = listening.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    megabytes = sum(each.tensor_size_in_bytes() for each in service.batcher.batch.cache.values()) / 1e6
    print(
        f"{options.rows} rows of {service.length} tokens ({megabytes:.0f} MB) at http://{host}:{port}",
        flush=True,
    )
    uvicorn.Server(uvicorn.Config(application(service), log_level="warning")).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket whose connections the kernel ends if the client reads nothing for too long."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=128)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PATIENCE)
    return listening


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """Raises ``RuntimeError`` if there is none, or it does not load."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would warn about model types that it does not know
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RuntimeError(f"the tokenizer in {folder} does not load: {reason}") from error


if __name__ == "__main__":
    main()
