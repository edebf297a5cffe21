"""The common parts of decoders and encoders: weights, linear layers, norms, activations, the residual stream.

Hidden states are always [N, hidden], N = rows times new tokens, so every linear layer is one Gemm, which
reads a weight as PyTorch stores it ([out, in]).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from converter.config import Config, Geometry, count
from converter.errors import UnsupportedModel
from converter.families import Family
from converter.onnx.alibi import Tokens
from converter.onnx.graph import ORT, Graph, Value
from converter.onnx.weights import Weights
from converter.source.sentence_transformers import SENTENCES, Pooling
from converter.source.values import same_values

if TYPE_CHECKING:
    from converter.onnx.quantise import Quantiser

Attend = Callable[[Value, Value, Value], Value]
"""A layer's attention of query, key and value [N, heads, head_dim]: the heads' outputs [N, hidden]."""
Norm = Literal["layer", "rms"]
"""LayerNorm, or the norm by the root mean square alone (Zhang and Sennrich 2019, arXiv 1910.07467)."""
ACTIVATIONS = {
    **{name: name for name in ("gelu", "gelu_tanh", "relu", "silu")},
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
"""Names of activations in configs -> those of ``Network.activation``."""
SHORTEST = 1e-12
"""torch's normalize divides a vector by its length, but not by less than this."""
FEWEST = 1e-9
"""sentence-transformers divides a sum by the number of its tokens, but not by less than this."""


@dataclass(eq=False)
class Network:
    """Base of the families' graphs."""

    graph: Graph
    fused: bool
    """Use onnxruntime's fused norms and activations."""
    config: Config
    family: Family
    geometry: Geometry
    weights: Weights
    convert_weights: bool
    """Convert weights to the graph's dtype when they are written, not when they are loaded."""
    last_logits: bool
    """Compute the logits of each row's last token only."""
    quantiser: Quantiser | None
    """What quantises the weights of linear layers, heads and tables."""
    norm_kind: Norm = field(default="layer", init=False)
    """Norm of the residual stream."""
    norm_bias: bool = field(default=True, init=False)
    """Whether LayerNorms have a bias."""

    def __post_init__(self) -> None:
        self.hidden = self.geometry.num_heads * self.geometry.head_dim
        self._parameters: dict[str, Value] = {}

    @property
    def epsilon(self) -> float:
        return float(self.config.get("layer_norm_epsilon", 1e-5))

    def parameter(self, name: str, *shape: int) -> Value:
        """A weight in the graph's dtype."""
        if name not in self._parameters:
            stored = self.stored_weight(name, shape)
            same = stored.dtype == self.graph.real(self.graph.dtype)
            self._parameters[name] = stored if same else self.graph.cast(stored)
        return self._parameters[name]

    def rows(self, name: str, indices: Value, count: int) -> Value:
        """Rows [N, hidden] of a table; only these rows are cast, not the whole table."""
        if self.quantiser is not None:
            return self.quantiser.rows(self.weights.external(name, (count, self.hidden)), indices)
        stored = self.stored_weight(name, (count, self.hidden))
        rows = self.graph.op("Gather", stored, indices)
        return rows if stored.dtype == self.graph.real(self.graph.dtype) else self.graph.cast(rows)

    def stored_weight(self, name: str, shape: tuple[int, ...]) -> Value:
        """A weight as it is stored, or in the graph's dtype with ``convert_weights``."""
        graph, tensor = self.graph, self.weights.external(name, shape)
        if tensor.dtype == graph.dtype or not self.convert_weights:
            return graph.initialiser(tensor)

        def convert() -> ir.TensorProtocol:
            values = tensor.numpy().astype(graph.dtype.numpy())
            tensor.release()
            return ir.tensor(values, dtype=graph.dtype, name=tensor.name)

        return graph.initialiser(
            ir.LazyTensor(convert, dtype=graph.dtype, shape=tensor.shape, name=tensor.name)
        )

    def linear(self, states: Value, name: str, inputs: int, outputs: int, *, bias: bool = True) -> Value:
        """A linear layer, [N, inputs] to [N, outputs], with the weight [outputs, inputs] called ``name``."""
        return self.product(states, f"{name}.weight", (outputs, inputs), f"{name}.bias" if bias else None)

    def conv1d(self, states: Value, name: str, inputs: int, outputs: int) -> Value:
        """Like ``linear``, with a weight that is stored [inputs, outputs], as in GPT-2."""
        return self.product(states, f"{name}.weight", (inputs, outputs), f"{name}.bias", by_column=True)

    def product(
        self,
        states: Value,
        weight: str,
        shape: tuple[int, int],
        bias: str | None = None,
        *,
        by_column: bool = False,
    ) -> Value:
        """States [N, inputs] times a weight and plus a bias, which are named as stored: [N, outputs].

        The shape of the weight is [outputs, inputs], or [inputs, outputs] with ``by_column``.
        """
        graph, name = self.graph, last_part(weight.removesuffix(".weight"))
        added = self.parameter(bias, shape[1 if by_column else 0]) if bias else None
        if self.quantiser is None:
            transposed = None if by_column else 1
            return graph.op(
                "Gemm", states, self.parameter(weight, *shape), added, transB=transposed, name=name
            )
        with graph.scope(name):
            tensor = self.weights.external(weight, shape)
            product = self.quantiser.product(states, tensor, by_column=by_column)
            # An operator of its own: some onnxruntimes for CUDA refuse MatMulNBits with a bias.
            return product if added is None else graph.op("Add", product, added)

    def split(self, states: Value, *sizes: int) -> tuple[Value, ...]:
        """Splits the channels of [N, sum of sizes]."""
        names = [f"part_{number}" for number in range(len(sizes))]
        return self.graph.ops("Split", states, self.graph.constant(list(sizes)), outputs=names, axis=1)

    def by_heads(self, query: Value, key: Value, value: Value) -> list[Value]:
        """Query, key and value [N, heads * head_dim] as [N, heads, head_dim]."""
        geometry, reshape = self.geometry, self.graph.reshape
        parts = [reshape(part, -1, geometry.num_kv_heads, geometry.head_dim) for part in (key, value)]
        return [reshape(query, -1, geometry.num_heads, geometry.head_dim), *parts]

    def norm_parameters(self, name: str, width: int, kind: Norm) -> tuple[Value, Value | None]:
        """Weight and bias of a norm over ``width`` channels."""
        weight = self.parameter(f"{name}.weight", width)
        biased = kind == "layer" and self.norm_bias
        return weight, self.parameter(f"{name}.bias", width) if biased else None

    def norm(
        self,
        states: Value,
        name: str,
        *,
        width: int | None = None,
        kind: Norm | None = None,
        epsilon: float | None = None,
    ) -> Value:
        """A norm; by default over the hidden size and of the residual stream's kind."""
        kind = kind or self.norm_kind
        epsilon = self.epsilon if epsilon is None else epsilon
        weight, bias = self.norm_parameters(name, width or self.hidden, kind)
        if kind == "rms":
            return self._rms_norm(states, weight, last_part(name), epsilon)
        return self.graph.op(
            "LayerNormalization", states, weight, bias, name=last_part(name), epsilon=epsilon
        )

    def _rms_norm(self, states: Value, weight: Value, name: str, epsilon: float) -> Value:
        """RMSNorm in standard operators, with the mean in float32; onnxruntime fuses them on loading."""
        graph = self.graph
        with graph.scope(name):
            wide = graph.wide(states)
            square = graph.op("Pow", wide, graph.float32(2.0))
            mean = graph.op("ReduceMean", square, graph.constant([-1]), keepdims=1)
            root = graph.op("Sqrt", graph.op("Add", mean, graph.float32(epsilon)))
            return graph.op("Mul", graph.narrow(graph.op("Div", wide, root)), weight)

    def activation(self, states: Value, kind: str) -> Value:
        """One of ``ACTIVATIONS``; ``gelu`` is exact, not approximated."""
        graph, name = self.graph, kind
        kind = ACTIVATIONS.get(name, "")
        if kind == "gelu":
            return graph.op("Gelu", states, domain=ORT) if self.fused else self._gelu(states, "none")
        if kind == "gelu_tanh":
            # In float32, the CPU's kernel of the standard operator is three times as fast.
            if self.fused and graph.dtype != ir.DataType.FLOAT:
                return graph.op("FastGelu", states, domain=ORT)
            return self._gelu(states, "tanh")
        if kind == "relu":
            return graph.op("Relu", states)
        if kind == "silu":
            return graph.op("Mul", states, graph.op("Sigmoid", states))
        raise UnsupportedModel(f"no graph for the activation {name!r}; only for {', '.join(ACTIVATIONS)}")

    # Outputs of a graph without a cache. They are float32, whatever the graph computes in: so are those of
    # half-precision graphs on the Hub, and transformers.js and fastembed pool what they get.

    def token_output(self, states: Value, name: str, tokens: Tokens, width: int) -> Value:
        """Declares [N, width] as an output [B, S, width], and returns that."""
        graph = self.graph
        shape = graph.op("Concat", tokens.rows, tokens.new, graph.constant([-1]), axis=0)
        result = graph.wide(graph.op("Reshape", states, shape))
        graph.output(result, name, ir.DataType.FLOAT, ["batch_size", "sequence_length", width])
        return result

    def row_output(self, scores: Value, width: int) -> None:
        """Declares a classifier's scores of rows [B, width] as the output."""
        self.graph.output(self.graph.wide(scores), "logits", ir.DataType.FLOAT, ["batch_size", width])

    def hidden_states(self, states: Value, tokens: Tokens, pooling: Pooling | None) -> None:
        """Declares a backbone's outputs: states [N, hidden] and, with a pooling, one vector of each text."""
        result = self.token_output(states, "last_hidden_state", tokens, self.hidden)
        if pooling is None:
            return
        vectors = sentence_vectors(tokens, result, pooling)
        width = len(pooling.modes) * self.hidden
        self.graph.output(vectors, SENTENCES, ir.DataType.FLOAT, ["batch_size", width])

    def spans(self, states: Value, tokens: Tokens) -> None:
        """Declares the outputs of question answering: two scores of each token."""
        graph = self.graph
        scores = self.linear(states, "qa_outputs", self.hidden, 2)
        shape = graph.op("Concat", tokens.rows, tokens.new, axis=0)
        for part, name in zip(self.split(scores, 1, 1), ("start_logits", "end_logits"), strict=True):
            result = graph.wide(graph.op("Reshape", part, shape))
            graph.output(result, name, ir.DataType.FLOAT, ["batch_size", "sequence_length"])

    def finish(self, head: str, states: Value, tokens: Tokens, pooling: Pooling | None) -> None:
        """From the states [N, hidden] to the outputs of a head that decoders and encoders have."""
        if head == "Model":
            self.hidden_states(states, tokens, pooling)
        elif head == "ForTokenClassification":
            scores = self.linear(states, "classifier", self.hidden, self.labels)
            self.token_output(scores, "logits", tokens, self.labels)
        elif head == "ForQuestionAnswering":
            self.spans(states, tokens)
        else:
            raise UnsupportedModel(f"no graph for the head {head!r}")

    @property
    def vocabulary(self) -> int:
        return count(self.config, "vocab_size")

    @property
    def head_table(self) -> str:
        """Name of the tensor that makes logits: a stored head that differs is never tied, as in Reference."""
        repository, names = self.weights.repository, (self.family.head, self.family.embeddings)
        if self.config.get("tie_word_embeddings", True):
            head, table = (self.family.find(repository.checkpoint.tensors, name) for name in names)
            if head is None or table is None or same_values(repository.folder, head, table):
                return self.family.embeddings
        return self.family.head

    @property
    def labels(self) -> int:
        return len(self.config.get("id2label") or ()) or count(self.config, "num_labels", default=2)

    def clamp(self, states: Value, limit: float) -> Value:
        """``states`` between -limit and limit, without Clip, which CUDA does not have for bfloat16."""
        low, high = (self.graph.narrow(self.graph.float32(value)) for value in (-limit, limit))
        return self.graph.op("Min", self.graph.op("Max", states, low), high)

    def _gelu(self, states: Value, approximate: str) -> Value:
        """The standard operator; bfloat16 is computed in float32, because few runtimes support it here."""
        graph = self.graph
        if graph.dtype != ir.DataType.BFLOAT16:
            return graph.op("Gelu", states, approximate=approximate)
        wide = graph.op("Gelu", graph.cast(states, ir.DataType.FLOAT), approximate=approximate)
        return graph.cast(wide)

    def factor(self, states: Value, factor: float) -> Value:
        """``states`` times a number, in float32: one in half precision would be an error of all results."""
        if factor == 1:
            return states
        graph = self.graph
        return graph.narrow(graph.op("Mul", graph.wide(states), graph.float32(factor)))


def last_part(name: str) -> str:
    """``a.b.c`` -> ``c``, a node's name."""
    return name.rsplit(".", maxsplit=1)[-1]


class Residual:
    """The residual stream. An addition is delayed until the norm after it, so one operator does both."""

    def __init__(self, network: Network, value: Value):
        self.network = network
        self._value = value
        self._pending: Value | None = None

    @property
    def value(self) -> Value:
        """The stream [N, hidden], with everything added."""
        if self._pending is not None:
            self._value = self.network.graph.op("Add", self._value, self._pending)
            self._pending = None
        return self._value

    def restart(self, value: Value) -> None:
        self._value, self._pending = value, None

    def add(self, output: Value) -> None:
        """Adds a layer's output [N, hidden]."""
        self._value, self._pending = self.value, output

    def norm(self, name: str) -> Value:
        """The norm of the stream; the stream itself is not changed."""
        network = self.network
        if self._pending is None or not network.fused:
            return network.norm(self.value, name)
        layer = network.norm_kind == "layer"
        normed, self._value = network.graph.ops(
            "SkipLayerNormalization" if layer else "SkipSimplifiedLayerNormalization",
            self._pending,
            self._value,
            *network.norm_parameters(name, network.hidden, network.norm_kind),
            domain=ORT,
            name=last_part(name),
            outputs=("output", None, None, "sum"),
            epsilon=network.epsilon,
        )
        self._pending = None
        return normed

    def keep(self, last: Value) -> None:
        """Keeps only one token of each row, at these indices [B]: [B, hidden]."""
        graph = self.network.graph
        self._value = graph.op("Gather", self._value, last)
        if self._pending is not None:
            self._pending = graph.op("Gather", self._pending, last)


def sentence_vectors(tokens: Tokens, states: Value, pooling: Pooling) -> Value:
    """One vector of each text, float32 [B, modes * hidden], of states float32 [B, S, hidden]."""
    graph = tokens.graph
    vectors = [
        _largest(tokens, states) if mode == "max" else _sum(tokens, states, mode) for mode in pooling.modes
    ]
    vector = vectors[0] if len(vectors) == 1 else graph.op("Concat", *vectors, axis=1)
    if not pooling.normalised:
        return vector
    length = graph.op("ReduceL2", vector, graph.constant([-1]), keepdims=1)
    return graph.op("Div", vector, graph.op("Max", length, graph.float32(SHORTEST)))


def _largest(tokens: Tokens, states: Value) -> Value:
    graph = tokens.graph
    real = graph.op("Unsqueeze", graph.cast(tokens.mask, ir.DataType.BOOL), graph.constant([2]))
    shown = graph.op("Where", real, states, graph.float32(float("-inf")))
    return graph.op("ReduceMax", shown, graph.constant([1]), keepdims=0)


def _sum(tokens: Tokens, states: Value, mode: str) -> Value:
    """Every mode but ``max`` is a weighted sum of the states."""
    graph, position = tokens.graph, tokens.all_positions
    weights = graph.cast(tokens.mask, ir.DataType.FLOAT)
    single = mode in ("cls", "lasttoken")
    if mode == "weightedmean":
        weights = graph.op("Mul", weights, graph.op("Add", position, graph.float32(1)))
    elif single:
        at = graph.float32(0) if mode == "cls" else graph.op("Sub", tokens.lengths, graph.float32(1))
        chosen = graph.cast(graph.op("Equal", position, at), ir.DataType.FLOAT)
        weights = graph.op("Mul", weights, chosen)
    row = graph.op("Unsqueeze", weights, graph.constant([1]))
    total = graph.op("Squeeze", graph.op("MatMul", row, states), graph.constant([1]))
    if single:
        return total
    count = graph.op("ReduceSum", weights, graph.constant([1]), keepdims=1)
    count = graph.op("Max", count, graph.float32(FEWEST))
    return graph.op("Div", total, graph.op("Sqrt", count) if mode == "mean_sqrt_len_tokens" else count)
