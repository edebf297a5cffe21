"""The manifest: size and SHA-256 of every file that a conversion or an export wrote into a repository.

``push`` sends the listed files and no others, and only as they were when they were verified. The card and the
reports of exports are not listed: nothing computes with them, and they may be edited or written again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.config import is_integer
from converter.errors import SourceError
from converter.model.model import Model
from converter.progress import byte_bar
from converter.result.converted import code_names
from converter.source.jsonfile import read_object
from converter.source.source import CARD, CONFIG, Source
from converter.weights.files import sha256

MANIFEST = "ntk_convert.json"
AGAIN = "if the model was changed on purpose, convert it: ntk-convert {} --out NEW"
"""Advice for a folder that transformers wrote, or with files that are not as they were written."""
EXPORTED = (".onnx", ".onnx_data", "genai_config.json")
"""How the names of the files end that an export writes."""
UNLISTED = (CARD, MANIFEST)


@dataclass(frozen=True)
class Entry:
    size: int
    """In bytes."""
    sha256: str | None
    """None for weights that are linked to the source's, since nothing has read them."""


def write(folder: Path, names: Iterable[str], known: Mapping[str, str | None]) -> None:
    """Writes the manifest of a repository, which lists ``names``.

    ``known`` is the SHA-256 of some of the files, or None for files that must not be read; all others are.
    """
    files = {}
    for name in sorted(set(names) - set(UNLISTED)):
        path = folder / name
        digest = known[name] if name in known else sha256(path)
        files[name] = {"size": path.stat().st_size, "sha256": digest}
    new = folder / f".{MANIFEST}.new"
    new.write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
    new.replace(folder / MANIFEST)


def read_manifest(folder: Path, unlisted: Collection[str] = UNLISTED) -> dict[str, Entry]:
    """The listed files, by name; ``SourceError`` if there is no manifest, or it is damaged."""
    if not (folder / MANIFEST).is_file():
        raise SourceError(f"{folder} has no {MANIFEST}, which a conversion writes; {AGAIN.format(folder)}")
    return _entries(read_object(folder / MANIFEST).get("files"), unlisted)


def model_files(model: Model) -> list[str]:
    """The files of a converted repository that decide what it computes: config.json, code and weights."""
    index = model.checkpoint.index
    code = code_names(model.folder, model.templates)
    return [CONFIG, *code, *model.checkpoint.files, *([] if index is None else [index])]


def compare(model: Model, names: Collection[str] | None = None, *, progress: bool = False) -> dict[str, str]:
    """The SHA-256 of the files in the manifest of a converted repository; ``names`` are those that matter.

    All of them do by default. Raises ``SourceError`` if one is not as it was written, or if a file with which
    the model computes is not listed. Linked weights, which nothing had read before, are searched for NaN and
    infinity.
    """
    folder, listed = model.folder, read_manifest(model.folder)
    for name in model_files(model):
        if name not in listed:
            raise SourceError(
                f"{name} is not in {MANIFEST}, so nobody has verified it; {AGAIN.format(folder)}, otherwise "
                "remove it, or convert the source again"
            )
    wanted = {name: entry for name, entry in listed.items() if names is None or name in names}
    for name in wanted:
        if not (folder / name).is_file():
            raise SourceError(f"{folder} lacks {name}, which was written there; {_remedy(name, folder)}")
    found = {}
    total = sum((folder / name).stat().st_size for name in wanted)
    with byte_bar("reading files", total, show=progress) as advance:
        for name, entry in wanted.items():
            look = bool if entry.sha256 else model.scan(name, "convert an earlier save of it")
            found[name] = sha256(folder / name, advance, look=look)
            if entry.sha256 not in (None, found[name]):
                raise SourceError(
                    f"{name} is not as the conversion or export wrote it, so nobody has verified it; "
                    f"{_remedy(name, folder)}"
                )
    return found


def _remedy(name: str, folder: Path) -> str:
    """What to do about a file that is not as it was written."""
    if name.endswith(EXPORTED):
        return f"put it back, or export it again: ntk-convert export {folder}"
    return f"{AGAIN.format(folder)}, otherwise put it back, or convert the source again"


def listed(source: Source) -> dict[str, Entry]:
    """The files that the manifest in a source lists; empty without one, or with one that has no digests."""
    return _entries(source.object(MANIFEST).get("files"), UNLISTED)


def digests(content: Mapping[str, Any]) -> dict[str, str | None]:
    """The files that a manifest of any version lists -> SHA-256, None where it has none."""
    files = content.get("files")
    if isinstance(files, list):
        return dict.fromkeys(map(str, files))
    return {name: entry.sha256 for name, entry in _entries(files, UNLISTED).items()}


def _entries(files: Any, unlisted: Collection[str]) -> dict[str, Entry]:
    entries = {}
    for name, found in files.items() if isinstance(files, dict) else ():
        size, digest = (found.get("size"), found.get("sha256")) if isinstance(found, dict) else (None, None)
        plain = not Path(name).is_absolute() and ".." not in Path(name).parts and name not in unlisted
        if not plain or not is_integer(size) or not isinstance(digest, str | None):
            raise SourceError(f"{MANIFEST} is damaged ({name[:100]!r}); convert the source again")
        entries[name] = Entry(size, digest)
    return entries


def update(folder: Path, added: Mapping[str, str]) -> None:
    """Lists files that were added or replaced, by their SHA-256, and removes those that are gone.

    A folder without a manifest gets none, because it may hold other files as well.
    """
    if not (folder / MANIFEST).is_file():
        return
    known = {name: entry.sha256 for name, entry in read_manifest(folder).items() if (folder / name).is_file()}
    known.update(added)
    write(folder, known, known)
