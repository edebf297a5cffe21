"""Attention in standard ONNX operators: a loop over blocks of queries, with a bias for each block.

Memory grows with the length and not with its square, since no more than one block's scores exist at a
time.
"""

from __future__ import annotations

from converter.families import Geometry
from converter.onnx.alibi import Alibi, Tokens
from converter.onnx.attention import Cache
from converter.onnx.graph import Value

BLOCK = 256
"""Queries whose scores exist at the same time."""


class PortableAttention:
    """See ``Attention``. Caches are plain [B, key-value heads, tokens, head_dim]."""

    def __init__(self, tokens: Tokens, alibi: Alibi, geometry: Geometry, softmax_scale: float):
        raise NotImplementedError

    def __call__(self, query: Value, key: Value, value: Value, past: Cache) -> tuple[Value, Cache]:
        raise NotImplementedError
