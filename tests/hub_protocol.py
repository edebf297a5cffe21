"""What both halves of the Hub on loopback speak of: requests, answers, refusals, repositories."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

Host = Literal["hub", "storage"]
Fault = Literal["cut", "reset", "short", "busy", "broken"]
"""What goes wrong with one transfer: the connection ends in the middle of the file, politely
(``cut``) or not (``reset``); the file seems complete but is half as long (a download's); HTTP 503; HTTP
500."""

LARGE = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".onnx_data", ".pt", ".model")
"""Ends of the file names that the Hub keeps in its storage (a new repository's .gitattributes)."""


@dataclass(frozen=True)
class Request:
    """One request, as it came."""

    host: Host
    method: str
    path: str
    """Still quoted, without the query."""
    headers: dict[str, str]
    """Names in lower case."""
    query: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    """Of a request to the Hub itself; files that are sent to the storage are not kept here."""

    @property
    def token(self) -> str | None:
        """The bearer token."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme == "Bearer" else None


@dataclass
class Repository:
    """A repository: its commits and what points to them."""

    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    """Branch, tag or pull request -> commit."""
    tags: set[str] = field(default_factory=set)
    """Which of them are tags."""
    private: bool = False
    gated: bool = False
    readers: frozenset[str] = frozenset()
    """Tokens that open it, if it is private or gated."""


@dataclass(frozen=True)
class Account:
    """Whose a token is."""

    name: str
    organisations: tuple[str, ...] = ()
    role: Literal["read", "write", "fineGrained"] = "write"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.name, *self.organisations)


@dataclass
class Answer:
    """An answer; a body that is a path is a file that can be asked for in ranges."""

    status: HTTPStatus = HTTPStatus.OK
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Path = b""


class Refusal(Exception):
    """An error as the Hub words it: in headers, which is where its client looks."""

    def __init__(self, status: HTTPStatus, code: str | None, message: str) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message, "Content-Type": "application/json"}
        if code is not None:
            headers["X-Error-Code"] = code
        self.answer = Answer(status, headers, json.dumps({"error": message}).encode())


def as_json(value: object) -> Answer:
    """An answer in JSON."""
    return Answer(headers={"Content-Type": "application/json"}, body=json.dumps(value).encode())


def match(pattern: re.Pattern[str], request: Request) -> dict[str, str]:
    """The parts of the path, unquoted; a quoted slash does not part them."""
    found = pattern.fullmatch(request.path)
    parts = found.groupdict() if found else {}
    return {name: unquote(part) for name, part in parts.items() if part is not None}


def resolve(repository: Repository, revision: str) -> str:
    """The commit that a branch, tag or commit is."""
    commit = repository.refs.get(revision, revision)
    if commit not in repository.commits:
        raise Refusal(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {quote(revision)}")
    return commit


def files_in(folder: Path) -> list[str]:
    """The files below a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def git_id(data: bytes) -> str:
    """The id that git gives a file's content."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def sha256(path: Path) -> str:
    """Of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
