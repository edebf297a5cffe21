"""The kinds of hostile input; each turns the valid source of ``tests.hostile.source`` into a hostile one.

Each module has ``EXAMPLES``, name -> function, and ``vary``, a function that makes random changes. These
functions change the source's folder and may return a text that replaces the command's MODEL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.hostile.kinds import cards, configs, headers, indexes, names, pickles, places, settings, verified

Make = Callable[[Path, Random], "str | None"]


@dataclass(frozen=True)
class Kind:
    """One kind of input."""

    title: str
    examples: Mapping[str, Make]
    vary: Make
    torch: bool = False
    """Whether its cases run torch, in this process or in one that it starts."""
    verify: bool = False
    """Whether results are verified, which builds and runs the model."""


KINDS: dict[str, Kind] = {
    "headers": Kind("safetensors headers", headers.EXAMPLES, headers.vary),
    "indexes": Kind("index files", indexes.EXAMPLES, indexes.vary),
    "configs": Kind("config.json", configs.EXAMPLES, configs.vary),
    "settings": Kind("tokenizer, modules, generation", settings.EXAMPLES, settings.vary),
    "cards": Kind("model cards", cards.EXAMPLES, cards.vary),
    "names": Kind("names of models and files", names.EXAMPLES, names.vary),
    "places": Kind("links, pipes, devices", places.EXAMPLES, places.vary),
    "pickles": Kind("pickles", pickles.EXAMPLES, pickles.vary, torch=True),
    "verified": Kind("configs, run", verified.EXAMPLES, verified.vary, torch=True, verify=True),
}
