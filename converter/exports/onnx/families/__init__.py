"""One module for each family that has a graph, found by the family's name.

The module has the name of the family (``Family.name``), and holds a ``Decoder`` or an ``Encoder`` whose name
is ``Family.camel``: ``mosaic_gpt.py`` holds ``MosaicGpt``. Looking for a module does not import it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from converter.families import Family


def has_graph(name: str) -> bool:
    """Whether the family of this name has a graph."""
    return find_spec(f"{__name__}.{name}") is not None


def network_class(family: Family) -> Any:
    """The family's ``Decoder`` or ``Encoder``; a family without one has no module here."""
    return getattr(import_module(f"{__name__}.{family.name}"), family.camel)
