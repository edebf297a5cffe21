"""A converted repository, as verification, exports, evaluation and push use it, and the code in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from converter import recipes
from converter.config import Geometry, read_provenance
from converter.errors import SourceError, UnsupportedModel
from converter.families import Family
from converter.families.refusals import check_merged
from converter.families.templates import templates_folder
from converter.recipes import AlibiRecipe, Recipe
from converter.result.repository import small_files
from converter.scaling.scaling import Scaling
from converter.source.checkpoint import Checkpoint, read_checkpoint
from converter.source.open import open_folder
from converter.source.remote_code import check_references
from converter.source.sentence_transformers import nested_files
from converter.source.source import CONFIG, Source
from converter.source.tokenizer import TEMPLATE
from converter.weights.finite import Scan

CONVERT_FIRST = "convert it first: ntk-convert MODEL --scale A --out DIR"


@dataclass(frozen=True)
class ConvertedRepository:
    """What a conversion wrote into a folder."""

    folder: Path
    config: dict[str, Any]
    """The parsed config.json."""
    recipe: Recipe
    checkpoint: Checkpoint
    """The weights' headers; always safetensors."""

    @cached_property
    def files(self) -> Source:
        """What reads its small files."""
        return open_folder(self.folder)

    @property
    def family(self) -> Family:
        """Its ALiBi family.

        Raises:
            UnsupportedModel: the model is rotary, so it has no ALiBi family.
        """
        if not isinstance(self.recipe, AlibiRecipe):
            raise UnsupportedModel(
                f"model_type {self.recipe.model_type!r} has rotary positions, not ALiBi; it belongs to no "
                "ALiBi family"
            )
        return self.recipe.family

    @property
    def scaling(self) -> Scaling:
        """What was baked in."""
        return self.recipe.own_scaling

    @property
    def geometry(self) -> Geometry:
        """The sizes of its attention."""
        return self.recipe.geometry

    @property
    def decoder(self) -> bool:
        """Whether it is causal."""
        return self.recipe.decoder

    @property
    def has_cache(self) -> bool:
        """Whether its class generates, and so has a cache in a graph."""
        return self.decoder and self.has_logits

    @property
    def train_length(self) -> int | None:
        """Trained length in tokens, as the conversion recorded it; else that of its dynamic scaling."""
        provenance = read_provenance(self.config)
        recorded = None if provenance is None else provenance.train_length
        scaling = self.scaling
        return scaling.train_length if recorded is None and scaling.dynamic else recorded

    @property
    def source(self) -> str | None:
        """Hub id or name of the source it was made from."""
        provenance = read_provenance(self.config)
        return None if provenance is None else provenance.source

    @property
    def head(self) -> str:
        """The end of its class's name: ``ForCausalLM``, ``Model``, ..."""
        name: str = self.config["architectures"][0]
        return name.removeprefix(f"Ntk{self.family.camel}")

    @property
    def linear_layers(self) -> list[str]:
        """Names of the linear layers in its blocks, which are what peft calls ``target_modules``."""
        weight = re.compile(rf"{re.escape(self.family.layers)}\.\d+\.(?:.+\.)?(\w+)\.weight")
        found = {
            weight.fullmatch(self.family.below(name))
            for name, tensor in self.checkpoint.tensors.items()
            if len(tensor.shape) == 2
        }
        return sorted({match[1] for match in found if match})

    def scan(self, file: str, remedy: str) -> Scan:
        """Finds weights that are NaN or infinite in the bytes of a file; ``remedy`` ends its message."""
        tensors = (tensor for tensor in self.checkpoint.tensors.values() if tensor.file == file)
        return Scan(tensors, file, self.recipe.unread, remedy)

    @property
    def has_logits(self) -> bool:
        """Whether it computes logits, a number for each token of the vocabulary."""
        named: list[str] = self.config["architectures"]
        return named == [self.family.language_model]


def open_converted(folder: Path) -> ConvertedRepository:
    """Reads a converted repository's config and the headers of its weights; runs none of its code.

    Raises:
        SourceError: not a converted repository, a damaged one, or one with code of another version.
        UnsupportedModel: no conversion writes such a model.
    """
    config, recipe = read_converted(folder)
    check_code(folder, recipe.templates)
    checkpoint = read_checkpoint(folder)
    if checkpoint.format != "safetensors":
        raise SourceError(f"the weights of {folder} are not safetensors files; convert the checkpoint again")
    return ConvertedRepository(folder, config, recipe, checkpoint)


def read_converted(folder: Path) -> tuple[dict[str, Any], Recipe]:
    """The parsed config.json of a converted repository, and its recipe; raises as ``open_converted``."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder; name a repository that ntk-convert wrote")
    check_merged(folder, [path.name for path in folder.iterdir()])
    if not (folder / CONFIG).is_file():
        raise SourceError(f"{folder} has no {CONFIG}; name a repository that ntk-convert wrote")
    for path in folder.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise SourceError(f"{path} is a pipe or a device, not a file; remove it")
    if not str(folder).isprintable():
        raise SourceError(f"the path {str(folder)[-80:]!r} has characters that cannot be printed; rename it")
    config = open_folder(folder).object(CONFIG)
    provenance = read_provenance(config)
    recipe = recipes.of_checkpoint(config)
    if not recipe.converted:
        if provenance is not None:
            raise SourceError(
                f"{folder}/{CONFIG} is damaged: it has ntk_convert's record, but not the converted model's "
                "settings; convert the source again"
            )
        named = config.get("model_type")
        raise SourceError(f"{folder} is not converted (model_type {named!r}); {CONVERT_FIRST}")
    return config, recipe


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
    check_references(source, names, copied_files(source))
    for name in names:
        if not (folder / name).is_file():
            raise SourceError(f"{folder} lacks {name}; convert the source again")
        if differs(folder, name):
            raise SourceError(
                f"{name} differs from what this version of ntk-convert writes and is not run; convert the "
                "source again"
            )


def copied_files(source: Source) -> list[str]:
    """The files of a converted repository but for its weights and its code."""
    return [CONFIG, *small_files(source.files), *nested_files(source).files]


def differs(folder: Path, name: str) -> bool:
    """Whether a code file of a repository is not the one that this version writes."""
    path, ours = folder / name, (templates_folder() / name).read_bytes()
    return path.stat().st_size != len(ours) or path.read_bytes() != ours
