"""What a part is told, and the models that parts compare."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import measuring
import torch
from measuring import STOCK, Setup
from report import Document

T = TypeVar("T")
TRAIN_LENGTH = 2048
DTYPES = ("bfloat16", "float16")
CONVERSIONS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "static": {"method": "ntk", "scale": 8},
    "position": {"method": "ntk", "dynamic": "position"},
}
"""Folder -> options of ``convert``."""
EXACT, ROUNDING = 1e-3, 3.0
"""Largest difference of float32 logits from stock's, relative to the largest; in half precision, a side may
differ from stock in float32 this many times as much as stock in half precision does."""
BLOOM_560M: dict[str, Any] = {"heads": 16, "head_dim": 64, "layers": 24, "vocabulary": 250880}
BLOOM_1B7: dict[str, Any] = {"heads": 16, "head_dim": 128, "layers": 24, "vocabulary": 250880}
MPT_7B: dict[str, Any] = {"heads": 32, "head_dim": 128, "layers": 32, "vocabulary": 50432, "family": "mpt"}
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
    """Without it, the part has failed."""
    exact: bool = False
    """It is also compared in float32, which flash attention does not have and flex has to compile."""
    dtypes: Sequence[str] = DTYPES


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


def available(document: Document, setup: Setup, sides: Sequence[Side]) -> list[Side]:
    """The sides that can be run here. Of the others the document says why not."""
    found = []
    for side in sides:
        reason = lacking(setup, side)
        if reason is None:
            found.append(side)
        else:
            (document.fail if side.required else document.skip)(f"{setup.family}, {side.name}", reason)
    return found


def lacking(setup: Setup, side: Side) -> object:
    """Why transformers or the model does not have an attention; None if it does. No weights are loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    trusted = {"trust_remote_code": side.folder != STOCK}
    config = AutoConfig.from_pretrained(setup.folder / side.folder, **trusted)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=side.attention, **trusted)
    except Exception as error:  # of many classes: not installed, not supported, not found on the Hub
        return error
    found = model.config._attn_implementation
    return None if side.attention in (None, found) else f"transformers would take {found} in its place"


def load(setup: Setup, side: Side) -> Any:
    """The model of a side that is available."""
    # With accelerate, weights go to the GPU as they are read, without a copy of the model beside it.
    direct = setup.device != "cpu" and find_spec("accelerate") is not None
    options: dict[str, Any] = {"device_map": setup.device} if direct else {}
    return measuring.load(setup, side.folder, attn_implementation=side.attention, **options)
