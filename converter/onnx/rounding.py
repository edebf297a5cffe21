"""Weights rounded to 4 or 8 bits: the numbers of a block, or those of an output, share a scale.

Blocks are rounded to the nearest, as onnxruntime's quantiser does. Numbers that were calibrated before are
read instead. Weights are read and rounded piece by piece: memory holds the scales of one weight, and no
weight as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike, NDArray
from safetensors import safe_open

Bits = Literal[4, 8]

BLOCK = 32
"""Numbers along a weight's inputs that share a scale and a zero point."""
PIECE = 1 << 18
"""Numbers of a weight that are quantised at once, which is quick if they fit into the processor's cache."""
BAND = 1 << 22
"""Numbers of a weight that are in memory at once when it is stored [inputs, outputs]: then each of its rows
has numbers of every output."""
LARGEST_WEIGHT = 64
"""Of the numbers in products of integers. On x86 processors without VNNI, onnxruntime adds two products in 16
bits and would cut off larger sums; 2 * 255 * 64 is below 2**15."""
TILE = 16
"""A weight of such products is stored with a multiple of this many outputs. On processors with AMX,
onnxruntime 1.22 computes wrong sums for the outputs of a tile that is not full; 1.31 does not."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A weight [outputs, inputs] of any float dtype, before it is quantised."""

    tensor: ir.TensorProtocol
    by_column: bool
    """Whether it is stored [inputs, outputs]."""
    bits: Bits = 8
    calibrated: Path | None = None
    """A safetensors file with its numbers, scales and zero points; None to round it to the nearest."""
    scales: DTypeLike = np.float32
    """The dtype that its scales are stored in."""

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


class QuantisationParameters(NamedTuple):
    """The scale and the zero point of each block of a weight, float32 and uint8 [outputs, blocks]."""

    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]


def block_parameters(
    blocks: NDArray[np.float32], bits: Bits, dtype: DTypeLike = np.float32
) -> QuantisationParameters:
    """The parameters of blocks [..., numbers]: the range of each, and 0, becomes that of the bits.

    The scales are numbers of ``dtype``, so the weights are rounded with what is stored.
    """
    lowest, highest = blocks.min(-1).clip(max=0), blocks.max(-1).clip(min=0)
    most = np.float32(2**bits - 1)
    scales = ((highest - lowest) / most).astype(dtype).astype(np.float32)
    scales[scales == 0] = 1
    zeros = nearest(-lowest / scales).clip(max=most).astype(np.uint8)
    return QuantisationParameters(scales, zeros)


def nearest(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounds as onnxruntime's quantiser does, which takes halves away from 0."""
    found: NDArray[np.float32] = np.trunc(values + np.copysign(np.float32(0.5), values))
    return found


def in_blocks(stored: Stored) -> Iterator[NDArray[np.float32]]:
    """A weight piece by piece, float32 [some outputs, blocks, BLOCK]; the last block is filled with zeros."""
    weight = stored.read()
    height = max(1, PIECE // (BLOCK * stored.blocks))
    for start in range(0, stored.outputs, height):
        piece = np.zeros((min(height, stored.outputs - start), BLOCK * stored.blocks), np.float32)
        piece[:, : stored.inputs] = weight[start : start + height]
        yield piece.reshape(len(piece), -1, BLOCK)


def quantisation_parameters(stored: Stored) -> QuantisationParameters:
    """Those of its calibration, or those with which its blocks are rounded to the nearest."""
    if stored.calibrated is not None:
        with safe_open(stored.calibrated, framework="numpy") as file:
            scales = file.get_tensor(f"{stored.name} scales")
            zeros = file.get_tensor(f"{stored.name} zeros")
            return QuantisationParameters(scales, zeros)
    all_scales, all_zeros = [], []
    for piece in in_blocks(stored):
        found = block_parameters(piece, stored.bits, stored.scales)
        all_scales.append(found.scales)
        all_zeros.append(found.zeros)
    return QuantisationParameters(np.concatenate(all_scales), np.concatenate(all_zeros))


def quantised(stored: Stored, parameters: QuantisationParameters) -> Iterator[NDArray[np.uint8]]:
    """The numbers of some outputs of a weight, from first to last, uint8 [some outputs, blocks * BLOCK]."""
    if stored.calibrated is not None:
        filled = np.repeat(parameters.zeros, BLOCK, axis=1)  # what fills the last block stands for 0
        with safe_open(stored.calibrated, framework="numpy") as file:
            filled[:, : stored.inputs] = file.get_tensor(f"{stored.name} numbers")
        yield filled
        return
    start = 0
    for piece in in_blocks(stored):
        stop = start + len(piece)
        scales = parameters.scales[start:stop, :, None].astype(np.float32)
        zeros = parameters.zeros[start:stop, :, None].astype(np.float32)
        numbers = nearest(piece * (np.float32(1) / scales) + zeros).clip(0, 2**stored.bits - 1)
        yield numbers.astype(np.uint8).reshape(len(piece), -1)
        start = stop


def rounded(weight: NDArray[np.float32], bits: Bits, scales: DTypeLike = np.float32) -> NDArray[np.float32]:
    """A weight [outputs, inputs] rounded to the nearest values that numbers of so many bits stand for."""
    stored = Stored(ir.tensor(weight), by_column=False, bits=bits, scales=scales)
    parameters = quantisation_parameters(stored)
    numbers = np.concatenate(list(quantised(stored, parameters)))
    return dequantised(numbers[:, : stored.inputs], parameters.scales, parameters.zeros)


def dequantised(
    numbers: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[Any]
) -> NDArray[np.float32]:
    """The values of numbers [outputs, inputs] with scales and zero points [outputs, blocks]."""
    blocks = np.arange(numbers.shape[1]) // BLOCK
    offsets = numbers.astype(np.float32) - zeros.astype(np.float32)[:, blocks]
    values: NDArray[np.float32] = offsets * scales[:, blocks]
    return values


def pack(numbers: NDArray[np.uint8], bits: Bits) -> NDArray[np.uint8]:
    """Numbers in rows of bytes; of two numbers of 4 bits, the first is in the low half."""
    if bits == 8:
        return numbers
    even = np.pad(numbers, ((0, 0), (0, numbers.shape[1] % 2)))
    packed: NDArray[np.uint8] = even[:, ::2] | even[:, 1::2] << np.uint8(4)
    return packed


def unpack(packed: NDArray[np.uint8], bits: Bits) -> NDArray[np.uint8]:
    """The numbers that ``pack`` stored."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def output_scales(stored: Stored) -> NDArray[np.float32]:
    """The scale of each output of a weight for products of integers, float32 [outputs]."""
    largest = np.concatenate([np.abs(piece).max(axis=(1, 2)) for piece in in_blocks(stored)])
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
