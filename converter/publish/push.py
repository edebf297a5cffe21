"""``push``: a converted repository to the Hub, if it is right and nothing else is there."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.config import read_provenance
from converter.errors import ConverterError, PushError, SourceError
from converter.interrupts import Interrupted
from converter.publish.contents import UNLISTED, Contents, read_contents, verify
from converter.publish.options import PushOptions
from converter.publish.target import Hub, Target, arrived, check_branch, same
from converter.result.card import OURS, with_place
from converter.source.base import CARD, CONFIG
from converter.source.hub import DEFAULT_REVISION
from converter.source.jsonfile import parse_object

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    from converter.verification import Check

GIT_SETTINGS = ".gitattributes"
"""The Hub's own file: it says which files are stored apart from git."""
FRONT_MATTER = re.compile(rb"\A\s*---[ \t]*\r?\n.*?^---[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class PushResult:
    """What was pushed."""

    repo: str
    branch: str
    new_branch: bool
    """Whether the branch was created."""
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
    """Files that the commit removed."""
    kept: Sequence[str]
    """Files that stay as they are on the Hub, because somebody wrote them by hand."""
    left: Sequence[str]
    """Files and folders that were not pushed."""
    checks: Sequence[Check]
    """The checks of verification; empty if the caller had verified it."""

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

    Files that the Hub already has are not sent again, so an interrupted push continues where it ended.
    Nothing in the folder is changed, and only files that a conversion or an export wrote are sent. In the
    card, the examples load the model from ``repo_id``; everything else is sent as it is.

    Args:
        folder: a repository that ``convert`` wrote.
        repo_id: ``user/name``; created if it does not exist.
        private: create it private; an existing one must be private already.
        branch: branch that gets the commit, created if it does not exist; None for the default branch.
        create_pr: open a pull request instead.
        overwrite: replace whatever the target holds. By default only files that a conversion wrote about the
            same model are replaced, and a card that somebody else wrote stays.
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
    return push_folder(Path(folder).absolute(), options, progress=progress, verified=verified)


def push_folder(
    folder: Path, options: PushOptions, *, progress: bool = False, verified: bool = False
) -> PushResult:
    """Does what ``push`` says.

    Args:
        folder: a repository that ``convert`` wrote, an absolute path.
        options: where to push to, and how.
        progress, verified: as for ``push``.
    """
    with tempfile.TemporaryDirectory() as own:
        contents = _with_card(read_contents(folder), options, Path(own))
        return _push(contents, options, progress=progress, verified=verified)


def _push(contents: Contents, options: PushOptions, *, progress: bool, verified: bool) -> PushResult:
    repo_id = options.repo_id
    hub, target = _open(options, contents.source, progress=progress)
    if target is not None:
        # What can be compared before anything is hashed.
        _check_clash(options, target, _difference(contents, target))
    checks = [] if verified else verify(contents, progress=progress)
    contents.check_linked(progress=progress)
    created = target is None
    try:
        if target is None:
            target = _created(hub, options)
        result, sent = _send(hub, options, contents, target, checks, progress=progress)
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


def push_result(folder: Path, options: PushOptions, *, progress: bool = False) -> PushResult:
    """Pushes what a conversion has just written and verified.

    Raises:
        PushError, Interrupted: as for ``push``; adds that the result is complete, and how to push it.
    """
    try:
        return push_folder(folder, options, progress=progress, verified=True)
    except (ConverterError, KeyboardInterrupt) as error:
        done = f"{folder} is complete, and this sends it: {options.command(folder)}"
        kind = Interrupted if isinstance(error, KeyboardInterrupt) else PushError
        raise kind(f"{error}; {done}" if str(error) else done) from error


def preflight(options: PushOptions, source: str | None = None) -> None:
    """Checks before hours of work what would keep a push from working.

    Args:
        options: of the push.
        source: Hub id or name of what will be converted. Without ``overwrite``, the target may hold nothing
            but a conversion of it and descriptions; ``push`` checks whether it is the same conversion.

    Raises:
        UsageError: an impossible name.
        PushError: no token, no access, or the target holds something else.
    """
    hub, target = _open(options, source, progress=False)
    held = sorted(target.files.keys() - {*UNLISTED, GIT_SETTINGS}) if target is not None else []
    if target is None or options.overwrite or not held:
        return
    origin = _origin(hub, target)
    if origin is None or origin != source:
        whose = f"made from {origin}" if origin else "not of a conversion"
        raise _occupied(options, target, f"{_some(held)}, {whose}")


def _with_card(contents: Contents, options: PushOptions, own: Path) -> Contents:
    """The contents with a card whose examples load the model from the Hub; it is written into ``own``."""
    if CARD not in contents.states:
        return contents
    text = (contents.folder / CARD).read_bytes().decode(errors="surrogateescape")
    branch = options.branch if options.branch != DEFAULT_REVISION else None
    card = with_place(text, options.repo_id, branch)
    (own / CARD).write_bytes(card.encode(errors="surrogateescape"))
    return replace(contents, card=own / CARD)


@dataclass(frozen=True)
class Difference:
    """The difference between a converted repository and a target."""

    changed: Sequence[str]
    """Files that the target lacks or has with other content."""
    unknown: Sequence[str]
    """Files of equal size that have to be hashed before they can be compared."""
    others: Sequence[str]
    """The target's files that the repository does not have."""
    clash: Sequence[str]
    """Files in the target that belong to another model."""
    kept: Sequence[str] = ()
    """Files in the target that were written by hand and are kept."""


def _open(options: PushOptions, source: str | None, *, progress: bool) -> tuple[Hub, Target | None]:
    """Connects to the Hub and checks the target, which is None if it has to be created."""
    check_branch(options.branch)
    hub = Hub.connect(options.repo_id, token=options.token, progress=progress)
    repo_id = options.repo_id
    if source is not None and source.lower() == repo_id.lower() and not (options.branch or options.create_pr):
        raise PushError(
            f"{repo_id} is what was converted; push to another repository, or with --branch or --create-pr"
        )
    target = hub.look(repo_id, options.branch)
    if not options.create_pr:
        hub.check_may_write(repo_id)
    if target is None:
        if options.create_pr:
            raise PushError(
                f"the Hub shows no repository {repo_id} to open a pull request in; drop --create-pr"
            )
        return hub, None
    if options.create_pr and target.new_branch:
        raise PushError(
            f"{repo_id} has no branch {target.branch} to open a pull request against; drop --create-pr or "
            "--branch"
        )
    if options.private and not target.private:
        raise PushError(
            f"{repo_id} exists and is public; drop --private, or make it private in its settings first"
        )
    return hub, target


def _created(hub: Hub, options: PushOptions) -> Target:
    hub.create(options.repo_id, private=options.private)
    target = hub.look(options.repo_id, options.branch)
    if target is None:
        raise PushError(
            f"the Hub does not show {options.repo_id}, which it has just created; run the command again"
        )
    return target


def _send(
    hub: Hub,
    options: PushOptions,
    contents: Contents,
    target: Target,
    checks: Sequence[Check],
    *,
    progress: bool,
) -> tuple[PushResult, Mapping[str, CommitOperationAdd]]:
    """Adds the commit if one is needed; returns what was pushed and the operations of the commit."""
    found = _difference(contents, target)
    _check_clash(options, target, found)
    paths = {name: contents.path(name) for name in (*found.changed, *found.unknown)}
    operations = hub.prepare(paths, progress=progress)
    hashes = {name: operation.upload_info.sha256.hex() for name, operation in operations.items()}
    contents.check_digests(hashes)
    found = _difference(contents, target, hashes)
    _check_clash(options, target, found)
    if CARD in found.changed and CARD in target.files and not options.overwrite:
        found = _keep_card(found, hub.read(target, CARD))
    deleted = found.others if options.overwrite else ()
    sent = {name: operations[name] for name in found.changed}
    commit, pull_request = target.head, None
    hub.send(target, [*sent.values()], create_pr=options.create_pr)
    contents.check_unchanged()
    with hub.new_branch(target) if target.new_branch else nullcontext():
        if sent or deleted:
            commit, pull_request = hub.commit(
                target, [*sent.values()], deleted, title=_title(contents), create_pr=options.create_pr
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
    """Raises ``PushError`` unless the Hub lists exactly what was pushed in the commit."""
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
    """Keeps the target's card if it has text that no conversion wrote."""
    if OURS.search(theirs.decode(errors="replace")) or not FRONT_MATTER.sub(b"", theirs, count=1).strip():
        return found
    changed = [name for name in found.changed if name != CARD]
    return replace(found, changed=changed, kept=[CARD])


def _difference(contents: Contents, target: Target, hashes: Mapping[str, str] | None = None) -> Difference:
    """Compares files by size, then by git's id or by SHA-256.

    Args:
        contents: the repository.
        target: what to compare it with.
        hashes: SHA-256 of some files, by name.
    """
    equal = {
        name: same(contents.path(name), target.files[name], (hashes or {}).get(name))
        for name in contents.states
        if name in target.files
    }
    changed = [name for name in contents.states if equal.get(name) is not True]
    unknown = [name for name in changed if name in equal and equal[name] is None]
    others = sorted(target.files.keys() - contents.states.keys() - {GIT_SETTINGS})
    differ = [name for name, is_same in equal.items() if is_same is False]
    clash = [name for name in (*differ, *others) if name not in UNLISTED]
    return Difference([name for name in changed if name not in unknown], unknown, others, clash)


def _check_clash(options: PushOptions, target: Target, found: Difference) -> None:
    if found.clash and not options.overwrite:
        raise _occupied(options, target, _some(found.clash))


def _occupied(options: PushOptions, target: Target, what: str) -> PushError:
    """The error for a target that holds something else."""
    if target.new_branch:
        return PushError(
            f"{target.repo_id} has no branch {target.branch}, and a new one begins as the default one, which "
            f"holds something else ({what}); name another repository, or give --overwrite to make the new "
            "branch, and no other, hold this model alone"
        )
    place = target.repo_id + (f" (branch {options.branch})" if options.branch else "")
    return PushError(
        f"{place} holds something else ({what}); name another repository or branch, or give --overwrite to "
        "replace it"
    )


def _some(names: Sequence[str]) -> str:
    """The first of some names, and the number of the others."""
    return names[0][:100] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _origin(hub: Hub, target: Target) -> str | None:
    """The source of the model in a target; None if this tool did not write it."""
    if CONFIG not in target.files:
        return None
    try:
        provenance = read_provenance(parse_object(hub.read(target, CONFIG), CONFIG))
    except SourceError:
        return None
    return None if provenance is None else provenance.source


def _title(contents: Contents) -> str:
    """The commit's first line."""
    provenance = read_provenance(contents.repository.config)
    tuned = ", fine-tuned" if provenance is not None and provenance.fine_tuned else ""
    return f"ntk-convert: {contents.source or 'a model'}, {contents.repository.scaling}{tuned}"
