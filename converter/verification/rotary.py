"""Checks of a converted rotary checkpoint: the frequencies that transformers computes from its config.

The rotary modules of transformers' own class for the checkpoint are built from the config as it was
written, and the angles by which they turn a token at position 1 are read back from their cosines and
sines. Nothing of the code that wrote the config is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from converter.checkpoint import Checkpoint, read_checkpoint
from converter.errors import ConverterError, VerificationError
from converter.rotary.settings import Rotary
from converter.scaling import Scaling
from converter.verification.check import Check

# float32's own rounding of a power of the base, relative.
TOLERANCE = 2e-5
# Tensors that transformers 5 renames as it loads them (its ``conversion_mapping.py``).
RENAMED = {"embed_out.": "lm_head."}
# Buffers that old checkpoints carry and no version of the model reads.
BUFFER = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.bias|masked_bias)$")


def verify(folder: Path, rotary: Rotary, scaling: Scaling) -> list[Check]:
    """Checks a converted repository, complete but for its card.

    Args:
        folder: the repository.
        rotary: the rotary positions of the source.
        scaling: what was asked for.

    Raises:
        VerificationError: the first check that failed, or a config that transformers cannot build.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        checkpoint = read_checkpoint(folder)
        # First, since building a model of a million layers would take a while to find them missing.
        if config.num_hidden_layers > len(checkpoint.tensors):
            raise VerificationError(
                f"config.json says {config.num_hidden_layers} layers, and the weights have "
                f"{len(checkpoint.tensors)} tensors"
            )
        with torch.device("meta"):
            model = model_class(config)(config)
        return [
            check_tensors(model, checkpoint),
            check_frequencies(model, rotary, scaling),
        ]
    except ConverterError:
        raise
    except Exception as error:  # a value that the model cannot be built from can raise anything
        reason = " ".join(str(error).split())
        raise VerificationError(
            f"transformers {transformers.__version__} does not run this config.json "
            f"({type(error).__name__}: {reason}); correct the value there"
        ) from error


def model_class(config: Any) -> Any:
    """transformers' class that the config names; the language model if it names none."""
    import transformers

    named = (config.architectures or [None])[0]
    if named is None:
        mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        named = mapping[type(config)].__name__
    found = getattr(transformers, named, None)
    if found is None or getattr(found, "config_class", None) is not type(config):
        raise VerificationError(
            f"architectures names {named!r}, which is no class of transformers {transformers.__version__} "
            f"for model_type {config.model_type!r}"
        )
    return found


def check_tensors(model: Any, checkpoint: Checkpoint) -> Check:
    """Every tensor that the model expects is stored with its shape, and no other.

    Stored names may lack the trunk's prefix or have it in excess, as transformers allows.

    Raises:
        VerificationError: names the first missing, left over or misshapen tensor.
    """
    name = type(model).__name__
    if any(re.search(r"\.(experts|block_sparse_moe)\.", stored) for stored in checkpoint.tensors):
        return Check(
            "tensors", "not compared: transformers rearranges experts as it loads them", skipped=True
        )
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    prefix = f"{model.base_model_prefix}."
    stored = {}
    for key, tensor in checkpoint.tensors.items():
        spellings = [key, prefix + key, key.removeprefix(prefix)]
        spellings += [new + key.removeprefix(old) for old, new in RENAMED.items() if key.startswith(old)]
        full = next((spelling for spelling in spellings if spelling in expected), key)
        if full in expected or not BUFFER.search(key):
            stored[full] = tensor.shape
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    problems = [f"{key!r} is missing" for key in sorted(expected.keys() - stored.keys() - tied)]
    problems += [f"{key!r} is left over" for key in sorted(stored.keys() - expected.keys())]
    problems += [
        f"{key!r} has shape {list(stored[key])}, not {list(expected[key])}"
        for key in sorted(expected.keys() & stored.keys())
        if stored[key] != expected[key]
    ]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise VerificationError(f"the checkpoint does not fit {name}: {problems[0]}{more}")
    return Check("tensors", f"all {len(stored)} tensors fit {name}; none missing, none left over")


def check_frequencies(model: Any, rotary: Rotary, scaling: Scaling) -> Check:
    """Compares measured frequencies with the formula, where scaling is at work and, dynamic, where not.

    Raises:
        VerificationError: names the pair of channels, the measured and the expected frequency.
    """
    lengths = [2]
    if scaling.dynamic is not None:
        assert scaling.rate is not None
        assert scaling.train_length is not None
        start = round(scaling.train_length / scaling.rate)
        lengths = [start, 2 * start, 3 * start]
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
            measured = measure(module, tokens)
            expected = torch.tensor(rotary.scaled(scaling, tokens), dtype=torch.float64)
            if measured.shape != expected.shape:
                raise VerificationError(
                    f"{kind.__name__} turns {2 * len(measured)} channels, not {2 * len(expected)}"
                )
            deviations = (measured / expected - 1).abs()
            pair = int(deviations.argmax())
            if not deviations[pair] < TOLERANCE:
                raise VerificationError(
                    f"{kind.__name__} turns pair {pair} by {measured[pair]:.6g} a token at {tokens} tokens, "
                    f"not {expected[pair]:.6g}"
                )
            worst = max(worst, float(deviations[pair]))
    where = f" at {', '.join(map(str, lengths))} tokens" if scaling.dynamic is not None else ""
    return Check(
        "frequencies",
        f"{len(rotary.frequencies)} frequencies measured from transformers' "
        f"{', '.join(sorted(kind.__name__ for kind in kinds))}{where}; "
        f"largest relative deviation {worst:.1e}",
    )


@torch.no_grad()
def measure(module: Any, tokens: int) -> torch.Tensor:
    """The angles, float64 and the largest first, by which a token is turned at position 1 of so many."""
    positions = torch.tensor([[1, tokens - 1]])
    cosines, sines = (output[0, 0].double() for output in module(torch.zeros(1), positions))
    angles = torch.atan2(sines, cosines).sort(descending=True).values
    # Both channels of a pair are listed, side by side or in two halves.
    return angles[::2]
