"""What an OpenAI-compatible server reads and writes: the bodies of requests, and the objects of answers.

What a request asks and the server does not do is an error, unless its value has no effect.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
}
"""Values with which these options change nothing, as null does; others are not supported."""
ABOUT_THE_CALLER = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"}


class BadRequest(Exception):
    """A request that gets an error: the HTTP status, and one line that says why."""

    def __init__(self, line: str, status: int = 400):
        super().__init__(line)
        self.status = status


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class Body(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: list[str] = Field(default=[], max_length=16)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Null means the default; one text to stop at may stand alone."""
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if value is not None}
        if isinstance(found.get("stop"), str):
            found["stop"] = [found["stop"]]
        return found

    @model_validator(mode="after")
    def _supported(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if name not in ABOUT_THE_CALLER and value not in WITHOUT_EFFECT.get(name, ()):
                raise ValueError(f"{name} {value!r} is not supported; drop it")
        if "" in self.stop:
            raise ValueError("a text to stop at is empty; drop it")
        return self


class CompletionBody(Body):
    prompt: str | list[int]
    max_tokens: int = Field(default=16, ge=0)
    echo: bool = False
    logprobs: Literal[0] | None = None
    """0: the log-probability of each token, and of no others."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, given: Any) -> Any:
        """A list of one prompt is that prompt."""
        several = isinstance(given, list) and any(isinstance(each, str | list) for each in given)
        if several and len(given) > 1:
            raise ValueError("several prompts in one request are not supported; send one request for each")
        prompt = given[0] if several else given
        if isinstance(prompt, list) and all(type(each) is int for each in prompt):
            return prompt
        if not isinstance(prompt, str):
            raise ValueError("a prompt is a text or a list of token ids")
        return prompt

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as there is room for."""
        return self.max_tokens

    @model_validator(mode="after")
    def _streamed(self) -> CompletionBody:
        if self.stream and (self.echo or self.logprobs is not None):
            raise ValueError("echo and logprobs are not streamed; drop them, or do not stream")
        return self


class Message(BaseModel):
    """What a chat template gets."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        """One text of several parts, as ``[{"type": "text", "text": "..."}]``."""
        if not isinstance(given, list):
            return given
        texts: list[str] = []
        for part in given:
            if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                raise ValueError("only parts of the type text are supported")
            texts.append(part["text"])
        return "".join(texts)


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as there is room for."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def parse(kind: type[Body], content: bytes) -> Any:
    """A body from its JSON; raises ``BadRequest``."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{where}: {said}" if where else said) from None


def error_object(line: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": line, "type": kind, "param": None, "code": status}}


def model_object(name: str, length: int) -> dict[str, Any]:
    """``length`` is the most tokens of a prompt and its answer."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "ntk-convert", "max_model_len": length}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Answer:
    """The objects of one answer: whole, or in chunks. They have one id and one time.

    Args:
        model: the model's name.
        chat: whether they are those of a chat.
    """

    def __init__(self, model: str, *, chat: bool):
        self.chat = chat
        self.model = model
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(
        self, text: str, reason: str | None, logprobs: dict[str, Any] | None, used: dict[str, int]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
            return self._object("chat.completion", [choice], usage=used)
        return self._object("text_completion", [{**choice, "text": text}], usage=used)

    def chunk(self, text: str, reason: str | None, *, first: bool = False) -> dict[str, Any]:
        """``reason`` is why the answer ends with this chunk; None if it goes on."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if not self.chat:
            return self._object("text_completion", [{**choice, "text": text}])
        delta = {"role": "assistant"} if first else {}
        if first or text:
            delta["content"] = text
        return self._object("chat.completion.chunk", [{**choice, "delta": delta}])

    def usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        """The last chunk, for those who ask for it."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._object(kind, [], usage=used)

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": choices, **more}
