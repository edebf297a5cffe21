"""Tiny checkpoints of the families that transformers has classes for, written by those classes.

Names, shapes and configs are therefore real; only the weights are new. The same arguments give the
same weights on every version of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny.layout import (
    HEAD_DIM,
    SPECIAL_IDS,
    VOCAB_SIZE,
    Format,
    Head,
    Random,
    Tensors,
    count_bytes,
    tokenizer,
    without_aliases,
    write_weights,
)

PREFIX = "transformer."


def bloom(folder: Path, num_heads: int = 4, **options: Any) -> Path:
    """A BLOOM; options as ``Factory`` lists them."""
    sizes = {"n_head": num_heads, "hidden_size": HEAD_DIM * num_heads, "n_layer": 2}
    return _write_checkpoint("Bloom", folder, sizes, **options)


def mpt(folder: Path, num_heads: int = 4, **options: Any) -> Path:
    """An MPT; options as ``Factory`` lists them.

    Transformers' class knows no ``attn_config.qk_ln``, ``expansion_ratio`` other than 4 or
    ``no_bias: false``, though checkpoints have them: for these the tensors are added or resized.
    """
    sizes = {"n_heads": num_heads, "d_model": HEAD_DIM * num_heads, "n_layers": 2}
    return _write_checkpoint("Mpt", folder, sizes, **options)


def falcon(folder: Path, num_heads: int = 4, **options: Any) -> Path:
    """A Falcon, by default as Falcon-RW is (ALiBi, sequential, biases); options as in ``Factory``."""
    sizes = {
        "num_attention_heads": num_heads,
        "hidden_size": HEAD_DIM * num_heads,
        "num_hidden_layers": 2,
        "alibi": True,
        "parallel_attn": False,
        "multi_query": False,
        "bias": True,
    }
    return _write_checkpoint("Falcon", folder, sizes, **options)


def _write_checkpoint(
    camel: str,
    folder: Path,
    sizes: Mapping[str, Any],
    *,
    head: Head | None = None,
    dtype: torch.dtype = torch.float32,
    fmt: Format = "safetensors",
    sharded: bool = False,
    prefix: bool = True,
    seed: int = 0,
    **config_changes: Any,
) -> Path:
    head, random = head or "CausalLM", Random(seed, PREFIX)
    settings = {"vocab_size": VOCAB_SIZE, **SPECIAL_IDS, **sizes, **config_changes}
    config = getattr(transformers, f"{camel}Config")(**settings)
    model = getattr(transformers, f"{camel}Model" if head == "Model" else f"{camel}For{head}")(config)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data.copy_(_values(random, name, tuple(parameter.shape)))
    model.to(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    state: Tensors = model.state_dict()
    model.save_pretrained(
        folder, max_shard_size=count_bytes(state) // 3 if sharded else 2 * count_bytes(state)
    )
    tokenizer(folder)

    added = _beyond_stock_mpt(config, state, random) if camel == "Mpt" else {}
    if added or fmt == "bin" or not prefix:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        state = {**state, **added}
        if fmt == "safetensors" or not prefix:
            state = without_aliases(state)
        if not prefix:
            state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
        write_weights(folder, state, fmt, sharded)
    return folder


def _values(random: Random, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    embeddings = name.endswith(("word_embeddings.weight", "wte.weight"))
    return random(name, *shape, scale=0.3 if embeddings else None)


def _beyond_stock_mpt(config: Any, state: Tensors, random: Random) -> Tensors:
    """The tensors that an MPT with this config has and transformers' class lacks or shapes otherwise."""
    trunk = "transformer." if "transformer.wte.weight" in state else ""
    width, inner = config.d_model, int(config.expansion_ratio * config.d_model)
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(config.n_layers):
        block = f"{trunk}blocks.{n}"
        if config.attn_config.qk_ln:
            shapes[f"{block}.attn.q_ln.weight"] = (width,)
            shapes[f"{block}.attn.k_ln.weight"] = (width,)
        if config.expansion_ratio != 4:
            shapes[f"{block}.ffn.up_proj.weight"] = (inner, width)
            shapes[f"{block}.ffn.down_proj.weight"] = (width, inner)
    if not config.no_bias:
        for name, shape in ({name: tensor.shape for name, tensor in state.items()} | shapes).items():
            if name.startswith((f"{trunk}blocks.", f"{trunk}norm_f.")):
                shapes[name.removesuffix("weight") + "bias"] = (shape[0],)
    dtype = state[f"{trunk}wte.weight"].dtype
    return {name: _values(random, name, shape).to(dtype) for name, shape in shapes.items()}
