"""A Hub on loopback: as much of the Hub's HTTP protocol as huggingface_hub needs to download.

Two listeners, as in life: the Hub itself, and the storage that it redirects to for large files,
another origin that must never see a token. Both record what they are asked. Repositories are plain
folders; a commit is a folder that does not change any more.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

Host = Literal["hub", "storage"]
Fault = Literal["cut", "reset", "short", "busy"]
"""What goes wrong with one download: the connection ends in the middle of the file, politely
(``cut``) or not (``reset``); the file seems complete but is half as long; HTTP 503."""

LARGE = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".pt", ".model")
"""Ends of the file names that the Hub keeps in its storage (a new repository's .gitattributes)."""
MODEL_INFO = re.compile(r"/api/models/(?P<id>[^/]+(?:/[^/]+)?)(?:/revision/(?P<revision>[^/]+))?")
RESOLVE = re.compile(r"/(?P<id>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(frozen=True)
class Request:
    """One request, as it came."""

    host: Host
    method: str
    path: str
    """Still quoted, without the query."""
    headers: dict[str, str]
    """Names in lower case."""

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
    """Branch or tag -> commit."""
    private: bool = False
    gated: bool = False
    readers: frozenset[str] = frozenset()
    """Tokens that open it, if it is private or gated."""


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


class HubServer:
    """The server; as a context manager it listens on two free ports of 127.0.0.1."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        """Tokens of anybody; others are refused. The readers of repositories need not be listed."""
        self.requests: list[Request] = []
        self.before: Callable[[Request], object] | None = None
        """Called with each request before it is answered."""
        self.faults: dict[str, list[Fault]] = {}
        """File name -> what goes wrong with its next downloads, one after another."""
        self._stored: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._listeners = {host: _listen(self, host) for host in ("hub", "storage")}

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners.values():
            listener.shutdown()
            listener.server_close()

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self._listeners['hub'].server_port}"

    def commit(
        self,
        repo_id: str,
        folder: Path,
        *,
        branch: str = "main",
        tag: str | None = None,
        private: bool = False,
        gated: bool = False,
        readers: Iterable[str] = (),
    ) -> str:
        """Makes ``folder`` the newest commit of a branch, and of a repository if it is the first.

        Returns:
            The commit's id, which depends on the folder's content alone.
        """
        repository = self.repositories.setdefault(
            repo_id, Repository(private=private, gated=gated, readers=frozenset(readers))
        )
        content = hashlib.sha1()
        for name in _files(folder):
            data = (folder / name).read_bytes()
            content.update(f"{name}\n{len(data)}\n".encode() + data)
        commit = content.hexdigest()
        repository.commits[commit] = folder
        repository.refs[branch] = commit
        if tag is not None:
            repository.refs[tag] = commit
        return commit

    def downloads(self) -> list[str]:
        """The names of the files whose content was asked for, in that order, each once."""
        names = []
        for request in self.requests:
            if request.method == "GET" and request.host == "storage":
                names.append(self._stored[request.path.removeprefix("/")].name)
            elif request.method == "GET" and (found := _match(RESOLVE, request)):
                names.append(found["file"])
        return list(dict.fromkeys(names))

    def answer(self, request: Request) -> Answer:
        """Records a request and answers it."""
        with self._lock:
            self.requests.append(request)
            if self.before is not None:
                self.before(request)
            try:
                return self._storage(request) if request.host == "storage" else self._hub(request)
            except Refusal as refusal:
                return refusal.answer

    def fault(self, name: str) -> Fault | None:
        """What goes wrong with this download of a file."""
        with self._lock:
            return self.faults[name].pop(0) if self.faults.get(name) else None

    def _hub(self, request: Request) -> Answer:
        if found := _match(MODEL_INFO, request):
            repository = self._allowed(found["id"], request.token, content=False)
            commit = _resolve(repository, found.get("revision", "main"))
            info = _model_info(found["id"], repository, commit)
            return Answer(headers={"Content-Type": "application/json"}, body=json.dumps(info).encode())
        if found := _match(RESOLVE, request):
            repository = self._allowed(found["id"], request.token, content=True)
            commit = _resolve(repository, found["revision"])
            return self._file(repository.commits[commit], found["file"], commit)
        raise Refusal(HTTPStatus.NOT_FOUND, None, "Sorry, we can't find the page you are looking for.")

    def _allowed(self, repo_id: str, token: str | None, *, content: bool) -> Repository:
        known = self.tokens.union(*(repository.readers for repository in self.repositories.values()))
        if token is not None and token not in known:
            raise Refusal(HTTPStatus.UNAUTHORIZED, None, "Invalid credentials in Authorization header")
        repository = self.repositories.get(repo_id)
        # Who is not logged in is not told what does not exist and what is private.
        if repository is None or (repository.private and token not in repository.readers):
            if token is None:
                raise Refusal(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Invalid username or password.")
            raise Refusal(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
        if content and repository.gated and token not in repository.readers:
            status = HTTPStatus.UNAUTHORIZED if token is None else HTTPStatus.FORBIDDEN
            raise Refusal(status, "GatedRepo", f"Access to model {repo_id} is restricted.")
        return repository

    def _file(self, folder: Path, name: str, commit: str) -> Answer:
        if name not in _files(folder):
            refusal = Refusal(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
            refusal.answer.headers["X-Repo-Commit"] = commit
            raise refusal
        path = folder / name
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not name.endswith(LARGE):
            return Answer(headers=headers | {"ETag": f'"{_git_id(path.read_bytes())}"'}, body=path)
        content = _sha256(path)
        self._stored[content] = path
        headers |= {
            "X-Linked-ETag": f'"{content}"',
            "X-Linked-Size": str(path.stat().st_size),
            "ETag": f'"{content}"',
            "Location": f"http://127.0.0.1:{self._listeners['storage'].server_port}/{content}?Signature=x",
        }
        return Answer(HTTPStatus.FOUND, headers, b"Found. Redirecting")

    def _storage(self, request: Request) -> Answer:
        if "authorization" in request.headers:
            raise Refusal(HTTPStatus.BAD_REQUEST, None, "Only one auth mechanism allowed")
        path = self._stored.get(request.path.removeprefix("/"))
        if path is None:
            raise Refusal(HTTPStatus.NOT_FOUND, None, "NoSuchKey")
        return Answer(headers={"Accept-Ranges": "bytes", "ETag": f'"{path.stat().st_size}"'}, body=path)


def _listen(server: HubServer, host: Host) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            headers = {name.lower(): value for name, value in self.headers.items()}
            _send(self, server, server.answer(Request(host, self.command, path, headers)))

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return listener


def _send(handler: BaseHTTPRequestHandler, server: HubServer, answer: Answer) -> None:
    status, headers, body = answer.status, dict(answer.headers), answer.body
    fault: Fault | None = None
    middle = 0
    if isinstance(body, Path):
        if handler.command == "GET":
            fault = server.fault(body.name)
        data = body.read_bytes()
        start, end = 0, len(data)
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", "")):
            start = int(found[1])
            end = min(int(found[2]) + 1, end) if found[2] else end
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            if start >= len(data):
                status, start, end = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, 0
                headers["Content-Range"] = f"bytes */{len(data)}"
        middle = max(0, len(data) // 2 - start)
        body = data[start:end]
        if fault == "short":
            body = body[:middle]
        elif fault == "busy":
            status, headers, body = HTTPStatus.SERVICE_UNAVAILABLE, {}, b""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command == "HEAD":
        return
    if fault not in ("cut", "reset"):
        handler.wfile.write(body)
        return
    handler.wfile.write(body[:middle])
    handler.wfile.flush()
    handler.close_connection = True
    if fault == "reset":
        # Lingering for no time makes closing a reset.
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()


def _match(pattern: re.Pattern[str], request: Request) -> dict[str, str]:
    """The parts of the path, unquoted; a quoted slash does not part them."""
    found = pattern.fullmatch(request.path)
    parts = found.groupdict() if found else {}
    return {name: unquote(part) for name, part in parts.items() if part is not None}


def _resolve(repository: Repository, revision: str) -> str:
    commit = repository.refs.get(revision, revision)
    if commit not in repository.commits:
        raise Refusal(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {quote(revision)}")
    return commit


def _model_info(repo_id: str, repository: Repository, commit: str) -> dict[str, Any]:
    folder = repository.commits[commit]
    siblings = []
    for name in _files(folder):
        data = (folder / name).read_bytes()
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _git_id(data)}
        if name.endswith(LARGE):
            entry["lfs"] = {"sha256": _sha256(folder / name), "size": len(data), "pointerSize": 134}
        siblings.append(entry)
    counts = _parameters(folder)
    return {
        "id": repo_id,
        "modelId": repo_id,
        "sha": commit,
        "private": repository.private,
        "gated": "manual" if repository.gated else False,
        "siblings": siblings,
        "tags": [],
        **({"safetensors": {"parameters": counts, "total": sum(counts.values())}} if counts else {}),
    }


def _parameters(folder: Path) -> dict[str, int]:
    """dtype -> number of elements, from the headers of the safetensors files in the root."""
    counts: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for length in tensor["shape"]:
                    size *= length
                counts[tensor["dtype"]] = counts.get(tensor["dtype"], 0) + size
    return counts


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _git_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
