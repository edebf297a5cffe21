"""Error messages for what the Hub refuses, and for failures on the way to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from converter.errors import ConverterError, PushError
from converter.source.hub import DEFAULT_REVISION, shown, template_for

UNREACHABLE = (
    "the Hub cannot be reached to write to {id}; check the connection (and HF_HUB_OFFLINE, HF_ENDPOINT)"
)
BROKEN_OFF = (
    "the connection broke off while {id} was written to; a push is one commit, all or nothing: run the same "
    "command again, and files that the Hub has are not sent again"
)
NO_HUB = "the server at HF_ENDPOINT is not a Hub; check the address, and whether your network needs a login"
NO_TOKEN = "writing to {id} takes a token with write access: `hf auth login`, HF_TOKEN or --token"
NOT_LET_IN = (
    "the Hub's Xet storage, which stores large files, refuses this token for {id}; use a token with write "
    "access, or set HF_HUB_DISABLE_XET=1, and run the same command again"
)
MISSING = "the Hub shows no repository {id} to this token; check the spelling and the token's access"
MESSAGES = {
    "HFValidationError": "{id} is not a valid repository name: {reason}",
    "LocalTokenNotFoundError": NO_TOKEN,
    "OfflineModeIsEnabled": UNREACHABLE,
    "RevisionNotFoundError": "the branch {branch} of {id} was removed meanwhile; run the command again",
    "DisabledRepoError": "the Hub disabled {id}; name another repository",
    "JSONDecodeError": NO_HUB,
    "XetError": NOT_LET_IN,
    "XetAuthenticationError": NOT_LET_IN,
}
LOST = {
    "ConnectTimeout": UNREACHABLE,
    "ConnectError": UNREACHABLE,
    "TransportError": BROKEN_OFF,
    "ConnectionError": BROKEN_OFF,
    "ChunkedEncodingError": BROKEN_OFF,
    "TimeoutError": BROKEN_OFF,
    "Timeout": BROKEN_OFF,
}
STATUS = {
    400: "the Hub does not accept this for {id}: {reason}",
    401: "the Hub does not know this token; create one with write access in its settings, then `hf auth "
    "login` or give --token",
    402: "the Hub requires payment to store this in {id}: {reason}",
    403: "this token may not write to {id} ({reason}); use one with write access, or a USER/NAME of yours",
    409: "{id} was changed at the same time ({reason}); run the same command again",
    412: "somebody else committed to {branch} of {id} meanwhile, and nothing was added; look at that commit, "
    "then run the same command again",
    413: "the Hub finds this too large for {id}: {reason}; see its storage limits",
    429: "the Hub got too many requests; wait, and run the same command again later",
    507: "there is no storage left for {id}: {reason}; free some of its owner's storage",
}
NO_XET = (
    "this Hub has no Xet storage, which the client uses for large files; set HF_HUB_DISABLE_XET=1 and run "
    "the same command again"
)
XET = {401: NOT_LET_IN, 403: NOT_LET_IN, 404: NO_XET}
"""HTTP status from that storage, or from the Hub about it -> message; hf_xet gives the status in words."""
FAILED = (
    "the Hub failed with HTTP {status} while {id} was written to; run the same command again later, and "
    "files that it has are not sent again"
)


@contextmanager
def explained(
    repo_id: str,
    token: str,
    branch: str | None = None,
    *,
    sending: bool = False,
    missing: str = MISSING,
) -> Iterator[None]:
    """Turns the client's errors into a ``PushError`` of one line; ``missing`` is the line for HTTP 404."""
    try:
        yield
    except ConverterError:
        raise
    except Exception as error:
        line = _line(error, missing, sending=sending)
        if line is None:
            raise
        cause = _cause(error)
        status = getattr(getattr(cause, "response", None), "status_code", None)
        reason = getattr(cause, "server_message", None) or str(cause)
        # The Hub's own words may contain anything.
        reason = " ".join(reason.replace(token, "...").split())[:200].rstrip(".")
        message = line.format(id=repo_id, branch=branch or DEFAULT_REVISION, status=status, reason=reason)
        raise PushError(message) from shown(error, token)


def _cause(error: BaseException) -> BaseException:
    """The error itself, which the client's threads wrap in a RuntimeError."""
    wrapped = type(error) is RuntimeError and error.__cause__ is not None
    return _cause(error.__cause__) if wrapped and error.__cause__ is not None else error


def _line(error: Exception, missing: str, *, sending: bool) -> str | None:
    cause = _cause(error)
    status = getattr(getattr(cause, "response", None), "status_code", None)
    found = template_for(cause, MESSAGES)
    if found is not None:
        return found
    if status == 404 and "/xet-write-token/" in str(cause):
        return NO_XET
    if isinstance(status, int):
        return missing if status == 404 else STATUS.get(status, FAILED)
    told = re.search(r"HTTP status client error \((\d{3})\b", str(cause))
    if told and int(told[1]) in XET:
        return XET[int(told[1])]
    lost = template_for(cause, LOST)
    if lost is not None:
        return lost if sending else UNREACHABLE
    if isinstance(cause, ValueError) and sending:
        # The client's own checks of the card's front matter and of large files.
        return STATUS[400]
    if isinstance(cause, (RuntimeError, OSError)) and sending and not getattr(cause, "errno", None):
        return BROKEN_OFF
    return None
