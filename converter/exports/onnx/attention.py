"""The interface of the two forms of attention."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from converter.config import Geometry
from converter.exports.onnx.alibi import Alibi, Tokens
from converter.exports.onnx.graph import Value


class Cache(NamedTuple):
    """Keys and values of one layer, each [B, key-value heads, tokens, ``head_size``]."""

    key: Value
    value: Value


class Attention(Protocol):
    """Causal attention with ALiBi over cached and new tokens.

    Whatever all layers share is computed once, by the constructor. Layouts are token-major: N = rows times
    new tokens, then heads, then channels.
    """

    head_size: int
    """Channels of a cached key or value."""

    def __call__(
        self, query: Value, key: Value, value: Value, past: Cache | None, layer: int
    ) -> tuple[Value, Cache]:
        """Attention of the new tokens.

        Args:
            query: [N, heads, head_dim].
            key, value: [N, key-value heads, head_dim].
            past: the layer's cache; None in a graph without caches.
            layer: index of the layer, which may have slopes of its own.

        Returns:
            The heads' outputs [N, heads * head_dim], and the layer's cache with the new tokens.
        """
        ...


class MakeAttention(Protocol):
    """The class of a form of attention."""

    def __call__(
        self, tokens: Tokens, alibi: Alibi, geometry: Geometry, softmax_scale: float
    ) -> Attention: ...
