"""The Hub: one repository at one commit, through huggingface_hub and its cache."""

from __future__ import annotations

import logging
import re
import textwrap
import traceback
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converter.errors import SourceError, UsageError, option
from converter.progress import LOG, LONG, stage
from converter.source.source import CONFIG, Source, no_config

DEFAULT_REVISION = "main"
HEXADECIMAL = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""A commit, or the digest of a file."""
SILENCE = 60.0
"""Seconds for which the Hub may be silent in a request. The client itself has no limit for most requests."""
LONGEST_WAIT = 120
"""Seconds for which the Hub may ask to wait before the next request."""
UNREACHABLE = {
    "ConnectionError",
    "FileMetadataError",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "Timeout",
    "TimeoutError",
    "TransportError",
}
"""Exceptions of huggingface_hub and its HTTP client which mean that the Hub cannot be reached.

They are names because the HTTP client (requests, httpx) changed between releases of huggingface_hub.
"""
BROKEN_OFF = {"ChunkedEncodingError", "ReadError", "RemoteProtocolError"}
"""Subclasses of exceptions in ``UNREACHABLE``: the Hub was reached, and then the connection broke off."""
GENERAL = {"LocalEntryNotFoundError", "RuntimeError"}
"""Exceptions whose cause says more: the cache lacks a file, or a thread of the client failed."""
LONGEST_REASON = 500
"""Characters of what the client says."""
SECRETS = re.compile(r"(?<=://)[^/\s@]*@|\?[^\s'\")]*=[^\s'\")]*")
"""Finds what an address can have of secrets: a password before the host, the signature of a download."""


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
    access_token(token)  # raises for one that is impossible
    if revision == "":
        raise UsageError(f"{option.revision} is empty; give a branch, tag or commit, or leave it out")
    set_up_client(progress=progress)
    client = _Client(repo_id, revision, token, cache_dir)
    prefix = f"{subfolder}/" if subfolder else ""
    name = f"{repo_id}/{subfolder}" if subfolder else repo_id

    # Before the download: without a connection this fails at once, and that would retry for half a minute.
    listing = client.list_files(prefix)
    if listing is not None and CONFIG not in listing.files:
        raise no_config(name, [*listing.files, *listing.nested])
    # By commit from here on. For a branch that moves meanwhile, the client would get the size of a file
    # from one commit and its content from another.
    config = client.download(f"{prefix}{CONFIG}", revision if listing is None else listing.commit)
    folder, snapshot = config.parent, config.parents[prefix.count("/")]
    commit = snapshot.name  # the client names the folder of a snapshot after its commit

    def download(file: str) -> None:
        client.download(f"{prefix}{file}", commit)

    if listing is None:  # only the files in the cache are available
        cached: dict[str, int | None] = {
            path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()
        }
        return Source(
            name, folder, cached, repo_id, commit, download=download, offline=True, subfolder=subfolder
        )
    _record_ref(snapshot, revision or DEFAULT_REVISION)
    return Source(
        name,
        folder,
        listing.files,
        repo_id,
        commit,
        parameters=listing.parameters,
        download=download,
        nested=listing.nested,
        digests=listing.digests,
        subfolder=subfolder,
    )


@dataclass
class _Client:
    """huggingface_hub for one repository; its methods raise ``SourceError``."""

    repo_id: str
    revision: str | None
    """What the user gave."""
    token: str | None = field(repr=False)
    cache_dir: Path | None
    unreached: Exception | None = None
    """Why the Hub could not be reached; then only what its cache has is read."""

    def list_files(self, prefix: str) -> Listing | None:
        """The files whose names begin with ``prefix``; None if the Hub cannot be reached."""
        from huggingface_hub import HfApi, constants

        api, wait = HfApi(token=self.token), constants.HF_HUB_ETAG_TIMEOUT
        try:
            with waiting():
                info = api.model_info(self.repo_id, revision=self.revision, timeout=wait, files_metadata=True)
            return _read_listing(info, prefix)
        except MemoryError:
            raise
        except Exception as error:
            if not is_unreachable(error):
                raise self._not_read(CONFIG, error) from shown(error, self.token)
            self.unreached = error
            return None

    def download(self, file: str, at: str | None) -> Path:
        """A file of a branch, tag or commit, in the cache."""
        from huggingface_hub import hf_hub_download

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about free space, which is checked elsewhere
                found = hf_hub_download(
                    self.repo_id,
                    file,
                    revision=at,
                    token=self.token,
                    cache_dir=self.cache_dir,
                    local_files_only=self.unreached is not None,
                )
            path = Path(found)
            if self.unreached is None:
                commit_id(path.parents[file.count("/")].name)
            return path
        except MemoryError:
            raise
        except Exception as error:
            reason = error
            if self.unreached is not None and is_unreachable(error):
                reason = self.unreached  # this one only says that the cache lacks the file
            raise self._not_read(file, reason) from shown(error, self.token)

    def _not_read(self, file: str, error: Exception) -> SourceError:
        reason = client_reason(error, self.token)
        return SourceError(
            f"{file} of {self.repo_id}, revision {self.revision or DEFAULT_REVISION!r}, cannot be read from "
            f"the Hub: {reason}; check the id (no local folder has this name), {option.revision}, "
            f"{option.token}, {option.cache_dir} and the connection (HF_HUB_OFFLINE, HF_ENDPOINT), and run "
            "the same command again: complete files stay in the cache"
        )


@dataclass(frozen=True)
class Listing:
    """What a ``Source`` keeps of the files of a commit."""

    commit: str
    files: dict[str, int | None]
    nested: dict[str, int | None]
    """Those in folders."""
    digests: dict[str, str]
    parameters: dict[str, int] | None


def _read_listing(info: Any, prefix: str) -> Listing:
    """The client's listing, of the files whose names begin with ``prefix``.

    An answer that is not a Hub's can raise any error.
    """
    files: dict[str, int | None] = {}
    nested: dict[str, int | None] = {}
    digests = {}
    for file in info.siblings:
        if not file.rfilename.isprintable() or not file.rfilename.startswith(prefix):
            continue
        name = file.rfilename.removeprefix(prefix)
        sizes = nested if "/" in name else files
        sizes[name] = None if file.size is None else int(file.size)
        digest = file.lfs.sha256 if file.lfs else file.blob_id
        if HEXADECIMAL.fullmatch(digest or ""):
            digests[name] = digest
    parameters = None
    if info.safetensors and info.safetensors.parameters and not prefix:  # they are of the files in the root
        parameters = {kind: int(count) for kind, count in info.safetensors.parameters.items()}
    return Listing(commit_id(info.sha), files, nested, digests, parameters)


def commit_id(found: object) -> str:
    """A commit that a server named, which becomes part of a path; a ``TypeError`` if it is none."""
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
        where = "the saved token (HF_TOKEN or hf auth login)" if token is None else option.token
        raise UsageError(f"{where} is not an access token; create one in the Hub's settings")
    return secret


def shown(error: BaseException, token: str | None) -> BaseException | None:
    """The cause that a traceback may show: a client's error, or None if its text contains the token."""
    secret = access_token(token)
    return None if secret and secret in "".join(traceback.format_exception(error)) else error


def client_reason(error: BaseException, token: str | None) -> str:
    """The kind of a client's error and what it says, in one line, without the token and other secrets.

    A server's answer, which may contain anything, is part of it.
    """
    error = innermost(error)
    said = str(error)
    secret = access_token(token)
    if secret:
        said = said.replace(secret, "[token]")
    said = SECRETS.sub("", said).replace("`", "'").strip().removesuffix(".")
    return f"{type(error).__name__}: {textwrap.shorten(said, LONGEST_REASON, placeholder=' ...')}"


def innermost(error: BaseException) -> BaseException:
    """The cause of an error that says more than the error; see ``GENERAL``."""
    while type(error).__name__ in GENERAL and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_unreachable(error: BaseException) -> bool:
    """Whether a client's error means that the Hub cannot be reached, so that only its cache is left."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & UNREACHABLE) and not names & BROKEN_OFF


def set_up_client(*, progress: bool) -> None:
    """Turns the client's progress bars off without ``progress``, and limits how long it waits.

    Before 1.0, huggingface_hub needs no limit: it does not wait as long as a Hub asks it to.
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


def _record_ref(folder: Path, revision: str) -> None:
    """Records the commit of a branch or tag in the cache, as the client does, for offline use."""
    refs = folder.parent.parent / "refs"
    ref = refs / revision
    if revision != folder.name and ref.resolve().is_relative_to(refs.resolve()):
        with suppress(OSError):  # a read-only cache works without this
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(folder.name, encoding="utf-8")
