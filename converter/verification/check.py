"""The outcome of a check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """A check that passed or was skipped; a failed check raises instead."""

    name: str
    detail: str
    """What was found, in one line."""
    skipped: bool = False
    """True if the check does not apply; the detail says why."""

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON."""
        return asdict(self)
