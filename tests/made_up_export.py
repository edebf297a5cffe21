"""A made-up second kind of export. Importing this module registers it, as an entry in ``EXPORTS`` would."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from converter import exports
from converter.config import Config
from converter.errors import UnsupportedModel, ValidationError
from converter.exports.base import Option
from converter.exports.staging import draft
from converter.recipes import Recipe
from converter.result.converted import ConvertedRepository
from converter.source.base import Source
from converter.source.checkpoint import Checkpoint
from converter.verification import Check

FILE, REPORT = "made_up.bin", "made_up_report.json"
FILL = b"\x2a"


@dataclass(frozen=True)
class Result:
    """See ``ExportResult``."""

    path: Path
    files: dict[str, int]

    def moved(self, path: Path) -> Result:
        return replace(self, path=path)

    def summary(self) -> str:
        return f"{FILE} of {self.files[FILE]} bytes"

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "files": self.files}


def check_decoder(recipe: Recipe) -> None:
    if not recipe.decoder:
        raise UnsupportedModel("only decoders are made up")


@dataclass(frozen=True)
class MadeUp:
    """See ``Export``: a file of so many bytes."""

    size: int = 1
    validate: bool = True

    name = "made_up"

    @property
    def words(self) -> list[str]:
        return ["--made-up", *(["--made-up-size", str(self.size)] if self.size != 1 else [])]

    def check_installed(self) -> None:
        pass

    def check(self, recipe: Recipe, config: Config, source: Source) -> None:
        del config, source
        check_decoder(recipe)

    def planned_files(self, recipe: Recipe, config: Config, elements: Mapping[str, int]) -> list[str]:
        del recipe, config, elements
        return [FILE, *[REPORT] * self.validate]

    def bytes_needed(self, checkpoint: Checkpoint, dtype: str | None) -> int:
        del checkpoint, dtype
        return self.size

    def write(self, repository: ConvertedRepository, *, progress: bool = False) -> Result:
        del progress
        check_decoder(repository.recipe)
        with draft(repository.folder, self.name) as made:
            made.files[FILE] = made.beside(FILE)
            made.files[FILE].write_bytes(FILL * self.size)
            if self.validate:
                made.reports[REPORT] = made.work / REPORT
                made.reports[REPORT].write_text("{}")
            made.section = "Made up", f"`{FILE}` has {self.size} bytes.\n"
        return Result(repository.folder, made.sizes)


class MadeUpKind:
    """See ``ExportKind``."""

    name = MadeUp.name
    help = "Make a file up."
    default = MadeUp()
    reports = (REPORT,)
    not_copied = (REPORT,)

    def options(self) -> Sequence[Option]:
        return (click.option("--made-up-size", type=int, default=1, help="Bytes to make up."),)

    def take(self, arguments: dict[str, Any], *, validate: bool = True) -> MadeUp:
        return MadeUp(arguments.pop("made_up_size"), validate)

    def check_again(
        self, repository: ConvertedRepository, listed: Collection[str], *, progress: bool = False
    ) -> Sequence[Check]:
        del progress
        if FILE not in listed:
            return []
        if (repository.folder / FILE).read_bytes().strip(FILL):
            raise ValidationError(f"{FILE} is not made up")
        return [Check("made up", f"{FILE} is all made up")]


exports.EXPORTS = (*exports.EXPORTS, MadeUpKind())
