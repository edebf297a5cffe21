"""The part of a checkpoint that checks run with real weights: the first layers, and some tokens.

Tensors with a row for each token of the vocabulary are read only for the test's tokens. The matrices of large
layers stay in their files and are read block by block whenever they are used, so memory does not grow with
the model. Everything is computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from converter.verification.patched import Patched

LAYERS, ROWS, TOKENS = 2, 2, 24
# Limits on memory, in elements. If two layers have more than LARGEST_PAIR, only one is run. If the layers
# that are run have more than LARGEST_LAYER, their matrices are streamed in blocks of at most BLOCK.
LARGEST_PAIR, LARGEST_LAYER, BLOCK = 32_000_000, 64_000_000, 8_000_000
TOLERANCE = 1e-4
"""Largest difference, relative to the largest value, that rounding can explain."""


class Streamed(nn.Module):
    """A linear layer whose weight stays in its file."""

    def __init__(self, patched: Patched, name: str, bias: nn.Parameter | None):
        """A layer that reads its weight [out, in] in blocks; its bias, if it has one, is [out]."""
        super().__init__()
        self.patched, self.name, self.bias = patched, name, bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps [..., in] to [..., out]."""
        rows, columns = self.patched.checkpoint.tensors[self.name].shape
        step = max(1, BLOCK // columns)
        # One buffer for all blocks: allocating one for each would fragment the heap.
        buffer = torch.empty(min(step, rows), columns, dtype=states.dtype)
        result = states.new_zeros(*states.shape[:-1], rows)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            block = buffer[: end - start]
            # Reopened for each block, so the pages of earlier blocks are released.
            with self.patched.open(self.name) as file:
                block.copy_(file.get_slice(self.name)[start:end])
            result[..., start:end] = states @ block.T
        return result if self.bias is None else result + self.bias


@dataclass(frozen=True)
class Slice:
    """Which layers and tokens of a converted repository are run."""

    patched: Patched
    layers: int
    """How many layers are run, from the first."""
    total: int
    """How many layers the model has."""
    tokens: tuple[int, ...]
    """Ids in the full vocabulary, ascending; the sliced model calls them 0, 1, 2, ..."""
    streamed: bool
    """Whether the layers' matrices stay in their files."""
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors read so far, cached for the next model."""

    @classmethod
    def of(cls, patched: Patched) -> Slice:
        """Chooses the slice of a repository whose tensors are known to fit its model."""
        family = patched.family
        sizes: dict[int, int] = {}
        for name, tensor in patched.checkpoint.tensors.items():
            bare = family.below(name)
            if bare.startswith(f"{family.layers}."):
                layer = int(bare[len(family.layers) + 1 :].split(".")[0])
                sizes[layer] = sizes.get(layer, 0) + math.prod(tensor.shape)
        pair = sum(size for layer, size in sizes.items() if layer < LAYERS)
        layers = min(LAYERS, len(sizes)) if pair <= LARGEST_PAIR else 1
        vocabulary = patched.build_config().vocab_size
        tokens = tuple(range(0, vocabulary, max(1, vocabulary // (ROWS * TOKENS))))[: ROWS * TOKENS]
        streamed = sum(size for layer, size in sizes.items() if layer < layers) > LARGEST_LAYER
        return cls(patched, layers, len(sizes), tokens, streamed)

    @property
    def which(self) -> str:
        """The layers, as messages call them."""
        if self.total == 1:
            return "the only layer"
        first = "the first layer" if self.layers == 1 else f"the first {self.layers} layers"
        return f"{first} of {self.total}"

    @property
    def ids(self) -> torch.Tensor:
        """The test's tokens in the sliced vocabulary, int64 [ROWS, TOKENS]."""
        return torch.arange(ROWS * TOKENS).remainder(len(self.tokens)).view(ROWS, TOKENS)

    def shrink(self, config: Any) -> None:
        """Changes a config, the patched model's or another's, to that of a sliced model."""
        config.num_hidden_layers = self.layers
        config.vocab_size = len(self.tokens)
        config.pad_token_id = None  # it is an id of the full vocabulary

    def tensor(self, key: str, shape: torch.Size) -> torch.Tensor:
        """A stored tensor of this shape, or else its rows for the test's tokens, in float32."""
        if key not in self.read:
            whole = tuple(self.patched.checkpoint.tensors[key].shape) == shape
            found = self.patched.tensor(key) if whole else self.patched.rows(key, list(self.tokens))
            self.read[key] = found.float() if found.is_floating_point() else found
        return self.read[key]

    def fill(self, model: Any) -> None:
        """Loads the stored tensors into a sliced backbone; those that are not stored stay as they are."""
        if self.streamed:
            self.stream(model)
        state = {}
        for name, wanted in model.state_dict().items():
            key = self.patched.stored_name(name)
            if key is not None:
                state[name] = self.tensor(key, wanted.shape)
        model.load_state_dict(state, strict=False, assign=True)

    def stream(self, model: Any) -> None:
        """Replaces the matrices in the layers of a model by streamed ones."""
        for name, module in list(model.named_modules()):
            key = self.patched.stored_name(f"{name}.weight")
            if key is not None and isinstance(module, nn.Linear):
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, Streamed(self.patched, key, module.bias))
