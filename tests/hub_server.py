"""A Hub on loopback: the part of the Hub's HTTP protocol that huggingface_hub uses, and fixtures that use it.

Like the real Hub it has two servers: the Hub itself, and the storage to which it redirects large files, a
different origin that must never see a token. Both record the requests. A commit is a folder that no longer
changes. Large files are uploaded first, each under its SHA-256, and a commit then names them; it is one
request of JSON lines, which succeeds or fails as a whole.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pytest
from safetensors import deserialize

from tests import forks
from tests.conftest import Run
from tests.messages import errors, says

ROOT = Path(__file__).parent.parent
TOKEN = "hf_secretSECRETsecret"
AS_USERS_DO = ("-m", "converter")
UNVERIFIED = (
    "-c",
    "import converter.verification; converter.verification.verify = lambda *_, **__: []\n"
    "from converter.cli import main; main()",
)
"""Starts the command line without verification, which takes seconds, to test the steps after it."""
IMPATIENT = ("-c", f"import time; time.sleep = lambda _: None\n{UNVERIFIED[1]}")
"""Without the pauses between the client's attempts, too."""

Command = Callable[..., Run]
Host = Literal["hub", "storage"]
Fault = Literal["cut", "short"]
"""A fault of one download: the connection is closed in the middle of the file (``cut``), or it seems complete
but has half the length (``short``)."""

LARGE = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".onnx_data", ".pt", ".model")
"""Suffixes of the files that the Hub keeps in its storage (from the .gitattributes of a new repository)."""
MODEL = r"/api/models/(?P<id>[^/]+/[^/]+)"
PATHS = {
    "refs": f"{MODEL}/refs",
    "tree": f"{MODEL}/tree/(?P<revision>[^/]+)",
    "info": r"/api/models/(?P<id>[^/]+(?:/[^/]+)?)(?:/revision/(?P<revision>[^/]+))?",
    "resolve": r"/(?P<id>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)",
    "branch": f"{MODEL}/branch/(?P<branch>.+)",
    "preupload": f"{MODEL}/preupload/(?P<revision>[^/]+)",
    "commit": f"{MODEL}/commit/(?P<revision>[^/]+)",
    "batch": r"/(?P<id>[^/]+/[^/]+)\.git/info/lfs/objects/batch",
    "object": r"/upload/(?P<oid>[0-9a-f]{64})",
}


@dataclass(frozen=True)
class Request:
    """One request as it was received."""

    host: Host
    method: str
    path: str
    """The path, still quoted, without the query."""
    headers: dict[str, str]
    """Header names are in lower case."""
    query: dict[str, str]
    body: bytes = b""
    """The body of a request to the Hub itself; uploads to the storage are not kept here."""

    @property
    def token(self) -> str | None:
        """The bearer token."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme == "Bearer" else None

    def match(self, kind: str) -> dict[str, str]:
        """The parts of a path of ``PATHS``, unquoted; a quoted slash does not separate parts."""
        found = re.fullmatch(PATHS[kind], self.path)
        parts = found.groupdict() if found else {}
        return {name: unquote(part) for name, part in parts.items() if part is not None}


@dataclass
class Repository:
    """A repository: its commits and what points to them."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    """Branch, tag or pull request -> commit."""
    tags: set[str] = field(default_factory=set)
    """The names in ``refs`` that are tags."""

    def resolve(self, revision: str) -> str:
        """The commit that a branch, tag or commit id names."""
        commit = self.refs.get(revision, revision)
        if commit not in self.commits:
            raise Refusal(HTTPStatus.NOT_FOUND, f"Invalid rev id: {quote(revision)}", "RevisionNotFound")
        return commit


@dataclass(frozen=True)
class Account:
    """The owner of a token."""

    name: str
    organisations: tuple[str, ...] = ()
    role: Literal["read", "write", "fineGrained"] = "write"

    def owns(self, namespace: str) -> bool:
        """Whether a namespace is the owner's."""
        return namespace in (self.name, *self.organisations)


@dataclass
class Answer:
    """An answer; its body may be a file."""

    status: HTTPStatus = HTTPStatus.OK
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Path = b""


class Refusal(Exception):
    """An error like the Hub's, with its message in headers, where the client looks for it."""

    def __init__(self, status: HTTPStatus, message: str, code: str | None = None) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer = as_json({"error": message}, status)
        self.answer.headers |= headers


def as_json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    """An answer in JSON."""
    return Answer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())


class HubServer:
    """The server; as a context manager it listens on two free ports of 127.0.0.1."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.accounts: dict[str, Account] = {}
        """Token -> its owner; other tokens are refused."""
        self.requests: list[Request] = []
        self.before: Callable[[Request], object] | None = None
        """Called with each request before it is answered; it may raise a ``Refusal``."""
        self.after: Callable[[Request, Answer], object] | None = None
        """Called with each answer of ``_read`` or the storage; it may change it."""
        self.faults: dict[str, Fault] = {}
        """File name -> the fault of its downloads."""
        self.half_sent: Callable[[], object] | None = None
        """Called when half of an uploaded file was received; the connection is closed if it returns True."""
        self.lost: set[str] = set()
        """Files that an accepted commit does not add."""
        self.transfer = "basic"
        """The protocol for large files: ``basic`` or ``xet``."""
        self.objects: dict[str, bytes] = {}
        """SHA-256 of an uploaded file -> its content."""
        self._temporary = tempfile.TemporaryDirectory(prefix="hub-")
        self._downloads: dict[str, Path] = {}
        """SHA-256 of a large file -> the file."""
        self._lock = threading.Lock()
        self._listeners = {host: _listen(self, host) for host in ("hub", "storage")}
        self.endpoint, self.storage = (
            f"http://127.0.0.1:{listener.server_port}" for listener in self._listeners.values()
        )

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners.values():
            listener.shutdown()
            listener.server_close()
        self._temporary.cleanup()

    # For tests: what is there, and what was asked for.

    def commit(
        self, repo_id: str, folder: Path, *, branch: str = "main", tag: str | None = None, **settings: Any
    ) -> str:
        """Makes ``folder`` the newest commit of a branch; a missing repository is created with ``settings``.

        Returns:
            The commit's id, which depends only on the folder's content.
        """
        repository = self.repositories.setdefault(repo_id, Repository(**settings))
        content = hashlib.sha1()
        for name in _files(folder):
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
        return {name: (folder / name).read_bytes() for name in _files(folder)}

    def downloads(self) -> list[str]:
        """The names of the files whose content was requested, each once, in order."""
        names = []
        for request in self.requests:
            if request.method == "GET" and request.host == "storage":
                names.append(self._downloads[request.path.removeprefix("/")].name)
            elif request.method == "GET" and (found := request.match("resolve")):
                names.append(found["file"])
        return list(dict.fromkeys(names))

    # Reading

    def answer(self, request: Request) -> Answer:
        """Records a request and answers it."""
        with self._lock:
            self.requests.append(request)
            try:
                if self.before is not None:
                    self.before(request)
                if request.token is not None and request.token not in self.accounts:
                    raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid credentials in Authorization header")
                if request.method == "POST":
                    return self._changed(request)
                stored = request.host == "storage"
                answer = self._stored_file(request) if stored else self._read(request)
                if self.after is not None:
                    self.after(request, answer)
                return answer
            except Refusal as refusal:
                return refusal.answer

    def _read(self, request: Request) -> Answer:
        if request.path == "/api/whoami-v2":
            if request.token is None:
                raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")
            account = self.accounts[request.token]
            orgs = [{"name": name} for name in account.organisations]
            auth = {"accessToken": {"role": account.role}}
            shown = {"fullname": account.name, "avatarUrl": f"{self.endpoint}/avatar.png"}  # by Gradio
            return as_json({"type": "user", "name": account.name, "orgs": orgs, "auth": auth, **shown})
        if found := request.match("refs"):
            return as_json(_refs(self._allowed(found["id"], request)))
        if found := request.match("tree"):
            repository = self._allowed(found["id"], request)
            return as_json(_tree(repository.commits[repository.resolve(found["revision"])]))
        if found := request.match("info"):
            repository = self._allowed(found["id"], request)
            return as_json(_model_info(found["id"], repository, found.get("revision", "main")))
        if found := request.match("resolve"):
            repository = self._allowed(found["id"], request)
            if repository.gated and not self._member(found["id"], request):
                status = HTTPStatus.UNAUTHORIZED if request.token is None else HTTPStatus.FORBIDDEN
                raise Refusal(status, f"Access to model {found['id']} is restricted.", "GatedRepo")
            commit = repository.resolve(found["revision"])
            return self._file(repository.commits[commit], found["file"], commit)
        raise Refusal(HTTPStatus.NOT_FOUND, "Sorry, we can't find the page you are looking for.")

    def _member(self, repo_id: str, request: Request) -> bool:
        account = self.accounts.get(request.token or "")
        return account is not None and account.owns(repo_id.partition("/")[0])

    def _allowed(self, repo_id: str, request: Request) -> Repository:
        """The repository, if the token may see it."""
        repository = self.repositories.get(repo_id)
        # Without a token, a missing repository and a private one give the same answer.
        if repository is None or (repository.private and not self._member(repo_id, request)):
            if request.token is None:
                raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid username or password.", "RepoNotFound")
            raise Refusal(HTTPStatus.NOT_FOUND, "Repository not found", "RepoNotFound")
        return repository

    def _file(self, folder: Path, name: str, commit: str) -> Answer:
        headers, path = {"X-Repo-Commit": commit}, folder / name
        if name not in _files(folder):
            refusal = Refusal(HTTPStatus.NOT_FOUND, "Entry not found", "EntryNotFound")
            refusal.answer.headers |= headers
            raise refusal
        if not name.endswith(LARGE):
            return Answer(headers=headers | {"ETag": f'"{_git_id(path.read_bytes())}"'}, body=path)
        content = _sha256(path)
        self._downloads[content] = path
        headers |= {
            "X-Linked-ETag": f'"{content}"',
            "X-Linked-Size": str(path.stat().st_size),
            "ETag": f'"{content}"',
            "Location": f"{self.storage}/{content}?Signature=x",
        }
        return Answer(HTTPStatus.FOUND, headers, b"Found. Redirecting")

    def _stored_file(self, request: Request) -> Answer:
        path = self._downloads[request.path.removeprefix("/")]
        return Answer(headers={"ETag": f'"{path.stat().st_size}"'}, body=path)

    # Writing

    def store(self, request: Request, body: BufferedIOBase, length: int) -> Answer | None:
        """Receives a file uploaded to the storage; None if the connection is to be closed."""
        with self._lock:
            self.requests.append(request)
        oid = request.match("object")["oid"]
        half = body.read(length // 2)
        if self.half_sent is not None and self.half_sent() is True:
            return None
        data = half + body.read(length - length // 2)
        if len(data) < length:
            return None
        if hashlib.sha256(data).hexdigest() != oid:
            return Refusal(HTTPStatus.BAD_REQUEST, "BadDigest").answer
        self.objects[oid] = data
        return Answer(headers={"ETag": f'"{oid[:32]}"'})

    def _changed(self, request: Request) -> Answer:
        """Answers a request that changes something, or that asks how to."""
        if request.path == "/api/repos/create":
            return self._create(request)
        if request.path == "/api/validate-yaml":
            return as_json({"errors": [], "warnings": []})  # of a card's front matter
        if found := request.match("preupload"):
            repository = self._writable(found["id"], request)
            folder = repository.commits[repository.resolve(found["revision"])]
            return as_json({"files": self._modes(json.loads(request.body), folder)})
        if found := request.match("batch"):
            self._writable(found["id"], request, proposal=True)
            objects = [self._object(asked) for asked in json.loads(request.body)["objects"]]
            return as_json({"transfer": self.transfer, "objects": objects})
        if found := request.match("branch"):
            repository = self._writable(found["id"], request)
            if found["branch"] in repository.refs:
                raise Refusal(HTTPStatus.CONFLICT, "Reference already exists")
            start = json.loads(request.body).get("startingPoint", "main")
            repository.refs[found["branch"]] = repository.resolve(start)
            return as_json({})
        if found := request.match("commit"):
            return self._commit(found["id"], found["revision"], request)
        raise Refusal(HTTPStatus.NOT_FOUND, "Sorry, we can't find the page you are looking for.")

    def _writable(self, repo_id: str, request: Request, *, proposal: bool = False) -> Repository:
        """The repository, if the token may write to it or open a pull request."""
        repository = self._allowed(repo_id, request)
        account = self.accounts.get(request.token or "")
        proposal = proposal or request.query.get("create_pr") == "1"
        if account is None or account.role == "read":
            raise Refusal(HTTPStatus.FORBIDDEN, "This token has no write access")
        if not proposal and not self._member(repo_id, request):
            raise Refusal(HTTPStatus.FORBIDDEN, f"You don't have write access to {repo_id}")
        return repository

    def _create(self, request: Request) -> Answer:
        asked = json.loads(request.body)
        account = self.accounts[request.token or ""]
        owner = asked["organization"] or account.name
        if account.role == "read" or not account.owns(owner):
            message = f'You don\'t have the rights to create a model under the namespace "{owner}"'
            raise Refusal(HTTPStatus.FORBIDDEN, message)
        repo_id = f"{owner}/{asked['name']}"
        if repo_id in self.repositories:
            raise Refusal(HTTPStatus.CONFLICT, "You already created this model repo")
        # Clients 0.36 send the first key, 2.x the second.
        private = bool(asked.get("private") or asked.get("visibility") == "private")
        repository = self.repositories[repo_id] = Repository(private=private)
        folder = self._folder()
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        _add(repository, "main", folder)
        return as_json({"url": f"{self.endpoint}/{repo_id}", "id": repo_id})

    def _folder(self) -> Path:
        """An empty folder for a commit."""
        return Path(tempfile.mkdtemp(dir=self._temporary.name))

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Where a large file is uploaded to, unless the storage has it."""
        if asked["oid"] in self.objects:
            return asked
        href = f"{self.storage}/upload/{asked['oid']}?Signature=x"
        return asked | {"actions": {"upload": {"href": href}}}

    def _commit(self, repo_id: str, revision: str, request: Request) -> Answer:
        repository = self._writable(repo_id, request)
        proposal = request.query.get("create_pr") == "1"
        first, *lines = (json.loads(line) for line in request.body.splitlines())
        parent = repository.resolve(revision)
        wanted = first["value"].get("parentCommit", parent)
        if revision not in repository.refs or revision in repository.tags:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{revision} is not a branch")
        if wanted != parent and not proposal:
            raise Refusal(HTTPStatus.PRECONDITION_FAILED, "A commit has happened since. Please refresh.")
        folder = self._folder()
        shutil.copytree(repository.commits[wanted], folder, dirs_exist_ok=True)
        for line in lines:
            if line["value"]["path"] not in self.lost:
                self._apply(line["key"], line["value"], folder)
        number = sum(name.startswith("refs/pr/") for name in repository.refs) + 1
        commit = _add(repository, f"refs/pr/{number}" if proposal else revision, folder)
        url = f"{self.endpoint}/{repo_id}"
        made = {"commitUrl": f"{url}/commit/{commit}", "commitOid": commit}
        return as_json(made | ({"pullRequestUrl": f"{url}/discussions/{number}"} if proposal else {}))

    def _apply(self, key: str, value: dict[str, Any], folder: Path) -> None:
        path = folder / value["path"]
        if key == "deletedFile":
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if key == "file" and not value["path"].endswith(LARGE):
            path.write_bytes(base64.b64decode(value["content"]))
        elif key == "lfsFile" and value["oid"] in self.objects:
            path.write_bytes(self.objects[value["oid"]])
        else:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{key} of {path.name} names what was not sent")

    def _modes(self, asked: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
        """How to send each file, and whether a .gitignore (the client's or else ours) leaves it out."""
        ours = folder / ".gitignore"
        lines = asked.get("gitIgnore", ours.read_text() if ours.is_file() else "").split()
        return [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": any(fnmatch.fnmatch(file["path"], line) for line in lines),
            }
            for file in asked["files"]
        ]


class Listener(ThreadingHTTPServer):
    """Ignores clients that disconnect; other errors are shown."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _listen(server: HubServer, host: Host) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # The client acknowledges headers after 40 ms, and Nagle's algorithm would send the body only then.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(host, self.command, url.path, headers, dict(parse_qsl(url.query)))
            length = int(headers.get("content-length", 0))
            if host == "storage" and self.command == "PUT":
                answer = server.store(request, self.rfile, length)
            else:
                answer = server.answer(replace(request, body=self.rfile.read(length)))
            if answer is None:
                self.close_connection = True
            else:
                _send(self, server, answer)

        do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    listener = Listener(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
    return listener


def _send(handler: BaseHTTPRequestHandler, server: HubServer, answer: Answer) -> None:
    fault: Fault | None = None
    body = answer.body
    if isinstance(body, Path):
        fault = server.faults.get(body.name)
        body = body.read_bytes()
    half = body[: len(body) // 2]
    handler.send_response(answer.status)
    length = len(half if fault == "short" and handler.command == "GET" else body)
    for name, value in {**answer.headers, "Content-Length": str(length)}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(half if fault else body)
    if fault == "cut":
        handler.close_connection = True


def _model_info(repo_id: str, repository: Repository, revision: str) -> dict[str, Any]:
    commit = repository.resolve(revision)
    folder = repository.commits[commit]
    siblings = [
        {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
        | ({"lfs": entry["lfs"] | {"sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {})
        for entry in _tree(folder)
    ]
    counts = _parameters(folder)
    return {
        "id": repo_id,
        "sha": commit,
        "private": repository.private,
        "siblings": siblings,
        "tags": [],
        **({"safetensors": {"parameters": counts, "total": sum(counts.values())}} if counts else {}),
    }


def _refs(repository: Repository) -> dict[str, Any]:
    found: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": []}
    for name, commit in repository.refs.items():
        if not name.startswith("refs/"):
            kind = "tags" if name in repository.tags else "branches"
            found[kind].append({"name": name, "ref": name, "targetCommit": commit})
    return found


def _tree(folder: Path) -> list[dict[str, Any]]:
    """All files of a commit, on one page."""
    entries = []
    for name in _files(folder):
        data = (folder / name).read_bytes()
        entry: dict[str, Any] = {"type": "file", "path": name, "oid": _git_id(data), "size": len(data)}
        if name.endswith(LARGE):
            # git stores a pointer instead of the file; this is the pointer's id.
            content = hashlib.sha256(data).hexdigest()
            entry["oid"] = _git_id(f"oid sha256:{content}".encode())
            entry["lfs"] = {"oid": content, "size": len(data), "pointerSize": 134}
        entries.append(entry)
    return entries


def _parameters(folder: Path) -> dict[str, int]:
    """dtype -> number of elements, from the safetensors files in the root."""
    counts: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        for _, tensor in deserialize(path.read_bytes()):
            counts[tensor["dtype"]] = counts.get(tensor["dtype"], 0) + math.prod(tensor["shape"])
    return counts


def _add(repository: Repository, branch: str, folder: Path) -> str:
    commit = secrets.token_hex(20)
    repository.commits[commit] = folder
    repository.refs[branch] = commit
    return commit


def _files(folder: Path) -> list[str]:
    """The files below a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _git_id(data: bytes) -> str:
    """The id that git gives a file's content."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Fixtures: the command line, as a process that uses this Hub


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working directory of the commands."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that uses ``hub``."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith("HF_") and not name.upper().endswith("_PROXY")
    }
    return own | {
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def command(hub: HubServer, environment: dict[str, str], work: Path) -> Iterator[Command]:
    """``command(*words, start=..., **environment)``: runs the command line as a process that uses ``hub``.

    The token must not appear in anything that it prints or writes.
    """

    def call(*words: object, start: Sequence[str] = AS_USERS_DO, **more: str) -> Run:
        done = forks.run(
            [sys.executable, *start, *map(str, words)],
            cwd=work,
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "secret" not in (done.stdout + done.stderr).lower()
        return Run(done.returncode, done.stdout, done.stderr)

    yield call
    for path in work.rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes().lower()
    assert {request.token for request in hub.requests if request.host == "storage"} <= {None}


@pytest.fixture
def here(run: Command, work: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``here(*words)``: runs the command line in this process, for commands refused before any request."""
    monkeypatch.chdir(work)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the Hub was asked")

    def call(*words: object) -> Run:
        done = run(*words)
        assert "secret" not in (done.out + done.err).lower()
        return done

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    return call


def refused(run: Run, *parts: str, code: int = 1) -> None:
    """One line that has all ``parts``, and no output."""
    assert (run.code, run.out) == (code, ""), run.err
    assert errors(run.err).startswith("error: ")
    assert errors(run.err).isprintable()
    assert "this is a bug" not in run.err
    says(run.err, *parts)
