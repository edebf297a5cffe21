"""Converted tiny checkpoints for the tests of the models, made by the real pipeline."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from converter import convert
from converter.families.templates import templates_folder
from converter.model.alibi import AlibiModel
from converter.model.open import read_model
from converter.result import manifest
from converter.scaling.scaling import CONCAVE, METHODS
from converter.source.open import open_folder
from converter.weights.files import sha256
from tests import tiny
from tests.conftest import edit_json

FAMILIES = tuple(tiny.FACTORIES)
STOCK = tuple(tiny.STOCK)
# Powers of two and not, more and fewer than the next one.
HEADS = (16, 12, 40)
TRAIN_LENGTH, RATE = 24, 1.5

SCALED = tuple(method for method in METHODS if method not in ("none", CONCAVE))
"""The methods that scale slopes."""
# From 12 to 192 tokens: this ramp keeps, partly scales and scales heads of 12 and more.
MORE: dict[str, dict[str, Any]] = {"by-parts": {"ramp": (0.5, 8.0), "train_length": TRAIN_LENGTH}}
STATIC: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    **{method: {"method": method, "scale": 4.0, **MORE.get(method, {})} for method in SCALED},
}
DYNAMIC = {
    f"{method}-{dynamic}": {
        "method": method,
        "dynamic": dynamic,
        "rate": RATE,
        "train_length": TRAIN_LENGTH,
        **MORE.get(method, {}),
    }
    for method in SCALED
    for dynamic in ("length", "position")
}
SCALINGS: dict[str, dict[str, Any]] = {
    **STATIC,
    **DYNAMIC,
    CONCAVE: {"method": CONCAVE, "train_length": TRAIN_LENGTH},
}

# With a row of exponents per layer; converted with ``scaled``.
FITTED = ("fitted", "fitted-position")
TEMPERED = "-tempered"
"""Ends the name of a scaling whose slopes are given as fitted ones, with temperatures; see ``tempered``."""


def fitted_scaling(heads: int, layers: int, dynamic: str | None = None) -> dict[str, Any]:
    """A fitted ``alibi_scaling``: exponents from -0.3 to 1.2, temperatures from -0.3 to 0.4; 4 times at most.

    Each layer has others.
    """
    rows = [[((7 * head + 4 * layer) % 16) / 10 - 0.3 for head in range(heads)] for layer in range(layers)]
    temperatures = [
        [((3 * head + 5 * layer) % 8) / 10 - 0.3 for head in range(heads)] for layer in range(layers)
    ]
    strength = (
        {"train_seq_len": TRAIN_LENGTH, "dynamic": dynamic, "rate": RATE} if dynamic else {"factor": 4.0}
    )
    return {"type": "fitted", **strength, "exponents": rows, "temperatures": temperatures}


def scaled(source: Path, out: Path, scaling: str, heads: int, **more: Any) -> Path:
    """Converts a model with one of ``SCALINGS``, or a fitted scaling such as ``FITTED``; unverified."""
    name = scaling.removesuffix(TEMPERED)
    options = SCALINGS.get(name) or {"slopes": fitted_scaling(heads, 2, name.partition("-")[2] or None)}
    convert(source, out, verify=False, **options, **more)
    if scaling != name:
        tempered(out)
    return out


def tempered(folder: Path, temperature: float = 0.5) -> Path:
    """Makes the scaling of a converted repository a fitted one: the same slopes, in one row for all layers.

    The temperature of each head is ``temperature`` times its exponent.
    """
    model = read_model(open_folder(folder))
    assert isinstance(model, AlibiModel)
    stock = model.stock({})
    # With the factor e, the exponent is the logarithm of what a slope is divided by.
    divided = model.scaled(stock, replace(model.scaling, factor=math.e, dynamic=None), 0, 0)
    exponents = [math.log(before / after) for before, after in zip(stock, divided, strict=True)]
    scaling = {
        key: value for key, value in config_of(folder)["alibi_scaling"].items() if key not in ("type", "ramp")
    }
    scaling |= {"type": "fitted", "exponents": [exponents]}
    scaling |= {"temperatures": [[temperature * exponent for exponent in exponents]]}
    edit_json(folder / "config.json", {"alibi_scaling": scaling})
    manifest.update(folder, {"config.json": sha256(folder / "config.json")})
    return folder


VARIANTS = {
    f"{name}-{variant}".replace("_", "-"): (name, dict(changes))
    for name in FAMILIES
    for variant, changes in tiny.CHECKPOINTS[name].variants.items()
}
"""Name -> a decoder, and changes of its config that change what it computes."""

CHECKED = ["tensors", "slopes", "paths", "loading"]
"""Names of the checks of a conversion."""

Convert = Callable[..., Path]
Mistaken = Callable[[str, str], None]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """``converted(name, num_heads, scaling, head=None, **config_changes)``: writes and converts a checkpoint.

    A change of None takes an encoder's key away.
    """

    def build(
        name: str, num_heads: int = 4, scaling: str = "ntk", *, head: Any = None, **changes: Any
    ) -> Path:
        # MPT's configs switch the cache off; the others' do not.
        changes = changes if name in tiny.ENCODERS else {"use_cache": True, **changes}
        factory = (tiny.FACTORIES | tiny.ENCODERS)[name]
        source = factory(tmp_path / "source", num_heads, head=head, **changes)
        if name in tiny.ENCODERS:
            edit_json(source / "config.json", {key: None for key, value in changes.items() if value is None})
        elif head is not None:
            edit_json(source / "config.json", {"pad_token_id": tiny.PAD})
        out = tmp_path / "out"
        return scaled(source, out, scaling, num_heads)

    return build


@pytest.fixture
def mistaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mistaken:
    """``mistaken(before, after)``: from here on, the templates are a copy with such a mistake."""

    def plant(before: str, after: str) -> None:
        copy = tmp_path / "templates"
        shutil.copytree(templates_folder(), copy)
        files = [path for path in copy.glob("*.py") if before in path.read_text(encoding="utf-8")]
        assert files, f"no template has {before!r}"
        for path in files:
            text = path.read_text(encoding="utf-8")
            assert text.count(before) == 1, f"{before!r} stands {text.count(before)} times in {path.name}"
            path.write_text(text.replace(before, after), encoding="utf-8")
        monkeypatch.setattr("converter.families.templates.PACKAGE", tmp_path)

    return plant


def load(folder: Path, auto_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """The converted model as a user loads it, with every tensor accounted for."""
    model, info = auto_class.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    if auto_class is not AutoModel:
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def batch(rows: int = 3, length: int = 60, side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask, both [rows, length], with rows of unequal length."""
    lengths = [length - 17 * row for row in range(rows)]
    ids = torch.from_numpy(tiny.token_ids(rows, length))
    return ids, torch.from_numpy(tiny.padding_mask(lengths, side, length))


def assert_logits(actual: torch.Tensor, expected: Any, mask: torch.Tensor | None = None) -> None:
    """Equal within 1e-4, or 1e-5 of the largest logit if that is more, at every real token."""
    expected = torch.as_tensor(np.asarray(expected)).double()
    real = torch.ones(expected.shape[:2]).bool() if mask is None else mask.bool()
    error = (actual.detach().double() - expected)[real].abs().max().item()
    assert error <= max(1e-4, 1e-5 * expected[real].abs().max().item()), f"largest error {error:.2e}"
