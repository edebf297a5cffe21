"""What the user is told when the Hub, or the way to it, keeps something from being written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from converter.errors import ConverterError, PushError
from converter.hub import DEFAULT_REVISION, shown, template_for

UNREACHABLE = (
    "the Hub cannot be reached to write to {id}; check the connection (and HF_HUB_OFFLINE, HF_ENDPOINT)"
)
BROKEN_OFF = (
    "the connection broke off while {id} was written to; a push is one commit, all or nothing: run the same "
    "command again, and what the Hub has is not sent again"
)
NO_HUB = "what answers at HF_ENDPOINT is no Hub; check it, and whether your network wants a log-in"
NO_TOKEN = "writing to {id} takes a token with write access: `hf auth login`, HF_TOKEN or --token"
NOT_LET_IN = (
    "the Hub's Xet storage, which the client sends large files to, does not take this token for {id}; use "
    "one with write access, or set HF_HUB_DISABLE_XET=1, and run the same command again"
)
MISSING = "the Hub shows no repository {id} to this token; check the spelling, and the token's access"
MESSAGES = {
    "HFValidationError": "{id} is no valid name of a repository: {reason}",
    "LocalTokenNotFoundError": NO_TOKEN,
    "OfflineModeIsEnabled": UNREACHABLE,
    "RevisionNotFoundError": "{id} has no branch {branch}; it was removed meanwhile, run the command again",
    "DisabledRepoError": "{id} was disabled by the Hub; name another repository",
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
    402: "the Hub wants payment to store this in {id}: {reason}",
    403: "this token may not write to {id} ({reason}); use one with write access, or a USER/NAME of yours",
    409: "{id} was changed at the same time ({reason}); run the same command again",
    412: "{branch} of {id} got a commit meanwhile, and nothing was added to it; look at that commit, then "
    "run the same command again",
    413: "the Hub finds this too large for {id}: {reason}; see its storage limits",
    429: "the Hub asks to wait, there were too many requests; run the same command again later",
    507: "there is no room left for {id}: {reason}; free some of its owner's storage",
}
NO_XET = (
    "this Hub has no Xet storage, which the client sends large files to; set HF_HUB_DISABLE_XET=1 and run "
    "the same command again"
)
XET = {401: NOT_LET_IN, 403: NOT_LET_IN, 404: NO_XET}
"""What that storage, or the Hub asked for a way into it, answers; hf_xet tells the status in words alone."""
FAILED = (
    "the Hub failed with HTTP {status} while {id} was written to; run the same command again later, and what "
    "it has is not sent again"
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
    """Turns what the client raises into one line of ours, ``missing`` if the Hub does not find it."""
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
        # The Hub's own words, which could hold anything.
        reason = " ".join(reason.replace(token, "...").split())[:200].rstrip(".")
        message = line.format(id=repo_id, branch=branch or DEFAULT_REVISION, status=status, reason=reason)
        raise PushError(message) from shown(error, token)


def _cause(error: BaseException) -> BaseException:
    """What the client's threads wrap is told by its own type."""
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
        # The client's own findings, about the card's front matter and about large files.
        return STATUS[400]
    if isinstance(cause, (RuntimeError, OSError)) and sending and not getattr(cause, "errno", None):
        return BROKEN_OFF
    return None
