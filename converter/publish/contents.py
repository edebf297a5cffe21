"""What belongs to a converted repository on the disk, and whether it is still right.

The files in its manifest belong to it, as a conversion or an export wrote them, and so do the card and the
reports of exports. All other files in the folder are the user's own and are not pushed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converter import validation
from converter.config import PROVENANCE
from converter.errors import SourceError, ValidationError
from converter.model.model import Model
from converter.onnx.files import REPORT, graphs_in
from converter.result import manifest
from converter.result.converted import CONVERT_FIRST, code_names, open_converted
from converter.source.source import CONFIG

if TYPE_CHECKING:
    from converter.verification import Check

UNLISTED = (*manifest.UNLISTED, REPORT)
"""Files that belong to a repository, but are not in its manifest; they may be edited or written again."""


@dataclass(frozen=True)
class Contents:
    repository: Model
    files: Mapping[str, int]
    """Every file that belongs to it, relative to its folder -> bytes."""
    digests: Mapping[str, str]
    """File in the manifest -> SHA-256. Other files may change."""
    left: Sequence[str]
    """Files that do not belong to it, and folders, which end in a slash."""

    @property
    def origin(self) -> str:
        """Hub id or name of what it was made from."""
        assert self.repository.provenance is not None
        return self.repository.provenance.source or "a model"


def read_contents(folder: Path, *, progress: bool = False) -> Contents:
    """Reads a converted repository; no code is run.

    Raises ``SourceError`` for one that is not complete, or with a file that is not as it was written. Linked
    weights, which nothing has read before, are searched for NaN and infinity.
    """
    repository = open_converted(folder)
    if PROVENANCE not in repository.result_config:
        raise SourceError(f"{folder}/{CONFIG} does not say what it was made from; {CONVERT_FIRST}")
    present = set(_walk(folder))
    listed = manifest.read_manifest(folder, UNLISTED)
    code = code_names(folder, repository.templates)
    for name in listed:
        if name.endswith(".py") and name not in code:
            raise SourceError(
                f"{name} is listed in {manifest.MANIFEST}, but no conversion writes it; remove it"
            )
    wanted = sorted([*listed, *(name for name in UNLISTED if name in present)])
    for name in wanted:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise SourceError(f"{name} is a link that leads out of {folder}; put the file itself there")
    digests = manifest.compare(repository, progress=progress)
    files = {name: (folder / name).stat().st_size for name in wanted}
    return Contents(repository, files, digests, sorted(present - files.keys()))


def verify(contents: Contents, *, progress: bool = False) -> list[Check]:
    """Checks the model and the listed graphs as ``validate`` does; raises for the first check that fails."""
    from converter.verification import Check

    model = contents.repository
    checks = validation.verify(model, progress=progress)
    graphs = {name: path for name, path in graphs_in(model.folder).items() if name in contents.digests}
    if graphs:
        report = validation.run_graphs(model, graphs, progress=progress)
        if report.failure:
            raise ValidationError(f"{report.failure}; export it again, or remove it")
        checks += [Check("graph", f"{graph.file}: {graph}") for graph in report.graphs]
    return checks


def _walk(folder: Path) -> Iterator[str]:
    """All files, relative to the folder. Hidden folders and links to folders are named, but not entered."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        closed = [name for name in folders if name.startswith(".") or (here / name).is_symlink()]
        folders[:] = sorted(set(folders) - set(closed) - {"__pycache__"})
        yield from (f"{(here / name).relative_to(folder).as_posix()}/" for name in closed)
        yield from ((here / name).relative_to(folder).as_posix() for name in files)
