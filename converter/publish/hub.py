"""The Hub's side of a push, through huggingface_hub: what a repository holds, and one new commit."""

from __future__ import annotations

import hashlib
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from converter.errors import ConverterError, PushError, UsageError, option
from converter.source.hub import (
    DEFAULT_REVISION,
    access_token,
    client_reason,
    commit_id,
    innermost,
    is_repo_id,
    set_up_client,
    shown,
    waiting,
)

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

BRANCH = re.compile(r"(?!refs/|[0-9a-f]{40}$|.*\.lock(/|$))\w[\w-]*([./][\w-]+)*", re.ASCII)
"""Names of branches that git accepts and the Hub does not reserve."""


ADDRESS = re.compile(r"https://(?:huggingface\.co|hf\.co)/(?P<repo_id>[^/?#]+/[^/?#]+)/?")
"""The address of a repository of models in a browser."""


def id_in(name: str) -> str:
    """The id of a repository that was given as an address; any other text as it is."""
    found = ADDRESS.fullmatch(name)
    return name if found is None else found["repo_id"]


def check_repo_id(repo_id: str) -> None:
    """Raises ``UsageError`` for a text that cannot be pushed to."""
    if repo_id.count("/") != 1 or not is_repo_id(repo_id):
        raise UsageError(f"{repo_id[:100]!r} is not a repository name; give USER/NAME, such as ada/bloom-ntk")


@dataclass(frozen=True)
class Target:
    """What a repository of the Hub holds, and where its next commit goes."""

    private: bool
    branch: str
    head: str
    """The parent of the next commit: the last one of the branch, or the one where a new branch begins."""
    new_branch: bool
    files: Mapping[str, RepoFile]


class Hub:
    """A repository on the Hub, for the owner of a token.

    Its methods raise ``PushError``, or ``UsageError`` for a name that cannot be pushed to.
    """

    def __init__(self, repo_id: str, *, token: str | None, progress: bool) -> None:
        """Asks the Hub for the owner of the token; refuses one that cannot write, and impossible names."""
        from huggingface_hub import HfApi

        check_repo_id(repo_id)
        secret = access_token(token)
        if secret is None:
            raise PushError(
                f"writing to {repo_id} takes a token with write access: `hf auth login`, HF_TOKEN or "
                f"{option.token}"
            )
        set_up_client(progress=progress)
        self.repo_id, self._token, self._api = repo_id, secret, HfApi(token=secret)
        with self._explained():
            told = self._api.whoami()
            self._owner: str = told["name"]
            spaces = [told, *(told.get("orgs") or [])]
            self._namespaces = [space["name"].lower() for space in spaces]
            self._role = ((told.get("auth") or {}).get("accessToken") or {}).get("role")
        if self._role == "read":
            raise PushError(
                f"this token of {self._owner} can only read; create one with write access in the Hub's "
                f"settings, then `hf auth login` or give {option.token}"
            )

    def check_namespace(self) -> None:
        """Refuses a namespace that the token's owner cannot write to.

        The Hub does not say where a fine-grained token may write, so such tokens pass.
        """
        namespace, _, name = self.repo_id.partition("/")
        if self._role != "fineGrained" and namespace.lower() not in self._namespaces:
            raise PushError(
                f"{namespace!r} is neither {self._owner}, whose token this is, nor one of its organisations; "
                f"write to {self._owner}/{name}, or ask to become a member"
            )

    def look(self, branch: str | None) -> Target | None:
        """The repository as it is now; None if the token cannot see one."""
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._explained(branch):
            try:
                info = self._api.model_info(self.repo_id)
            except RepositoryNotFoundError:
                return None
            # The Hub redirects a repository's old name to its new one, and would redirect what is written.
            if info.id.lower() != self.repo_id.lower():
                raise PushError(
                    f"{self.repo_id} was renamed to {info.id[:100]}; use that name to write to it"
                )
            head = commit_id(info.sha)
            heads = {DEFAULT_REVISION: head}
            if branch not in (None, DEFAULT_REVISION):
                refs = self._api.list_repo_refs(self.repo_id)
                if branch in [tag.name for tag in refs.tags]:
                    raise UsageError(f"{option.branch} {branch} is a tag of {self.repo_id}; name a branch")
                heads = {found.name: commit_id(found.target_commit) for found in refs.branches}
            branch = branch or DEFAULT_REVISION
            head = heads.get(branch, head)
            return Target(bool(info.private), branch, head, branch not in heads, self.files(head, branch))

    def files(self, commit: str, branch: str | None = None) -> dict[str, RepoFile]:
        """The files of a commit, by name; ``branch`` is where errors say that it is."""
        from huggingface_hub.hf_api import RepoFile

        with self._explained(branch):
            tree = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
            return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def read(self, name: str, commit: str) -> bytes:
        with self._explained(), tempfile.TemporaryDirectory() as cache:
            path = self._api.hf_hub_download(self.repo_id, name, revision=commit, cache_dir=cache)
            return Path(path).read_bytes()

    def create(self, branch: str | None, *, private: bool) -> Target:
        """Creates the repository, empty; fails if somebody else has just done so."""
        with self._explained():
            # Without --private, the namespace's own default applies.
            self._api.create_repo(self.repo_id, private=private or None)
        target = self.look(branch)
        if target is None:
            raise PushError(f"the Hub does not show {self.repo_id} yet; run the same command again")
        return target

    def commit(
        self,
        target: Target,
        added: Mapping[str, bytes | Path],
        deleted: Sequence[str],
        *,
        title: str,
        create_pr: bool,
    ) -> tuple[str, str | None]:
        """Adds a commit to the target, unless somebody else did; its id and the pull request's URL."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        with self._explained(target.branch), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the Hub's suggestions for the card
            if target.new_branch:
                self._api.create_branch(self.repo_id, branch=target.branch, revision=target.head)
            if not added and not deleted:
                return target.head, None
            made = self._api.create_commit(
                self.repo_id,
                operations=[
                    *starmap(CommitOperationAdd, added.items()),
                    *map(CommitOperationDelete, deleted),
                ],
                commit_message=title,
                revision=target.branch,
                parent_commit=target.head,
                create_pr=create_pr,
            )
        return made.oid, made.pr_url

    def url(self, branch: str) -> str:
        """The address of a branch in a browser."""
        base = f"{self._api.endpoint}/{self.repo_id}"
        return base if branch == DEFAULT_REVISION else f"{base}/tree/{quote(branch)}"

    @contextmanager
    def _explained(self, branch: str | None = None) -> Iterator[None]:
        """Turns the client's errors into a ``PushError`` of one line, which does not tell the token."""
        try:
            with waiting():
                yield
        except ConverterError:
            raise
        except Exception as error:
            if is_local(innermost(error)):
                raise
            place = f"{self.repo_id}, branch {branch or DEFAULT_REVISION!r},"
            reason = client_reason(error, self._token)
            raise PushError(
                f"{place} cannot be pushed to: {reason}; check the id, whether {option.token} has write "
                "access, and the connection (HF_HUB_OFFLINE, HF_ENDPOINT, HF_HUB_DISABLE_XET=1), and run "
                "the same command again: the files come in one commit, all or none, and what the Hub has is "
                "not sent again"
            ) from shown(error, self._token)


def is_local(error: BaseException) -> bool:
    """Whether an error has nothing to do with the Hub: of memory, or of a file that is sent."""
    if isinstance(error, MemoryError):
        return True
    of_network = isinstance(error, ConnectionError | TimeoutError)
    return isinstance(error, OSError) and error.errno is not None and not of_network


def same(content: bytes | Path, sha256: str | None, remote: RepoFile) -> bool:
    """Whether a file, or its content, is the Hub's. ``sha256`` is that of a large file, if it is known."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    if size != remote.size:
        return False
    if remote.lfs is not None and sha256 is not None:
        return sha256 == remote.lfs.sha256
    data = content if isinstance(content, bytes) else content.read_bytes()
    if remote.lfs is not None:
        return hashlib.sha256(data).hexdigest() == remote.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % size + data).hexdigest() == remote.blob_id
