"""``push``: a converted repository to the Hub, if it is right and nothing else is there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import PushError, SourceError
from converter.interrupts import Interrupted
from converter.jsonfile import parse_object
from converter.manifest import UNLISTED
from converter.publish.contents import Contents, read_contents, verify
from converter.publish.target import Hub, Target, arrived, check_branch, same
from converter.repository import PROVENANCE
from converter.source import CARD, CONFIG

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    from converter.verification import Check

GIT_SETTINGS = ".gitattributes"
"""The Hub's own: which files it keeps apart from git."""
OUR_CARD = re.compile(rb"^with ntk-convert \S", re.MULTILINE)
"""A line of every card that a conversion writes."""
FRONT_MATTER = re.compile(rb"\A\s*---[ \t]*\r?\n.*?^---[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class PushResult:
    """What was pushed."""

    repo: str
    branch: str
    new_branch: bool
    """Whether the branch was created."""
    commit: str
    """The commit that holds it; of a pull request, that one's."""
    url: str
    """Where to look at it."""
    pull_request: str | None
    """Address of the pull request, if one was asked for and there was something to change."""
    files: Mapping[str, int]
    """Every file of the repository that belongs to the model and is on the Hub -> bytes."""
    changed: Sequence[str]
    """Those that the commit added or replaced; empty if the Hub had all of it."""
    deleted: Sequence[str]
    """Files that the commit removed."""
    kept: Sequence[str]
    """Files that the Hub has another of, written by hand, which stays."""
    left: Sequence[str]
    """What was in the folder and not pushed."""
    checks: Sequence[Check]
    """What verification found right; empty if the caller had verified it."""

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {
            "repo": self.repo,
            "branch": self.branch,
            "new_branch": self.new_branch,
            "commit": self.commit,
            "url": self.url,
            "pull_request": self.pull_request,
            "files": dict(self.files),
            "changed": list(self.changed),
            "deleted": list(self.deleted),
            "kept": list(self.kept),
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
        overwrite: replace what the target holds; without it, only what a conversion wrote about the model,
            and a card that somebody else wrote stays.
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
        _check_clash(request, target, _difference(contents, target))
    checks = [] if verified else verify(contents, progress=progress)
    created = target is None
    try:
        if target is None:
            target = _created(hub, request)
        result, sent = _send(hub, request, contents, target, checks, progress=progress)
    except KeyboardInterrupt as error:
        more = f"; {error}" if str(error) else ""
        raise Interrupted(
            f"a push is one commit, so {repo_id} has all of it or nothing; run the same command again, and "
            f"what the Hub has is not sent again{more}"
        ) from error
    except PushError as error:
        if created and target is not None:
            raise PushError(f"{error}; {repo_id} was created") from error
        raise
    try:
        _check_arrived(hub, target, result, sent)
    except KeyboardInterrupt as error:
        raise Interrupted(f"all of it is in {repo_id}, as commit {result.commit}") from error
    return result


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
        source: Hub id or name of what will be converted. A target with anything else than a conversion of it
            and descriptions is refused, unless ``overwrite``; whether it is the same one, ``push`` finds out.

    Raises:
        UsageError: a name that cannot be one.
        PushError: no token, no access, or the target holds something else.
    """
    request = Request(repo_id, private, branch, create_pr, overwrite)
    hub, target = _open(request, source, token=token, progress=False)
    held = sorted(target.files.keys() - {*UNLISTED, GIT_SETTINGS}) if target is not None else []
    if target is None or overwrite or not held:
        return
    origin = _origin(hub, target)
    if origin is None or origin != source:
        whose = f"made from {origin}" if origin else "not of a conversion"
        raise _occupied(request, target, f"{_some(held)}, {whose}")


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
    kept: Sequence[str] = ()
    """The target's files that were written by hand and stay."""


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
) -> tuple[PushResult, Mapping[str, CommitOperationAdd]]:
    """Adds the commit, if one is needed; what was pushed, and the operations that the commit is of."""
    found = _difference(contents, target)
    _check_clash(request, target, found)
    paths = {name: contents.folder / name for name in (*found.changed, *found.unknown)}
    operations = hub.prepare(paths, progress=progress)
    hashes = {name: operation.upload_info.sha256.hex() for name, operation in operations.items()}
    contents.check_digests(hashes)
    found = _difference(contents, target, hashes)
    _check_clash(request, target, found)
    if CARD in found.changed and CARD in target.files and not request.overwrite:
        found = _keep_card(found, hub.read(target, CARD))
    deleted = found.others if request.overwrite else ()
    sent = {name: operations[name] for name in found.changed}
    commit, pull_request = target.head, None
    hub.send(target, [*sent.values()], create_pr=request.create_pr)
    contents.check_unchanged()
    with hub.new_branch(target) if target.new_branch else nullcontext():
        if sent or deleted:
            commit, pull_request = hub.commit(
                target, [*sent.values()], deleted, title=_title(contents), create_pr=request.create_pr
            )
    result = PushResult(
        repo=target.repo_id,
        branch=target.branch,
        new_branch=target.new_branch,
        commit=commit,
        url=pull_request or hub.url(target.repo_id, target.branch),
        pull_request=pull_request,
        files={name: size for name, size in contents.files.items() if name not in found.kept},
        changed=found.changed,
        deleted=deleted,
        kept=found.kept,
        left=contents.left,
        checks=checks,
    )
    return result, sent


def _check_arrived(
    hub: Hub, target: Target, result: PushResult, sent: Mapping[str, CommitOperationAdd]
) -> None:
    """Raises ``PushError`` unless the commit holds what was pushed, as the Hub lists it."""
    if result.commit == target.head:
        return
    try:
        files = hub.files(target.repo_id, result.commit)
    except PushError as error:
        raise PushError(
            f"{target.repo_id} got commit {result.commit}, which could not be compared with the folder; run "
            f"the same command again ({error})"
        ) from error
    wrong = sorted(files.keys() & set(result.deleted))
    for name in result.files:
        found = files.get(name)
        right = arrived(sent[name], found) if name in sent and found else found == target.files.get(name)
        wrong += [name] * (found is None or not right)
    if wrong:
        raise PushError(
            f"commit {result.commit} of {target.repo_id} is not what was pushed ({_some(wrong)}); do not use "
            "it, and run the same command again with --overwrite"
        )


def _keep_card(found: Difference, theirs: bytes) -> Difference:
    """Leaves the target its card, if it says something and no conversion wrote it."""
    if OUR_CARD.search(theirs) or not FRONT_MATTER.sub(b"", theirs, count=1).strip():
        return found
    changed = [name for name in found.changed if name != CARD]
    return replace(found, changed=changed, kept=[CARD])


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
    clash = [name for name in (*differ, *others) if name not in UNLISTED]
    return Difference([name for name in changed if name not in unknown], unknown, others, clash)


def _check_clash(request: Request, target: Target, found: Difference) -> None:
    if found.clash and not request.overwrite:
        raise _occupied(request, target, _some(found.clash))


def _occupied(request: Request, target: Target, what: str) -> PushError:
    """The target holds something else."""
    if target.new_branch:
        return PushError(
            f"{target.repo_id} has no branch {target.branch}, and a new one begins as the default one, which "
            f"holds something else ({what}); name another repository, or give --overwrite to make the new "
            "branch, and no other, hold this model alone"
        )
    place = target.repo_id + (f" (branch {request.branch})" if request.branch else "")
    return PushError(
        f"{place} holds something else ({what}); name another repository or branch, or give --overwrite to "
        "replace it"
    )


def _some(names: Sequence[str]) -> str:
    """The first of some names, and how many more."""
    return names[0][:100] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _origin(hub: Hub, target: Target) -> str | None:
    """What the model in a target was converted from; None if this tool did not write it."""
    if CONFIG not in target.files:
        return None
    try:
        config = parse_object(hub.read(target, CONFIG), CONFIG)
    except SourceError:
        return None
    origin = config.get(PROVENANCE)
    source = origin.get("source") if isinstance(origin, Mapping) else None
    return source if isinstance(source, str) else None


def _title(contents: Contents) -> str:
    """The commit's first line."""
    return f"ntk-convert: {contents.source or 'a model'}, {contents.recipe.own_scaling}"
