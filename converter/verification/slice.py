"""The part of a checkpoint that is run with its real weights: the first layers, and some tokens.

Of what has a row for each token of the vocabulary, only the rows of the test's tokens are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from converter.families.base import Family
from converter.verification.patched import Patched

LAYERS, ROWS, TOKENS = 2, 2, 24
# What bounds the memory: two layers of more elements than this become one, and a layer of more than
# that keeps its stored dtype, mapped from the file, and gets the tolerance of half precision, in which
# the model that it is compared with errs itself.
LARGEST_PAIR, LARGEST_FLOAT32 = 32_000_000, 400_000_000
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1


@dataclass(frozen=True)
class Slice:
    """Which layers and tokens of a converted repository are run."""

    patched: Patched
    family: Family
    layers: int
    """How many of the first."""
    total: int
    """How many there are."""
    tokens: tuple[int, ...]
    """In the full vocabulary, ascending; to a sliced model they are 0, 1, 2, ..."""
    dtype: torch.dtype
    """What it is computed in."""

    @classmethod
    def of(cls, patched: Patched, family: Family) -> Slice:
        """The slice of a repository whose tensors are known to fit its model."""
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
        dtype = torch.float32
        if sum(size for layer, size in sizes.items() if layer < layers) > LARGEST_FLOAT32:
            names = family.tensor_names(family.embeddings)
            dtype = patched.rows(
                next(name for name in names if name in patched.checkpoint.tensors), [0]
            ).dtype
        return cls(patched, family, layers, len(sizes), tokens, dtype)

    @property
    def tolerance(self) -> float:
        """The largest difference that is rounding, relative to the largest value."""
        return TOLERANCE if self.dtype == torch.float32 else HALF_TOLERANCE

    @property
    def which(self) -> str:
        """The layers, for people."""
        return f"the first {self.layers} of {self.total} layers" if self.total > 1 else "the only layer"

    @property
    def precision(self) -> str:
        """The dtype, for people."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def ids(self) -> torch.Tensor:
        """The test's tokens in the sliced vocabulary, int64 [ROWS, TOKENS]."""
        return torch.arange(ROWS * TOKENS).remainder(len(self.tokens)).view(ROWS, TOKENS)

    def shrink(self, config: Any) -> None:
        """Makes a config, the patched model's or another's, that of a sliced model."""
        config.num_hidden_layers = self.layers
        config.vocab_size = len(self.tokens)
        config.pad_token_id = None  # counts in the full vocabulary

    def state(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of a sliced model's tensors those that are stored, with or without the trunk's prefix."""
        stored, found = self.patched.checkpoint.tensors, {}
        for name, wanted in expected.items():
            spellings = (name, *self.family.tensor_names(self.family.below(name)))
            key = next((spelling for spelling in spellings if spelling in stored), None)
            if key is None:
                continue
            shape, sliced = tuple(stored[key].shape), tuple(wanted.shape)
            if shape == sliced:
                tensor = self.patched.tensor(key)
            elif shape[1:] == sliced[1:] and sliced[:1] == (len(self.tokens),):
                tensor = self.patched.rows(key, list(self.tokens))
            else:
                continue
            found[name] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        return found

    def fill(self, model: Any) -> list[str]:
        """Gives a sliced model the stored tensors.

        Returns:
            The names of its parameters that are not stored, nor tied to the embeddings.
        """
        state = self.state(model.state_dict())
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
