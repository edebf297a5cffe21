"""What a part is told: where it runs, until when, and on what sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Geometry:
    """The sizes of a published model."""

    name: str
    family: str
    heads: int
    head_dim: int
    layers: int
    vocabulary: int

    def said(self) -> str:
        return (
            f"{self.name}'s geometry: {self.heads} heads x {self.head_dim}, {self.layers} layers, "
            f"vocabulary {self.vocabulary}"
        )


BLOOM = Geometry("BLOOM-1b7", "bloom", heads=16, head_dim=128, layers=24, vocabulary=250880)
MPT = Geometry("MPT-7B", "mpt", heads=32, head_dim=128, layers=32, vocabulary=50432)


@dataclass(frozen=True)
class Settings:
    """The settings of one part."""

    device: str
    """``cuda``, or ``cpu`` for a trial: everything that a CPU can run, on tiny sizes."""
    folder: Path
    """For temporary files."""
    results: Path | None
    """The folder of the result files; None to print the results."""
    until: float
    """The time of ``time.monotonic()`` at which the part must have ended."""
    optimum_python: str | None = None
    """Python of an environment with optimum-onnx."""

    @property
    def trial(self) -> bool:
        return self.device == "cpu"

    def size(self, real: T, tiny: T) -> T:
        """A size for the GPU, or for a trial."""
        return tiny if self.trial else real

    def geometry(self, geometry: Geometry, **changes: int) -> Geometry:
        """A model's geometry, with changes; tiny in a trial."""
        tiny = {"heads": 2, "head_dim": 16, "layers": 2, "vocabulary": 512}
        return replace(geometry, **(tiny if self.trial else changes))


def shared(items: Sequence[T], until: float, weights: Sequence[float] = ()) -> Iterator[tuple[T, float]]:
    """Each item with the time at which it must end; what an item leaves goes to those after it.

    Args:
        until: the time of ``time.monotonic()`` at which the last one must end.
        weights: how the time is divided; by default all items get the same.
    """
    weights = weights or [1.0] * len(items)
    for number, item in enumerate(items):
        now = time.monotonic()
        yield item, now + (until - now) * weights[number] / sum(weights[number:])
