"""References to code in the JSON files of a repository.

An ALiBi result needs ``trust_remote_code=True``, and then transformers and sentence-transformers run what
such files name: classes of any repository (``user/name--module.Class``), kernels of the Hub, installed
packages. So a converted repository names its own code files and no other code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from converter.errors import SourceError
from converter.source.jsonfile import parse, read_bytes
from converter.source.source import CONFIG, plain_text
from converter.source.tokenizer import VOCABULARIES

AUTO_MAP = "auto_map"
CLASSES = (AUTO_MAP, "custom_pipelines")
"""Keys of transformers: each text below them names a class, of this repository or of another one."""
KERNELS = tuple(f"{start}{what}_implementation" for what in ("attn", "experts") for start in ("", "_"))
"""Keys that make transformers load code from the Hub if their value is a name such as ``user/name``."""
IMPORTED = (
    *("type", "types", "tokenizer_class", "activation_function", "activation_fn"),
    "sbert_ce_default_activation_function",
)
"""Keys of sentence-transformers: a dotted name is imported."""
LIBRARIES = ("sentence_transformers.", "torch.")
NOT_COPIED = "sentence_transformers.CodeThatWasNotCopied"
"""Takes the place of a dotted name. It does not load, while a default could load and be silently wrong."""
ARGUMENTS = ("trust_remote_code", "code_revision")
"""Keys that sentence-transformers passes on, and that choose which code runs."""
PLACES = "_name_or_path"
"""End of the keys that make a library load a part of the model from another repository."""


def json_files(names: Collection[str]) -> list[str]:
    """Of these files, those that can name code: JSON, and not a vocabulary."""
    return [name for name in names if name.endswith(".json") and name not in VOCABULARIES]


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is not JSON, so that no library reads it either."""
    try:
        return parse(read_bytes(path), path.name)
    except SourceError as error:
        if isinstance(error.__cause__, json.JSONDecodeError | UnicodeDecodeError):
            return None
        raise


def without_references(content: Any, code: Collection[str]) -> tuple[Any, dict[str, str]]:
    """The content of a JSON file without references to other files than ``code``, names of Python files.

    The references are returned as well: key -> the first thing that it names, both safe for a card.
    """
    found: dict[str, str] = {}
    return _cleaned(content, code, found), found


def with_local_names(content: Any, code: Collection[str]) -> Any:
    """The same, where ``auto_map`` names ``code`` without the repository that a model was loaded from.

    transformers saves such a model's ``module.Class`` as ``user/name--module.Class``, and its code beside it.
    """
    if not isinstance(content, dict) or AUTO_MAP not in content:
        return content

    def local(value: Any) -> Any:
        if isinstance(value, list):
            return [local(entry) for entry in value]
        if isinstance(value, dict):
            return {key: local(entry) for key, entry in value.items()}
        name = value.rpartition("--")[2] if isinstance(value, str) else ""
        return name if _file(name) in code else value

    return {**content, AUTO_MAP: local(content[AUTO_MAP])}


def check_references(folder: Path, code: Collection[str], names: Collection[str]) -> None:
    """Raises ``SourceError`` if one of these files of a converted repository names other code."""
    for name in (CONFIG, *json_files(names)):
        refuse(name, without_references(read_json(folder / name), code)[1])


def refuse(name: str, found: dict[str, str]) -> None:
    """Raises ``SourceError`` if ``without_references`` found any in the file of this name."""
    for key, text in found.items():
        raise SourceError(
            f"{name} has {key} {text}, which makes loading run code that is not this repository's own; "
            "remove the key, or convert the source again"
        )


def _cleaned(value: Any, code: Collection[str], found: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_cleaned(entry, code, found) for entry in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, entry in value.items():
        other = next((text for text in _texts(key, entry) if _elsewhere(key, text, code)), None)
        if other is None:
            result[key] = _cleaned(entry, code, found)
        else:
            found.setdefault(plain_text(key), plain_text(other))
            result |= {key: NOT_COPIED} if key in IMPORTED else {}
    return result


def _texts(key: str, value: Any) -> Iterator[str]:
    """The texts at any depth below a key that can name code."""
    if key not in (*CLASSES, *KERNELS, *IMPORTED, *ARGUMENTS) and not key.endswith(PLACES):
        return
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts(key, entry)
    elif isinstance(value, str) or value is True:
        yield str(value)


def _elsewhere(key: str, text: str, code: Collection[str]) -> bool:
    if key in CLASSES:
        return _file(text) not in code
    if key in KERNELS:
        return "/" in text
    if key in IMPORTED:
        return "." in text and not text.startswith(LIBRARIES)
    return key != PLACES  # which records a config's own place, and is not read


def _file(reference: str) -> str:
    """The file that has the class ``module.Class``."""
    return f"{reference.partition('.')[0]}.py"
