"""The code in a converted repository, and a check that it is unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from converter.config import Config
from converter.errors import SourceError
from converter.families.refusals import check_kernels
from converter.families.templates import templates_folder
from converter.source.base import CONFIG
from converter.source.tokenizer import TEMPLATE


def code_names(folder: Path, templates: Sequence[str]) -> list[str]:
    """The code files of a converted repository: its templates, and the tokenizer's if it has that."""
    return [*templates, *([TEMPLATE] if templates and (folder / TEMPLATE).is_file() else [])]


def check_code(folder: Path, config: Config, templates: Sequence[str]) -> None:
    """Checks that a converted repository holds the code that this version writes; runs none of it.

    Verification runs this tool's own templates, which says something about the repository only if its copies
    are the same.

    Args:
        folder: the repository.
        config: its config.json.
        templates: names of the code files that it must hold.

    Raises:
        SourceError: the code differs or is missing, or the config names other code.
        UnsupportedModel: the config replaces the attention with code from the Hub.
    """
    check_kernels(config)
    names = code_names(folder, templates)
    if not all(f"{reference.partition('.')[0]}.py" in names for reference in references(config)):
        raise SourceError(f"{CONFIG}: auto_map names code outside this repository; convert again")
    for name in names:
        if not (folder / name).is_file():
            raise SourceError(f"{folder} lacks {name}; convert the source again")
        if differs(folder, name):
            raise SourceError(
                f"{name} differs from what this version of ntk-convert writes and is not run; convert the "
                "source again"
            )


def references(config: Config) -> list[str]:
    """What the config's ``auto_map`` names: ``module.Class``, or ``user/name--module.Class`` elsewhere."""
    mapped = config.get("auto_map") or {}
    return [str(named) for named in (mapped.values() if isinstance(mapped, Mapping) else [mapped])]


def differs(folder: Path, name: str) -> bool:
    """Whether a code file of a repository is not the one that this version writes."""
    path, ours = folder / name, (templates_folder() / name).read_bytes()
    return path.stat().st_size != len(ours) or path.read_bytes() != ours
