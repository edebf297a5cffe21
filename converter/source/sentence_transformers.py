"""Files in a source's subfolders that a converted repository also needs.

``additional_chat_templates/*.jinja`` are named chat templates of transformers. ``modules.json`` is a file of
sentence-transformers that lists the parts of a sentence encoder in order, each with the folder of its
settings, such as ``1_Pooling`` (github.com/UKPLab/sentence-transformers, SentenceTransformer.save).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import SourceError
from converter.source.jsonfile import parse, read_bytes
from converter.source.source import CONFIG, Source, plain_text

CHAT_TEMPLATES = "additional_chat_templates"
MODULES = "modules.json"
UNREADABLE = f"{MODULES} is not a list of modules that sentence-transformers can read"
MOST_MODULES, MOST_NAMED = 32, 8
"""Modules of one encoder (usually about three), and file names in one note."""
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
NO_FILES = ("sentence_transformers.models.Normalize",)
"""Types of modules that old releases saved without a file; git and the Hub have no empty folders."""
LIBRARY = "sentence_transformers."
"""Prefix of the types of modules that are part of sentence-transformers."""


@dataclass(frozen=True)
class Nested:
    """Files in a source's subfolders."""

    files: dict[str, int | None]
    """Files to copy, as ``folder/name``, and their sizes in bytes."""
    notes: Sequence[str]
    """What the result lacks, one sentence each."""
    sentence_encoder: bool | None
    """Whether sentence-transformers loads the result by its ``modules.json``; None if there is none."""


def nested_files(source: Source) -> Nested:
    """Finds the files to copy; from the Hub, ``modules.json`` is downloaded for this."""
    files = {name: size for name, size in source.inside(CHAT_TEMPLATES).items() if name.endswith(".jinja")}
    notes = []
    modules: list[dict[str, Any]] = []
    if MODULES in source.files:
        source.fetch([MODULES])
        try:
            modules = read_modules(source.folder)
        except SourceError:
            notes.append(UNREADABLE)
    for module in modules:
        folder, kind = module.get("path"), module.get("type")
        if not isinstance(kind, str) or not kind.startswith(LIBRARY):
            notes.append(
                f"{MODULES} names {plain_text(kind)}, code of the source that is not copied, so "
                "sentence-transformers cannot load this repository"
            )
        if folder in ("", None):  # the transformer itself, whose files are in the root
            continue
        found = source.inside(folder) if isinstance(folder, str) else {}
        if not found and kind in NO_FILES:
            continue
        copied = {f"{folder}/{name}" for name in (CONFIG, WEIGHTS)} & found.keys()
        files |= {name: found[name] for name in sorted(copied)}
        same = {f"{folder}/{PICKLED}"} if f"{folder}/{WEIGHTS}" in found else set()
        left = (
            sorted(found.keys() - copied - same) if found else [f"{plain_text(folder)} ({MODULES} names it)"]
        )
        if left:
            more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
            notes.append(f"not copied for sentence-transformers: {', '.join(left[:MOST_NAMED])}{more}")
    return Nested(files, notes, sentence_encoder=not notes if modules or notes else None)


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """The entries of ``modules.json``, or a ``SourceError`` if sentence-transformers could not read them."""
    value = parse(read_bytes(folder / MODULES), MODULES)
    listed = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    if not listed or len(value) > MOST_MODULES:
        raise SourceError(UNREADABLE)
    modules: list[dict[str, Any]] = value
    return modules
