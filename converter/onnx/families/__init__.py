"""One module for each family, found by the family's name.

The module has the name of the family (``Family.name``), and holds a ``Decoder`` or an ``Encoder`` whose name
is ``Family.camel``: ``mosaic_gpt.py`` holds ``MosaicGpt``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from converter.families import Family


def network_class(family: Family) -> Any:
    """The family's ``Decoder`` or ``Encoder``."""
    return getattr(import_module(f"{__name__}.{family.name}"), family.camel)
