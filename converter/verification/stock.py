"""The first layers, with the real weights and unscaled slopes, agree with the stock model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from converter.errors import VerificationError
from converter.families.base import Config, Family
from converter.verification.check import Check
from converter.verification.patched import Patched, build

LAYERS, ROWS, TOKENS, PADDING = 2, 2, 24, 5
# Elements of the layers that are still checked in float32; larger ones keep the stored dtype, which
# bounds the memory, and get the tolerance of half precision, in which the stock model itself errs.
LARGEST_FLOAT32 = 400_000_000
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1


@torch.no_grad()
def check(patched: Patched, family: Family, source_config: Config) -> Check:
    """Runs a slice of the checkpoint through transformers' class and through the patched one.

    The slice has the first layers and, of the embeddings, only the rows that the test tokens use.

    Raises:
        VerificationError: the two differ; says by how much.
    """
    name = "stock model"
    unfit = family.stock_unfit(source_config)
    if unfit is not None:
        return Check(name, f"skipped: {unfit}", skipped=True)
    import transformers

    stored = {full.removeprefix("transformer."): full for full in patched.checkpoint.tensors}
    layers_prefix = family.layers_prefix.removeprefix("transformer.")
    count = min(LAYERS, patched.build_config().num_hidden_layers)
    kept = {
        bare: full
        for bare, full in stored.items()
        if not bare.startswith(f"{layers_prefix}.")
        or int(bare[len(layers_prefix) + 1 :].split(".")[0]) < count
    }

    normalised = family.normalise(source_config)
    stock_config_class = getattr(transformers, f"{family.camel}Config")
    stock_config = stock_config_class(**{**normalised, "model_type": stock_config_class.model_type})
    patched_config = patched.build_config(alibi_scaling=None)
    vocabulary = patched_config.vocab_size
    step = max(1, vocabulary // (ROWS * TOKENS))
    tokens = list(range(0, vocabulary, step))[: ROWS * TOKENS]
    for config in (stock_config, patched_config):
        config.num_hidden_layers = count
        config.vocab_size = len(tokens)
        config.pad_token_id = None  # counts in the full vocabulary
    stock_class = getattr(transformers, f"{family.camel}Model")
    models = [build(stock_class, stock_config, "meta"), build(patched.trunk, patched_config, "meta")]

    names = [bare for bare in models[1].state_dict() if bare in kept]
    embeddings = family.embeddings
    state = {bare: patched.tensor(kept[bare]) for bare in names if bare != embeddings}
    state[embeddings] = patched.rows(kept[embeddings], tokens)
    elements = sum(tensor.numel() for tensor in state.values())
    full = elements <= LARGEST_FLOAT32
    dtype = torch.float32 if full else state[embeddings].dtype
    state = {bare: tensor.to(dtype) for bare, tensor in state.items()}
    for model in models:
        model.load_state_dict(state, strict=False, assign=True)
        materialise(model)

    ids = torch.arange(ROWS * TOKENS).remainder(len(tokens)).view(ROWS, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    worst = 0.0
    with exact_stock_bias():
        for attention_mask in (None, mask):
            real = mask.bool() if attention_mask is not None else torch.ones_like(mask).bool()
            stock, ours = (
                model(ids, attention_mask=attention_mask).last_hidden_state[real].float() for model in models
            )
            worst = max(worst, float((stock - ours).abs().max() / stock.abs().max()))
    tolerance = TOLERANCE if full else HALF_TOLERANCE
    if not worst < tolerance:
        raise VerificationError(
            f"with scale 1, the first {count} layers differ from stock {stock_class.__name__} by {worst:.2e} "
            f"(relative; at most {tolerance:g})"
        )
    precision = str(dtype).removeprefix("torch.")
    return Check(
        name,
        f"first {count} layers with the real weights and scale 1 agree with transformers' "
        f"{stock_class.__name__} in {precision}; largest relative difference {worst:.1e}",
    )


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
