"""The first layers, with the real weights and unscaled slopes, agree with the stock model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from converter.errors import VerificationError
from converter.families.base import Config, Family
from converter.verification.check import Check
from converter.verification.patched import Patched, build

LAYERS, ROWS, TOKENS, PADDING = 2, 2, 24, 5
# What bounds the memory: two layers of more elements than this become one, and a layer of more than
# that keeps its stored dtype, mapped from the file, and gets the tolerance of half precision, in which
# the stock model itself errs.
LARGEST_PAIR, LARGEST_FLOAT32 = 32_000_000, 400_000_000
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1


@torch.no_grad()
def check(patched: Patched, family: Family, source_config: Config) -> Check:
    """Runs a slice of the checkpoint through transformers' class and through the patched one.

    The slice has the first layers and, of the embeddings, only the rows that the test tokens use.

    Raises:
        VerificationError: the two differ; says by how much.
    """
    name = "stock model"
    unfit = family.stock_unfit(source_config) if family.stock else "transformers has no class for this model"
    if unfit is not None:
        return Check(name, unfit, skipped=True)
    import transformers

    stored = {family.below(full): full for full in patched.checkpoint.tensors}
    count, total = layers_to_run(patched, stored, family.layers)
    stock_config_class = getattr(transformers, f"{family.camel}Config")
    stock_class = getattr(transformers, f"{family.camel}Model")
    settings = {**family.normalise(source_config), "model_type": stock_config_class.model_type}
    try:
        stock_config = stock_config_class(**settings)
    except Exception as error:  # 5.x is strict about types that older versions and other code accept
        reason = " ".join(str(error).split())
        return Check(name, f"transformers' own class refuses this config ({reason})", skipped=True)
    patched_config = patched.build_config(alibi_scaling=None)
    step = max(1, patched_config.vocab_size // (ROWS * TOKENS))
    tokens = list(range(0, patched_config.vocab_size, step))[: ROWS * TOKENS]
    for config in (stock_config, patched_config):
        config.num_hidden_layers = count
        config.vocab_size = len(tokens)
        config.pad_token_id = None  # counts in the full vocabulary
    stock, ours = build(stock_class, stock_config, "meta"), build(patched.trunk, patched_config, "meta")

    state = {bare: patched.tensor(stored[bare]) for bare in ours.state_dict() if bare != family.embeddings}
    state[family.embeddings] = patched.rows(stored[family.embeddings], tokens)
    full = sum(tensor.numel() for tensor in state.values()) <= LARGEST_FLOAT32
    dtype = torch.float32 if full else state[family.embeddings].dtype
    state = {bare: tensor.to(dtype) for bare, tensor in state.items()}
    for model in (stock, ours):
        model.load_state_dict(state, strict=False, assign=True)
        materialise(model)

    worst, tolerance = largest_difference(stock, ours, len(tokens)), TOLERANCE if full else HALF_TOLERANCE
    which = f"the first {count} of {total} layers" if total > 1 else "the only layer"
    if not worst < tolerance:
        raise VerificationError(
            f"with scale 1, {which} differ from stock {stock_class.__name__} by {worst:.2e} "
            f"(relative; at most {tolerance:g})"
        )
    return Check(
        name,
        f"{which}, with the real weights and scale 1, gives what transformers' {stock_class.__name__} gives "
        f"in {str(dtype).removeprefix('torch.')}; largest relative difference {worst:.1e}",
    )


def layers_to_run(patched: Patched, stored: Mapping[str, str], layers: str) -> tuple[int, int]:
    """How many of the first layers to run, and how many there are."""
    sizes: dict[int, int] = {}
    for bare, full in stored.items():
        if bare.startswith(f"{layers}."):
            layer = int(bare[len(layers) + 1 :].split(".")[0])
            sizes[layer] = sizes.get(layer, 0) + math.prod(patched.checkpoint.tensors[full].shape)
    pair = sum(size for layer, size in sizes.items() if layer < LAYERS)
    return (min(LAYERS, len(sizes)) if pair <= LARGEST_PAIR else 1), len(sizes)


def largest_difference(stock: Any, ours: Any, vocabulary: int) -> float:
    """Of the hidden states, relative to the largest; without a mask and with a padded row."""
    ids = torch.arange(ROWS * TOKENS).remainder(vocabulary).view(ROWS, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    differences = []
    with exact_stock_bias():
        for attention_mask, real in ((None, torch.ones_like(mask).bool()), (mask, mask.bool())):
            expected, states = (
                model(ids, attention_mask=attention_mask).last_hidden_state[real].float()
                for model in (stock, ours)
            )
            differences.append((expected - states).abs().max() / expected.abs().max())
    return float(torch.stack(differences).max())  # NaN if one is, which no tolerance lets pass


def materialise(model: torch.nn.Module) -> None:
    """Replaces non-persistent buffers that a model built without memory left empty."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.zeros_like(buffer, device="cpu"), persistent=False)


@contextlib.contextmanager
def exact_stock_bias() -> Iterator[None]:
    """Gives stock Falcon BLOOM's bias: the same, but not rounded to bfloat16 in a float32 model."""
    from transformers.models.bloom import modeling_bloom
    from transformers.models.falcon import modeling_falcon

    exact: Any = modeling_bloom.build_alibi_tensor
    with mock.patch.object(modeling_falcon, "build_alibi_tensor", exact):
        yield
