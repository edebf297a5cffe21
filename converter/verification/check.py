"""The outcome of a check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One thing that was checked and found right (a failure raises instead)."""

    name: str
    detail: str
    """What was found, in one line."""
    skipped: bool = False
    """True if the check could not apply; the detail says why."""

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON."""
        return asdict(self)
