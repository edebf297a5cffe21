"""Types that both halves of the Hub on loopback share: requests, answers, refusals, repositories."""

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
Fault = Literal["cut", "reset", "short", "busy"]
"""A fault of one transfer: the connection is closed (``cut``) or reset (``reset``) in the middle of the file;
a download seems complete but has half the length (``short``); HTTP 503 (``busy``)."""

LARGE = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".onnx_data", ".pt", ".model")
"""Suffixes of the files that the Hub keeps in its storage (from the .gitattributes of a new repository)."""


@dataclass(frozen=True)
class Request:
    """One request as it was received."""

    host: Host
    method: str
    path: str
    """The path, still quoted, without the query."""
    headers: dict[str, str]
    """Header names are in lower case."""
    query: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    """The body of a request to the Hub itself; uploads to the storage are not kept here."""

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
    """The names in ``refs`` that are tags."""
    private: bool = False
    gated: bool = False
    readers: frozenset[str] = frozenset()
    """Tokens that may read the repository if it is private or gated."""


@dataclass(frozen=True)
class Account:
    """The owner of a token."""

    name: str
    organisations: tuple[str, ...] = ()
    role: Literal["read", "write", "fineGrained"] = "write"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.name, *self.organisations)


@dataclass
class Answer:
    """An answer; if the body is a path, ranges of that file can be requested."""

    status: HTTPStatus = HTTPStatus.OK
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Path = b""


class Refusal(Exception):
    """An error like the Hub's, with its message in headers, where the client looks for it."""

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
    """The parts of the path, unquoted; a quoted slash does not separate parts."""
    found = pattern.fullmatch(request.path)
    parts = found.groupdict() if found else {}
    return {name: unquote(part) for name, part in parts.items() if part is not None}


def resolve(repository: Repository, revision: str) -> str:
    """The commit that a branch, tag or commit id names."""
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
    """The SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
