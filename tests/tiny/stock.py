"""Tiny checkpoints of the families that transformers has classes for, written by those classes.

Names, shapes and configs are therefore real; only the weights are new. The same arguments give the
same weights on every version of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import layout
from tests.tiny.layout import (
    SPECIAL_IDS,
    VOCAB_SIZE,
    Factory,
    MakeTensors,
    Random,
    Tensors,
    Wanted,
    count_bytes,
    without_aliases,
    write_weights,
)

PREFIX = "transformer."


Added = Callable[[Any, Tensors, Random], Tensors]
"""Config, the class's state and random values -> the tensors that the class lacks or shapes otherwise."""


def factory(camel: str, sizes: Callable[[int], Mapping[str, Any]], added: Added = lambda *_: {}) -> Factory:
    """What writes the checkpoints of transformers' own classes, ``<camel>Model`` and so on.

    Args:
        camel: the classes' prefix: ``"Bloom"``.
        sizes: number of heads -> the config's keys, beside the vocabulary and special tokens.
        added: what the original's checkpoints have beyond those classes.
    """

    def make(folder: Path, wanted: Wanted, changes: dict[str, Any]) -> None:
        random = Random(wanted.seed, PREFIX)
        settings = {"vocab_size": VOCAB_SIZE, **SPECIAL_IDS, **sizes(wanted.num_heads), **changes}
        config = getattr(transformers, f"{camel}Config")(**settings)
        model = model_class(camel, wanted.head or "CausalLM")(config)
        for name, parameter in sorted(model.named_parameters()):
            parameter.data.copy_(values(random, name, tuple(parameter.shape)))
        state: Tensors = model.to(wanted.dtype).state_dict()
        size = count_bytes(state)
        model.save_pretrained(folder, max_shard_size=size // 3 if wanted.sharded else 2 * size)
        beyond = added(config, state, random)
        if beyond or wanted.fmt == "bin" or not wanted.prefix:
            for file in folder.glob("*.safetensors*"):
                file.unlink()
            state = {**state, **beyond}
            if wanted.fmt == "safetensors" or not wanted.prefix:
                state = without_aliases(state)
            if not wanted.prefix:
                state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
            write_weights(folder, state, wanted.fmt, wanted.sharded)

    return layout.factory(make)


def maker(camel: str, names: Mapping[str, str] = {}) -> MakeTensors:
    """What makes the tensors of a config, by the names and shapes of transformers' own classes.

    Args:
        camel: the classes' prefix: ``"Bloom"``.
        names: old key of a config -> the key that the class reads.
    """

    def tensors(config: dict[str, Any], head: str, random: Random) -> Tensors:
        settings = {names.get(key, key): value for key, value in config.items()}
        settings.pop("auto_map", None)
        with torch.device("meta"):
            model = model_class(camel, head)(getattr(transformers, f"{camel}Config")(**settings))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return {name: values(random, name, shape) for name, shape in shapes.items()}

    return tensors


def model_class(camel: str, head: str) -> Any:
    """transformers' class of that head, or of the trunk for ``"Model"``."""
    return getattr(transformers, f"{camel}Model" if head == "Model" else f"{camel}For{head}")


def values(random: Random, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor [shape], the embeddings smaller than what a linear map has."""
    embeddings = name.endswith(("word_embeddings.weight", "wte.weight"))
    return random(name, *shape, scale=0.3 if embeddings else None)
