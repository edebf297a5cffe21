"""The outcome of a check."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from converter.errors import TOO_MANY_FILES, out_of_memory


@dataclass(frozen=True)
class Check:
    """A check that passed or was skipped; a failed check raises instead."""

    name: str
    detail: str
    """What was found, in one line."""
    skipped: bool = False
    """True if the check does not apply; the detail says why."""


def not_ours(error: Exception) -> bool:
    """Whether an error of a check is one of the machine, such as a full disk, and not of the repository."""
    if TOO_MANY_FILES in str(error):
        return True
    return out_of_memory(error) or getattr(error, "errno", None) not in (None, errno.ENOENT)
