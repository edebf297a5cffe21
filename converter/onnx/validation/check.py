"""The outcome of a graph's validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from converter.errors import ValidationError

TOLERANCES = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 0.15, "int8": 0.1, "int4": 0.5}
"""Largest difference between a graph's logits and those of the torch model in float32.

Of float dtypes, the largest of all differences as a part of the largest logit: float32 differs by the
order of sums, half precision by its rounding in every layer. Of quantised graphs, where single logits
say little, the root mean square of the differences as a part of that of the logits; unrelated logits
would have 1.4.
"""


@dataclass(frozen=True)
class GraphCheck:
    """One thing that a graph was asked."""

    name: str
    passed: bool
    detail: str
    difference: float | None = None
    """As ``TOLERANCES`` defines it; None where no numbers are compared."""


@dataclass(frozen=True)
class ProviderReport:
    """A graph on one execution provider."""

    provider: str
    """``cpu`` or ``cuda``."""
    ran: Mapping[str, Mapping[str, int]]
    """onnxruntime's provider -> operator -> count, from the profile of a short prompt."""
    tolerance: float
    checks: Sequence[GraphCheck]
    note: str | None
    """What was not as in the file, and why."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class GraphReport:
    """A graph and all that was checked of it."""

    file: str
    profile: str
    dtype: str
    bytes: int
    extent: str
    """What of the model was run."""
    structure: Sequence[GraphCheck]
    providers: Sequence[ProviderReport]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.structure) and all(p.passed for p in self.providers)


@dataclass(frozen=True)
class ValidationReport:
    """All graphs of a repository."""

    graphs: Sequence[GraphReport]
    versions: Mapping[str, str]
    seconds: float

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """The first thing that is wrong, in one line."""
        for graph in self.graphs:
            for check in (*graph.structure, *(c for p in graph.providers for c in p.checks)):
                if not check.passed:
                    return f"{graph.file}: {check.name}: {check.detail}"
        return None

    def check(self) -> None:
        """Raises ``ValidationError`` if anything is wrong."""
        if self.failure is not None:
            raise ValidationError(self.failure)

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return {"passed": self.passed, **asdict(self)}
