"""What an export is: a form of a converted repository that another engine runs.

There are three parts:

* ``Export``: the options that were chosen, a frozen dataclass whose fields all have a default;
* ``ExportResult``: what was written;
* ``ExportKind``: what the command line, the pipeline and ``push`` need to know of every export of this kind.
  ``converter.exports.EXPORTS`` lists the kinds.

Importing a kind imports nothing heavy, so that ``--help`` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from converter.config import Config
    from converter.recipes import Recipe
    from converter.result.converted import ConvertedRepository
    from converter.source.base import Source
    from converter.source.checkpoint import Checkpoint
    from converter.verification import Check

Option = Callable[[Any], Any]
"""What ``click.option(...)`` returns."""


class ExportResult(Protocol):
    """What an export wrote."""

    @property
    def path(self) -> Path:
        """The repository, absolute."""
        ...

    @property
    def files(self) -> Mapping[str, int]:
        """File, relative to the repository -> bytes."""
        ...

    def moved(self, path: Path) -> ExportResult:
        """The same result, after the repository was renamed to ``path``."""
        ...

    def summary(self) -> str:
        """What was written and what validation found, for people."""
        ...

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        ...


class Export(Protocol):
    """One export with its options."""

    @property
    def name(self) -> str:
        """Name of its kind."""
        ...

    @property
    def words(self) -> list[str]:
        """The flag and the options as on a command line, without options that have their default."""
        ...

    def check_installed(self) -> None:
        """Checks what can be known before anything is read.

        Raises:
            MissingPackage: a package that the export needs is not installed.
            ProviderError: a device that the export needs is not available.
        """
        ...

    def check(self, recipe: Recipe, config: Config, source: Source) -> None:
        """Checks that a repository with this config can be exported, before weights are downloaded.

        Args:
            recipe: how the model will be converted.
            config: config.json of the converted repository.
            source: what will be converted; small files may be fetched from it.

        Raises:
            UnsupportedModel: it cannot; says why.
            SourceError: a file that the export needs is damaged.
        """
        ...

    def planned_files(self, recipe: Recipe, config: Config, elements: Mapping[str, int]) -> list[str]:
        """Names of the files that ``write`` would write.

        Args:
            recipe, config: as for ``check``, which accepted them.
            elements: safetensors dtype of the weights -> number of elements; empty if they are not known.
        """
        ...

    def bytes_needed(self, checkpoint: Checkpoint, dtype: str | None) -> int:
        """Disk space that the export needs, in bytes, apart from some hundred kilobytes.

        Args:
            checkpoint: the source's; the parameters of ``.bin`` files are taken to have two bytes each.
            dtype: safetensors dtype that the weights will have; None for the checkpoint's own.
        """
        ...

    def write(self, repository: ConvertedRepository, *, progress: bool = False) -> ExportResult:
        """Exports a converted repository into its own folder; ``exports.staging`` does the common part.

        Args:
            repository: what to export; its folder is an absolute path.
            progress: draw progress bars on stderr.

        Raises:
            UnsupportedModel: the repository cannot be exported.
            ConverterError: the export is wrong or cannot be written; the folder is as it was.
        """
        ...


class ExportKind(Protocol):
    """A kind of export, as ``converter.exports.EXPORTS`` lists it."""

    @property
    def name(self) -> str:
        """Key of the result in JSON; ``some_name`` is asked for by ``--some-name``."""
        ...

    @property
    def help(self) -> str:
        """Help text of that flag."""
        ...

    @property
    def default(self) -> Export:
        """The export with all options at their defaults."""
        ...

    @property
    def reports(self) -> Sequence[str]:
        """Names of reports that an export writes.

        Nothing computes with a report and it may be written again, so the manifest does not list it.
        """
        ...

    @property
    def not_copied(self) -> Sequence[str]:
        """Names of small files that a conversion does not copy from a source.

        They belong to an export of the source, which is not scaled.
        """
        ...

    def options(self) -> Sequence[Option]:
        """The click options of this kind, in the order of the help text."""
        ...

    def take(self, arguments: dict[str, Any], *, validate: bool = True) -> Export:
        """Takes the values of ``options`` out of a command's arguments.

        Args:
            arguments: parameter name -> value; those of ``options`` are removed.
            validate: run the export before it is put in place.
        """
        ...

    def check_again(
        self, repository: ConvertedRepository, listed: Collection[str], *, progress: bool = False
    ) -> Sequence[Check]:
        """Checks what exports of this kind wrote into a repository; ``push`` asks for it.

        Args:
            repository: what the exports belong to; nothing in it is changed.
            listed: names of the files in the repository's manifest; others are ignored.
            progress: draw progress bars on stderr.

        Returns:
            What was checked; empty if the repository has no export of this kind.

        Raises:
            ValidationError: an export that is wrong.
            MissingPackage: a package that the check needs is not installed.
        """
        ...


def export_folder(folder: str | Path, export: Export, *, progress: bool = False) -> ExportResult:
    """Exports the converted repository in a folder.

    Args:
        folder: a repository that ``convert`` wrote.
        export: in which form.
        progress: draw progress bars on stderr.

    Raises:
        MissingPackage, ProviderError: see ``Export.check_installed``.
        SourceError: not a converted repository, or a damaged one.
        ConverterError: see ``Export.write``.
    """
    from converter.result.converted import open_converted

    export.check_installed()
    return export.write(open_converted(Path(folder).resolve()), progress=progress)
