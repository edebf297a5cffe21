"""Files in a source's folders that a converted repository needs too.

``additional_chat_templates/*.jinja`` are named chat templates of transformers. ``modules.json`` is of
sentence-transformers: the parts of a sentence encoder, in order, each with the folder of its settings,
such as ``1_Pooling`` (github.com/UKPLab/sentence-transformers, SentenceTransformer.save).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from converter.errors import SourceError
from converter.jsonfile import parse, read_bytes
from converter.source import CONFIG, Source, plain_text

CHAT_TEMPLATES = "additional_chat_templates"
MODULES = "modules.json"
MOST_MODULES, MOST_NAMED = 32, 8
"""Modules of one encoder, which has three or so; files that a note names."""
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
OWN_CODE = "sentence_transformers."
"""How the type of a module starts that is sentence-transformers' own."""


@dataclass(frozen=True)
class Nested:
    """Files in a source's folders."""

    files: dict[str, int | None]
    """Those to copy, ``folder/name``, and their sizes in bytes."""
    notes: Sequence[str]
    """What the result lacks."""


def nested_files(source: Source) -> Nested:
    """Looks for them; of a Hub repository, ``modules.json`` is downloaded for it."""
    files = {name: size for name, size in source.inside(CHAT_TEMPLATES).items() if name.endswith(".jinja")}
    notes = []
    modules = _modules(source)
    if modules is None:
        notes.append(f"{MODULES} is not the list of modules that sentence-transformers reads")
    for module in modules or []:
        folder, kind = module.get("path"), module.get("type")
        if not isinstance(kind, str) or not kind.startswith(OWN_CODE):
            notes.append(
                f"{MODULES} names {plain_text(kind)}, code of the source's own, which is not copied: "
                "sentence-transformers cannot load this repository"
            )
        if folder in ("", None):  # the transformer itself, whose files are in the root
            continue
        found = source.inside(folder) if isinstance(folder, str) else {}
        copied = {f"{folder}/{name}" for name in (CONFIG, WEIGHTS)} & found.keys()
        files |= {name: found[name] for name in sorted(copied)}
        same = {f"{folder}/{PICKLED}"} if f"{folder}/{WEIGHTS}" in found else set()
        left = (
            sorted(found.keys() - copied - same) if found else [f"{plain_text(folder)} ({MODULES} names it)"]
        )
        if left:
            more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
            notes.append(f"not copied for sentence-transformers: {', '.join(left[:MOST_NAMED])}{more}")
    return Nested(files, notes)


def _modules(source: Source) -> list[dict[str, Any]] | None:
    if MODULES not in source.files:
        return []
    source.fetch([MODULES])
    try:
        value = parse(read_bytes(source.folder / MODULES), MODULES)
    except SourceError:
        return None
    listed = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    return value if listed and len(value) <= MOST_MODULES else None
