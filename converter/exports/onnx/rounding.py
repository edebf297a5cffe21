"""Weights rounded to 4 or 8 bits: the numbers of a block, or those of an output, share a scale.

onnxruntime's quantiser rounds blocks to the nearest. Numbers that were calibrated before are read instead.
Weights are read and rounded piece by piece: memory holds the scales of one weight, and no weight as a whole.
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
BAND = 1 << 22
"""Numbers of a weight that are in memory at once when it is stored [inputs, outputs]: then each of its rows
has numbers of every output."""
LARGEST_WEIGHT = 64
"""Of the numbers in products of integers. On x86 processors without VNNI, onnxruntime adds two products in 16
bits and would cut off larger sums; 2 * 255 * 64 is below 2**15."""
TILE = 16
"""A weight of such products is stored with a multiple of this many outputs. On processors with AMX,
onnxruntime 1.22 computes wrong sums for the outputs of a tile that is not full; 1.31 does not."""


@dataclass(frozen=True)
class Stored:
    """A weight [outputs, inputs] of any float dtype, before it is quantised."""

    tensor: ir.TensorProtocol
    by_column: bool
    """Whether it is stored [inputs, outputs]."""
    bits: Bits = 8
    calibrated: Path | None = None
    """A safetensors file with its numbers, scales and zero points; None to round it to the nearest."""

    @property
    def name(self) -> str:
        return self.tensor.name or ""

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

    def read(self) -> NDArray[Any]:
        """The weight [outputs, inputs], which lies in its file until it is used."""
        return self.tensor.numpy().T if self.by_column else self.tensor.numpy()

    def close(self) -> None:
        """Closes the file that the weight was read from."""
        if isinstance(self.tensor, ir.ExternalTensor):
            self.tensor.release()


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


def quantised(stored: Stored, steps: Steps) -> Iterator[NDArray[np.uint8]]:
    """Quantises a weight in blocks and fills ``steps``.

    Yields:
        The numbers of some outputs, from first to last, as MatMulNBits stores them, [outputs, bytes].
    """
    if stored.calibrated is not None:
        with safe_open(stored.calibrated, framework="numpy") as file:
            steps.scales[:] = file.get_tensor(f"{stored.name}_scales")
            steps.zeros[:] = file.get_tensor(f"{stored.name}_zero_points")
            yield file.get_tensor(f"{stored.name}_Q4")
        return
    with _quiet_root_logger():
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            DefaultWeightOnlyQuantizer,
        )
    kernel = DefaultWeightOnlyQuantizer(DefaultWeightOnlyQuantConfig(block_size=BLOCK, bits=stored.bits))
    weight = stored.read()
    height = max(1, PIECE // (BLOCK * stored.blocks))
    for start in range(0, stored.outputs, height):
        piece = weight[start : start + height].astype(np.float32)
        found = kernel.qbits_block_quant(np.ascontiguousarray(piece.T))
        # Old releases of onnxruntime return some of them flat.
        packed, scales, zeros = (part.reshape(len(piece), -1) for part in found)
        steps.scales[start : start + height], steps.zeros[start : start + height] = scales, zeros
        yield packed


def rounded(weight: NDArray[np.float32], bits: Bits) -> NDArray[np.float32]:
    """A weight [outputs, inputs] rounded to the nearest values that numbers of so many bits stand for."""
    stored = Stored(ir.tensor(weight), by_column=False, bits=bits)
    steps = Steps.empty(stored)
    packed = np.concatenate(list(quantised(stored, steps)))
    return dequantised(unpack(packed, bits)[:, : stored.inputs], steps.scales, unpack(steps.zeros, bits))


def dequantised(
    numbers: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[Any]
) -> NDArray[np.float32]:
    """The values of numbers [outputs, inputs] with scales and zero points [outputs, blocks]."""
    blocks = np.arange(numbers.shape[1]) // BLOCK
    offsets = numbers.astype(np.float32) - zeros.astype(np.float32)[:, blocks]
    values: NDArray[np.float32] = offsets * scales[:, blocks]
    return values


def unpack(packed: NDArray[np.uint8], bits: Bits) -> NDArray[np.uint8]:
    """The numbers in each row of bytes; of two numbers in a byte, the first is in the low half."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def output_scales(stored: Stored) -> NDArray[np.float32]:
    """The scale of each output of a weight for products of integers, float32 [outputs]."""
    weight = stored.read()
    height = max(1, PIECE // stored.inputs)
    pieces = (weight[start : start + height] for start in range(0, stored.outputs, height))
    largest = np.concatenate([np.abs(piece.astype(np.float32)).max(axis=1) for piece in pieces])
    scales: NDArray[np.float32] = np.where(largest > 0, largest, 1) / np.float32(LARGEST_WEIGHT)
    return scales


def integers(stored: Stored, scales: NDArray[np.float32]) -> Iterator[NDArray[np.int8]]:
    """The numbers of a weight for products of integers, int8 [some inputs, outputs and padding] at a time."""
    weight = stored.read().T
    height = max(1, BAND // stored.outputs)
    for start in range(0, stored.inputs, height):
        numbers = np.rint(weight[start : start + height].astype(np.float32) / scales).astype(np.int8)
        yield np.pad(numbers, ((0, 0), (0, -stored.outputs % TILE)))


def rounded_by_output(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """A weight [outputs, inputs] rounded to the nearest values that ``integers`` stand for."""
    scales = output_scales(Stored(ir.tensor(weight), by_column=False))[:, None]
    values: NDArray[np.float32] = np.rint(weight / scales) * scales
    return values


@contextlib.contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """Keeps the quantiser's module from setting up logging for the whole program when it is imported."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
