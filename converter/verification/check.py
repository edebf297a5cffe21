"""The outcome of a check, and what a check needs besides the repository."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from converter.config import Config
from converter.source.remote_code import OwnCode


@dataclass(frozen=True)
class Context:
    """What checks compare a repository with."""

    source_config: Config
    """The source's config as read, for the stock model."""
    own_code: OwnCode | None = None
    """The source's own code, to run and compare with; None to run none of it."""


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
