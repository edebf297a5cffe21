"""What a machine could do at best: the times that no implementation of a model in float32 can beat.

A prompt of a BLOOM needs operations: those of the products with weights, and those of causal attention, at
the speed of the fastest matrix product measured here. A decoded token needs bytes: every weight and every
cached key and value is read once, at the bandwidth measured here. All else (norms, softmax, copies) counts as
free, so a share of 100 % is out of reach. An encoder needs operations like a prompt, for its real tokens, but
its attention is not causal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

SIZE = 2048
"""Rows and columns of the products: large enough for full speed."""
BYTES = 1 << 29
"""Read to measure the bandwidth: more than processors cache."""
RUNS = 5
"""Of which the fastest counts."""
FLOAT = 4
"""Bytes of a float32."""


class Machine(NamedTuple):
    """What was measured."""

    operations: float
    """Per second; a multiplication and an addition are two."""
    bandwidth: float
    """Bytes per second, reading."""

    def or_better(self, other: Machine) -> Machine:
        """The better of two measurements, one by one."""
        return Machine(*map(max, self, other))


class Bloom(NamedTuple):
    """The sizes of a model in BLOOM's layout, whose head is its embedding table."""

    hidden: int
    layers: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Numbers in all layers' matrices: 3 + 1 in attention, 4 + 4 after it, times hidden x hidden."""
        return 12 * self.layers * self.hidden**2

    def prefill_seconds(self, machine: Machine, tokens: int, logits: int) -> float:
        """The shortest time of a prompt.

        Args:
            machine: as measured.
            tokens: of the prompt.
            logits: number of tokens whose logits are computed.
        """
        return self.product_seconds(machine, tokens, logits) + self.attention_seconds(machine, tokens)

    def product_seconds(self, machine: Machine, tokens: int, logits: int) -> float:
        """The part of a prompt's products with weights."""
        products = 2 * (self.layer_weights * tokens + self.hidden * self.vocabulary * logits)
        return products / machine.operations

    def attention_seconds(self, machine: Machine, tokens: int) -> float:
        """The part of a prompt's causal attention."""
        # A token's query meets the keys, and its probabilities the values, up to the token itself.
        pairs = tokens * (tokens + 1) // 2
        return 2 * 2 * self.layers * self.hidden * pairs / machine.operations

    def decode_seconds(self, machine: Machine, tokens: float) -> float:
        """The shortest time of one token over a cache that holds ``tokens`` with it."""
        return self.weight_seconds(machine) + self.cache_seconds(machine, tokens)

    def weight_seconds(self, machine: Machine) -> float:
        """The part of one token's weights."""
        return FLOAT * (self.layer_weights + self.hidden * self.vocabulary) / machine.bandwidth

    def cache_seconds(self, machine: Machine, tokens: float) -> float:
        """The part of the keys and values that one token reads."""
        return FLOAT * 2 * self.layers * self.hidden * tokens / machine.bandwidth


class Encoder(NamedTuple):
    """The sizes of a model in BERT's layout."""

    hidden: int
    layers: int
    inner: int
    gated: bool
    """Whether the feed-forward layer has three matrices, as JinaBERT's, instead of BERT's two."""

    def seconds(self, machine: Machine, lengths: Sequence[int]) -> float:
        """The shortest time for the hidden states of texts that have ``lengths`` tokens, without padding."""
        weights = 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.inner
        products = 2 * self.layers * weights * sum(lengths)
        return products / machine.operations + self.layers * self.attention_seconds(machine, lengths)

    def attention_seconds(self, machine: Machine, lengths: Sequence[int]) -> float:
        """The part of one layer's attention: every token's query meets the keys and values of all tokens."""
        return 2 * 2 * self.hidden * sum(length**2 for length in lengths) / machine.operations


def measure(threads: int) -> Machine:
    """Measures this machine; call it in a fresh process with ``OMP_NUM_THREADS`` set to ``threads``."""
    torch.set_num_threads(threads)
    square = torch.rand(SIZE, SIZE)
    product = min(fastest(lambda: square @ square), fastest(lambda: square.numpy() @ square.numpy()))
    long = torch.ones(BYTES // FLOAT // SIZE, SIZE)
    vector, sums = torch.ones(SIZE), np.ones(SIZE, np.float32)
    reading = min(fastest(lambda: long @ vector), fastest(lambda: long.numpy() @ sums), fastest(long.sum))
    return Machine(2 * SIZE**3 / product, BYTES / reading)


def fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls, after one that is not timed."""
    call()
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
