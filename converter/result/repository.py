"""The files of a converted repository except its weights and card: config, templates, small files."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from converter.config import Config
from converter.errors import SourceError
from converter.families.templates import templates_folder
from converter.scaling.request import SLOPES_FILE
from converter.source.keys import ADAPTER
from converter.source.remote_code import without_references
from converter.source.source import CARD, CONFIG, QUANTISED_BY, Source
from converter.weights.files import copy_file

KEPT_ENDS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
LICENCE = re.compile(
    r"(copying|notice|use_policy|acceptable_use|licen[sc]e).*"
    r"|.*(licen[sc]e|许可)[^.]*(\.(md|txt|pdf))?",
    re.IGNORECASE,
)
"""Matches names of licences, also of Baichuan: Community License for Baichuan2 Model.pdf."""
MOST_FILES = 1000
"""Small files; a repository has about ten, and each is written and flushed to the disk on its own."""
VERSIONED = re.compile(r"(config|tokenizer)\.\d.*\.json")
"""Files for one version of transformers, which a key that is not kept would name; see ``keys.py``."""
LEFT_ENDS = (".index.json", ".safetensors", ".bin", ".py")
# Files that are not copied although their suffix is in KEPT_ENDS: config and card are written anew, an
# adapter's config would make transformers look for the adapter, and the others describe a training, another
# conversion or a graph.
LEFT_NAMES = (
    CONFIG,
    CARD,
    ADAPTER,
    "trainer_state.json",
    "all_results.json",
    "eval_results.json",
    "train_results.json",
    "ntk_convert.json",
    *QUANTISED_BY,
    "genai_config.json",
    "onnx_validation.json",
    SLOPES_FILE,
)


def small_files(names: Iterable[str]) -> list[str]:
    """The files of a source that are copied as they are: tokenizer, generation config, licence."""
    found = sorted(
        name
        for name in names
        if not name.startswith(".")
        and name not in LEFT_NAMES
        and not VERSIONED.fullmatch(name)
        and not name.endswith(LEFT_ENDS)
        and (name.endswith(KEPT_ENDS) or LICENCE.fullmatch(name))
    )
    if len(found) > MOST_FILES:
        raise SourceError(
            f"the source has {len(found)} small files such as {found[0]!r}, more than a model has "
            f"({MOST_FILES}); move those that are not the model's to another folder"
        )
    return found


def set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Records the dtype of the weights, e.g. ``bfloat16``, under the key that the config uses for it."""
    keys = [key for key in ("torch_dtype", "dtype") if key in config]
    config |= dict.fromkeys(keys or ["torch_dtype"], dtype)


def write_repository(
    folder: Path,
    config: Config,
    templates: Iterable[str],
    source: Source,
    copied: Iterable[str],
    rewritten: Mapping[str, Any],
) -> None:
    """Writes them; ``copied`` must have been fetched, ``rewritten`` is the content of other JSON files."""
    for name, value in {CONFIG: config, **rewritten}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        # transformers sorts the keys of a config.json too, so what it saves of a result looks the same.
        text = json.dumps(value, indent=2, sort_keys=name == CONFIG)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    for name in templates:
        copy_file(templates_folder() / name, folder / name)
    for name in copied:
        (folder / name).parent.mkdir(exist_ok=True)
        source.copy(name, folder / name)


def own_code_only(contents: Mapping[str, Any], code: Collection[str]) -> tuple[dict[str, Any], str | None]:
    """Removes references to other code than ``code`` from the result's JSON files; see ``remote_code``.

    Returns the new content of each file that had some, by name, and a note, or None.
    """
    files: dict[str, Any] = {}
    removed = []
    for name, content in contents.items():
        cleaned, found = without_references(content, code)
        if found:
            files[name] = cleaned
            removed.append(f"{name} ({', '.join(f'{key}: {text}' for key, text in found.items())})")
    what = "references to code that is not copied were removed, so what needs it does not load"
    return files, f"{what}: {', '.join(removed)}" if removed else None
