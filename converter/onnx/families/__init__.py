"""The families that have a graph."""

from __future__ import annotations

from converter.onnx.decoder import Decoder
from converter.onnx.encoder import Encoder
from converter.onnx.families.baichuan import Baichuan
from converter.onnx.families.bloom import Bloom
from converter.onnx.families.falcon import Falcon
from converter.onnx.families.jais import Jais
from converter.onnx.families.jina_bert import JinaBert
from converter.onnx.families.mosaic_bert import MosaicBert
from converter.onnx.families.mosaic_gpt import MosaicGpt
from converter.onnx.families.mpt import Mpt
from converter.onnx.families.refact import Refact

DECODERS: dict[str, type[Decoder]] = {
    "baichuan": Baichuan,
    "bloom": Bloom,
    "falcon": Falcon,
    "jais": Jais,
    "mosaic_gpt": MosaicGpt,
    "mpt": Mpt,
    "refact": Refact,
}
ENCODERS: dict[str, type[Encoder]] = {"jina_bert": JinaBert, "mosaic_bert": MosaicBert}
"""Family name -> its graph."""
