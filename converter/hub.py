"""The Hub: one repository at one commit, through huggingface_hub and its cache."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from converter.errors import SourceError, UsageError
from converter.source import CONFIG, Source

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

DEFAULT_REVISION = "main"
UNREACHABLE = (
    "{id} is no local folder, and the Hub cannot be reached for what the cache lacks of it; check the "
    "connection (and HF_HUB_OFFLINE, HF_ENDPOINT), or give a local folder"
)
NO_FILE = "{id} has no file {file} (revision {revision}); it is no checkpoint that can be converted"
BROKEN_OFF = (
    "the download of {file} from {id} broke off; run the same command again, files that are complete are in "
    "the cache"
)
LATER = "the Hub does not give {id} at the moment (HTTP {status}); run the same command again later"
CACHE = "{file} cannot be written to the Hub's cache: {reason}; give another --cache-dir, or see to this one"
MESSAGES = {
    "GatedRepoError": "{id} is gated: accept its terms on its Hub page, then `hf auth login` or give --token",
    "RepositoryNotFoundError": (
        "{id} is neither a local folder nor a repository that the Hub shows you; check the spelling, and if "
        "it is private, `hf auth login` or give --token"
    ),
    "RevisionNotFoundError": "{id} has no revision {revision}; give --revision one that it has",
    "DisabledRepoError": "{id} was disabled by the Hub and cannot be downloaded; use another source",
    "LocalEntryNotFoundError": UNREACHABLE,
    "EntryNotFoundError": NO_FILE,
    "RemoteEntryNotFoundError": NO_FILE,
    "HFValidationError": "{id} is neither a local folder nor a valid Hub id such as bigscience/bloom-1b7",
    "HfHubHTTPError": "the Hub refused {id} (HTTP {status}); check token and HF_ENDPOINT",
    "FileMetadataError": UNREACHABLE,
    "JSONDecodeError": "what answers is no Hub; check HF_ENDPOINT, and whether your network wants a log-in",
    "ChunkedEncodingError": BROKEN_OFF,
    "ReadError": BROKEN_OFF,
    "RemoteProtocolError": BROKEN_OFF,
    "OfflineModeIsEnabled": UNREACHABLE,
    "TransportError": UNREACHABLE,
    "ConnectionError": UNREACHABLE,
    "TimeoutError": UNREACHABLE,
    "Timeout": UNREACHABLE,
}
"""Exception of huggingface_hub or its HTTP client, by class name -> the line that the user gets.

By name, because the client (requests, httpx) changed between releases of huggingface_hub, and in
the order of an exception's own classes, so that the most specific line wins.
"""


def open_repository(
    repo_id: str, *, revision: str | None, token: str | None, cache_dir: Path | None, progress: bool
) -> Source:
    """A repository of the Hub, its revision resolved once to the commit that all files come from.

    Args:
        repo_id: ``user/name``.
        revision: branch, tag or commit; the default branch if None.
        token: access token; None for HF_TOKEN or the saved login. It is sent to the Hub only.
        cache_dir: the cache's folder; None for huggingface_hub's own.
        progress: show the client's own progress bars.

    Raises:
        SourceError: not found, gated, no such revision, offline and not cached, ...
        UsageError: a token that cannot be one, or an empty revision.
    """
    from huggingface_hub import HfApi, hf_hub_download

    access_token(token)
    if revision == "":
        raise UsageError("--revision is empty; give a branch, tag or commit, or leave it out")
    progress_bars(show=progress)

    def list_files(at: str | None) -> ModelInfo | None:
        try:
            return HfApi(token=token).model_info(repo_id, revision=at, files_metadata=True)
        except Exception as error:
            if template_for(error, MESSAGES) is UNREACHABLE:
                return None
            raise explained(error, repo_id, revision, CONFIG) from shown(error, token)

    def download(name: str, at: str | None, *, offline: bool = False) -> Path:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a disk that may be too small: it is, or it is not
                path = hf_hub_download(
                    repo_id, name, revision=at, token=token, cache_dir=cache_dir, local_files_only=offline
                )
        except Exception as error:
            raise explained(error, repo_id, revision, name) from shown(error, token)
        return Path(path)

    # Asked first, because it fails at once where a download would retry for half a minute.
    info = list_files(revision)
    # By commit from here on: asked for a branch, the client takes the size of a file with one request
    # and its content with the next, and stores what it got as what it asked for.
    folder = download(CONFIG, info.sha if info else revision, offline=info is None).parent
    commit = folder.name  # which is how the client names the folder of a snapshot
    parameters = nested = None
    if info is None:
        # Offline with a cached snapshot: what the cache holds is all there is.
        files: dict[str, int | None] = {
            path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()
        }
    else:
        _note(folder, revision or DEFAULT_REVISION)
        siblings = [file for file in info.siblings or () if file.rfilename.isprintable()]
        listed: dict[str, int | None] = {file.rfilename: file.size for file in siblings}
        files = {name: size for name, size in listed.items() if "/" not in name}
        nested = {name: size for name, size in listed.items() if "/" in name}
        parameters = info.safetensors.parameters if info.safetensors else None

    def fetch(name: str) -> None:
        download(name, commit, offline=info is None)

    offline = info is None
    return Source(repo_id, folder, files, repo_id, commit, parameters, fetch, offline=offline, nested=nested)


def access_token(token: str | None) -> str | None:
    """The token that the client will send: the one given, HF_TOKEN or the saved login; None without one.

    Raises:
        UsageError: what cannot be one. An HTTP client refuses what is no header with an error that quotes
            it, the token included.
    """
    from huggingface_hub import get_token

    secret = get_token() if token is None else token
    if secret is not None and not re.fullmatch("[!-~]+", secret):
        where = "the saved token (HF_TOKEN or hf auth login)" if token is None else "--token"
        raise UsageError(f"{where} is not an access token; create one in the Hub's settings")
    return secret


def shown(error: BaseException, token: str | None) -> BaseException | None:
    """What a traceback may show as the cause: the error, or None if the Hub has said the token back in it.

    Args:
        error: of the client.
        token: as for ``access_token``.
    """
    secret = access_token(token)
    return None if secret and secret in "".join(traceback.format_exception(error)) else error


def progress_bars(*, show: bool) -> None:
    """Lets the client draw bars or not; what HF_HUB_DISABLE_PROGRESS_BARS forbids stays forbidden."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not show:
        disable_progress_bars()


def bytes_to_download(source: Source, names: Iterable[str]) -> int:
    """How much of a source's files the Hub's cache lacks, as far as the Hub tells sizes.

    The cache is on the file system of ``source.folder``. Of a file whose download was interrupted, all
    bytes are counted, though the client goes on where it stopped. Nothing is asked of the Hub.
    """
    if source.local:
        return 0
    lacking = [name for name in names if not (source.folder / name).is_file()]
    sizes = {**source.files, **(source.nested or {})}
    return sum(sizes.get(name) or 0 for name in lacking)


def _note(folder: Path, revision: str) -> None:
    """Writes into the cache which commit a branch or tag is, as the client does, for offline use.

    Args:
        folder: the snapshot's, ``REPOSITORY/snapshots/COMMIT``.
        revision: what the commit was found by.
    """
    refs = folder.parent.parent / "refs"
    ref = refs / revision
    if revision != folder.name and ref.resolve().is_relative_to(refs.resolve()):
        with suppress(OSError):  # a cache that is only read serves as well
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(folder.name, encoding="utf-8")


def template_for(error: BaseException, messages: Mapping[str, str]) -> str | None:
    """The line of a table like ``MESSAGES`` for an error; None if it has none."""
    return next((messages[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in messages), None)


def explained(error: Exception, repo_id: str, revision: str | None, file: str) -> Exception:
    """What the user is told of an error of the client while ``file`` was fetched; else the error itself."""
    template, answered = template_for(error, MESSAGES), error.__cause__
    if template is UNREACHABLE and getattr(answered, "response", None) is not None:
        # The client reports a file that it could not ask about as one that the cache lacks.
        assert isinstance(answered, Exception)
        return explained(answered, repo_id, revision, file)
    if template is None and isinstance(error, OSError):
        # The client's own finding that a file is too short has no number; the cache's disk has one.
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
