"""What tests do to a folder of a model before a command reads it.

Each function returns the change, a function of the folder, so a table can hold it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.conftest import edit_json
from tests.tiny.layout import Tensors, change_tensors

Change = Callable[[Path], object]


def nothing(folder: Path) -> None:
    pass


def config(**keys: Any) -> Change:
    """Sets keys of config.json; None removes one, and an ellipsis is null."""
    return lambda folder: edit_json(folder / "config.json", keys)


def put(name: str, content: Any) -> Change:
    """Sets keys of a JSON file, which is made if there is none; a list is all of its content."""

    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, dict) and not path.is_file():
            path.write_text("{}", encoding="utf-8")
        if isinstance(content, dict):
            edit_json(path, content)
        else:
            path.write_text(json.dumps(content), encoding="utf-8")

    return change


def written(name: str, content: str | bytes) -> Change:
    """A file is made, or replaced."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def removed(pattern: str) -> Change:
    """The file of this pattern is removed."""

    def change(folder: Path) -> None:
        [path] = folder.glob(pattern)
        path.unlink()

    return change


def copied(name: str, copy: str, **keys: Any) -> Change:
    """A copy of a file; of a JSON file, with other values of these keys."""

    def change(folder: Path) -> None:
        shutil.copy(folder / name, folder / copy)
        if keys:
            edit_json(folder / copy, keys)

    return change


def tensors(change: Callable[[Tensors], object], **metadata: str) -> Change:
    """Changes the tensors of a checkpoint of one file."""
    return lambda folder: change_tensors(folder, change, **metadata)


def pickled(folder: Path) -> None:
    """The weights are in a .bin file in place of safetensors."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def all_of(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change
