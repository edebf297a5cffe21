"""The models that the parts compare: checkpoints of random weights, and what the converter makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch_speed

from gpu.document import Document
from gpu.settings import Geometry, Settings

TRAIN_LENGTH = 2048
DTYPES = ("bfloat16", "float16")
STOCK = "stock"
Variant = Literal["none", "static", "position"]
CONVERSIONS: dict[Variant, dict[str, Any]] = {
    "none": {"method": "none"},
    "static": {"method": "ntk", "scale": 8},
    "position": {"method": "ntk", "dynamic": "position"},
}


@dataclass(frozen=True)
class Side:
    """One way to run a model."""

    name: str
    folder: str
    """``stock``, or a variant."""
    attention: str | None
    """The implementation's name in transformers; None for the model's default."""
    required: bool = False
    """Without it, the part has failed."""
    exact: bool = False
    """It is also compared in float32, which flash attention does not have and flex has to compile."""
    dtypes: Sequence[str] = DTYPES


SomeSide = TypeVar("SomeSide", bound=Side)


@contextmanager
def repositories(
    settings: Settings, geometry: Geometry, longest: int, variants: Sequence[Variant] = ("none", "position")
) -> Iterator[torch_speed.Setup]:
    """Writes ``stock`` in bfloat16 and a folder for each variant, which links to its weights.

    Args:
        longest: most tokens of a prompt.
    """
    from converter import convert

    setup = torch_speed.Setup(
        folder=Path(settings.folder, f"{geometry.name}-{geometry.head_dim}"),
        family=geometry.family,
        heads=geometry.heads,
        head_dim=geometry.head_dim,
        layers=geometry.layers,
        dtype="bfloat16",
        device=settings.device,
        threads=torch.get_num_threads(),
        repeats=3,
        seconds=2.0,
        longest=max(longest, TRAIN_LENGTH) + 4096,
        vocabulary=geometry.vocabulary,
    )
    stock = setup.folder / STOCK
    try:
        torch_speed.make_checkpoint(setup)
        for variant in variants:
            options = {**CONVERSIONS[variant], "train_length": TRAIN_LENGTH}
            convert(stock, setup.folder / variant, link="hard", verify=False, **options)
        torch_speed.release()
        yield setup
    finally:
        shutil.rmtree(setup.folder, ignore_errors=True)


def available(document: Document, setup: torch_speed.Setup, sides: Sequence[SomeSide]) -> list[SomeSide]:
    """The sides that can be run here. Of the others the document says why not."""
    found = []
    for side in sides:
        reason = lacking(setup, side)
        if reason is None:
            found.append(side)
        else:
            (document.fail if side.required else document.skip)(f"{setup.family}, {side.name}", reason)
    return found


def lacking(setup: torch_speed.Setup, side: Side) -> object:
    """Why transformers or the model does not have an attention; None if it does. No weights are loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own_code = {"trust_remote_code": side.folder != STOCK}
    config = AutoConfig.from_pretrained(setup.folder / side.folder, **own_code)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=side.attention, **own_code)
    except Exception as error:  # of many classes: not installed, not supported, not found on the Hub
        return error
    found = model.config._attn_implementation
    return None if side.attention in (None, found) else f"transformers would take {found} in its place"


def load(setup: torch_speed.Setup, side: Side) -> Any:
    """The model of a side that is available, in bfloat16."""
    # With accelerate, weights go to the GPU as they are read, without a copy of the model beside it.
    direct = setup.device != "cpu" and find_spec("accelerate") is not None
    options: dict[str, Any] = {"device_map": setup.device} if direct else {}
    return torch_speed.load(setup, side.folder, attn_implementation=side.attention, **options)
