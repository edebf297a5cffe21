"""How a repository makes one vector of a text, as its files for sentence-transformers say.

``modules.json`` lists the parts of a sentence encoder. What is computed here is a transformer, a pooling and
a normalisation (github.com/UKPLab/sentence-transformers, modules/pooling.py and modules/normalize.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import SourceError, UnsupportedModel
from converter.source.jsonfile import read_object
from converter.source.sentence_transformers import LIBRARY, MODULES, UNREADABLE, read_modules
from converter.source.source import CONFIG, plain_text

SENTENCES = "sentence_embedding"
"""What sentence-transformers calls the vector of a text."""
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older key of 1_Pooling/config.json -> mode, in the order in which several vectors are joined."""
MODES = tuple(FLAGS.values())


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a text become one vector, over its real tokens."""

    modes: tuple[str, ...]
    """Of ``MODES``; the vectors of several are joined."""
    normalised: bool
    """Whether the vector is scaled to unit length."""

    def __str__(self) -> str:
        return " and ".join(self.modes) + (", scaled to unit length" if self.normalised else "")

    def to_json(self) -> dict[str, Any]:
        """Its fields, as JSON."""
        return {"modes": list(self.modes), "normalised": self.normalised}


def read_pooling(folder: Path) -> Pooling | None:
    """How sentence-transformers would pool a repository's hidden states; None without ``modules.json``.

    Raises:
        UnsupportedModel: in a way that is not computed here.
        SourceError: one of the files is damaged.
    """
    if not (folder / MODULES).is_file():
        return None
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(
            f"{MODULES} lists {', '.join(map(plain_text, kinds)) or 'nothing'}; what can be computed is "
            "Transformer, Pooling and Normalize, in this order"
        )
    for kind, part in modules[2:]:
        settings = _settings(folder, part)
        if settings.get("module_input_name", SENTENCES) != SENTENCES:
            raise UnsupportedModel(f"{kind} of {MODULES} does not scale the vector of the text")
    pooling = _settings(folder, modules[1][1])
    if not pooling:
        raise UnsupportedModel(f"{modules[1][1]}/{CONFIG} is missing, which says how to pool")
    if pooling.get("include_prompt", True) is not True:
        raise UnsupportedModel("the pooling leaves out a prompt, whose length is not known here")
    return Pooling(_modes(pooling), normalised=len(modules) > 2)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The kind of each module, and its folder."""
    found = []
    for module in read_modules(folder):
        kind, part = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(part, str) or Path(part).name != part:
            raise SourceError(UNREADABLE)
        found.append((kind.rpartition(".")[2] if kind.startswith(LIBRARY) else kind, part))
    return found


def _settings(folder: Path, part: str) -> dict[str, Any]:
    path = folder / part / CONFIG
    return read_object(path) if part and path.is_file() else {}


def _modes(settings: dict[str, Any]) -> tuple[str, ...]:
    """The modes that a pooling's settings name; the mean if they name none, as in sentence-transformers."""
    named = settings.get("pooling_mode")
    if named is None:
        named = [mode for flag, mode in FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = named if isinstance(named, list) else [named]
    for mode in modes:
        if mode not in MODES:
            raise UnsupportedModel(f"the pooling mode {plain_text(mode)} is not one of {', '.join(MODES)}")
    return tuple(modes)
