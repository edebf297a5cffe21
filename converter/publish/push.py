"""``push``: a converted repository to the Hub, if it is right and nothing else is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.config import Config, Provenance
from converter.errors import PushError, UsageError, option
from converter.interrupts import Interrupted
from converter.publish.contents import UNLISTED, Contents, read_contents, verify
from converter.publish.hub import BRANCH, Hub, Target, check_repo_id, id_in, same
from converter.publish.remote_version import find_remote_version
from converter.result.card.update import is_by_hand, with_place
from converter.source.hub import DEFAULT_REVISION, access_token
from converter.source.source import CARD

if TYPE_CHECKING:
    from converter.verification import Check

GIT_SETTINGS = ".gitattributes"
"""The Hub's own file: it says which files are stored apart from git."""
IGNORED = ".gitignore"


@dataclass(frozen=True)
class PushOptions:
    """A repository on the Hub, and how it is pushed to; see ``push``."""

    repo_id: str
    """If an address in a browser was given, the id in it."""
    private: bool = False
    branch: str | None = None
    create_pr: bool = False
    overwrite: bool = False
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "repo_id", id_in(self.repo_id))

    @property
    def has_token(self) -> bool:
        """Whether there is a token: the one that was given, HF_TOKEN or the saved login."""
        return access_token(self.token) is not None

    @property
    def options(self) -> dict[str, Any]:
        """The options for ``argv``, without the token, which nobody may print."""
        return {
            "branch": self.branch,
            "private": self.private,
            "create_pr": self.create_pr,
            "overwrite": self.overwrite,
        }


@dataclass(frozen=True)
class PushResult:
    repo: str
    branch: str
    commit: str
    """The commit that holds it, or the pull request's commit."""
    url: str
    """Its address in a browser."""
    pull_request: str | None
    """Address of the pull request, if one was asked for and there was something to change."""
    files: Mapping[str, int]
    """Every file of the repository that is on the Hub now -> bytes."""
    changed: Sequence[str]
    """Files that the commit added or replaced; empty if the Hub had all of them."""
    deleted: Sequence[str]
    kept: Sequence[str]
    """Files that stay as they are on the Hub, because somebody wrote them by hand."""
    stale: Sequence[str]
    """Graphs on the Hub of an older version of the model, which do not compute what it computes now."""
    left: Sequence[str]
    """Files and folders that were not pushed."""
    checks: Sequence[Check]
    """The checks of verification; empty if the caller had verified it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PushPreview:
    """What a push would send, and what it would leave out."""

    repo: str
    branch: str
    files: Mapping[str, int]
    """Every file that belongs to the repository -> bytes."""
    left: Sequence[str]
    """Files and folders that would not be pushed."""
    changes: Changes | None
    """What would change on the Hub; None if there is no token to ask it with."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "dry_run": True}


@dataclass(frozen=True)
class Changes:
    """What a commit changes in a repository; the fields are those of ``PushResult``."""

    changed: Sequence[str]
    deleted: Sequence[str] = ()
    kept: Sequence[str] = ()
    stale: Sequence[str] = ()


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    branch: str | None = None,
    create_pr: bool = False,
    overwrite: bool = False,
    token: str | None = None,
    progress: bool = False,
    verified: bool = False,
) -> PushResult:
    """Verifies a converted repository and adds it to the Hub as one commit, all or nothing.

    Without ``overwrite``, a target that holds anything else is refused, and a card that was written by hand
    stays. A target with an older version of the model, made from the same original, is updated: files that
    its manifest lists are replaced or removed, graphs are left, and so is what others put there.

    Files that the Hub already has are not sent again, so an interrupted push continues where it ended.
    Nothing in the folder is changed, and only files that a conversion or an export wrote are sent. In the
    card, the examples load the model from ``repo_id``; everything else is sent as it is.

    Args:
        folder: a repository that ``convert`` wrote.
        repo_id: ``user/name``, or its address in a browser; created if it does not exist.
        private: create it private; an existing one must be private already.
        branch: branch that gets the commit, created if it does not exist; None for the default branch.
        create_pr: open a pull request instead.
        overwrite: replace whatever the target holds.
        token: Hub access token; HF_TOKEN or the saved login by default.
        progress: draw progress bars on stderr.
        verified: this process has just verified the folder.

    Raises:
        UsageError: an impossible name.
        SourceError: not a converted repository, or one with files that cannot be pushed.
        VerificationError, ValidationError: it is wrong; nothing was sent.
        PushError: the target holds something else, or the Hub refuses it.
        Interrupted: the user stopped it.
    """
    options = PushOptions(repo_id, private, branch, create_pr, overwrite, token)
    try:
        return _push(Path(folder), options, progress=progress, verified=verified)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"a push is one commit, so {options.repo_id} has all of it or nothing; run the same command "
            "again, and what the Hub has is not sent again"
        ) from error


def preview(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    branch: str | None = None,
    create_pr: bool = False,
    overwrite: bool = False,
    token: str | None = None,
    progress: bool = False,
) -> PushPreview:
    """What ``push`` would send. Nothing is verified or sent, and without a token the Hub is not asked.

    The arguments are those of ``push``, which raises the same errors.
    """
    options = PushOptions(repo_id, private, branch, create_pr, overwrite, token)
    check_names(options)
    contents = read_contents(Path(folder), progress=progress)
    files = _to_send(contents, options)
    changes = None
    if options.has_token:
        hub, target = _open(options, contents.origin, progress=progress)
        changes = _changes(hub, options, contents, files, target)
    return PushPreview(
        repo=options.repo_id,
        branch=branch or DEFAULT_REVISION,
        files={name: _size(content) for name, content in files.items()},
        left=contents.left,
        changes=changes,
    )


def check_target(options: PushOptions, origin: Provenance, config: Config) -> None:
    """Checks before hours of work what would keep a push of such a result from working."""
    hub, target = _open(options, origin.source, progress=False)
    if target is None or options.overwrite:
        return
    if find_remote_version(hub, target, origin, config) is None:
        held = sorted(target.files.keys() - {*UNLISTED, GIT_SETTINGS})
        if held:
            raise _occupied(options, target, held)


def _push(folder: Path, options: PushOptions, *, progress: bool, verified: bool) -> PushResult:
    contents = read_contents(folder, progress=progress)
    hub, target = _open(options, contents.origin, progress=progress)
    files = _to_send(contents, options)
    changes = _changes(hub, options, contents, files, target)
    checks = [] if verified else verify(contents, progress=progress)
    target = target or hub.create(options.branch, private=options.private)
    commit, pull_request = hub.commit(
        target,
        {name: files[name] for name in changes.changed},
        changes.deleted,
        title=f"ntk-convert: {contents.origin}, {contents.repository.scaling}",
        create_pr=options.create_pr,
    )
    lacking = sorted(files.keys() - hub.files(commit).keys())
    if lacking:
        raise PushError(
            f"commit {commit} of {hub.repo_id} lacks {_some(lacking)}, which the Hub left out; do not use "
            f"it: remove any {IGNORED} there, and run the same command again"
        )
    return PushResult(
        repo=hub.repo_id,
        branch=target.branch,
        commit=commit,
        url=pull_request or hub.url(target.branch),
        pull_request=pull_request,
        files={name: _size(files[name]) for name in files if name not in changes.kept},
        changed=changes.changed,
        deleted=changes.deleted,
        kept=changes.kept,
        stale=changes.stale,
        left=contents.left,
        checks=checks,
    )


def check_names(options: PushOptions) -> None:
    """Raises ``UsageError`` for an impossible name of a repository or a branch."""
    check_repo_id(options.repo_id)
    branch = options.branch
    if branch is not None and not BRANCH.fullmatch(branch):
        raise UsageError(
            f"{option.branch} {branch[:100]!r} is not a valid branch name; use letters, digits, - and _"
        )


def _open(options: PushOptions, source: str | None, *, progress: bool) -> tuple[Hub, Target | None]:
    """Connects to the Hub and checks the target, which is None if it has to be created."""
    repo_id, branch = options.repo_id, options.branch
    check_names(options)
    hub = Hub(repo_id, token=options.token, progress=progress)
    if source is not None and source.lower() == repo_id.lower() and not (branch or options.create_pr):
        raise PushError(
            f"{repo_id} is what was converted; push to another repository, or with {option.branch} or "
            f"{option.create_pr}"
        )
    target = hub.look(branch)
    if not options.create_pr:
        hub.check_namespace()
    elif target is None or target.new_branch:
        place = repo_id if target is None else f"{repo_id} (branch {branch})"
        raise PushError(f"the Hub shows no {place} to open a pull request in; drop {option.create_pr}")
    if target is not None and options.private and not target.private:
        raise PushError(
            f"{repo_id} exists and is public; drop {option.private}, or make it private in its settings first"
        )
    return hub, target


def _to_send(contents: Contents, options: PushOptions) -> dict[str, bytes | Path]:
    """The files of a repository, and the content of the card, whose examples load it from the Hub."""
    folder = contents.repository.folder
    files: dict[str, bytes | Path] = {name: folder / name for name in contents.files}
    if CARD in files:
        text = (folder / CARD).read_bytes().decode(errors="surrogateescape")
        branch = options.branch if options.branch != DEFAULT_REVISION else None
        files[CARD] = with_place(text, options.repo_id, branch).encode(errors="surrogateescape")
    return files


def _changes(
    hub: Hub,
    options: PushOptions,
    contents: Contents,
    files: Mapping[str, bytes | Path],
    target: Target | None,
) -> Changes:
    """What the commit would change; ``PushError`` for what must stay. Without a target, all files are new."""
    if target is None:
        return Changes([*files])
    changed, deleted, stale = _compare(hub, options, contents, files, target)
    kept = []
    if CARD in changed and CARD in target.files and not options.overwrite:
        kept = [CARD] if is_by_hand(hub.read(CARD, target.head)) else []
    return Changes([name for name in changed if name not in kept], deleted, kept, stale)


def _compare(
    hub: Hub, options: PushOptions, contents: Contents, files: Mapping[str, bytes | Path], target: Target
) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """The files that change, that are deleted, and stale graphs; ``PushError`` for what must stay."""
    theirs, model = target.files, contents.repository
    changed = [
        name
        for name, content in files.items()
        if name not in theirs or not same(content, contents.digests.get(name), theirs[name])
    ]
    others = sorted(theirs.keys() - files.keys() - {GIT_SETTINGS})
    deleted: Sequence[str] = others
    stale: Sequence[str] = ()
    if not options.overwrite:
        remote = (
            None
            if model.provenance is None
            else find_remote_version(hub, target, model.provenance, model.result_config)
        )
        clash = [name for name in (*changed, *others) if name in theirs and name not in UNLISTED]
        if remote is not None:
            clash = [name for name in clash if name in changed and not remote.wrote(name)]
        if clash:
            raise _occupied(options, target, clash)
        deleted, stale = ((), ()) if remote is None else remote.update(changed, others, model)
    if IGNORED in theirs:
        raise PushError(
            f"{options.repo_id} has a {IGNORED}, by which the Hub leaves out files; remove it there"
        )
    return changed, deleted, stale


def _occupied(options: PushOptions, target: Target, held: Sequence[str]) -> PushError:
    """The error for a target that holds something else."""
    place = options.repo_id + (f" (branch {options.branch})" if options.branch else "")
    begins = ", as a new branch begins as the default one," * target.new_branch
    return PushError(
        f"{place} holds something else{begins} ({_some(held)}); name another repository or branch, or give "
        f"{option.overwrite} to replace it there"
    )


def _size(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _some(names: Sequence[str]) -> str:
    """The first of some names, and the number of the others."""
    return names[0][:100] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
