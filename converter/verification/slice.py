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
from transformers.pytorch_utils import Conv1D

from converter.verification.patched import Patched

LAYERS, ROWS, TOKENS = 2, 2, 24
# Limits on memory, in elements. If two layers have more than LARGEST_PAIR, only one is run. If the layers
# that are run have more than LARGEST_LAYER, their matrices are streamed in blocks of at most BLOCK.
LARGEST_PAIR, LARGEST_LAYER, BLOCK = 32_000_000, 64_000_000, 8_000_000
TOLERANCE = 1e-4
"""Largest difference, relative to the largest value, that rounding can explain."""


class Streamed(nn.Module):
    """A linear layer whose weight stays in its file."""

    def __init__(self, patched: Patched, name: str, bias: nn.Parameter | None, *, transposed: bool):
        """A layer that reads its weight in blocks.

        Args:
            name: the stored weight, [out, in]; [in, out] if ``transposed``.
            bias: [out], if it has one.
        """
        super().__init__()
        self.patched, self.name, self.bias, self.transposed = patched, name, bias, transposed

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps [..., in] to [..., out]."""
        rows, columns = self.patched.checkpoint.tensors[self.name].shape
        step = max(1, BLOCK // columns)
        # One buffer for all blocks: allocating one for each would fragment the heap.
        buffer = torch.empty(min(step, rows), columns, dtype=states.dtype)
        result = states.new_zeros(*states.shape[:-1], columns if self.transposed else rows)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            block = buffer[: end - start]
            # Reopened for each block, so the pages of earlier blocks are released.
            with self.patched.open(self.name) as file:
                block.copy_(file.get_slice(self.name)[start:end])
            if self.transposed:
                result += states[..., start:end] @ block
            else:
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

    def stored(self, name: str) -> str | None:
        """The stored name of a model's tensor, with or without the backbone's prefix; None if not stored."""
        spellings = (name, *self.patched.family.tensor_names(self.patched.family.below(name)))
        return next((key for key in spellings if key in self.patched.checkpoint.tensors), None)

    def tensor(self, key: str, shape: torch.Size) -> torch.Tensor | None:
        """A stored tensor, or its rows for the test's tokens, in float32; None if neither has ``shape``."""
        if key not in self.read:
            whole = tuple(self.patched.checkpoint.tensors[key].shape)
            if whole == shape:
                found = self.patched.tensor(key)
            elif whole[1:] == shape[1:] and shape[:1] == (len(self.tokens),):
                found = self.patched.rows(key, list(self.tokens))
            else:
                return None
            self.read[key] = found.float() if found.is_floating_point() else found
        found = self.read[key]
        return found if found.shape == shape else None

    def fill(self, model: Any) -> list[str]:
        """Loads the stored tensors into a sliced model.

        Returns:
            The names of the parameters that are neither stored nor tied to the embeddings.
        """
        if self.streamed:
            self.stream(model)
        state = {}
        for name, wanted in model.state_dict().items():
            key = self.stored(name)
            found = None if key is None else self.tensor(key, wanted.shape)
            if found is not None:
                state[name] = found
        parameters = dict(model.named_parameters(remove_duplicate=False))
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        names = {id(parameters[name]): name for name in parameters if name in state}
        model.load_state_dict(state, strict=False, assign=True)
        missing = []
        for name, parameter in parameters.items():
            if name in state:
                continue
            module, _, leaf = name.rpartition(".")
            if id(parameter) in names:  # one tensor under two names
                setattr(model.get_submodule(module), leaf, model.get_parameter(names[id(parameter)]))
            elif head is not None and parameter is head.weight:
                head.weight = model.get_input_embeddings().weight
            else:
                missing.append(name)
        return missing

    def stream(self, model: Any) -> None:
        """Replaces the matrices in the layers of a model by streamed ones."""
        for name, module in list(model.named_modules()):
            key = self.stored(f"{name}.weight")
            inside = self.patched.family.below(f"{name}.").startswith(f"{self.patched.family.layers}.")
            if key is None or not inside or not isinstance(module, (nn.Linear, Conv1D)):
                continue
            if tuple(module.weight.shape) == tuple(self.patched.checkpoint.tensors[key].shape):
                transposed = isinstance(module, Conv1D)
                streamed = Streamed(self.patched, key, module.bias, transposed=transposed)
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, streamed)
