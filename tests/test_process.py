"""The process of a Python program: two threads may convert, and nothing of a run stays in it."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto

from converter import convert, evaluate, export, validate
from tests import tiny
from tests.conftest import Pristine
from tests.patched import CHECKED

FAMILIES = (*tiny.FACTORIES, *tiny.ENCODERS, "llama")


def test_conversions_in_threads(pristine: Pristine, tmp_path: Path) -> None:
    """transformers is not safe there, so one waits for the other where a model is loaded."""
    names = ("bloom", "mpt", "jina_bert", "llama")
    begin, checked = threading.Barrier(len(names)), {}

    def work(name: str) -> None:
        source = pristine(name)
        begin.wait()
        checked[name] = [check.name for check in convert(source, tmp_path / name, scale=2).checks]

    threads = [threading.Thread(target=work, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert checked == dict.fromkeys(names[:3], CHECKED) | {"llama": ["tensors", "frequencies"]}


def registered() -> list[list[Any]]:
    """What transformers' Auto classes know beside its own classes."""
    modules = (configuration_auto, modeling_auto, tokenization_auto)
    mappings = [mapping for module in modules for mapping in vars(module).values()]
    return [list(mapping._extra_content) for mapping in mappings if hasattr(mapping, "_extra_content")]


def classes() -> set[str]:
    """The classes of repositories' code that are in memory."""
    gc.collect()
    kinds = [f"{each.__module__}.{each.__name__}" for each in gc.get_objects() if type(each) is type]
    return {kind for kind in kinds if kind.startswith(("transformers_modules", "ntk_convert_verification"))}


def state() -> list[Any]:
    """What a whole process has one of."""
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
        torch.get_num_threads(),
        torch.get_default_dtype(),
        sys.dont_write_bytecode,
        sys.path[:],
        registered(),
        [name for name in sys.modules if name.startswith("transformers_modules.")],
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_of_a_conversion_stays(pristine: Pristine, tmp_path: Path, name: str) -> None:
    source = pristine(name)
    before, known = state(), classes()
    convert(source, tmp_path / "out", scale=2, train_length=64)
    assert state() == before
    assert classes() <= known


USES: dict[str, Callable[[Path, Path], object]] = {
    "validate": lambda folder, _: validate(folder),
    "export": lambda folder, _: export(folder),
    "evaluate": lambda folder, text: evaluate(folder, text=text, lengths=[16], train_length=16, items=2),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_nothing_of_other_uses_stays(pristine: Pristine, tmp_path: Path, name: str, use: str) -> None:
    if (name, use) == ("llama", "export"):
        pytest.skip("no graph is made of a rotary model")
    folder, text = tmp_path / "out", tmp_path / "text"
    convert(pristine(name), folder, scale=2, train_length=16, verify=False)
    text.write_text(" ".join(f"w{number % 50}" for number in range(400)))
    before, known = state(), classes()
    USES[use](folder, text)
    assert state() == before
    assert classes() <= known
