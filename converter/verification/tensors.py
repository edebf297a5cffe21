"""Checks that every tensor the model expects is stored with its shape, and no other tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.errors import VerificationError
from converter.verification.check import Check
from converter.verification.patched import Patched, build

NAME = "tensors"


def check(patched: Patched) -> Check:
    """Compares names and shapes with those of the model, built on the meta device.

    A stored name may lack the backbone's prefix or have an extra one, as transformers allows when it loads a
    backbone into a model with a head, or the reverse.

    Raises:
        VerificationError: a tensor is missing, left over or misshapen; the message names the first.
    """
    family = patched.model.family
    # Checked first, since it would take long to build a million layers and find them missing.
    in_config = patched.build_config().num_hidden_layers
    stored_layers = len({patched.layer_of(name) for name in patched.model.checkpoint.tensors} - {None})
    if in_config != stored_layers:
        raise VerificationError(f"config.json says {in_config} layers, but the weights have {stored_layers}")
    model = build(patched.architecture, patched.build_config(), device="meta")
    expected = model.state_dict().keys()
    stored = {}
    unread = patched.model.unread
    prefix = f"{family.base_prefix}."
    for name, tensor in patched.model.checkpoint.tensors.items():
        if unread.search(name):
            continue
        spellings = (name, prefix + name, family.below(name))
        full = next((spelling for spelling in spellings if spelling in expected), name)
        if full in stored:
            raise VerificationError(f"the tensor {full!r} is stored twice, with and without {prefix!r}")
        stored[full] = tensor.shape

    return fits(model, stored)


def fits(model: Any, stored: Mapping[str, tuple[int, ...]]) -> Check:
    """Checks the shapes of the stored tensors, by the model's names.

    Raises:
        VerificationError: a tensor is missing, left over or misshapen; the message names the first.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    missing = sorted(expected.keys() - stored.keys() - tied)
    left_over = sorted(stored.keys() - expected.keys())
    problems = [f"{name!r} is missing" for name in missing] + [f"{name!r} is left over" for name in left_over]
    problems += [
        f"{name!r} has shape {list(stored[name])}, not {list(expected[name])}"
        for name in sorted(expected.keys() & stored.keys())
        if stored[name] != expected[name]
    ]
    if problems:
        raise VerificationError(
            f"the checkpoint does not fit {type(model).__name__}: {problems[0]}"
            + (f", and {len(problems) - 1} more" if len(problems) > 1 else "")
        )
    return Check(NAME, f"all {len(stored)} tensors fit {type(model).__name__}; none missing, none left over")
