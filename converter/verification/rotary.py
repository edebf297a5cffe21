"""Checks a converted rotary checkpoint: its tensors, and the frequencies that transformers computes for it.

The check builds the rotary modules of transformers' own class from the config as it was written. From their
cosines and sines it reads back the angles by which they turn a token at position 1. It uses none of the code
that wrote the config.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from converter.errors import VerificationError
from converter.families.checks import check_wrapper
from converter.model.rotary import RotaryModel
from converter.verification.check import Check
from converter.verification.tensors import fits

# Relative; float32 rounds a power of the base by about this much.
TOLERANCE = 2e-5


def verify(converted: RotaryModel, passed: list[Check]) -> None:
    """Runs all checks; ``passed`` gets each that passes, see ``converter.verification.verify``."""
    import transformers

    checkpoint = converted.checkpoint
    config_class: Any = transformers.CONFIG_MAPPING[converted.model_type]
    config = config_class.from_dict(dict(converted.result_config))
    # Checked first, since it would take long to build a million layers and find them missing.
    if config.num_hidden_layers > len(checkpoint.tensors):
        raise VerificationError(
            f"config.json says {config.num_hidden_layers} layers, but the weights have only "
            f"{len(checkpoint.tensors)} tensors"
        )
    with torch.device("meta"):
        model = model_class(config)(config)
    passed.append(check_tensors(model, converted))
    passed.append(check_frequencies(model, converted))


def model_class(config: Any) -> Any:
    """The class of transformers that the config names; the language model's if it names none."""
    import transformers

    named = (config.architectures or [None])[0]
    if named is None:
        mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        named = mapping[type(config)].__name__
    found = getattr(transformers, named, None)
    if found is None or getattr(found, "config_class", None) is not type(config):
        raise VerificationError(
            f"architectures names {named!r}, which transformers {transformers.__version__} does not have "
            f"for model_type {config.model_type!r}"
        )
    return found


def check_tensors(model: Any, converted: RotaryModel) -> Check:
    """Checks that every tensor the model expects is stored with its shape, and no other tensor."""
    checkpoint = converted.checkpoint
    if any(re.search(r"\.(experts|block_sparse_moe)\.", stored) for stored in checkpoint.tensors):
        return Check(
            "tensors", "not compared: transformers rearranges experts as it loads them", skipped=True
        )
    embeddings = model.get_input_embeddings().weight
    named = next(name for name, parameter in model.named_parameters() if parameter is embeddings)
    backbone = model.base_model_prefix
    check_wrapper(checkpoint.tensors, named.removeprefix(f"{backbone}."), backbone)
    return fits(model, checkpoint.tensors, converted.ignored_tensors)


def check_frequencies(model: Any, converted: RotaryModel) -> Check:
    """Compares measured frequencies with the formula; for a dynamic scaling, at three lengths.

    The first of those is the longest at which the factor is still 1. ``VerificationError`` names the pair of
    channels that differs and both values.
    """
    rotary, change = converted.rotary, converted.change(converted.scaling)
    start = change.dynamic_from
    lengths = [2] if start is None else [start, 2 * start, 3 * start]
    kinds = {
        type(module)
        for module in model.modules()
        if any(name == "inv_freq" for name, _ in module.named_buffers(recurse=False))
    }
    if not kinds:
        raise VerificationError(f"{type(model).__name__} has no rotary module to measure")
    worst = 0.0
    for kind in kinds:
        module = kind(config=model.config)
        for tokens in lengths:
            measured, amplitude = measure(module, tokens)
            expected = torch.tensor(rotary.scaled(converted.scaling, tokens), dtype=torch.float64)
            if measured.shape != expected.shape:
                raise VerificationError(
                    f"{kind.__name__} turns {2 * len(measured)} channels, not {2 * len(expected)}"
                )
            deviations = (measured / expected - 1).abs()
            pair = int(deviations.argmax())
            if not deviations[pair] < TOLERANCE:
                raise VerificationError(
                    f"{kind.__name__} turns pair {pair} by {measured[pair]:.6g} per token at {tokens} "
                    f"tokens, not {expected[pair]:.6g}"
                )
            worst = max(worst, float(deviations[pair]))
            if not abs(amplitude / change.attention - 1) < TOLERANCE:
                raise VerificationError(
                    f"{kind.__name__} multiplies queries and keys by {amplitude:.6g}, "
                    f"not {change.attention:.6g}"
                )
    where = f" at {', '.join(map(str, lengths))} tokens" if start is not None else ""
    return Check(
        "frequencies",
        f"{len(rotary.frequencies)} frequencies measured from transformers' "
        f"{', '.join(sorted(kind.__name__ for kind in kinds))}{where}; "
        f"largest relative deviation {worst:.1e}",
    )


@torch.no_grad()
def measure(module: Any, tokens: int) -> tuple[torch.Tensor, float]:
    """The angles, float64, largest first, by which a row of ``tokens`` tokens is turned at position 1.

    And the factor on its length: the length of the pair of cosine and sine.
    """
    positions = torch.tensor([[1, tokens - 1]])
    cosines, sines = (output[0, 0].double() for output in module(torch.zeros(1), positions))
    angles = torch.atan2(sines, cosines).sort(descending=True).values
    # Both channels of a pair are listed, side by side or in two halves.
    return angles[::2], float(torch.hypot(cosines, sines).mean())
