"""The outcome of a validation, for people and for ``onnx_validation.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from converter.onnx.options import QUANTISED

TOLERANCES = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 0.15, **dict.fromkeys(QUANTISED, 0.1)}
"""Largest difference between the results of a graph and of the torch model in float32.

For float dtypes this is the largest difference divided by the largest result: float32 differs by the order
of sums, and in decoders by ``SCORES``; half precision by its rounding in every layer. For quantised graphs,
whose single logits say little, it is the root mean square of the differences divided by that of the results;
unrelated ones would give 1.4. Their torch model computes with the values that the graph stores, so whatever
the bits of the weights, what is left is the rounding of activations to 8 bits.
"""

SCORES = 2.0**-21
"""How much the results of a decoder in float32 may differ by rounded scores, for each token of the longest
prompt and each nat of the steepest slope. Keys with folded positions, as the torch model's, have scores up to
slope * position, of which float32 keeps 24 bits. A trained model with a slope of 0.5 differs by 1.1e-4 from
float64 at 2048 tokens, and by 3.9e-4 at 4096."""

AGAIN = "export it again: ntk-convert export DIR"


@dataclass(frozen=True)
class GraphCheck:
    name: str
    passed: bool
    detail: str
    difference: float | None = None
    """As ``TOLERANCES`` defines it; None where no numbers are compared."""

    def __str__(self) -> str:
        return f"{'ok    ' if self.passed else 'FAILED'}  {self.name}: {self.detail}"


def failed(name: str, error: Exception) -> GraphCheck:
    """A check that failed with an exception, whose message gets no line breaks."""
    return GraphCheck(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


@dataclass(frozen=True)
class ProviderReport:
    """A graph on one execution provider."""

    provider: str
    """``cpu`` or ``cuda``."""
    ran: Mapping[str, Mapping[str, int]]
    """onnxruntime's provider -> operator -> count, from the profile of a small batch."""
    tolerance: float
    checks: Sequence[GraphCheck]
    note: str | None
    """How the graph that ran differs from the file, and why; None if it does not."""


@dataclass(frozen=True)
class GraphReport:
    file: str
    profile: str
    dtype: str
    bytes: int
    extent: str
    """How much of the model was run."""
    structure: Sequence[GraphCheck]
    providers: Sequence[ProviderReport]

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """The first check that failed, in one line; None if all passed."""
        for check in (*self.structure, *(each for place in self.providers for each in place.checks)):
            if not check.passed:
                return f"{check.name}: {check.detail}"
        return None

    def __str__(self) -> str:
        places = ", ".join(place.provider for place in self.providers)
        return self.failure or f"gives what the model gives, on {places}; run: {self.extent}"


@dataclass(frozen=True)
class ValidationReport:
    graphs: Sequence[GraphReport]
    versions: Mapping[str, str]
    seconds: float
    note: str | None = None
    """Why the graphs were not run on CUDA, if onnxruntime has it and it does not work; else None."""

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """The first check that failed, in one line; None if all passed."""
        return next((f"{each.file}: {each.failure}" for each in self.graphs if each.failure), None)

    def summary(self) -> str:
        lines = []
        for graph in self.graphs:
            lines.append(f"{graph.file}: {graph.profile}, {graph.dtype}; run: {graph.extent}")
            lines += [f"  {check}" for check in graph.structure]
            for place in graph.providers:
                note = f", {place.note}" if place.note else ""
                lines.append(f"  on {place.provider}: ran on {', '.join(place.ran) or 'nothing'}{note}")
                lines += [f"    {check}" for check in place.checks]
        lines += [f"note: {self.note}"] * (self.note is not None)
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}
