"""Opens what a conversion wrote, for exports, push and validation: the repository must be this version's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from converter.errors import SourceError, UnsupportedModel
from converter.families.templates import templates_folder
from converter.model.model import Model
from converter.model.open import read_model
from converter.result.repository import small_files
from converter.source.open import open_folder
from converter.source.remote_code import check_references
from converter.source.sentence_transformers import nested_files
from converter.source.source import CONFIG
from converter.source.tokenizer import TEMPLATE

CONVERT_FIRST = "convert it first: ntk-convert MODEL --scale A --out DIR"


def open_converted(folder: Path) -> Model:
    """Opens a converted repository whose code is this version's; runs none of it.

    Raises ``SourceError`` for any other folder, and ``UnsupportedModel`` for what no conversion writes.
    """
    model = read_converted(folder)
    check_code(folder, model.templates)
    if model.checkpoint.format != "safetensors":
        raise SourceError(f"the weights of {folder} are not safetensors files; convert it again")
    return model


def read_converted(folder: Path) -> Model:
    """A converted repository, whatever its code; raises as ``open_converted``."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder; name a repository that ntk-convert wrote")
    if not (folder / CONFIG).is_file():
        raise SourceError(f"{folder} has no {CONFIG}; name a repository that ntk-convert wrote")
    for path in folder.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise SourceError(f"{path} is a pipe or a device, not a file; remove it")
    if not str(folder).isprintable():
        raise SourceError(f"the path {str(folder)[-80:]!r} has characters that cannot be printed; rename it")
    model = read_model(open_folder(folder))
    if model.stale_quantisation:
        raise UnsupportedModel(
            f"{folder}: {model.stale_quantisation[0]} says that the weights are quantised, and they are not; "
            f"convert it again: ntk-convert {folder} --out NEW"
        )
    if not model.converted:
        named = model.config_json.get("model_type")
        raise SourceError(f"{folder} is not converted (model_type {named!r}); {CONVERT_FIRST}")
    return model


def code_names(folder: Path, templates: Sequence[str]) -> list[str]:
    """The code files of a converted repository: its templates, and the tokenizer's if it has that."""
    return [*templates, *([TEMPLATE] if templates and (folder / TEMPLATE).is_file() else [])]


def check_code(folder: Path, templates: Sequence[str]) -> None:
    """Refuses a repository that has or names other code than this version writes; runs none of it.

    Verification runs this tool's own templates, which says something about the repository only if its copies
    are the same.
    """
    names = code_names(folder, templates)
    source = open_folder(folder)
    others = [CONFIG, *small_files(source.files), *nested_files(source).files]
    check_references(source, names, others)
    for name in names:
        if not (folder / name).is_file():
            raise SourceError(f"{folder} lacks {name}; convert it again: ntk-convert {folder} --out NEW")
        path, ours = folder / name, (templates_folder() / name).read_bytes()
        if path.stat().st_size != len(ours) or path.read_bytes() != ours:
            raise SourceError(
                f"{name} differs from what this version of ntk-convert writes and is not run; convert the "
                f"repository again: ntk-convert {folder} --out NEW"
            )
