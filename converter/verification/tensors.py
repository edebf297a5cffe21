"""Checks that every tensor the model expects is stored with its shape, and no other tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from converter.errors import VerificationError
from converter.source.checkpoint import Tensor
from converter.verification.check import Check
from converter.verification.imported import ImportedRepository, build

NAME = "tensors"
RENAMED = {"embed_out.": "lm_head."}
"""Tensors that transformers 5 renames as it loads them (its ``conversion_mapping.py``)."""


def check_tensors(imported: ImportedRepository) -> Check:
    """Compares names and shapes with those of the model, built on the meta device; see ``fits``."""
    # Checked first, since it would take long to build a million layers and find them missing.
    in_config = imported.build_config().num_hidden_layers
    stored_layers = len({imported.layer_of(name) for name in imported.model.checkpoint.tensors} - {None})
    if in_config != stored_layers:
        raise VerificationError(f"config.json says {in_config} layers, but the weights have {stored_layers}")
    model = build(imported.architecture, imported.build_config(), device="meta")
    return fits(model, imported.model.checkpoint.tensors, imported.model.ignored_tensors)


def fits(model: Any, tensors: Mapping[str, Tensor], ignored: re.Pattern[str]) -> Check:
    """Compares stored tensors with a model; ``VerificationError`` names the first that is wrong.

    A stored name may lack the backbone's prefix or have an extra one, as transformers allows when it loads a
    backbone into a model with a head, or the reverse.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {}
    prefix = f"{model.base_model_prefix}."
    for name, tensor in tensors.items():
        spellings = [name, prefix + name, name.removeprefix(prefix)]
        spellings += [new + name.removeprefix(old) for old, new in RENAMED.items() if name.startswith(old)]
        full = next((spelling for spelling in spellings if spelling in expected), name)
        if full in stored:
            raise VerificationError(f"the tensor {full!r} is stored twice, with and without {prefix!r}")
        if full in expected or not ignored.search(name):
            stored[full] = tensor.shape
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
