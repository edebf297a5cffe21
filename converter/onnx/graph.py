"""An ONNX graph that is being built: operators, constants, scoped names.

It names the weights without reading them. It is an onnx-ir graph of standard ONNX operators. Operators of
onnxruntime alone, documented in its ContribOperators.md, have ``domain=ORT``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from converter._version import __version__
from converter.progress import byte_bar

OPSET = 21
"""Of the standard operators; Gelu needs 20 at least."""
EMBEDDINGS, HEAD = "embeddings", "head"
"""Scopes of the nodes before the layers and after them."""
ORT = "com.microsoft"
"""Domain of the operators that only onnxruntime has."""

COMPUTE = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
"""Names of the dtypes that a graph can compute in."""
INLINE = 1024
"""Bytes of the largest constant that is stored in the graph's own file."""

Dimension = int | str
Value = ir.Value


class Graph:
    """Nodes are added in the order in which they run; it computes in FLOAT, FLOAT16 or BFLOAT16.

    ``widened``: use float32 in place of bfloat16, of which only stored weights are left. onnxruntime's CPU
    provider has no kernels for bfloat16; this way it runs everything except their rounding.
    """

    def __init__(self, dtype: ir.DataType, *, widened: bool = False):
        self.dtype = dtype
        self.widened = widened
        self.main = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, ORT: 1}, name="ntk_convert")
        self._open = self.main
        self._scopes: list[str] = []
        self._used: dict[str, int] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names the nodes made inside ``/name/...``, so that a viewer shows the model's structure."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    @property
    def outer(self) -> bool:
        """Whether the open scope is outside the layers."""
        return not {EMBEDDINGS, HEAD}.isdisjoint(self._scopes)

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[Dimension]) -> Value:
        """Declares an input of the graph; a string as a dimension names a dynamic one."""
        value = ir.val(name, self.real(dtype), shape)
        self.main.inputs.append(value)
        return value

    def output(self, value: Value, name: str, dtype: ir.DataType, shape: Sequence[Dimension]) -> None:
        """Declares ``value``, which is not an output yet, an output called ``name``."""
        value.name, value.dtype, value.shape = name, self.real(dtype), ir.Shape(shape)
        self.main.outputs.append(value)

    def op(
        self,
        op_type: str,
        *inputs: Value | None,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> Value:
        """Adds a node with one output and returns the output; see ``ops``."""
        [output] = self.ops(op_type, *inputs, outputs=["output"], domain=domain, name=name, **attributes)
        return output

    def ops(
        self,
        op_type: str,
        *inputs: Value | None,
        outputs: Sequence[str | None],
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> tuple[Value, ...]:
        """Adds a node with several outputs.

        None leaves an optional input, output or attribute out; outputs that are left out are not returned.
        The node is called ``name``, or as its operator, within the open scope.
        """
        path = self._unique("/" + "/".join([*self._scopes, name or op_type]))
        values = [ir.val("" if output is None else f"{path}_{output}") for output in outputs]
        given = {key: value for key, value in attributes.items() if value is not None}
        # Trailing inputs that are left out are not written.
        trimmed = list(inputs)
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        self._open.append(ir.node(op_type, trimmed, given, domain=domain, outputs=values, name=path))
        return tuple(value for value in values if value.name)

    def constant(self, content: Any, dtype: ir.DataType | None = None) -> Value:
        """A small constant, by default int64 or the graph's dtype; equal constants are shared."""
        array = np.asarray(content)
        if dtype is None:
            dtype = ir.DataType.INT64 if array.dtype.kind == "i" else self.real(self.dtype)
        array = array.astype(dtype.numpy())
        key = (dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            value = ir.val(name, const_value=ir.tensor(array, dtype=dtype, name=name))
            self.main.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def float32(self, content: Any) -> Value:
        """A float32 constant, whatever the graph computes in."""
        return self.constant(np.asarray(content, dtype=np.float32), ir.DataType.FLOAT)

    def initialiser(self, tensor: Any) -> Value:
        """A stored tensor (anything with onnx-ir's tensor interface) under its own name."""
        if tensor.name not in self.main.initializers:
            self.main.register_initializer(ir.val(tensor.name, const_value=tensor))
        return self.main.initializers[tensor.name]

    def cast(self, value: Value, dtype: ir.DataType | None = None) -> Value:
        """Casts to ``dtype``, the graph's own by default."""
        return self.op("Cast", value, to=int(self.real(dtype or self.dtype)))

    def real(self, dtype: ir.DataType) -> ir.DataType:
        """The dtype that a value has where the graph says ``dtype``."""
        return ir.DataType.FLOAT if self.widened and dtype == ir.DataType.BFLOAT16 else dtype

    def wide(self, value: Value) -> Value:
        """A value of the graph's dtype in float32."""
        return value if self.dtype == ir.DataType.FLOAT else self.cast(value, ir.DataType.FLOAT)

    def narrow(self, value: Value) -> Value:
        """A float32 value in the graph's dtype; constants are kept in float32, which validation may need."""
        return value if self.dtype == ir.DataType.FLOAT else self.cast(value)

    def scalar(self, value: Value) -> Value:
        """[1] as []."""
        return self.op("Squeeze", value, self.constant([0]))

    def range(self, count: Value) -> Value:
        """int64 [count]: 0 to ``count`` - 1, of int64 [1]."""
        return self.op("Range", self.constant(0), self.scalar(count), self.constant(1))

    def reshape(self, value: Value, *shape: int) -> Value:
        """Reshapes to known sizes, one of which may be -1."""
        return self.op("Reshape", value, self.constant(shape))

    def loop(self, trips: Value, step: Callable[[Value], Value]) -> Value:
        """Runs ``step`` for 0 to ``trips`` - 1 (int64 scalars) and stacks what it returns along a new axis.

        That is the first axis. ``step`` may use any value made before, and its result has a fixed shape.
        """
        number = ir.val(self._unique("iteration"), ir.DataType.INT64, [])
        going = ir.val(self._unique("going"), ir.DataType.BOOL, [])

        def once() -> list[Value]:
            # The condition, as a constant: a GPU's provider would bring any other to the host at every trip.
            return [self.op("Constant", value=ir.tensor(True)), step(number)]

        body = self._body([number, going], once)
        return self.op("Loop", trips, self.constant(True, ir.DataType.BOOL), body=body)

    def choose(self, condition: Value, then: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """Runs one of two branches, which make values of the same dtype and number of dimensions."""
        branches: dict[str, Any] = {
            "then_branch": self._body([], lambda: [then()]),
            "else_branch": self._body([], lambda: [otherwise()]),
        }
        return self.op("If", condition, **branches)

    def _body(self, inputs: Sequence[Value], make: Callable[[], Sequence[Value]]) -> ir.Graph:
        """A graph inside the graph: ``make`` adds its nodes and returns its outputs."""
        body = ir.Graph(inputs, [], nodes=[], name=self._unique("body"))
        outer, self._open = self._open, body
        try:
            body.outputs.extend(make())
        finally:
            self._open = outer
        return body

    def model(self, metadata: Mapping[str, str] | None = None) -> ir.Model:
        """The finished graph, with ``metadata`` as its properties."""
        used = {node.domain for node in ir.traversal.RecursiveGraphIterator(self.main)}
        if ORT not in used:
            self.main.opset_imports.pop(ORT, None)
        return ir.Model(
            self.main,
            ir_version=10,
            producer_name="ntk-convert",
            producer_version=__version__,
            metadata_props=dict(metadata or {}),
        )

    def save(
        self,
        path: Path,
        metadata: Mapping[str, str],
        *,
        copy_weights: bool = False,
        one_file: bool = False,
        progress: bool = False,
    ) -> None:
        """Writes the graph, which points to the weights where they are.

        With ``copy_weights`` they are copied into a file beside it, ``_data`` at the end of its name; with
        ``one_file`` into the graph's own file, through memory, at most 2 GB.
        """
        model = self.model(metadata)
        if one_file:
            ir.external_data.load_to_model(model)
        if one_file or not copy_weights:
            ir.save(model, path, format="protobuf")
            return
        tensors = (value.const_value for value in self.main.initializers.values())
        total = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        with byte_bar("writing weights", total, show=progress) as advance:

            def written(tensor: ir.TensorProtocol, _: object) -> None:
                advance(tensor.nbytes)

            ir.save(
                model,
                path,
                format="protobuf",
                external_data=f"{path.name}_data",
                size_threshold_bytes=INLINE,
                callback=written,
            )

    def _unique(self, name: str) -> str:
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return name if count == 0 else f"{name}_{count}"
