"""The writing half of the Hub on loopback: accounts, new repositories, branches, large files, commits.

Large files are uploaded first, each under its SHA-256, and a commit then names them; a file that the storage
already has is not requested again. A commit is one request of JSON lines, which succeeds or fails as a whole.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tests.hub_protocol import (
    LARGE,
    Account,
    Answer,
    Refusal,
    Repository,
    Request,
    as_json,
    files_in,
    match,
    resolve,
)

if TYPE_CHECKING:
    from tests.hub_server import HubServer

BRANCH = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/branch/(?P<branch>.+)")
PREUPLOAD = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)")
BATCH = re.compile(r"/(?P<id>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
COMMIT = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)")
OBJECT = re.compile(r"/upload/(?P<oid>[0-9a-f]{64})")
LARGEST_INLINE = 10 << 20
"""Bytes of a file that a commit may contain itself."""
PIECE = 1 << 20
"""Bytes of an uploaded file that are held in memory."""
NEW = {".gitattributes": "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
"""The files of a new repository."""


class Writing:
    """The requests that change repositories."""

    def __init__(self, server: HubServer, folder: Path) -> None:
        self.server = server
        self.commits, self.objects = folder / "commits", folder / "objects"
        self.commits.mkdir()
        self.objects.mkdir()

    @property
    def stored(self) -> set[str]:
        """The SHA-256 of every uploaded file."""
        return {path.name for path in self.objects.iterdir() if len(path.name) == 64}

    def whoami(self, request: Request) -> Answer:
        """The owner of the token."""
        if request.token is None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, None, "Invalid username or password.")
        self.server.check_token(request.token)
        account = self.server.accounts.get(request.token, Account("reader", role="read"))
        return as_json(
            {
                "type": "user",
                "name": account.name,
                "orgs": [{"name": name} for name in account.organisations],
                "auth": {"accessToken": {"displayName": "test", "role": account.role}},
            }
        )

    def answer(self, request: Request) -> Answer:
        """Answers a POST request to the Hub itself."""
        self.server.check_token(request.token)
        if request.path == "/api/repos/create":
            return self._create(request)
        if request.path == "/api/validate-yaml":
            return _validate_card(json.loads(request.body)["content"])
        if found := match(PREUPLOAD, request):
            repository = self._writable(found["id"], request)
            folder = repository.commits[resolve(repository, found["revision"])]
            return as_json({"files": self._modes(json.loads(request.body), folder)})
        if found := match(BATCH, request):
            self._writable(found["id"], request, proposal=True)
            return as_json(self._batch(json.loads(request.body)["objects"], found["id"]))
        if request.path.startswith("/verify/"):
            asked = json.loads(request.body)
            if not self._has(asked["oid"], asked["size"]):
                raise Refusal(HTTPStatus.NOT_FOUND, None, "Object not found")
            return as_json({})
        if found := match(BRANCH, request):
            if request.method == "DELETE":
                del self._writable(found["id"], request).refs[unquote(found["branch"])]
                return as_json({})
            return self._branch(found["id"], unquote(found["branch"]), request)
        if found := match(COMMIT, request):
            return self._commit(found["id"], found["revision"], request)
        raise Refusal(HTTPStatus.NOT_FOUND, None, "Sorry, we can't find the page you are looking for.")

    def receive(self, request: Request, body: BufferedIOBase, length: int, *, cut: bool) -> Answer | None:
        """Receives a file in pieces; None if the connection is to be closed."""
        found = match(OBJECT, request)
        if not found:
            return Refusal(HTTPStatus.NOT_FOUND, None, "NoSuchKey").answer
        path = self.objects / f"incoming-{secrets.token_hex(8)}"
        content = hashlib.sha256()
        with path.open("wb") as file:
            for piece in self._pieces(body, length, half=cut):
                file.write(piece)
                content.update(piece)
        if path.stat().st_size < length:
            path.unlink()
            return None
        if content.hexdigest() != found["oid"]:
            path.unlink()
            return Refusal(HTTPStatus.BAD_REQUEST, None, "BadDigest").answer
        path.replace(self.objects / found["oid"])
        return Answer(headers={"ETag": f'"{content.hexdigest()[:32]}"'})

    def _pieces(self, body: BufferedIOBase, length: int, *, half: bool) -> Iterator[bytes]:
        read, told = 0, False
        while read < (length // 2 if half else length):
            piece = body.read(min(PIECE, max(1, length // 4), length - read))
            if not piece:  # the client disconnected
                return
            read += len(piece)
            yield piece
            if not told and read >= length // 2 and self.server.half_sent is not None:
                told = True
                self.server.half_sent()

    def _writable(self, repo_id: str, request: Request, *, proposal: bool = False) -> Repository:
        """The repository, if the token may write to it or open a pull request."""
        repository = self.server.allowed(repo_id, request.token)
        account = self.server.accounts.get(request.token or "")
        proposal = proposal or request.query.get("create_pr") == "1"
        if account is None or account.role == "read":
            raise Refusal(HTTPStatus.FORBIDDEN, None, "This token has no write access")
        if not proposal and repo_id.partition("/")[0] not in account.namespaces:
            raise Refusal(HTTPStatus.FORBIDDEN, None, f"You don't have write access to {repo_id}")
        return repository

    def _create(self, request: Request) -> Answer:
        asked = json.loads(request.body)
        account = self.server.accounts.get(request.token or "")
        owner = asked["organization"] or (account.name if account else "")
        if account is None or account.role == "read" or owner not in account.namespaces:
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                None,
                f'You don\'t have the rights to create a model under the namespace "{owner}"',
            )
        repo_id = f"{owner}/{asked['name']}"
        if repo_id in self.server.repositories:
            refusal = Refusal(HTTPStatus.CONFLICT, None, "You already created this model repo")
            refusal.answer.body = json.dumps({"url": f"{self.server.endpoint}/{repo_id}"}).encode()
            raise refusal
        # Clients 0.36 send the first key, 2.x the second.
        private = bool(asked.get("private") or asked.get("visibility") == "private")
        repository = self.server.repositories[repo_id] = Repository(private=private)
        folder = self.commits / secrets.token_hex(8)
        folder.mkdir()
        for name, text in NEW.items():
            (folder / name).write_text(text)
        self._add(repository, "main", folder)
        return as_json({"url": f"{self.server.endpoint}/{repo_id}", "id": repo_id})

    def _branch(self, repo_id: str, branch: str, request: Request) -> Answer:
        repository = self._writable(repo_id, request)
        if branch in repository.refs:
            raise Refusal(HTTPStatus.CONFLICT, None, "Reference already exists")
        start = json.loads(request.body).get("startingPoint", "main")
        repository.refs[branch] = resolve(repository, start)
        return as_json({})

    def _has(self, oid: str, size: int) -> bool:
        path = self.objects / oid
        return path.is_file() and path.stat().st_size == size

    def _batch(self, objects: Iterable[dict[str, Any]], repo_id: str) -> dict[str, Any]:
        answered = []
        for asked in objects:
            oid, size = asked["oid"], asked["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if not self._has(oid, size):
                entry["actions"] = {
                    "upload": {"href": f"{self.server.storage}/upload/{oid}?Signature=x"},
                    "verify": {"href": f"{self.server.endpoint}/verify/{repo_id}"},
                }
            answered.append(entry)
        return {"transfer": self.server.transfer, "objects": answered}

    def _commit(self, repo_id: str, revision: str, request: Request) -> Answer:
        repository = self._writable(repo_id, request)
        proposal = request.query.get("create_pr") == "1"
        lines = [json.loads(line) for line in request.body.splitlines()]
        parent = resolve(repository, revision)
        wanted = lines[0]["value"].get("parentCommit", parent)
        if revision not in repository.refs or revision in repository.tags:
            raise Refusal(HTTPStatus.BAD_REQUEST, None, f"{revision} is not a branch")
        if wanted != parent and not proposal:
            raise Refusal(
                HTTPStatus.PRECONDITION_FAILED, None, "A commit has happened since. Please refresh."
            )
        folder = self.commits / secrets.token_hex(8)
        folder.mkdir()
        before = repository.commits[wanted]
        for name in files_in(before):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _link(before / name, folder / name)
        try:
            for line in lines[1:]:
                self._apply(line["key"], line["value"], folder)
        except Refusal:
            shutil.rmtree(folder)
            raise
        number = sum(name.startswith("refs/pr/") for name in repository.refs) + 1
        commit = self._add(repository, f"refs/pr/{number}" if proposal else revision, folder)
        url = f"{self.server.endpoint}/{repo_id}"
        made = {"commitUrl": f"{url}/commit/{commit}", "commitOid": commit}
        return as_json(made | ({"pullRequestUrl": f"{url}/discussions/{number}"} if proposal else {}))

    def _apply(self, key: str, value: dict[str, Any], folder: Path) -> None:
        name = PurePosixPath(value["path"])
        if value["path"] in self.server.lost:
            return
        if name.is_absolute() or ".." in name.parts:
            raise Refusal(HTTPStatus.BAD_REQUEST, None, "Invalid path")
        path = folder / name
        if key == "deletedFile":
            if not path.is_file():
                raise Refusal(HTTPStatus.NOT_FOUND, "EntryNotFound", "A file with this name doesn't exist")
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if key == "file":
            content = base64.b64decode(value["content"])
            if len(content) > LARGEST_INLINE or value["path"].endswith(LARGE):
                raise Refusal(HTTPStatus.BAD_REQUEST, None, "Your push was rejected: use LFS")
            path.write_bytes(content)
        elif key == "lfsFile" and self._has(value["oid"], value["size"]):
            _link(self.objects / value["oid"], path)
        else:
            raise Refusal(HTTPStatus.BAD_REQUEST, None, f"{key} of {name} names what was not sent")

    def _modes(self, asked: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
        """How to send each file, and whether a .gitignore (the client's or else ours) leaves it out."""
        ours = folder / ".gitignore"
        lines = asked.get("gitIgnore", ours.read_text() if ours.is_file() else "").split()
        return [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": file["path"] in self.server.ignored
                or any(fnmatch.fnmatch(file["path"], line) for line in lines),
            }
            for file in asked["files"]
        ]

    def _add(self, repository: Repository, branch: str, folder: Path) -> str:
        commit = secrets.token_hex(20)
        repository.commits[commit] = folder
        repository.refs[branch] = commit
        return commit


def _validate_card(content: str) -> Answer:
    """Checks a card's front matter as the Hub does: it must be YAML, and an object."""
    import yaml

    front = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    try:
        valid = front is None or isinstance(yaml.safe_load(front[1]), dict)
    except yaml.YAMLError:
        valid = False
    answer = as_json(
        {"errors": [] if valid else [{"message": '"metadata" must be an object'}], "warnings": []}
    )
    answer.status = HTTPStatus.OK if valid else HTTPStatus.BAD_REQUEST
    return answer


def _link(source: Path, target: Path) -> None:
    """Links a file if the file system can, else copies it; folders of commits never change."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
