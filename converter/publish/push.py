"""``push``: a converted repository to the Hub, if it is right and nothing else is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.checkpoint import weight_index
from converter.errors import PushError, SourceError
from converter.interrupts import Interrupted
from converter.jsonfile import parse_object
from converter.onnx.export import REPORT
from converter.publish.contents import Contents, read_contents, verify
from converter.publish.target import Hub, Target, check_branch, same
from converter.repository import PROVENANCE
from converter.source import CARD, CONFIG

if TYPE_CHECKING:
    from converter.verification import Check

GIT_SETTINGS = ".gitattributes"
"""The Hub's own: which files it keeps apart from git."""
DESCRIPTIONS = (CARD, REPORT)
"""What is written about a model may be replaced without being asked for; it computes nothing."""


@dataclass(frozen=True)
class PushResult:
    """What was pushed."""

    repo: str
    branch: str
    commit: str
    """The commit that holds it; of a pull request, that one's."""
    url: str
    """Where to look at it."""
    pull_request: str | None
    """Address of the pull request, if one was asked for and there was something to change."""
    files: Mapping[str, int]
    """Every file of the repository that belongs to the model -> bytes."""
    changed: Sequence[str]
    """Those that the commit added or replaced; empty if the Hub had all of it."""
    deleted: Sequence[str]
    """Files that the commit removed."""
    left: Sequence[str]
    """What was in the folder and not pushed."""
    checks: Sequence[Check]
    """What verification found right; empty if the caller had verified it."""

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {
            "repo": self.repo,
            "branch": self.branch,
            "commit": self.commit,
            "url": self.url,
            "pull_request": self.pull_request,
            "files": dict(self.files),
            "changed": list(self.changed),
            "deleted": list(self.deleted),
            "left": list(self.left),
            "checks": [check.to_json() for check in self.checks],
        }


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
    """Verifies a converted repository and adds it to the Hub as one commit.

    Files that the Hub has are not sent again, so that a push that was interrupted goes on. Nothing in the
    folder is changed, and of its files only those go that a conversion or an export writes.

    Args:
        folder: a repository that ``convert`` wrote.
        repo_id: ``user/name``; created if it does not exist.
        private: create it private; an existing one must be.
        branch: branch to add the commit to, created if it does not exist; the default one if None.
        create_pr: open a pull request instead.
        overwrite: replace what the target holds; without it, only a description may be replaced.
        token: Hub access token; HF_TOKEN or the saved login by default.
        progress: draw progress bars on stderr.
        verified: this process has just verified the folder.

    Raises:
        UsageError: a name that cannot be one.
        SourceError: no converted repository, or one with files that cannot be pushed.
        VerificationError, ValidationError: it is not right; nothing was sent.
        PushError: the target holds something else, or the Hub does not take it.
        Interrupted: the user stopped it.
    """
    request = Request(repo_id, private, branch, create_pr, overwrite)
    contents = read_contents(Path(folder).absolute())
    hub, target = _open(request, contents.source, token=token, progress=progress)
    if target is not None:
        # As far as it can be told before anything is hashed.
        _check_clash(request, _difference(contents, target))
    checks = [] if verified else verify(contents, progress=progress)
    created = target is None
    try:
        if target is None:
            target = _created(hub, request)
        return _send(hub, request, contents, target, checks, progress=progress)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"a push is one commit, so {repo_id} has all of it or nothing; run the same command again, and "
            "what the Hub has is not sent again"
        ) from error
    except PushError as error:
        if created and target is not None:
            raise PushError(f"{error}; {repo_id} was created and is empty") from error
        raise


def preflight(
    repo_id: str,
    *,
    private: bool = False,
    branch: str | None = None,
    create_pr: bool = False,
    overwrite: bool = False,
    token: str | None = None,
    source: str | None = None,
) -> None:
    """Finds out before hours of work what would keep ``push`` from working.

    Args:
        repo_id, private, branch, create_pr, overwrite, token: of ``push``.
        source: Hub id or name of what will be converted. A target with a model of anything else is refused,
            unless ``overwrite``; whether it is the same conversion, ``push`` finds out.

    Raises:
        UsageError: a name that cannot be one.
        PushError: no token, no access, or the target holds something else.
    """
    request = Request(repo_id, private, branch, create_pr, overwrite)
    hub, target = _open(request, source, token=token, progress=False)
    if target is None or overwrite or weight_index(target.files) is None:
        return
    origin = _origin(hub, target)
    if origin is None or origin != source:
        whose = f"made from {origin}" if origin else "which ntk-convert did not write"
        raise PushError(
            f"{_place(request)} holds a model, {whose}; name another repository or branch, or give "
            "--overwrite to replace it"
        )


@dataclass(frozen=True)
class Request:
    """Where to push to; see ``push``."""

    repo_id: str
    private: bool
    branch: str | None
    create_pr: bool
    overwrite: bool


@dataclass(frozen=True)
class Difference:
    """Between a converted repository and a target."""

    changed: Sequence[str]
    """Files that the target lacks, or has with another content."""
    unknown: Sequence[str]
    """Files of the same size, whose content has to be hashed to tell."""
    others: Sequence[str]
    """The target's files that the repository does not have."""
    clash: Sequence[str]
    """The target's files that make it something else."""


def _open(
    request: Request, source: str | None, *, token: str | None, progress: bool
) -> tuple[Hub, Target | None]:
    """The Hub and the target, if what is asked for can be done there; the target is None if it has to be
    created."""
    check_branch(request.branch)
    hub = Hub.connect(request.repo_id, token=token, progress=progress)
    repo_id = request.repo_id
    if source is not None and source.lower() == repo_id.lower() and not (request.branch or request.create_pr):
        raise PushError(
            f"{repo_id} is what was converted; push to another repository, or with --branch or --create-pr"
        )
    target = hub.look(repo_id, request.branch)
    if not request.create_pr:
        hub.check_may_write(repo_id)
    if target is None:
        if request.create_pr:
            raise PushError(
                f"the Hub shows no repository {repo_id} to open a pull request in; drop --create-pr"
            )
        return hub, None
    if request.create_pr and target.new_branch:
        raise PushError(
            f"{repo_id} has no branch {target.branch} to open a pull request against; drop --create-pr or "
            "--branch"
        )
    if request.private and not target.private:
        raise PushError(
            f"{repo_id} exists and is public; drop --private, or make it private in its settings first"
        )
    return hub, target


def _created(hub: Hub, request: Request) -> Target:
    hub.create(request.repo_id, private=request.private)
    target = hub.look(request.repo_id, request.branch)
    if target is None:
        raise PushError(f"the Hub does not show {request.repo_id}, which it has just created; run it again")
    return target


def _send(
    hub: Hub,
    request: Request,
    contents: Contents,
    target: Target,
    checks: Sequence[Check],
    *,
    progress: bool,
) -> PushResult:
    found = _difference(contents, target)
    _check_clash(request, found)
    paths = {name: contents.folder / name for name in (*found.changed, *found.unknown)}
    operations = hub.prepare(paths, progress=progress)
    hashes = {name: operation.upload_info.sha256.hex() for name, operation in operations.items()}
    contents.check_digests(hashes)
    found = _difference(contents, target, hashes)
    _check_clash(request, found)
    deleted = found.others if request.overwrite else ()
    commit, pull_request = target.head, None
    if found.changed or deleted or target.new_branch:
        changed = [operations[name] for name in found.changed]
        hub.send(target, changed, create_pr=request.create_pr)
        contents.check_unchanged()
        commit, pull_request = hub.commit(
            target, changed, deleted, title=_title(contents), create_pr=request.create_pr
        )
    return PushResult(
        repo=target.repo_id,
        branch=target.branch,
        commit=commit,
        url=pull_request or hub.url(target.repo_id, target.branch),
        pull_request=pull_request,
        files=contents.files,
        changed=found.changed,
        deleted=deleted,
        left=contents.left,
        checks=checks,
    )


def _difference(contents: Contents, target: Target, hashes: Mapping[str, str] | None = None) -> Difference:
    """Compares by size, then by git's id or, where ``hashes`` has it, by SHA-256."""
    equal = {
        name: same(contents.folder / name, target.files[name], (hashes or {}).get(name))
        for name in contents.states
        if name in target.files
    }
    changed = [name for name in contents.states if equal.get(name) is not True]
    unknown = [name for name in changed if name in equal and equal[name] is None]
    others = sorted(target.files.keys() - contents.states.keys() - {GIT_SETTINGS})
    differ = [name for name, is_same in equal.items() if is_same is False]
    clash = [name for name in (*differ, *others) if name not in DESCRIPTIONS]
    return Difference([name for name in changed if name not in unknown], unknown, others, clash)


def _check_clash(request: Request, found: Difference) -> None:
    if found.clash and not request.overwrite:
        more = f" and {len(found.clash) - 1} more" if len(found.clash) > 1 else ""
        raise PushError(
            f"{_place(request)} holds something else ({found.clash[0]}{more}); name another repository or "
            "branch, or give --overwrite to replace it"
        )


def _place(request: Request) -> str:
    return request.repo_id + (f" (branch {request.branch})" if request.branch else "")


def _origin(hub: Hub, target: Target) -> str | None:
    """What the model in a target was converted from; None if this tool did not write it."""
    if CONFIG not in target.files:
        return None
    try:
        config = parse_object(hub.config(target), CONFIG)
    except SourceError:
        return None
    origin = config.get(PROVENANCE)
    source = origin.get("source") if isinstance(origin, Mapping) else None
    return source if isinstance(source, str) else None


def _title(contents: Contents) -> str:
    """The commit's first line."""
    return f"ntk-convert: {contents.source or 'a model'}, {contents.recipe.own_scaling}"
