"""The concave penalty of decoders in a graph; ``templates/ntk_concave.py`` has the formula and its reasons.

    A d + B (1 - (1 - d / n) ** K)

In folded channels, the curve is a number c of the query times a number u of the key at position j, and L is
the trained length:

    c = B (L / n) ** K      u = ((j + 1) / L) ** K

Shapes: B rows, S new tokens a row, N = B * S, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from converter.errors import UnsupportedModel, option
from converter.onnx.alibi import Alibi, Tokens
from converter.onnx.graph import Graph, Value
from converter.scaling.scaling import LARGEST_BITS

QUERY_PARTS, KEY_PARTS = (0, 0, 0, 1, 1, 2), (0, 1, 2, 0, 1, 0)
"""The parts of c and of u that are multiplied and summed, one product in each channel."""
HALF_QUERY_PARTS, HALF_KEY_PARTS = (0, 0, 1, 2, 2, 3), (0, 1, 0, 2, 3, 2)
"""The same in float16: two parts for near keys, then two for far ones."""
CURVE_CHANNELS = len(QUERY_PARTS)
NEAR, NEAR_SCALE, FAR_SCALE = 18, 3, 15
"""In float16, keys are near with u up to 2 ** NEAR. Scales are powers of 2."""
STEEPEST_HALF = 9.7e5
"""The largest slope * trained length / softmax scale for which c stays within float16's range."""
PART_BITS, HALF_BITS = 8, 11
"""Leading bits of a part: those of bfloat16, and of float16."""
BITS = {ir.DataType.FLOAT: 24, ir.DataType.DOUBLE: 53}


def times_with_far_keys(power: int) -> float:
    """A multiple of the trained length at which float16 graphs have near and far keys, and hold them all."""
    return float(2 ** ((NEAR + LARGEST_BITS) / 2 / power))


class ConcavePenalty:
    """A and B of every new token's query, and the channels in which its dot product computes the curve."""

    def __init__(self, tokens: Tokens, alibi: Alibi):
        scaling = alibi.scaling
        assert scaling.power is not None
        self.graph = graph = tokens.graph
        self.tokens = tokens
        self.alibi = alibi
        self.power = scaling.power
        self.train_length = scaling.train_length
        self.seen = graph.op("Unsqueeze", self._counts(), graph.constant([2]))
        """float32 [B, S, 1]: n, the tokens that a query sees."""
        length, power = graph.float32(self.train_length), graph.float32(self.power)
        slopes = graph.float32(alibi.slopes)
        end = graph.op("Max", graph.op("Min", self.seen, length), graph.op("Div", self.seen, power))
        beyond = graph.op("Div", graph.op("Sub", self.seen, end), graph.float32(self.power - 1))
        self.curves = graph.op("Mul", slopes, beyond)
        """float32 [B, S, H]: B, exactly 0 up to the trained length."""
        less = graph.op("Div", graph.op("Mul", self.curves, power), self.seen)
        self.lines = graph.op("Max", graph.op("Sub", slopes, less), graph.float32(0))
        """float32 [B, S, H]: A, exactly the slopes up to the trained length."""

    def _counts(self) -> Value:
        """float32 [B, S]: each new token's position, counted from 1."""
        return self.graph.op("Add", self.tokens.positions, self.graph.float32(1))

    @property
    def half(self) -> bool:
        """Whether the channels are float16."""
        return self.graph.dtype == ir.DataType.FLOAT16

    def query_channels(self, softmax_scale: float) -> list[Value]:
        """The ``CURVE_CHANNELS`` channels of queries, each float32 [B, S, H, 1]: parts of c.

        Raises ``UnsupportedModel`` if float16 cannot hold them.
        """
        graph = self.graph
        ratio = graph.op("Div", graph.float32(self.train_length), self.seen)
        # Up to the trained length B is 0, and the power of a larger ratio would leave float32's range.
        ratio = self._to_power(graph.op("Min", ratio, graph.float32(1)))
        weight = graph.op("Mul", graph.op("Mul", self.curves, ratio), graph.float32(1 / softmax_scale))
        weight = graph.op("Unsqueeze", weight, graph.constant([3]))
        if not self.half:
            return in_order(split(graph, weight, ir.DataType.FLOAT, PART_BITS, 3), QUERY_PARTS)
        if max(self.alibi.slopes) * self.train_length / softmax_scale > STEEPEST_HALF:
            raise UnsupportedModel(
                "float16 does not hold the concave penalty of this model's steepest slope; give "
                f"{option.onnx_dtype} bf16 or fp32, or {option.onnx_profile} portable"
            )
        far = graph.op("Unsqueeze", self._is_far(self.seen), graph.constant([3]))
        near_weight = graph.op("Mul", weight, graph.float32(2.0**NEAR_SCALE))
        far_weight = graph.op("Mul", weight, graph.float32(2.0**FAR_SCALE))
        far_weight = graph.op("Where", far, far_weight, graph.float32(0))
        parts = [
            *split(graph, near_weight, ir.DataType.FLOAT, HALF_BITS, 2),
            *split(graph, far_weight, ir.DataType.FLOAT, HALF_BITS, 2),
        ]
        return in_order(parts, HALF_QUERY_PARTS)

    def key_channels(self) -> list[Value]:
        """The ``CURVE_CHANNELS`` channels of keys, each float32 [N, 1]: parts of u, 0 for padded tokens.

        They are computed in float64: an error of u, unlike one of c, is another one for every key.
        """
        graph, double = self.graph, ir.DataType.DOUBLE

        def exact(number: float) -> Value:
            return graph.constant(number, double)

        counts = self._counts()
        values = graph.op("Div", graph.cast(counts, double), exact(self.train_length))
        mask = graph.cast(self.tokens.new_mask, double)
        values = graph.op("Mul", self._to_power(values), mask)
        if self.half:
            far = self._is_far(counts)
            near_values = graph.op("Where", far, exact(0), graph.op("Mul", values, exact(2.0**-NEAR_SCALE)))
            far_values = graph.op("Where", far, graph.op("Mul", values, exact(2.0**-FAR_SCALE)), exact(0))
            parts = [
                *split(graph, near_values, double, HALF_BITS, 2),
                *split(graph, far_values, double, HALF_BITS, 2),
            ]
            order = HALF_KEY_PARTS
        else:
            parts, order = split(graph, values, double, PART_BITS, 3), KEY_PARTS
        rounded = [graph.cast(part, ir.DataType.FLOAT) for part in parts]
        return in_order([graph.reshape(part, -1, 1) for part in rounded], order)

    def penalty_per_token(self, distance: Value, seen: Value, lines: Value, curves: Value) -> Value:
        """The penalty divided by the distance d, float32 [B, H, Q, T], for Q queries and T keys of a block.

        ``A + B / n * (1 - r ** K) / (1 - r)`` with r = 1 - d / n. The fraction is a product for a power of
        two, (1 + r) (1 + r ** 2) (1 + r ** 4) ..., so nothing is subtracted, and small distances are exact.

        Args:
            distance: -d, float32 [B, 1, Q, T]. Beyond n, where a query may not look, r is 0.
            seen: n, float32 [B, 1, Q, 1].
            lines, curves: A and B / n, float32 [B, H, Q, 1].
        """
        graph, one = self.graph, self.graph.float32(1)
        ratio = graph.op("Add", graph.op("Div", distance, seen), one)
        ratio = graph.op("Max", ratio, graph.float32(0))
        product = graph.op("Add", ratio, one)
        for _ in range(squarings(self.power) - 1):
            ratio = graph.op("Mul", ratio, ratio)
            product = graph.op("Mul", product, graph.op("Add", ratio, one))
        return graph.op("Add", lines, graph.op("Mul", curves, product))

    def _to_power(self, ratio: Value) -> Value:
        """``ratio ** K`` by squaring, which is more exact than Pow."""
        for _ in range(squarings(self.power)):
            ratio = self.graph.op("Mul", ratio, ratio)
        return ratio

    def _is_far(self, counts: Value) -> Value:
        """bool: which of these positions, counted from 1, have keys that are far in float16."""
        near = self.train_length * 2 ** (NEAR / self.power)
        return self.graph.op("Greater", counts, self.graph.float32(near))


def concave_penalty(tokens: Tokens, alibi: Alibi) -> ConcavePenalty | None:
    """None for scalings whose penalties are slopes."""
    return None if alibi.scaling.power is None else ConcavePenalty(tokens, alibi)


def squarings(power: int) -> int:
    """How often a number is squared for its power, itself a power of two."""
    return power.bit_length() - 1


def split(graph: Graph, values: Value, dtype: ir.DataType, bits: int, count: int) -> list[Value]:
    """As many values of a dtype that add up to the given ones; all but the last have so many leading bits.

    The leading bits are Veltkamp's, by plain sums and products: optimisers may remove a Cast and its inverse.
    """
    factor = graph.constant(2.0 ** (BITS[dtype] - bits) + 1, dtype)
    found = []
    for _ in range(count - 1):
        spread = graph.op("Mul", values, factor)
        leading = graph.op("Sub", spread, graph.op("Sub", spread, values))
        values = graph.op("Sub", values, leading)
        found.append(leading)
    return [*found, values]


def in_order(parts: Sequence[Value], order: Sequence[int]) -> list[Value]:
    return [parts[number] for number in order]
