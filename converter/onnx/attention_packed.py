"""Encoders' attention for CPUs: no padding is computed, and no keys that are too far away to matter.

The tokens of all rows stand one after another, and so do their states between embeddings and head. Attention
goes through blocks of queries, head by head. A block sees its own rows, and of these the keys that its head
can reach. What to compute is read from the numbers, so on a GPU every block would wait for the host; there,
``SymmetricAttention`` is better.

Shapes: B rows, S tokens a row, N packed tokens, H heads, D channels, Q queries in a block.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from converter.config import Geometry
from converter.onnx.alibi import Alibi, Tokens
from converter.onnx.graph import Value

BLOCK = 256
"""Most queries in a block. 128 is as fast for long rows, and slower for several short ones."""
APART = 10**12
"""Distance between rows, and that of padding from all. Times a slope, it outweighs every score."""
EVERYWHERE = 1e9
"""How far a head reaches that no bound limits, in tokens."""
NEGLIGIBLE = 2.0**-24
"""What the probabilities of all keys left out for a query may add up to: float32 rounds 1 + this to 1."""


class PackedTokens:
    """The tokens that are computed: the real ones, and each row's first, which classifiers read."""

    def __init__(self, tokens: Tokens):
        self.tokens = tokens
        self.graph = graph = tokens.graph
        one, zero = graph.constant([1]), graph.constant(0)
        real = graph.cast(tokens.mask, ir.DataType.BOOL)
        kept = graph.op("Or", real, graph.op("Equal", graph.range(tokens.new), zero))
        self._kept = graph.reshape(graph.cast(kept, ir.DataType.INT64), -1, 1)
        places = graph.op("NonZero", kept)
        count = graph.op("Shape", places, start=1)
        self.blocks = graph.op("Max", self._parts(count, graph.constant([BLOCK])), one)
        """int64 [1]: the number of blocks."""
        self.block = self._parts(count, self.blocks)
        """int64 [1]: Q. The last token is repeated until all blocks are full, but nobody's key."""
        self.count = graph.op("Mul", self.block, self.blocks)
        """int64 [1]: N."""
        filled = graph.op("Min", graph.range(self.count), graph.op("Sub", count, one))
        row, slot = (
            graph.op("Gather", graph.op("Gather", places, graph.constant(axis), axis=0), filled)
            for axis in (0, 1)
        )
        self.index = graph.op("Add", graph.op("Mul", row, tokens.new), slot)
        """int64 [N]: where they are among all B * S."""
        self.real = graph.cast(self.take(tokens.mask), ir.DataType.BOOL)
        """bool [N]."""
        self.places = graph.op("Add", graph.op("Mul", row, graph.constant(APART)), slot)
        """int64 [N]: their slots; other rows are far away."""
        self.starts = graph.op("Mul", graph.range(self.blocks), self.block)
        """int64 [blocks]: the first token of each block; and of its rows, and the first after these."""
        last = graph.op("Sub", graph.op("Add", self.starts, self.block), one)
        lengths = graph.op("ReduceSum", graph.cast(kept, ir.DataType.INT64), one, keepdims=0)
        ends = graph.op("CumSum", lengths, zero)
        begins = graph.op("Sub", ends, lengths)
        first, last = (graph.op("Gather", row, each) for each in (self.starts, last))
        self.row_starts, self.row_ends = graph.op("Gather", begins, first), graph.op("Gather", ends, last)
        self.one_row = graph.op("Equal", first, last)
        """bool [blocks]: whether all queries of a block are of one row."""

    def take(self, values: Value, *channels: int) -> Value:
        """[N, channels] of values [B, S, channels]."""
        return self.graph.op("Gather", self.graph.reshape(values, -1, *channels), self.index)

    def unpack(self, states: Value) -> Value:
        """[B * S, any] of states [N, any]; 0 at the tokens that are not computed."""
        graph = self.graph
        place = graph.op("CumSum", graph.reshape(self._kept, -1), graph.constant(0))
        all_states = graph.op("Gather", states, graph.op("Sub", place, graph.constant(1)))
        return graph.op("Mul", all_states, graph.cast(self._kept))

    def _parts(self, count: Value, size: Value) -> Value:
        """How many parts of a size make up a number."""
        graph = self.graph
        return graph.op("Div", graph.op("Sub", graph.op("Add", count, size), graph.constant([1])), size)


class PackedAttention:
    """Every query sees every real key of its row, at the distance between their slots."""

    def __init__(self, packed: PackedTokens, alibi: Alibi, geometry: Geometry, softmax_scale: float):
        self.packed = packed
        self.graph = graph = packed.graph
        self.geometry = geometry
        self.softmax_scale = softmax_scale
        heads = geometry.num_heads
        with graph.scope("alibi"):
            self.single = graph.op("Equal", packed.blocks, graph.constant([1]))
            """bool [1]: whether there is only one block."""
            self.items = graph.op("Mul", packed.blocks, graph.constant([heads]))
            """int64 [1]: the number of blocks of all heads."""
            times = graph.constant([heads])
            self.keys = graph.op("Where", packed.real, packed.places, graph.constant(-APART))
            """int64 [N]: the places of keys."""
            self.query_places = graph.reshape(graph.op("Tile", packed.places, times), -1, 1)
            """int64 [H * N, 1]; ``key_places`` [H * N]."""
            self.key_places = graph.op("Tile", self.keys, times)
            self.one_row = graph.op("Tile", packed.one_row, times)
            """bool [H * blocks]."""
            head = graph.reshape(graph.range(graph.constant([heads])), -1, 1)
            self.offsets = graph.op("Mul", head, packed.count)
            """int64 [H, 1]: each head's first among the H * N."""
            logarithm = graph.op("Log", graph.cast(packed.count, ir.DataType.FLOAT))
            self.least = graph.op("Add", logarithm, graph.float32(-math.log(NEGLIGIBLE)))
            """float32 [1]: how far below the query's own key a score has to be."""
            self.slopes = [self._slopes(alibi, layer) for layer in range(alibi.rows)]
            self.factors = [self._query_factors(alibi, layer) for layer in range(alibi.rows)]
            """One for all layers, or one per layer; None without temperatures."""

    def _slopes(self, alibi: Alibi, layer: int) -> Value:
        """float32 [H, N]: those of each query."""
        graph, tokens, heads = self.graph, self.packed.tokens, self.geometry.num_heads
        shape = graph.op("Concat", tokens.rows, tokens.new, graph.constant([heads]), axis=0)
        slopes = graph.op("Expand", alibi.slopes_at(tokens, layer), shape)
        return graph.op("Transpose", self.packed.take(slopes, heads), perm=[1, 0])

    def _query_factors(self, alibi: Alibi, layer: int) -> Value | None:
        """float32 [1 or N, H, 1]."""
        factors = alibi.query_factors(self.packed.tokens, layer)
        if factors is None or not alibi.scaling.dynamic:
            return factors
        return self.graph.op("Gather", factors, self.packed.index)

    def __call__(self, query: Value, key: Value, value: Value, layer: int) -> Value:
        """[N, H * D] of query, key and value [N, H, D]."""
        graph, packed = self.graph, self.packed
        heads, size = self.geometry.num_heads, self.geometry.head_dim
        slopes = self.slopes[layer if len(self.slopes) > 1 else 0]
        factors = self.factors[layer if len(self.factors) > 1 else 0]
        query = graph.op("Mul", query, graph.float32(self.softmax_scale))
        query = query if factors is None else graph.op("Mul", query, factors)
        query, key, value = (graph.op("Transpose", each, perm=[1, 0, 2]) for each in (query, key, value))
        negative = graph.op("Neg", slopes)

        def whole() -> Value:
            """All heads at once."""
            places = graph.reshape(packed.places, -1, 1), self.keys
            bias = self._bias(graph.reshape(negative, heads, -1, 1), self._between(*places))
            scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 2, 1]))
            probabilities = graph.op("Softmax", graph.op("Add", scores, bias), axis=-1)
            return graph.op("MatMul", probabilities, value)

        def by_blocks() -> Value:
            first, end = (graph.reshape(each, -1) for each in self._reach(query, key, slopes))
            of_query = [graph.reshape(query, -1, size), self.query_places, graph.reshape(negative, -1, 1)]
            of_key = [graph.reshape(key, -1, size), graph.reshape(value, -1, size), self.key_places]

            def step(number: Value) -> Value:
                at = graph.reshape(number, 1)
                start = graph.op("Mul", at, packed.block)
                stop = graph.op("Add", start, packed.block)
                bounds = graph.op("Gather", first, at), graph.op("Gather", end, at)
                axis = graph.constant([0])
                q, places, slope = (graph.op("Slice", each, start, stop, axis) for each in of_query)
                k, v, key_places = (graph.op("Slice", each, *bounds, axis) for each in of_key)
                between = graph.choose(
                    graph.op("Gather", self.one_row, at),
                    lambda: self._within_row(places, key_places),
                    lambda: self._between(places, key_places),
                )
                scores = graph.op("Gemm", q, k, self._bias(slope, between), transB=1)
                return graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v)

            return graph.reshape(graph.loop(graph.scalar(self.items), step), heads, -1, size)

        output = graph.choose(self.single, whole, by_blocks)
        return graph.reshape(graph.op("Transpose", output, perm=[1, 0, 2]), -1, heads * size)

    def _between(self, queries: Value, keys: Value) -> Value:
        """float32 [Q, keys]: from places of queries [Q, 1] to those of keys [keys], with a sign."""
        return self.graph.cast(self.graph.op("Sub", queries, keys), ir.DataType.FLOAT)

    def _within_row(self, queries: Value, keys: Value) -> Value:
        """The same if all are of one row, faster: float32 is exact for places less the first query's."""
        graph = self.graph
        origin = graph.op("Gather", graph.reshape(queries, -1), graph.constant(0))
        queries, keys = (self._between(each, origin) for each in (queries, keys))
        return graph.op("Sub", queries, keys)

    def _bias(self, negative: Value, between: Value) -> Value:
        """float32 [..., Q, keys] of -slopes [..., Q, 1]."""
        return self.graph.op("Mul", self.graph.op("Abs", between), negative)

    def _reach(self, query: Value, key: Value, slopes: Value) -> tuple[Value, Value]:
        """The first key of each block and the first after its last, among the H * N: int64 [H, blocks].

        As in templates/ntk_tiles.py: by Cauchy and Schwarz, a key's score exceeds that of the query's own key
        by at most ``|q| |k - c| - q.(own - c)``, less slope times distance, for any vector c, here the keys'
        mean. The tokens of a row are at least as far apart in their slots as in the packed order.
        """
        graph, packed = self.graph, self.packed
        heads = self.geometry.num_heads
        center = graph.op("ReduceMean", key, graph.constant([1]), keepdims=1)
        key = graph.op("Sub", key, center)
        last = graph.constant([2])
        longest = graph.op("ReduceL2", key, last, keepdims=0)
        longest = graph.op("ReduceMax", longest, graph.constant([1]), keepdims=1)
        own = graph.op("ReduceSum", graph.op("Mul", query, key), last, keepdims=0)
        most = graph.op("Mul", graph.op("ReduceL2", query, last, keepdims=0), longest)
        excess = graph.op("Add", graph.op("Sub", most, own), self.least)
        # Of a query that is no key, there is no own score.
        excess = graph.op("Where", packed.real, graph.op("Div", excess, slopes), graph.float32(EVERYWHERE))
        # Comparisons with NaN are false, so then the head reaches everywhere.
        everywhere = graph.float32(EVERYWHERE)
        bounded = graph.op("Less", excess, everywhere)
        excess = graph.op("Where", bounded, excess, everywhere)
        shape = graph.op("Concat", graph.constant([heads]), packed.blocks, packed.block, axis=0)
        excess = graph.op("ReduceMax", graph.op("Reshape", excess, shape), last, keepdims=0)
        reach = graph.cast(graph.op("Ceil", excess), ir.DataType.INT64)
        first = graph.op("Max", graph.op("Sub", packed.starts, reach), packed.row_starts)
        end = graph.op("Add", graph.op("Add", packed.starts, packed.block), reach)
        end = graph.op("Min", end, packed.row_ends)
        return graph.op("Add", first, self.offsets), graph.op("Add", end, self.offsets)
