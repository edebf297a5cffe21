"""Checks that the first layers, with real weights and unscaled slopes, agree with the stock model."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import FalconModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from converter.config import Config
from converter.errors import VerificationError
from converter.verification.check import Check
from converter.verification.patched import Patched, build
from converter.verification.slice import TOLERANCE, Slice

NAME = "stock model"
LEFT = "that the layers compute what the source's code does was tested for the family, not with these weights"
"""What a skipped check leaves unverified."""
PADDING = 5


@torch.no_grad()
def check(patched: Patched, source_config: Config) -> Check:
    """Runs a slice of the checkpoint through transformers' class and through the patched one.

    Raises:
        VerificationError: the two differ; the message says by how much.
    """
    family = patched.family
    unfit = family.stock_unfit(source_config) if family.stock else "transformers has no class for this model"
    if unfit is not None:
        return Check(NAME, f"{unfit}; {LEFT}", skipped=True)
    import transformers

    stock_config_class = getattr(transformers, f"{family.camel}Config")
    stock_class = getattr(transformers, f"{family.camel}Model")
    settings = {**family.normalise(source_config), "model_type": stock_config_class.model_type}
    try:
        stock_config = stock_config_class(**settings)
    except Exception as error:  # transformers 5 rejects types that older versions and other code accept
        reason = " ".join(str(error).split())
        why = f"transformers' own class rejects this config ({reason})"
        return Check(NAME, f"{why}; {LEFT}", skipped=True)
    part, models = Slice.of(patched), []
    patched_config = patched.build_config(alibi_scaling=None)
    for model_class, config in ((stock_class, stock_config), (patched.backbone, patched_config)):
        part.shrink(config)
        model = build(model_class, config, "meta")
        part.fill(model)
        materialise(model)
        models.append(model)

    stock, ours = models
    if isinstance(stock, FalconModel):
        unround_bias(stock)
    worst = largest_difference(stock, ours, part.ids)
    if math.isnan(worst):
        raise VerificationError(f"with scale 1, the output of {part.which} is not a number: {_cause(part)}")
    if not worst < TOLERANCE:
        raise VerificationError(
            f"with scale 1, the output of {part.which} differs from that of stock {stock_class.__name__} by "
            f"{worst:.2e} (relative; at most {TOLERANCE:g})"
        )
    return Check(
        NAME,
        f"with the real weights and scale 1, the output of {part.which} agrees with that of transformers' "
        f"{stock_class.__name__} in float32; largest relative difference {worst:.1e}",
    )


def _cause(part: Slice) -> str:
    """The weight that most likely made it so."""
    largest = {name: float(tensor.abs().max()) for name, tensor in part.read.items() if tensor.dim() > 1}
    zeros = [name for name, value in largest.items() if value == 0]
    name = zeros[0] if zeros else max(largest, key=lambda name: largest[name])
    what = "holds zeros only" if zeros else f"has values up to {largest[name]:.1e}"
    return f"the tensor {name!r} {what}; download the checkpoint again"


def largest_difference(stock: Any, ours: Any, ids: torch.Tensor) -> float:
    """Largest difference of the hidden states, relative to the largest state; with and without padding."""
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    differences = []
    for attention_mask, real in ((None, torch.ones_like(mask).bool()), (mask, mask.bool())):
        expected, states = (
            model(ids, attention_mask=attention_mask).last_hidden_state[real].float()
            for model in (stock, ours)
        )
        differences.append((expected - states).abs().max() / expected.abs().max())
    return float(torch.stack(differences).max())  # NaN if any is; NaN fails every comparison


def materialise(model: torch.nn.Module) -> None:
    """Replaces the non-persistent buffers that are empty because the model was built on the meta device."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.zeros_like(buffer, device="cpu"), persistent=False)


def unround_bias(stock: FalconModel) -> None:
    """Gives the layers of a stock Falcon its bias without the rounding to bfloat16 that it has in any dtype.

    Stock BLOOM has the same function without the rounding.

    Args:
        stock: computes attention with sdpa, for which the bias is part of the mask.
    """
    heads = stock.config.num_attention_heads
    scale = (stock.config.hidden_size // heads) ** -0.5

    def exact(_: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        mask = keywords["attention_mask"]  # [B, H, Q, K]
        hidden = mask == torch.finfo(mask.dtype).min
        real = (~hidden[:, 0, -1]).long()  # the last query sees every real key
        bias = build_alibi_tensor(real, heads, mask.dtype).view(len(mask), heads, 1, -1)
        return arguments, keywords | {"attention_mask": torch.where(hidden, mask, scale * bias)}

    for layer in stock.h:
        layer.register_forward_pre_hook(exact, with_kwargs=True)
