"""What a part is told, and the models that parts compare."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import measuring
import torch
from measuring import Setup

T = TypeVar("T")
TRAIN_LENGTH = 2048
CONVERSIONS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "position": {"method": "ntk", "dynamic": "position"},
}
"""Folder -> options of ``convert``."""
EXACT, ROUNDING = 1e-3, 3.0
"""Largest difference of float32 logits from stock's, relative to the largest; in half precision, a side may
differ from stock in float32 this many times as much as stock in half precision does."""
BLOOM_560M: dict[str, Any] = {"heads": 16, "head_dim": 64, "layers": 24, "vocabulary": 250880}
BLOOM_1B7: dict[str, Any] = {"heads": 16, "head_dim": 128, "layers": 24, "vocabulary": 250880}
"""The sizes of published models."""


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

    @property
    def trial(self) -> bool:
        return self.device == "cpu"

    def size(self, real: T, tiny: T) -> T:
        """A size for the GPU, or for a trial."""
        return tiny if self.trial else real

    def setup(self, folder: str, geometry: Mapping[str, Any], longest: int = 0, **changes: Any) -> Setup:
        """A model's sizes, with changes; tiny in a trial."""
        tiny = {"heads": 2, "head_dim": 16, "layers": 2, "vocabulary": 512}
        own: dict[str, Any] = {"dtype": "bfloat16", **geometry, **changes, **(tiny if self.trial else {})}
        longest = max(longest, TRAIN_LENGTH) + 4096
        threads = torch.get_num_threads()
        return Setup(self.folder / folder, longest=longest, device=self.device, threads=threads, **own)


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


@dataclass(frozen=True)
class Side:
    """One way to run a model in torch."""

    name: str
    folder: str
    """``stock``, or a conversion."""
    attention: str | None
    """The implementation's name in transformers; None for the model's default."""
    required: bool = False
    """Without it, the part has failed; others may not be installed."""
    exact: bool = False
    """It is also compared in float32, which flash attention does not have and flex has to compile."""


@contextmanager
def repositories(setup: Setup, *conversions: str) -> Iterator[None]:
    """Writes ``stock`` and a folder for each conversion, which links to its weights."""
    setup.folder.mkdir()
    try:
        options = {name: {**CONVERSIONS[name], "train_length": TRAIN_LENGTH} for name in conversions}
        measuring.make_repositories(setup, options)
        yield
    finally:
        shutil.rmtree(setup.folder, ignore_errors=True)


def load(setup: Setup, side: Side) -> Any:
    """The model of a side.

    Raises:
        ValueError: transformers takes another attention in place of the one that is asked for.
    """
    model = measuring.load(setup, side.folder, attn_implementation=side.attention)
    if side.attention not in (None, found := model.config._attn_implementation):
        raise ValueError(f"transformers takes {found} in place of {side.attention}")
    return model
