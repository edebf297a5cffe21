"""onnxruntime's GroupQueryAttention with ALiBi folded into extra channels of queries and keys.

Softmax ignores a constant that is added to a whole row, so ``s * q.k_j + m * p_j`` is causal ALiBi. That is
a dot product: append m / s to the query and the key's position p_j to the key. There is no bias, no mask and
no [S, T] tensor. onnxruntime's CUDA flash attention takes ALiBi in no other form.
The channels are those of ``templates/ntk_alibi.py``, which explains the choice of numbers, and one more: it
subtracts ``m * p`` of the query's own position, a constant of the row, so the scores of near keys are small
numbers in kernels that keep them in half precision.

A concave penalty has more channels (concave.py). Its line is in those of the slope, and the constant that is
subtracted is ``A * p + B``.

GroupQueryAttention takes heads of a multiple of 8 channels only. Other heads get channels of zeros as well.
"""

from __future__ import annotations

import onnx_ir as ir

from converter.config import Geometry
from converter.onnx.alibi import Alibi, Cache, Tokens
from converter.onnx.concave import CURVE_CHANNELS, concave_penalty
from converter.onnx.graph import ORT, Value
from converter.scaling.scaling import FOLDED_CHANNELS, Scaling

MULTIPLE = 8
"""GroupQueryAttention's head size must be a multiple of this."""
BASE = 256.0
PADDED_QUERY, PADDED_KEY = 128.0, -256.0
CENTRE_KEY = 256.0
SPLIT = 2.0**16 + 1
"""Veltkamp's constant, which keeps the 8 leading bits of a float32."""


def head_size(geometry: Geometry, scaling: Scaling) -> int:
    """Channels of a cached key or value."""
    return -(-(geometry.head_dim + scaling.folded_channels) // MULTIPLE) * MULTIPLE


class OrtAttention:
    """Causal attention with ALiBi over cached and new tokens.

    Whatever all layers share is computed once, by the constructor. Layouts are token-major: N = rows times
    new tokens, then heads, then channels. Cached keys hold their channels of positions.

    GroupQueryAttention has two limits. It takes several new tokens over a cache with one row only. Keys and
    values must have the same size, so values are padded with zeros.
    """

    def __init__(self, tokens: Tokens, alibi: Alibi, geometry: Geometry, softmax_scale: float):
        graph = tokens.graph
        self.graph = graph
        self.geometry = geometry
        self.softmax_scale = softmax_scale
        self.head_size = head_size(geometry, alibi.scaling)
        self.width = self.head_size - geometry.head_dim
        """Channels of the penalty, and of zeros."""
        with graph.scope("alibi"):
            self.concave = concave_penalty(tokens, alibi)
            used = FOLDED_CHANNELS
            if self.concave is not None:
                used += CURVE_CHANNELS
            self.zeros = self.width - used
            """Channels of zeros."""
            self.by_row = graph.op("Concat", tokens.rows, tokens.new, graph.constant([-1]), axis=0)
            count = graph.op("Mul", tokens.rows, tokens.new)
            self.query_channels = [self._query_channels(tokens, alibi, layer) for layer in range(alibi.rows)]
            """One for all layers, or one per layer."""
            self.query_factors = [alibi.query_factors(tokens, layer) for layer in range(alibi.rows)]
            """The same; None without temperatures."""
            self.key_channels = self._key_channels(tokens, count)
            channels = graph.constant([geometry.num_kv_heads, self.width])
            kv_shape = graph.op("Concat", count, channels, axis=0)
            self.value_channels = graph.op("Expand", graph.constant([[[0.0]]]), kv_shape)
            # The channels hide padded keys: to the kernel, all tokens up to a row's last new one are real.
            self.last_key = graph.cast(graph.reshape(tokens.last_new, -1), ir.DataType.INT32)
            total = graph.cast(tokens.total, ir.DataType.INT32)
            self.total = graph.op("Squeeze", total, graph.constant([0]))

    def __call__(
        self, query: Value, key: Value, value: Value, past: Cache | None, layer: int
    ) -> tuple[Value, Cache]:
        """The heads' outputs [N, heads * head_dim] of the new tokens, and the layer's cache with them.

        ``query`` is [N, heads, head_dim], ``key`` and ``value`` are [N, key-value heads, head_dim]. ``past``
        is the layer's cache, None in a graph without caches.
        """
        graph, geometry = self.graph, self.geometry
        row = layer if len(self.query_channels) > 1 else 0
        factors = self.query_factors[row]
        if factors is not None:
            wide = graph.cast(query, ir.DataType.FLOAT)
            query = graph.cast(graph.op("Mul", wide, factors))
        joined = (
            graph.op("Reshape", graph.op("Concat", states, channels, axis=-1), self.by_row)
            for states, channels in (
                (query, self.query_channels[row]),
                (key, self.key_channels),
                (value, self.value_channels),
            )
        )
        output, present_key, present_value = graph.ops(
            "GroupQueryAttention",
            *joined,
            *(past or (None, None)),
            self.last_key,
            self.total,
            domain=ORT,
            outputs=("output", "present_key", "present_value"),
            num_heads=geometry.num_heads,
            kv_num_heads=geometry.num_kv_heads,
            scale=self.softmax_scale,
        )
        output = graph.reshape(output, -1, geometry.num_heads, self.head_size)
        output = graph.op(
            "Slice", output, graph.constant([0]), graph.constant([geometry.head_dim]), graph.constant([2])
        )
        output = graph.reshape(output, -1, geometry.num_heads * geometry.head_dim)
        return output, Cache(present_key, present_value)

    def _query_channels(self, tokens: Tokens, alibi: Alibi, layer: int) -> Value:
        """[N, H, width]: the slope's 8 leading bits and the rest, three times each; the curve; constants.

        The leading bits (Veltkamp) are exact in bfloat16 and float16. onnxruntime computes them once, when it
        loads the graph, unless the slopes depend on the tokens.
        """
        graph, scale, heads = self.graph, self.softmax_scale, self.geometry.num_heads
        if self.concave is None:
            slopes, curve = alibi.slopes_at(tokens, layer), []
        else:
            slopes, curve = self.concave.lines, self.concave.query_channels(scale)
        weight = graph.op(
            "Mul", graph.op("Unsqueeze", slopes, graph.constant([3])), graph.float32(BASE / scale)
        )
        spread = graph.op("Mul", weight, graph.float32(SPLIT))
        leading = graph.op("Sub", spread, graph.op("Sub", spread, weight))
        rest = graph.op("Sub", weight, leading)
        own = graph.op("Shape", weight)
        constants = [
            graph.op("Expand", graph.float32([value]), own)
            for value in (PADDED_QUERY / scale, *[0.0] * self.zeros)
        ]
        fixed = graph.op("Concat", *[leading] * 3, *[rest] * 3, *curve, *constants, axis=-1)
        width = self.width - 1
        shape = graph.op("Concat", tokens.rows, tokens.new, graph.constant([heads, width]), axis=0)
        fixed = graph.reshape(graph.op("Expand", fixed, shape), -1, heads, width)
        centre = graph.op("Mul", self._column(tokens.positions), graph.float32(-1 / scale / CENTRE_KEY))
        centre = graph.op("Mul", graph.op("Reshape", centre, self.by_row), slopes)
        if self.concave is not None:
            curve_at_own = graph.op("Mul", self.concave.curves, graph.float32(1 / scale / CENTRE_KEY))
            centre = graph.op("Sub", centre, curve_at_own)
        centre = graph.reshape(centre, -1, heads, 1)
        return graph.cast(graph.op("Concat", fixed, centre, axis=-1))

    def _key_channels(self, tokens: Tokens, count: Value) -> Value:
        """[N, key-value heads, width]: the position's digits in base 256, the curve, padding, a constant."""
        graph = self.graph
        base = graph.float32(BASE)
        position = self._column(tokens.positions)
        high = graph.op("Floor", graph.op("Div", position, graph.float32(BASE**2)))
        low = graph.op("Sub", position, graph.op("Mul", high, graph.float32(BASE**2)))
        middle = graph.op("Floor", graph.op("Div", low, base))
        low = graph.op("Sub", low, graph.op("Mul", middle, base))
        digits = [graph.op("Mul", high, base), middle, graph.op("Div", low, base)]
        curve = [] if self.concave is None else self.concave.key_channels()
        mask = graph.cast(tokens.new_mask, ir.DataType.FLOAT)
        padded = graph.op("Sub", graph.float32(1), self._column(mask))
        padded = graph.op("Mul", padded, graph.float32(PADDED_KEY))
        constants = [
            graph.op("Expand", graph.float32([[value]]), graph.op("Shape", padded))
            for value in (*[0.0] * self.zeros, CENTRE_KEY)
        ]
        channels = graph.op("Concat", *digits, *digits, *curve, padded, *constants, axis=-1)
        shape = graph.op("Concat", count, graph.constant([self.geometry.num_kv_heads, self.width]), axis=0)
        return graph.cast(graph.op("Expand", graph.op("Unsqueeze", channels, graph.constant([1])), shape))

    def _column(self, values: Value) -> Value:
        """[B, S] as [N, 1]."""
        return self.graph.reshape(values, -1, 1)
