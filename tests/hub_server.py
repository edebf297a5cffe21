"""A Hub on loopback: the part of the Hub's HTTP protocol that huggingface_hub uses to download and upload.

Like the real Hub it has two servers: the Hub itself, and the storage to which it redirects large files, a
different origin that must never see a token. Both record the requests. Repositories are plain folders; a
commit is a folder that no longer changes. The code for uploads is in ``hub_writing``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from tests.hub_protocol import (
    LARGE,
    Account,
    Answer,
    Fault,
    Host,
    Refusal,
    Repository,
    Request,
    as_json,
    files_in,
    git_id,
    match,
    resolve,
    sha256,
)
from tests.hub_writing import Writing

__all__ = ["Account", "Fault", "HubServer", "Refusal", "Repository", "Request"]

MODEL_INFO = re.compile(r"/api/models/(?P<id>[^/]+(?:/[^/]+)?)(?:/revision/(?P<revision>[^/]+))?")
REFS = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/refs")
TREE = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
RESOLVE = re.compile(r"/(?P<id>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
LARGEST_BODY = 64 << 20
"""Bytes read at most from a request to the Hub itself; uploads to the storage are streamed."""


class HubServer:
    """The server; as a context manager it listens on two free ports of 127.0.0.1."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        """Valid tokens; others are refused. The ``readers`` of repositories need not be listed."""
        self.accounts: dict[str, Account] = {}
        """Token -> its owner; only these tokens can write."""
        self.renamed: dict[str, str] = {}
        """Old name of a repository -> its new one; requests for the old name are redirected."""
        self.requests: list[Request] = []
        self.before: Callable[[Request], object] | None = None
        """Called with each request before it is answered; it may raise a ``Refusal``."""
        self.faults: dict[str, list[Fault]] = {}
        """File name -> the faults of its next downloads, in order."""
        self.upload_faults: list[Literal["cut", "reset"] | None] = []
        """Faults of the next uploads to the storage, in order; None for no fault."""
        self.half_sent: Callable[[], object] | None = None
        """Called when half of an uploaded file was received, before the rest is read."""
        self.ignored: set[str] = set()
        """Files that the Hub tells the client to leave out."""
        self.lost: set[str] = set()
        """Files that an accepted commit does not add."""
        self.transfer = "basic"
        """The protocol for large files: ``basic`` or ``xet``."""
        self._temporary = tempfile.TemporaryDirectory(prefix="hub-")
        self.writing = Writing(self, Path(self._temporary.name))
        self._stored: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._listeners = {host: _listen(self, host) for host in ("hub", "storage")}

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners.values():
            listener.shutdown()
            listener.server_close()
        self._temporary.cleanup()

    @property
    def endpoint(self) -> str:
        """The value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._listeners['hub'].server_port}"

    @property
    def storage(self) -> str:
        """The address of the storage for large files."""
        return f"http://127.0.0.1:{self._listeners['storage'].server_port}"

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
        """Makes ``folder`` the newest commit of a branch, and creates the repository if it is missing.

        Returns:
            The commit's id, which depends only on the folder's content.
        """
        repository = self.repositories.setdefault(
            repo_id, Repository(private=private, gated=gated, readers=frozenset(readers))
        )
        content = hashlib.sha1()
        for name in files_in(folder):
            data = (folder / name).read_bytes()
            content.update(f"{name}\n{len(data)}\n".encode() + data)
        commit = content.hexdigest()
        repository.commits[commit] = folder
        repository.refs[branch] = commit
        if tag is not None:
            repository.refs[tag] = commit
            repository.tags.add(tag)
        return commit

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a repository: name -> content."""
        repository = self.repositories[repo_id]
        folder = repository.commits[repository.refs[revision]]
        return {name: (folder / name).read_bytes() for name in files_in(folder)}

    def downloads(self) -> list[str]:
        """The names of the files whose content was requested, each once, in order."""
        names = []
        for request in self.requests:
            if request.method == "GET" and request.host == "storage":
                names.append(self._stored[request.path.removeprefix("/")].name)
            elif request.method == "GET" and (found := match(RESOLVE, request)):
                names.append(found["file"])
        return list(dict.fromkeys(names))

    def answer(self, request: Request) -> Answer:
        """Records a request and answers it."""
        with self._lock:
            self.requests.append(request)
            try:
                if self.before is not None:
                    self.before(request)
                return self._storage(request) if request.host == "storage" else self._hub(request)
            except Refusal as refusal:
                return refusal.answer

    def fault(self, name: str) -> Fault | None:
        """The fault of this download of a file."""
        with self._lock:
            return self.faults[name].pop(0) if self.faults.get(name) else None

    def store(self, request: Request, body: BufferedIOBase, length: int) -> Answer | None:
        """Receives a file uploaded to the storage; None if the connection is to be closed."""
        with self._lock:
            self.requests.append(request)
            fault = self.upload_faults.pop(0) if self.upload_faults else None
        if "authorization" in request.headers:
            return Refusal(HTTPStatus.BAD_REQUEST, None, "Only one auth mechanism allowed").answer
        return self.writing.receive(request, body, length, cut=fault is not None)

    def _hub(self, request: Request) -> Answer:
        for old, new in self.renamed.items():
            if re.match(rf"(/api/models)?/{re.escape(old)}(?![\w-])", request.path):
                query = f"?{urlencode(request.query)}" if request.query else ""
                where = self.endpoint + request.path.replace(old, new, 1) + query
                return Answer(HTTPStatus.TEMPORARY_REDIRECT, {"Location": where})
        if request.method in ("POST", "DELETE"):
            return self.writing.answer(request)
        if request.path == "/api/whoami-v2":
            return self.writing.whoami(request)
        if found := match(REFS, request):
            return as_json(_refs(self.allowed(found["id"], request.token)))
        if found := match(TREE, request):
            repository = self.allowed(found["id"], request.token)
            entries = _tree(repository.commits[resolve(repository, found["revision"])])
            deep = request.query.get("recursive", "").lower() == "true"
            return as_json([entry for entry in entries if deep or "/" not in entry["path"]])
        if found := match(MODEL_INFO, request):
            repository = self.allowed(found["id"], request.token)
            commit = resolve(repository, found.get("revision", "main"))
            return as_json(_model_info(found["id"], repository, commit))
        if found := match(RESOLVE, request):
            repository = self.allowed(found["id"], request.token, content=True)
            commit = resolve(repository, found["revision"])
            return self._file(repository.commits[commit], found["file"], commit)
        raise Refusal(HTTPStatus.NOT_FOUND, None, "Sorry, we can't find the page you are looking for.")

    def check_token(self, token: str | None) -> None:
        """Refuses an unknown token."""
        known = self.tokens.union(*(repository.readers for repository in self.repositories.values()))
        if token is not None and token not in known | self.accounts.keys():
            raise Refusal(HTTPStatus.UNAUTHORIZED, None, "Invalid credentials in Authorization header")

    def allowed(self, repo_id: str, token: str | None, *, content: bool = False) -> Repository:
        """The repository, if the token may see it; with ``content``, the token must also open its files."""
        self.check_token(token)
        repository = self.repositories.get(repo_id)
        account = self.accounts.get(token or "")
        member = account is not None and repo_id.partition("/")[0] in account.namespaces
        # Without a token, a missing repository and a private one give the same answer.
        if repository is None or (repository.private and not member and token not in repository.readers):
            if token is None:
                raise Refusal(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Invalid username or password.")
            raise Refusal(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
        if content and repository.gated and token not in repository.readers:
            status = HTTPStatus.UNAUTHORIZED if token is None else HTTPStatus.FORBIDDEN
            raise Refusal(status, "GatedRepo", f"Access to model {repo_id} is restricted.")
        return repository

    def _file(self, folder: Path, name: str, commit: str) -> Answer:
        if name not in files_in(folder):
            refusal = Refusal(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
            refusal.answer.headers["X-Repo-Commit"] = commit
            raise refusal
        path = folder / name
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not name.endswith(LARGE):
            return Answer(headers=headers | {"ETag": f'"{git_id(path.read_bytes())}"'}, body=path)
        content = sha256(path)
        self._stored[content] = path
        headers |= {
            "X-Linked-ETag": f'"{content}"',
            "X-Linked-Size": str(path.stat().st_size),
            "ETag": f'"{content}"',
            "Location": f"{self.storage}/{content}?Signature=x",
        }
        return Answer(HTTPStatus.FOUND, headers, b"Found. Redirecting")

    def _storage(self, request: Request) -> Answer:
        if "authorization" in request.headers:
            raise Refusal(HTTPStatus.BAD_REQUEST, None, "Only one auth mechanism allowed")
        path = self._stored.get(request.path.removeprefix("/"))
        if path is None:
            raise Refusal(HTTPStatus.NOT_FOUND, None, "NoSuchKey")
        return Answer(headers={"Accept-Ranges": "bytes", "ETag": f'"{path.stat().st_size}"'}, body=path)


class Listener(ThreadingHTTPServer):
    """Ignores clients that disconnect; other errors are shown."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _listen(server: HubServer, host: Host) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            request, body, length = self.request_line()
            if host == "storage" and self.command == "PUT":
                answer = server.store(request, body, length)
                if answer is None:
                    _break_off(self)
                    return
            elif length > LARGEST_BODY:
                answer = Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, None, "payload too large").answer
                self.close_connection = True
            else:
                answer = server.answer(replace(request, body=body.read(length)))
            _send(self, server, answer)

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

        def request_line(self) -> tuple[Request, BufferedIOBase, int]:
            """The request without its body; the stream to read the body from, and its length in bytes."""
            url = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(host, self.command, url.path, headers, dict(parse_qsl(url.query)))
            return request, self.rfile, int(headers.get("content-length", 0))

        def log_message(self, *_: object) -> None:
            pass

    listener = Listener(("127.0.0.1", 0), Handler)
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
    _break_off(handler, politely=fault == "cut")


def _break_off(handler: BaseHTTPRequestHandler, *, politely: bool = False) -> None:
    handler.close_connection = True
    if not politely:
        # With a linger time of zero, closing resets the connection.
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()


def _model_info(repo_id: str, repository: Repository, commit: str) -> dict[str, Any]:
    folder = repository.commits[commit]
    siblings = []
    for entry in _tree(folder):
        if entry["type"] == "file":
            lfs = {"lfs": entry["lfs"] | {"sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {}
            siblings.append(
                {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"], **lfs}
            )
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


def _refs(repository: Repository) -> dict[str, Any]:
    kinds: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
    for name, commit in repository.refs.items():
        kind, start = ("tags", "refs/tags/") if name in repository.tags else ("branches", "refs/heads/")
        if not name.startswith("refs/"):
            kinds[kind].append({"name": name, "ref": start + name, "targetCommit": commit})
    return kinds


def _tree(folder: Path) -> list[dict[str, Any]]:
    """All entries of a commit, on one page."""
    entries = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            entries.append({"type": "directory", "path": name, "oid": git_id(b""), "size": 0})
            continue
        data = path.read_bytes()
        entry: dict[str, Any] = {"type": "file", "path": name, "oid": git_id(data), "size": len(data)}
        if name.endswith(LARGE):
            # git stores a pointer instead of the file; this is the pointer's id.
            entry["oid"] = git_id(f"oid sha256:{sha256(path)}".encode())
            entry["lfs"] = {"oid": sha256(path), "size": len(data), "pointerSize": 134}
        entries.append(entry)
    return entries


def _parameters(folder: Path) -> dict[str, int]:
    """dtype -> number of elements, from the headers of the safetensors files in the root."""
    counts: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        for name, tensor in header.items():
            if name != "__metadata__":
                counts[tensor["dtype"]] = counts.get(tensor["dtype"], 0) + math.prod(tensor["shape"])
    return counts
