"""The Hub: one repository at one commit, through huggingface_hub and its cache."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from converter.errors import SourceError, UsageError
from converter.progress import LOG, LONG, stage
from converter.source.source import CONFIG, Source, check_others

DEFAULT_REVISION = "main"
HEXADECIMAL = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""A commit, or the digest of a file."""
UNREACHABLE = (
    "{id} is not a local folder, and the Hub cannot be reached for files that the cache lacks; check the "
    "connection (and HF_HUB_OFFLINE, HF_ENDPOINT), or give a local folder"
)
NO_FILE = "{id} has no file {file} (revision {revision}), so it cannot be converted"
SILENCE = 60.0
"""Seconds for which the Hub may be silent in a request. The client itself has no limit for most requests."""
LONGEST_WAIT = 120
"""Seconds for which the Hub may ask to wait before the next request."""
BROKEN_OFF = (
    "the download of {file} from {id} broke off; run the same command again: complete files stay in the cache"
)
LATER = "the Hub cannot serve {id} at the moment (HTTP {status}); run the same command again later"
NO_HUB = "the server that answers is not a Hub; check HF_ENDPOINT, and whether your network needs a log-in"
NOT_A_HUB = dict.fromkeys(("JSONDecodeError", "KeyError", "TypeError", "AttributeError"), NO_HUB)
"""The client's errors, as in ``MESSAGES``, for an answer of another form than a Hub's."""
CACHE = "{file} cannot be written to the Hub cache: {reason}; fix this, or choose another `cache_dir`"
MESSAGES = {
    "GatedRepoError": (
        "{id} is gated: accept its terms on its Hub page, then run `hf auth login` or give `token`"
    ),
    "RepositoryNotFoundError": (
        "{id} is neither a local folder nor a Hub repository that you can access; check the spelling and, "
        "if it is private, run `hf auth login` or give `token`"
    ),
    "RevisionNotFoundError": "{id} has no revision {revision}; give an existing `revision`, or leave it out",
    "DisabledRepoError": "{id} was disabled by the Hub and cannot be downloaded; use another source",
    "LocalEntryNotFoundError": UNREACHABLE,
    "EntryNotFoundError": NO_FILE,
    "RemoteEntryNotFoundError": NO_FILE,
    "HFValidationError": "{id} is neither a local folder nor a valid Hub id such as bigscience/bloom-1b7",
    "HfHubHTTPError": "the Hub refused access to {id} (HTTP {status}); check your token and HF_ENDPOINT",
    "FileMetadataError": UNREACHABLE,
    **NOT_A_HUB,
    "ValueError": NO_HUB,
    "ChunkedEncodingError": BROKEN_OFF,
    "ReadError": BROKEN_OFF,
    "RemoteProtocolError": BROKEN_OFF,
    "OfflineModeIsEnabled": UNREACHABLE,
    "TransportError": UNREACHABLE,
    "ConnectionError": UNREACHABLE,
    "TimeoutError": UNREACHABLE,
    "Timeout": UNREACHABLE,
}
"""Exception of huggingface_hub or its HTTP client, by class name -> the message for the user.

The keys are names because the HTTP client (requests, httpx) changed between releases of huggingface_hub.
An exception's base classes are looked up in order, so the most specific message is used.
"""


def is_repo_id(name: str) -> bool:
    """Whether a name can be that of a repository on the Hub."""
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


def is_hub_id(name: str) -> bool:
    """Whether a name is that of a repository on the Hub: it has an owner, as no folder's own name has."""
    return "/" in name and is_repo_id(name)


def open_repository(
    repo_id: str,
    *,
    subfolder: str | None,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    progress: bool,
) -> Source:
    """Opens a repository of the Hub, or a folder in it; all files come from one commit.

    The token (None for HF_TOKEN or the saved login) is sent only to the Hub. Raises ``SourceError`` if there
    is no such repository or revision, it is gated, or neither the Hub nor its cache can be reached, and
    ``UsageError`` for a token that cannot be one or an empty revision.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download

    access_token(token)
    if revision == "":
        raise UsageError("`revision` is empty; give a branch, tag or commit, or leave it out")
    set_up_client(progress=progress)
    prefix = f"{subfolder}/" if subfolder else ""
    name = f"{repo_id}/{subfolder}" if subfolder else repo_id

    def list_files(at: str | None) -> dict[str, Any] | None:
        try:
            api, wait = HfApi(token=token), constants.HF_HUB_ETAG_TIMEOUT
            with waiting():
                info = api.model_info(repo_id, revision=at, timeout=wait, files_metadata=True)
            return _listed(info, prefix)
        except Exception as error:
            if template_for(error, MESSAGES) is UNREACHABLE:
                return None
            raise explained(error, repo_id, revision, CONFIG) from shown(error, token)

    def download(name: str, at: str | None, *, offline: bool = False) -> Path:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about free space, which is checked elsewhere
                path = hf_hub_download(
                    repo_id, name, revision=at, token=token, cache_dir=cache_dir, local_files_only=offline
                )
            if not offline:
                commit_id(Path(path).parents[name.count("/")].name)
        except Exception as error:
            raise explained(error, repo_id, revision, name) from shown(error, token)
        return Path(path)

    # First, because this fails at once, where a download would retry for half a minute.
    listing = list_files(revision)
    if listing is not None and CONFIG not in listing["files"]:
        check_others(name, [*listing["files"], *listing["nested"]])
    # By commit from here on. For a branch that moves meanwhile, the client would get the size of a file
    # from one commit and its content from another.
    at = listing["commit"] if listing else revision
    config = download(f"{prefix}{CONFIG}", at, offline=listing is None)
    folder, snapshot = config.parent, config.parents[prefix.count("/")]
    commit = snapshot.name  # the client names the folder of a snapshot after its commit

    def fetch(file: str) -> None:
        download(f"{prefix}{file}", commit, offline=listing is None)

    if listing is not None:
        _note(snapshot, revision or DEFAULT_REVISION)
        of_commit = {**listing, "commit": commit}
        return Source(name, folder, repo_id=repo_id, download=fetch, subfolder=subfolder, **of_commit)
    # Offline with a cached snapshot: only the files in the cache are available.
    files: dict[str, int | None] = {
        path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()
    }
    return Source(name, folder, files, repo_id, commit, download=fetch, offline=True, subfolder=subfolder)


def _listed(info: Any, prefix: str) -> dict[str, Any]:
    """What a ``Source`` keeps of the client's listing, of the files whose names begin with ``prefix``.

    Raises one of ``NOT_A_HUB`` if it has another form.
    """
    files = {
        file.rfilename.removeprefix(prefix): file
        for file in info.siblings
        if file.rfilename.isprintable() and file.rfilename.startswith(prefix)
    }
    sizes = {name: None if file.size is None else int(file.size) for name, file in files.items()}
    digests = {name: file.lfs.sha256 if file.lfs else file.blob_id for name, file in files.items()}
    # Of the files in the root.
    counts = info.safetensors.parameters if info.safetensors and not prefix else None
    return {
        "commit": commit_id(info.sha),
        "files": {name: size for name, size in sizes.items() if "/" not in name},
        "nested": {name: size for name, size in sizes.items() if "/" in name},
        "digests": {name: digest for name, digest in digests.items() if HEXADECIMAL.fullmatch(digest or "")},
        "parameters": counts and {kind: int(count) for kind, count in counts.items()},
    }


def commit_id(found: object) -> str:
    """A commit that a server named, which becomes part of a path; see ``NOT_A_HUB``."""
    if not isinstance(found, str) or not HEXADECIMAL.fullmatch(found):
        raise TypeError(f"{found!r} is not a commit")
    return found


def access_token(token: str | None) -> str | None:
    """The token that the client will send: ``token``, HF_TOKEN or the saved login; None without any.

    Raises ``UsageError`` for text that cannot be one: an HTTP client would refuse it with an error that
    quotes it.
    """
    from huggingface_hub import get_token

    secret = get_token() if token is None else token
    if secret is not None and not re.fullmatch("[!-~]+", secret):
        where = "the saved token (HF_TOKEN or hf auth login)" if token is None else "`token`"
        raise UsageError(f"{where} is not an access token; create one in the Hub's settings")
    return secret


def shown(error: BaseException, token: str | None) -> BaseException | None:
    """The cause that a traceback may show: a client's error, or None if its text contains the token."""
    secret = access_token(token)
    return None if secret and secret in "".join(traceback.format_exception(error)) else error


def set_up_client(*, progress: bool) -> None:
    """Turns the client's progress bars off without ``progress``, and limits how long it waits.

    huggingface_hub before 1.0 has no such limits: it does not wait as long as a Hub asks.
    """
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    client: Any = get_session()
    if not hasattr(client, "event_hooks"):
        return
    if client.timeout.read is None:
        client.timeout = SILENCE
    if _limit_wait not in client.event_hooks["response"]:
        client.event_hooks["response"].append(_limit_wait)


def waiting() -> AbstractContextManager[None]:
    """Says after some seconds that the Hub has not answered yet."""
    return stage("waiting for the Hub", logging.WARNING)


def _limit_wait(response: Any) -> None:
    """Says how long the Hub asks to wait, or raises the client's error if that is too long."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    limit = parse_ratelimit_headers(response.headers)
    asked = response.headers.get("retry-after", "")
    wait = int(asked) if asked.isdecimal() else 0
    if response.status_code == 429 and limit is not None and limit.remaining == 0:
        wait = limit.reset_in_seconds
    if response.status_code < 400 or wait < LONG:
        return
    if wait > LONGEST_WAIT:
        raise HfHubHTTPError(f"the Hub asks to wait {wait} seconds", response=response)
    LOG.warning(f"the Hub asks to wait {wait} seconds ...")


def _note(folder: Path, revision: str) -> None:
    """Records the commit of a branch or tag in the cache, as the client does, for offline use."""
    refs = folder.parent.parent / "refs"
    ref = refs / revision
    if revision != folder.name and ref.resolve().is_relative_to(refs.resolve()):
        with suppress(OSError):  # a read-only cache works without this
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(folder.name, encoding="utf-8")


def template_for(error: BaseException, messages: Mapping[str, str]) -> str | None:
    """The message for an error in a table like ``MESSAGES``; None if there is none."""
    return next((messages[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in messages), None)


def explained(error: Exception, repo_id: str, revision: str | None, file: str) -> Exception:
    """The SourceError for an error of the client while it fetched ``file``; else the error itself."""
    template, answered = template_for(error, MESSAGES), error.__cause__
    answer = getattr(answered, "response", None)
    if template is UNREACHABLE and isinstance(answered, Exception) and answer is not None:
        # After a failed request, the client reports that the cache lacks the file.
        return explained(answered, repo_id, revision, file)
    if template is None and isinstance(error, OSError):
        # The client's error for a file that is too short has no errno; an error of the disk has one.
        template = CACHE if error.errno else BROKEN_OFF
    if template is None:
        return error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if (
        template is MESSAGES["HfHubHTTPError"]
        and isinstance(status, int)
        and (status == 429 or status >= 500)
    ):
        template = LATER
    at = repr(revision or DEFAULT_REVISION)
    reason = getattr(error, "strerror", None)
    return SourceError(template.format(id=repo_id, revision=at, file=file, status=status, reason=reason))
