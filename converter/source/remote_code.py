"""References to code in the JSON files of a repository.

An ALiBi result needs ``trust_remote_code=True``, and then transformers and sentence-transformers run what
such files name: classes of any repository (``user/name--module.Class``), kernels of the Hub, installed
packages. So a converted repository names its own code files and no other code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from converter.errors import SourceError
from converter.source.source import Source, plain_text

CLASSES = ("auto_map", "custom_pipelines")
"""Keys of transformers: each text below them names a class, of this repository or of another one."""
KERNELS = tuple(f"{start}{what}_implementation" for what in ("attn", "experts") for start in ("", "_"))
"""Keys that make transformers load code from the Hub if their value is a name such as ``user/name``."""
ACTIVATIONS = ("activation_function", "activation_fn", "sbert_ce_default_activation_function")
IMPORTED = ("type", "types", "tokenizer_class", *ACTIVATIONS)
"""Keys of sentence-transformers: a dotted name is imported."""
LIBRARIES = ("sentence_transformers.", "torch.")
NOT_COPIED = "sentence_transformers.CodeThatWasNotCopied"
"""Takes the place of a dotted name. It does not load, while a default could load and be silently wrong."""
ARGUMENTS = ("trust_remote_code", "code_revision", "use_kernels")
"""Keys that sentence-transformers passes on, and that choose which code runs."""
PLACES = "_name_or_path"
"""End of the keys that make a library load a part of the model from another repository."""


def without_references(content: Any, code: Collection[str]) -> tuple[Any, dict[str, str]]:
    """The content of a JSON file without references to other files than ``code``, names of Python files.

    The references are returned as well: key -> the first thing that it names, both safe for a card.
    """
    found: dict[str, str] = {}
    return _cleaned(content, code, found), found


def check_references(source: Source, code: Collection[str], names: Iterable[str]) -> None:
    """Raises ``SourceError`` if one of these files of a converted repository names other code."""
    for name, content in source.contents(name for name in names if name.endswith(".json")).items():
        for key, text in without_references(content, code)[1].items():
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
        other = next((text for text in _texts(key, entry) if _foreign(key, text, code)), None)
        if other is None:
            result[key] = _cleaned(entry, code, found)
            continue
        found.setdefault(plain_text(key), plain_text(other))
        if key in IMPORTED:
            result[key] = NOT_COPIED
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


def _foreign(key: str, text: str, code: Collection[str]) -> bool:
    """Whether a text names code other than these files."""
    if key in CLASSES:
        return f"{text.partition('.')[0]}.py" not in code
    if key in KERNELS:
        return "/" in text
    if key in IMPORTED:
        return "." in text and not text.startswith(LIBRARIES)
    return key != PLACES  # which records a config's own place, and is not read
