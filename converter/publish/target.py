"""The target of a push, through huggingface_hub: the files of a repository on the Hub, and a new commit.

A push is one commit, so nobody ever sees half of it. Files that the Hub stores apart from git (weights) are
sent before the commit. Contents that the Hub has are not sent again, so an interrupted push continues.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import PushError, UsageError
from converter.progress import byte_bar
from converter.publish.messages import NO_HUB, NO_TOKEN, explained
from converter.source.hub import DEFAULT_REVISION, access_token, is_repo_id, progress_bars

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

SENDERS = 4
"""Number of files that are sent at the same time."""
HELD = 10 << 20
"""Bytes; smaller files are kept in memory from when they are compared until they are sent."""
APART = (".safetensors", ".onnx", ".onnx_data", ".model")
"""Ends of file names that a new repository on the Hub stores apart from git, however small the file is."""
LARGEST_IN_GIT = 64 << 20
"""Bytes; larger files are not compared by their id in git, because the Hub stores them apart from git."""


@dataclass(frozen=True)
class RemoteFile:
    """A file in a repository of the Hub."""

    size: int
    git_id: str
    """Git's id of the content, or of the pointer that git has in its place."""
    sha256: str | None
    """Of the content, if the Hub stores it apart from git."""


@dataclass(frozen=True)
class Target:
    """A repository of the Hub and where its next commit goes."""

    repo_id: str
    private: bool
    branch: str
    head: str
    """The parent of the next commit: the last one of the branch, or the one where a new branch begins."""
    new_branch: bool
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    """The files of that commit."""


@dataclass(frozen=True)
class Account:
    """The owner of the token."""

    name: str
    namespaces: Sequence[str]
    """Where it can have repositories: its own name and those of its organisations."""
    role: str
    """Of the token: ``read``, ``write`` or ``fineGrained``."""


class Hub:
    """The Hub, with one token."""

    def __init__(self, api: HfApi, token: str, account: Account) -> None:
        self._api, self._token, self.account = api, token, account

    @classmethod
    def connect(cls, repo_id: str, *, token: str | None, progress: bool) -> Hub:
        """Asks the Hub for the owner of the token.

        Args:
            repo_id: the repository that will be written to.
            token: access token; None for HF_TOKEN or the saved login. It is sent to the Hub only.
            progress: let the client draw bars.

        Raises:
            PushError: no token, a token that the Hub does not know or that can only read, or not a Hub.
            UsageError: an impossible name or token.
        """
        from huggingface_hub import HfApi

        check_name(repo_id)
        sent = access_token(token)
        if sent is None:
            raise PushError(NO_TOKEN.format(id=repo_id))
        progress_bars(show=progress)
        api = HfApi(token=sent)
        with explained(repo_id, sent, missing=NO_HUB):
            told = api.whoami()
        account = _account(told)
        if account is None:
            raise PushError(NO_HUB)
        if account.role == "read":
            raise PushError(
                f"this token of {account.name} can only read; create one with write access in the Hub's "
                "settings, then `hf auth login` or give --token"
            )
        return cls(api, sent, account)

    def look(self, repo_id: str, branch: str | None) -> Target | None:
        """A repository as it is now; None if the token cannot see one.

        Raises:
            UsageError: the branch is a tag.
            PushError: the repository was renamed, or the Hub does not answer.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        with explained(repo_id, self._token, branch):
            try:
                info = self._api.model_info(repo_id)
            except RepositoryNotFoundError:
                return None
            # The Hub redirects a repository's old name to its new one, and would redirect what is written.
            if info.id.lower() != repo_id.lower():
                raise PushError(f"{repo_id} was renamed to {info.id[:100]}; use that name to write to it")
            head, new_branch = info.sha, False
            if branch not in (None, DEFAULT_REVISION):
                refs = self._api.list_repo_refs(repo_id)
                if branch in [tag.name for tag in refs.tags]:
                    raise UsageError(f"--branch {branch} is a tag of {repo_id}; name a branch")
                heads = {found.name: found.target_commit for found in refs.branches}
                new_branch = branch not in heads
                head = heads.get(branch or "", head)
            if head is None:
                raise PushError(f"the Hub does not say which commit {repo_id} is at; try again later")
            files = self.files(repo_id, head)
            return Target(repo_id, bool(info.private), branch or DEFAULT_REVISION, head, new_branch, files)

    def files(self, repo_id: str, commit: str) -> dict[str, RemoteFile]:
        """The files of a commit, by name.

        Raises:
            PushError: the Hub does not answer.
        """
        from huggingface_hub.hf_api import RepoFile

        with explained(repo_id, self._token):
            tree = self._api.list_repo_tree(repo_id, recursive=True, revision=commit)
            return {
                entry.path: RemoteFile(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
                for entry in tree
                if isinstance(entry, RepoFile)
            }

    def check_may_write(self, repo_id: str) -> None:
        """Raises ``PushError`` for a namespace that the token's owner cannot write to.

        For fine-grained tokens the Hub does not say where they can write.
        """
        namespace = repo_id.partition("/")[0]
        known = [name.lower() for name in self.account.namespaces]
        if self.account.role != "fineGrained" and namespace.lower() not in known:
            raise PushError(
                f"{namespace!r} is neither {self.account.name}, whose token this is, nor one of its "
                f"organisations; write to {self.account.name}/{repo_id.partition('/')[2]}, or ask to become "
                "a member"
            )

    def create(self, repo_id: str, *, private: bool) -> None:
        """Creates an empty repository.

        Raises:
            PushError: the Hub refuses.
        """
        with explained(repo_id, self._token):
            # Without --private, the namespace's own default applies.
            self._api.create_repo(repo_id, private=private or None, exist_ok=True)

    def read(self, target: Target, name: str) -> bytes:
        """A small file of the target.

        Raises:
            PushError: the Hub does not send it.
        """
        with explained(target.repo_id, self._token), tempfile.TemporaryDirectory() as cache:
            path = self._api.hf_hub_download(target.repo_id, name, revision=target.head, cache_dir=cache)
            return Path(path).read_bytes()

    def prepare(self, paths: Mapping[str, Path], *, progress: bool) -> dict[str, CommitOperationAdd]:
        """Reads and hashes the files that will be sent.

        Large files are stored by their SHA-256, so no other content can arrive. A small file would be read
        again for the commit, so its content is kept in memory.

        Args:
            paths: name in the repository -> file.
            progress: draw a bar on stderr.
        """
        from huggingface_hub import CommitOperationAdd

        sizes = {name: path.stat().st_size for name, path in paths.items()}
        operations = {}
        with byte_bar("hashing", sum(sizes.values()), show=progress) as advance:
            for name, path in paths.items():
                held = sizes[name] <= HELD and not name.endswith(APART)
                content = path.read_bytes() if held else path
                operations[name] = CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
                # New clients hash a file when its hash is first read; reading it here lets the bar show that.
                _ = operations[name].upload_info.sha256
                advance(sizes[name])
        return operations

    def send(self, target: Target, operations: Sequence[CommitOperationAdd], *, create_pr: bool) -> None:
        """Sends files that the Hub stores apart from git and does not have yet; the branch is not changed.

        Each large file is sent in a thread of our own, which ends with the process. The client's own threads
        would keep an interrupted push waiting until whole files were sent.

        Raises:
            PushError: the Hub refuses them, or the connection broke off.
        """
        small: list[CommitOperationAdd] = []
        waiting: list[list[CommitOperationAdd]] = []
        for operation in operations:
            if isinstance(operation.path_or_fileobj, bytes):
                small.append(operation)
            else:
                waiting.append([operation])
        waiting += [small] if small else []
        # A branch that does not exist yet begins as the default branch.
        revision = DEFAULT_REVISION if target.new_branch else target.branch
        failures: list[BaseException] = []

        def work() -> None:
            while not failures:
                try:
                    additions = waiting.pop(0)
                except IndexError:  # another thread took the last
                    return
                try:
                    self._api.preupload_lfs_files(
                        target.repo_id,
                        additions=additions,
                        revision=revision,
                        create_pr=create_pr,
                        free_memory=False,
                        # Files that the target's own .gitignore excludes are pushed too.
                        gitignore_content="# nothing\n",
                    )
                except BaseException as error:
                    failures.append(error)

        from huggingface_hub.utils.tqdm import tqdm

        # Created before the threads start: otherwise a pool of the client creates the lock of its bars and
        # removes it at its end, while other threads hold it.
        tqdm.get_lock()  # type: ignore[no-untyped-call]
        threads = [threading.Thread(target=work, daemon=True) for _ in waiting[:SENDERS]]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
        if failures:
            with explained(target.repo_id, self._token, target.branch, sending=True):
                raise failures[0]
        for operation in operations:
            # The client would silently commit the rest.
            if getattr(operation, "_should_ignore", False):
                raise PushError(
                    f"the Hub would leave {operation.path_in_repo} out of {target.repo_id}, for its "
                    ".gitignore; remove that file there first"
                )

    @contextmanager
    def new_branch(self, target: Target) -> Iterator[None]:
        """Creates the target's branch, and removes it again if the block fails.

        Raises:
            PushError: the Hub does not create it, or somebody else did.
        """
        ours = True
        try:
            with explained(target.repo_id, self._token, target.branch, sending=True):
                try:
                    self._api.create_branch(target.repo_id, branch=target.branch, revision=target.head)
                except Exception as error:
                    # If the Hub answered, it has not created the branch.
                    ours = getattr(error, "response", None) is None
                    raise
            yield
        except BaseException as error:
            if not ours or self._removed(target):
                raise
            stays = f"its branch {target.branch}, which was created for it, may still be there"
            if isinstance(error, PushError):
                raise PushError(f"{error}; {stays}") from error
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(stays) from error
            raise

    def _removed(self, target: Target) -> bool:
        """Removes a branch that got no commit; returns whether it is gone."""
        try:
            refs = self._api.list_repo_refs(target.repo_id)
            heads = {found.name: found.target_commit for found in refs.branches}
            if heads.get(target.branch) == target.head:
                self._api.delete_branch(target.repo_id, branch=target.branch)
        except (Exception, KeyboardInterrupt):
            return False
        return True

    def commit(
        self,
        target: Target,
        operations: Sequence[CommitOperationAdd],
        deleted: Sequence[str],
        *,
        title: str,
        create_pr: bool,
    ) -> tuple[str, str | None]:
        """Adds one commit to the target, unless somebody else did meanwhile.

        Returns:
            The commit's id, and the address of the pull request if there is one.

        Raises:
            PushError: the branch moved, or the Hub does not accept the commit.
        """
        from huggingface_hub import CommitOperationDelete

        with (
            explained(target.repo_id, self._token, target.branch, sending=True),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the Hub's suggestions for the card
            made = self._api.create_commit(
                target.repo_id,
                operations=[*operations, *map(CommitOperationDelete, deleted)],
                commit_message=title,
                revision=target.branch,
                parent_commit=target.head,
                create_pr=create_pr,
            )
        return made.oid, made.pr_url

    def url(self, repo_id: str, branch: str = DEFAULT_REVISION) -> str:
        """The address of a repository in a browser."""
        from urllib.parse import quote

        base = f"{self._api.endpoint}/{repo_id}"
        return base if branch == DEFAULT_REVISION else f"{base}/tree/{quote(branch)}"


def same(path: Path, remote: RemoteFile, sha256: str | None = None) -> bool | None:
    """Whether a file equals the Hub's; None if telling takes its SHA-256.

    Args:
        path: the file.
        remote: the Hub's file.
        sha256: of the file, if it is known.
    """
    if path.stat().st_size != remote.size:
        return False
    if remote.sha256 is not None:
        return None if sha256 is None else sha256 == remote.sha256
    if remote.size > LARGEST_IN_GIT:
        return False
    return git_id(path.read_bytes()) == remote.git_id


def arrived(operation: CommitOperationAdd, remote: RemoteFile) -> bool:
    """Whether the Hub has the content that was sent."""
    info = operation.upload_info
    if remote.sha256 is not None:
        return (remote.size, remote.sha256) == (info.size, info.sha256.hex())
    with operation.as_file() as file:
        return remote.size == info.size and git_id(file.read()) == remote.git_id


def git_id(content: bytes) -> str:
    """The id that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def check_name(repo_id: str) -> None:
    """Raises ``UsageError`` for a name that is not ``USER/NAME``."""
    if repo_id.count("/") != 1 or not is_repo_id(repo_id):
        raise UsageError(f"{repo_id[:100]!r} is not a repository name; give USER/NAME, such as ada/bloom-ntk")


def check_branch(branch: str | None) -> None:
    """Raises ``UsageError`` for a branch name that git does not accept or that the Hub reserves."""
    if branch is not None and (
        not re.fullmatch(r"\w[\w./-]*(?<![./])", branch, re.ASCII)
        or re.search(r"\.\.|//|/\.|\.lock(/|$)", branch)
        or branch.startswith("refs/")
        or re.fullmatch("[0-9a-f]{40}", branch)
    ):
        raise UsageError(
            f"--branch {branch[:100]!r} is not a valid branch name; use letters, digits, - and _"
        )


def _account(told: Any) -> Account | None:
    name = told.get("name") if isinstance(told, Mapping) else None
    if not isinstance(name, str):
        return None
    organisations = [entry.get("name") for entry in told.get("orgs") or [] if isinstance(entry, Mapping)]
    auth = told.get("auth")
    access = auth.get("accessToken") if isinstance(auth, Mapping) else None
    role = access.get("role") if isinstance(access, Mapping) else None
    return Account(name, [name, *filter(None, organisations)], str(role))
