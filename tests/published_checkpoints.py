"""The facts in ``published/``: the configs, tensors, files, tokenizers and trained lengths of checkpoints.

``published/FAMILY.json`` is a list of checkpoints, each with

* ``config``, where each key was seen (``config_sources``), and what could not be seen (``unseen``);
* ``stands_for``: the Hub ids of other checkpoints with these sizes, whose own config was not seen;
* ``layout``: the name of its tensors' layout, or null if the family's code cannot read it;
* ``sizes``: letters of its shapes to which the layout gives another value;
* ``stored``: the first weight file, the dtype and the bytes, or null if its files were not seen;
* ``tokenizer``: keys of its tokenizer_config.json and its vocabulary files, or null if they were not seen;
* ``train_length`` and ``train_length_source``, or where it was looked for;
* ``tensors`` and ``tokenizer_class``: notes on both, in words.

``published/layouts/FAMILY.json`` has the names and shapes of the tensors as a rule. ``N`` in a name is
the number of a layer. The letters in a shape are those of ``sizes``, which gives for each a key of the config
(``|`` between its spellings), a number, or an expression; "D+2K D" has D + 2 K rows and D columns.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "published"
Entry = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

CHECKPOINTS: dict[str, list[Entry]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))
}
LAYOUTS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((FOLDER / "layouts").glob("*.json"))
}
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def shapes(family: str, entry: Entry, **others: int) -> Shapes:
    """The names and shapes of a checkpoint's tensors.

    Args:
        family: the family's name.
        entry: the checkpoint.
        others: letters of sizes -> other values, such as N for fewer layers.
    """
    rule = LAYOUTS[family]
    layout = rule["layouts"][entry["layout"]]
    sizes = {**rule["sizes"], **entry.get("sizes", {}), **others}
    below = {**rule["trunk"], **layout.get("trunk", {})}
    named = {f"{layout['prefix']}{name}": shape for name, shape in below.items()} | layout.get("head", {})
    layers = range(_size("N", sizes, entry["config"]))
    return {
        name.replace(".N.", f".{layer}."): tuple(
            _size(part, sizes, entry["config"]) for part in shape.split()
        )
        for name, shape in named.items()
        for layer in (layers if ".N." in name else (0,))
    }


def _size(expression: str | int, sizes: dict[str, str | int], config: dict[str, Any]) -> int:
    """The value of a shape's part (``3D``, ``D+2K``, ``128``), or of one of ``sizes``."""
    if isinstance(expression, int):
        return expression
    for key in expression.split("|"):
        if key in config:
            return int(config[key])
    total = 0
    for term in expression.split("+"):
        [(factor, letter)] = re.findall(r"^(\d*)([A-Z]?)$", term)
        total += int(factor or 1) * (_size(sizes[letter], sizes, config) if letter else 1)
    return total


def with_layers(family: str, config: dict[str, Any], count: int) -> dict[str, Any]:
    """The config of the same model with another number of layers."""
    [key] = [key for key in LAYOUTS[family]["sizes"]["N"].split("|") if key in config]
    return {**config, key: count}


def weight_files(first: str) -> list[str]:
    """All shards, of which this is the first: ``model-00001-of-00003.safetensors``, ..."""
    found = re.fullmatch(r"(.*?)(\d+)-of-(\d+)(\..*)", first)
    if found is None:
        return [first]
    start, digits, count, end = found.groups()
    return [f"{start}{n:0{len(digits)}}-of-{count}{end}" for n in range(1, int(count) + 1)]


def size_limits(stored: dict[str, Any]) -> tuple[float, float]:
    """The least and the most bytes of all tensors that fit what was seen of the files.

    An index states the exact number. A page of the Hub shows the size of each file to three digits.
    """
    seen = stored["bytes"]
    if isinstance(seen, int):
        return seen, seen
    low = high = 0.0
    for text in seen:
        number, unit = text.split()
        scale = {"MB": 1e6, "GB": 1e9}[unit]
        half = 0.5 * 10.0 ** -len(number.partition(".")[2])
        low += (float(number) - half) * scale
        high += (float(number) + half) * scale
    return 0.999 * low, high  # a file also has names and sizes in it
