"""Attention in standard ONNX operators: a loop over blocks of queries, with a bias for each block.

Memory grows with the length and not with its square, because the scores of only one block exist at a time.
Decoders use the causal form, which has a cache. Encoders use the symmetric form, unless attention_packed.py
has theirs: no fused operator of onnxruntime computes symmetric ALiBi without a bias for all pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from converter.config import Geometry
from converter.onnx.alibi import Alibi, Cache, Tokens
from converter.onnx.concave import concave_penalty
from converter.onnx.graph import Value

BLOCK = 128
"""Queries in a decoder's block. 256 is as fast and needs more memory."""
SCRATCH = 1 << 25
"""Most scores of all rows and heads in an encoder's block, if it has more than ``BLOCK`` queries. In float32
these are 128 MiB, WebGPU's limit."""
FAR = -1e30
"""Distance of a key that a query may not see. Times a slope, it outweighs every score. It is finite, so a
query that may see no key at all averages over all of them instead of giving NaN."""


class BlockwiseAttention:
    """The common part: the blocks, and the attention of one block.

    Shapes: B rows, S new tokens a row, T tokens a row with the cached ones, N = B * S, H heads, G
    key-value heads, D channels, Q queries in a block, K keys that a block sees.
    """

    def __init__(self, tokens: Tokens, alibi: Alibi, geometry: Geometry, softmax_scale: float):
        graph = tokens.graph
        self.graph = graph
        self.geometry = geometry
        self.softmax_scale = softmax_scale
        self.tokens = tokens
        scaling = alibi.scaling
        self.slopes_vary = scaling.dynamic == "position"
        with graph.scope("alibi"):
            one = graph.constant([1])
            heads = graph.constant([-1, geometry.head_dim])
            self.by_row = graph.op("Concat", tokens.rows, tokens.new, heads, axis=0)
            """int64 [4]: the shape [B, S, heads, D]."""
            self.hidden = geometry.num_heads * geometry.head_dim
            self.joined = graph.op("Concat", tokens.rows, graph.constant([-1, self.hidden]), axis=0)
            """int64 [3]: the shape [B, queries of all blocks, H * D]."""
            self.block = graph.op("Min", tokens.new, self._most_queries())
            """int64 [1]: Q; decoding has a block of one query."""
            whole = graph.op("Sub", graph.op("Add", tokens.new, self.block), one)
            self.blocks = graph.scalar(graph.op("Div", whole, self.block))
            """int64 []: the number of blocks."""
            self.single = graph.op("Equal", self.block, tokens.new)
            """bool [1]: whether there is only one block."""
            self.within = graph.range(self.block)
            """int64 [Q]: 0 to Q - 1."""
            self.last = graph.op("Sub", tokens.new, one)
            """int64 [1]: the last query."""
            self.real = graph.cast(tokens.mask, ir.DataType.BOOL)
            """bool [B, T]."""
            self.slopes = [self._slopes(alibi, layer) for layer in range(alibi.rows)]
            self.query_factors = [alibi.query_factors(tokens, layer) for layer in range(alibi.rows)]
            """One for all layers, or one per layer; None without temperatures."""

    def _most_queries(self) -> Value:
        """int64 [1]."""
        return self.graph.constant([BLOCK])

    def _slopes(self, alibi: Alibi, layer: int) -> Value:
        """float32 [1 or B, H, 1 or S, 1]."""
        return self._by_query(alibi.slopes_at(self.tokens, layer))

    def _by_query(self, values: Value) -> Value:
        """[1 or B, 1 or S, any] as [1 or B, any, 1 or S, 1]."""
        graph = self.graph
        return graph.op("Unsqueeze", graph.op("Transpose", values, perm=[0, 2, 1]), graph.constant([3]))

    def _scaled(self, query: Value, layer: int) -> Value:
        """Queries [N, H, D] as [B, H, S, D], scaled in float32, as all scores share the scale."""
        graph = self.graph
        scaled = graph.op("Mul", graph.wide(query), graph.float32(self.softmax_scale))
        factors = self.query_factors[layer if len(self.query_factors) > 1 else 0]
        if factors is not None:
            scaled = graph.op("Mul", scaled, factors)
        return self._by_head(graph.narrow(scaled))

    def _all_blocks(self, one: Callable[[], Value], step: Callable[[Value], Value]) -> Value:
        """The outputs of all blocks, [N, H * D]; ``one`` and ``step`` make [B, Q, H, D] for a block."""
        graph = self.graph

        def many() -> Value:
            stacked = graph.loop(self.blocks, step)
            output = graph.op("Transpose", stacked, perm=[1, 0, 2, 3, 4])
            output = graph.op("Reshape", output, self.joined)
            output = self._first(self.tokens.new, output, axis=1)
            return graph.reshape(output, -1, self.hidden)

        return graph.choose(self.single, lambda: graph.reshape(one(), -1, self.hidden), many)

    def _queries(self, start: Value) -> Value:
        """int64 [Q]: the block's queries from ``start`` on; the last query fills up the last block."""
        return self.graph.op("Min", self.graph.op("Add", start, self.within), self.last)

    def _attend(self, queries: Value, index: Value, cache: Cache, distance: Value, layer: int) -> Value:
        """The outputs [B, Q, H, D] of the block of queries ``index``, int64 [Q].

        ``distance`` is float32 [B or 1, 1, Q, K], negative, and ``FAR`` where a query may not look. Masks are
        applied here, where there is no dimension of heads, so they cost almost nothing.
        """
        graph, geometry = self.graph, self.geometry
        heads, groups, size = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        bias = graph.op("Mul", self._penalty_per_token(distance, index, layer), distance)
        block = graph.op("Gather", queries, index, axis=2)
        # Heads that share a key are rows of one product, so no key is repeated.
        block = graph.reshape(block, 0, groups, -1, size)
        transposed = graph.op("Transpose", cache.key, perm=[0, 1, 3, 2])
        scores = graph.op("MatMul", block, transposed)
        scores = graph.reshape(graph.wide(scores), 0, heads, -1, 0)
        probabilities = graph.narrow(graph.op("Softmax", graph.op("Add", scores, bias), axis=-1))
        output = graph.op("MatMul", graph.reshape(probabilities, 0, groups, -1, 0), cache.value)
        return graph.op("Transpose", graph.reshape(output, 0, heads, -1, size), perm=[0, 2, 1, 3])

    def _penalty_per_token(self, distance: Value, index: Value, layer: int) -> Value:
        """float32 [1 or B, H, 1 or Q, 1 or K]: what a distance costs the queries ``index`` for each token."""
        del distance
        slopes = self.slopes[layer if len(self.slopes) > 1 else 0]
        return self.graph.op("Gather", slopes, index, axis=2) if self.slopes_vary else slopes

    def _by_head(self, states: Value) -> Value:
        """[N, heads, D] as [B, heads, S, D]."""
        graph = self.graph
        return graph.op("Transpose", graph.op("Reshape", states, self.by_row), perm=[0, 2, 1, 3])

    def _first(self, count: Value, values: Value, axis: int) -> Value:
        """The first ``count`` along an axis."""
        graph = self.graph
        return graph.op("Slice", values, graph.constant([0]), count, graph.constant([axis]))


class PortableAttention(BlockwiseAttention):
    """The same as ``OrtAttention``. Caches are plain [B, key-value heads, tokens, head_dim]."""

    def __init__(self, tokens: Tokens, alibi: Alibi, geometry: Geometry, softmax_scale: float):
        graph = tokens.graph
        with graph.scope("alibi"):
            self.concave = concave_penalty(tokens, alibi)
        super().__init__(tokens, alibi, geometry, softmax_scale)
        self.head_size = geometry.head_dim
        with graph.scope("alibi"):
            self.key_slots = graph.op("Unsqueeze", graph.range(tokens.total), graph.constant([0]))
            """int64 [1, T]: where in the cache the keys are."""
            keys = graph.op("Where", self.real, tokens.all_positions, graph.float32(FAR))
            self.key_positions = graph.op("Unsqueeze", keys, graph.constant([1, 2]))
            """float32 [B, 1, 1, T]."""
            self.query_positions = graph.op("Unsqueeze", tokens.positions, graph.constant([1, 3]))
            """float32 [B, 1, S, 1]."""
            if self.concave is not None:
                per_token = graph.op("Div", self.concave.curves, self.concave.seen)
                self.curves = self._by_query(per_token)
                """B / n, float32 [B, H, S, 1]."""
                self.seen = self._by_query(self.concave.seen)
                """n, float32 [B, 1, S, 1]."""

    def _slopes(self, alibi: Alibi, layer: int) -> Value:
        """float32 [1 or B, H, 1 or S, 1]; of a concave penalty, those of its line."""
        if self.concave is None:
            return super()._slopes(alibi, layer)
        return self._by_query(self.concave.lines)

    def _penalty_per_token(self, distance: Value, index: Value, layer: int) -> Value:
        slopes = super()._penalty_per_token(distance, index, layer)
        if self.concave is None:
            return slopes
        curves, seen = (self.graph.op("Gather", each, index, axis=2) for each in (self.curves, self.seen))
        return self.concave.penalty_per_token(distance, seen, slopes, curves)

    def __call__(
        self, query: Value, key: Value, value: Value, past: Cache | None, layer: int
    ) -> tuple[Value, Cache]:
        graph = self.graph
        queries = self._scaled(query, layer)
        present = Cache(self._by_head(key), self._by_head(value))
        if past is not None:
            present = Cache(
                *(graph.op("Concat", *parts, axis=2) for parts in zip(past, present, strict=True))
            )

        def one_block() -> Value:
            """A single block sees all keys, and none are copied."""
            index = self._queries(graph.constant(0))
            distance = self._distance(index, self.key_positions, self.key_slots)
            return self._attend(queries, index, present, distance, layer)

        def step(number: Value) -> Value:
            """A block, without the keys beyond its last query; copying the others costs less."""
            start = graph.op("Mul", number, self.block)
            end = graph.op("Add", graph.op("Add", start, self.block), self.tokens.first_new)
            cache = Cache(*(self._first(end, states, axis=2) for states in present))
            keys = self._first(end, self.key_positions, axis=3), self._first(end, self.key_slots, axis=1)
            index = self._queries(start)
            return self._attend(queries, index, cache, self._distance(index, *keys), layer)

        return self._all_blocks(one_block, step), present

    def _distance(self, index: Value, key_positions: Value, key_slots: Value) -> Value:
        """float32 [B, 1, Q, K], from the queries ``index`` [Q] to keys [B, 1, 1, K] in slots [1, K]."""
        graph = self.graph
        positions = graph.op("Gather", self.query_positions, index, axis=2)
        slots = graph.op("Unsqueeze", graph.op("Add", index, self.tokens.first_new), graph.constant([1]))
        distance = graph.op("Sub", key_positions, positions)
        later = graph.op("Greater", key_slots, slots)
        return graph.op("Where", later, graph.float32(FAR), distance)


class SymmetricAttention(BlockwiseAttention):
    """Attention of encoders: every query sees every real key, at the distance between their slots."""

    def __init__(self, tokens: Tokens, alibi: Alibi, geometry: Geometry, softmax_scale: float):
        super().__init__(tokens, alibi, geometry, softmax_scale)
        graph = self.graph
        with graph.scope("alibi"):
            slots = graph.cast(graph.range(tokens.total), ir.DataType.FLOAT)
            self.queries = graph.op("Unsqueeze", slots, graph.constant([1]))
            """float32 [S, 1]: the slots."""
            self.keys = graph.op("Where", self.real, slots, graph.float32(FAR))
            self.keys = graph.op("Unsqueeze", self.keys, graph.constant([1, 2]))
            """float32 [B, 1, 1, T]."""

    def _most_queries(self) -> Value:
        """As many as ``SCRATCH`` allows: on a GPU, small blocks would take the time for starting kernels."""
        graph, tokens = self.graph, self.tokens
        rows = graph.op("Mul", tokens.rows, graph.constant([self.geometry.num_heads]))
        most = graph.op("Div", graph.constant([SCRATCH]), graph.op("Mul", rows, tokens.total))
        return graph.op("Max", most, graph.constant([BLOCK]))

    def __call__(self, query: Value, key: Value, value: Value, layer: int) -> Value:
        """[N, H * D] of query, key and value [N, H, D]."""
        graph = self.graph
        queries = self._scaled(query, layer)
        cache = Cache(self._by_head(key), self._by_head(value))

        def step(number: Value) -> Value:
            index = self._queries(graph.op("Mul", number, self.block))
            return self._attend(queries, index, cache, self._distance(index), layer)

        return self._all_blocks(lambda: step(graph.constant(0)), step)

    def _distance(self, index: Value) -> Value:
        """float32 [B, 1, Q, T]."""
        graph = self.graph
        slots = graph.op("Gather", self.queries, index)
        return graph.op("Neg", graph.op("Abs", graph.op("Sub", self.keys, slots)))
