"""The families that have a graph."""

from __future__ import annotations

from converter.errors import UnsupportedModel
from converter.families import Family
from converter.onnx.decoder import Decoder
from converter.onnx.families.bloom import Bloom
from converter.onnx.families.falcon import Falcon
from converter.onnx.families.mpt import Mpt

DECODERS: dict[str, type[Decoder]] = {"bloom": Bloom, "mpt": Mpt, "falcon": Falcon}
"""Family name -> its graph."""


def decoder_class(family: Family) -> type[Decoder]:
    """The family's graph.

    Raises:
        UnsupportedModel: it has none.
    """
    if family.name not in DECODERS:
        raise UnsupportedModel(f"{family.title} has no ONNX graph yet; only {', '.join(DECODERS)} have one")
    return DECODERS[family.name]
