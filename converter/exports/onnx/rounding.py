"""Weights rounded to 4 or 8 bits: the numbers of a block share a scale and a zero point.

onnxruntime's quantiser rounds them to the nearest. Numbers that were calibrated before are read instead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from safetensors import safe_open

Bits = Literal[4, 8]

BLOCK = 32
"""Numbers along a weight's inputs that share a scale and a zero point."""
PIECE = 1 << 18
"""Numbers of a weight that are quantised at once. They are transposed first, which is quick if they fit into
the processor's cache."""


@dataclass(frozen=True)
class Calibrated:
    """A weight whose numbers of 4 bits are known already."""

    file: Path
    """A safetensors file with its numbers, scales and zero points, as MatMulNBits stores them."""
    name: str

    def save_in(self, tensors: dict[str, NDArray[Any]], *parts: NDArray[Any]) -> None:
        """Adds its numbers, scales and zero points to what will be saved."""
        tensors |= {f"{self.name}.{index}": np.ascontiguousarray(part) for index, part in enumerate(parts)}

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
        """Its numbers [outputs, bytes], scales [outputs, blocks] and zero points [outputs, bytes]."""
        with safe_open(self.file, framework="numpy") as file:
            numbers, scales, zeros = (file.get_tensor(f"{self.name}.{index}") for index in range(3))
        return numbers, scales, zeros


@dataclass(frozen=True)
class Stored:
    """A weight [outputs, inputs] of any float dtype, before it is quantised."""

    tensor: ir.TensorProtocol
    by_column: bool
    """Whether it is stored [inputs, outputs]."""
    bits: Bits
    calibrated: Calibrated | None = None
    """Where its numbers come from; None to round it to the nearest."""

    @property
    def outputs(self) -> int:
        return int(self.tensor.shape.numpy()[1 if self.by_column else 0])

    @property
    def inputs(self) -> int:
        return int(self.tensor.shape.numpy()[0 if self.by_column else 1])

    @property
    def blocks(self) -> int:
        """How many blocks the inputs fill; the last one may be padded."""
        return -(-self.inputs // BLOCK)


@dataclass(frozen=True)
class Steps:
    """The scale and the zero point of each block of a weight, as MatMulNBits stores them."""

    scales: NDArray[np.float32]
    """[outputs, blocks]."""
    zeros: NDArray[np.uint8]
    """[outputs, bytes of the zero points of all blocks]."""

    @classmethod
    def empty(cls, stored: Stored) -> Steps:
        """Without values."""
        width = -(-stored.blocks * stored.bits // 8)
        return cls(
            np.empty((stored.outputs, stored.blocks), np.float32), np.empty((stored.outputs, width), np.uint8)
        )


def rounded(weight: NDArray[np.float32], bits: Bits) -> NDArray[np.float32]:
    """A weight [outputs, inputs] rounded to the nearest values that numbers of so many bits stand for."""
    stored = Stored(ir.tensor(weight), by_column=False, bits=bits)
    steps, result = Steps.empty(stored), np.empty(weight.shape, np.float32)
    for outputs, packed in quantised(stored, steps, range(stored.blocks)):
        numbers, zeros = unpack(packed, bits), unpack(steps.zeros[outputs], bits)
        result[outputs] = dequantised(numbers[:, : stored.inputs], steps.scales[outputs], zeros)
    return result


def dequantised(
    numbers: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[Any]
) -> NDArray[np.float32]:
    """The values of numbers [outputs, inputs] with scales and zero points [outputs, blocks]."""
    blocks = np.arange(numbers.shape[1]) // BLOCK
    offsets = numbers.astype(np.float32) - zeros.astype(np.float32)[:, blocks]
    values: NDArray[np.float32] = offsets * scales[:, blocks]
    return values


def quantised(stored: Stored, steps: Steps, blocks: range) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
    """Reads some blocks of every output of a weight and quantises them.

    Args:
        stored: the weight.
        steps: gets the scales and zero points.
        blocks: which; the zero points of those before must fill whole bytes.

    Yields:
        Some outputs, from first to last, and their numbers as MatMulNBits stores them, [outputs, bytes].
    """
    if stored.calibrated is not None:
        numbers, scales, zeros = stored.calibrated.read()
        steps.scales[:], steps.zeros[:] = scales, zeros
        width = BLOCK * stored.bits // 8
        yield slice(0, stored.outputs), numbers[:, width * blocks.start : width * blocks.stop]
        return
    with _quiet_root_logger():
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            DefaultWeightOnlyQuantizer,
        )
    kernel = DefaultWeightOnlyQuantizer(DefaultWeightOnlyQuantConfig(block_size=BLOCK, bits=stored.bits))
    bits, count = stored.bits, len(blocks)
    weight = stored.tensor.numpy().T if stored.by_column else stored.tensor.numpy()
    inputs = slice(BLOCK * blocks.start, BLOCK * blocks.stop)
    places = slice(blocks.start * bits // 8, -(-blocks.stop * bits // 8))
    height = max(1, PIECE // (BLOCK * count))
    for start in range(0, stored.outputs, height):
        outputs = slice(start, min(start + height, stored.outputs))
        piece = weight[outputs, inputs].astype(np.float32)
        found = kernel.qbits_block_quant(np.ascontiguousarray(piece.T))
        # Old releases of onnxruntime return some of them flat.
        packed, scale, zero = (part.reshape(len(piece), -1) for part in found)
        steps.scales[outputs, blocks.start : blocks.stop] = scale
        steps.zeros[outputs, places] = zero
        yield outputs, packed


def unpack(packed: NDArray[np.uint8], bits: Bits) -> NDArray[np.uint8]:
    """The numbers in each row of bytes; of two numbers in a byte, the first is in the low half."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def pack(numbers: NDArray[np.uint8], bits: Bits) -> NDArray[np.uint8]:
    """The bytes of numbers as ONNX stores them: across the ends of rows, if they have 4 bits."""
    if bits == 8:
        return np.ascontiguousarray(numbers)
    flat = np.append(numbers, np.zeros(numbers.size % 2, np.uint8))
    halves: NDArray[np.uint8] = flat[::2] | flat[1::2] << np.uint8(4)
    return halves


@contextlib.contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """Keeps the quantiser's module from setting up logging for the whole program when it is imported."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
