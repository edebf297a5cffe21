"""What a converted repository on the disk consists of, and whether it still is what it must be.

What its manifest lists belongs to it, as a conversion or an export wrote it, and the card. Everything else in
the folder is somebody's own and stays where it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converter import manifest
from converter import recipe as recipes
from converter.checkpoint import Checkpoint, read_checkpoint
from converter.errors import SourceError, ValidationError, VerificationError
from converter.families import Config
from converter.jsonfile import read_object
from converter.onnx.export import check_requirements, graphs_in
from converter.recipe import Recipe
from converter.repository import PROVENANCE, check_code
from converter.source import CONFIG
from converter.weights.files import sha256

if TYPE_CHECKING:
    from converter.verification import Check

State = tuple[int, int, int, int]
"""Size in bytes, times of the last changes in ns, and number of a file: another state, another content."""
SMALL = 64 << 20
"""Bytes of a file that is compared with the manifest at once; larger ones are when they are sent."""


@dataclass(frozen=True)
class Contents:
    """A converted repository."""

    folder: Path
    config: Config
    recipe: Recipe
    checkpoint: Checkpoint
    graphs: Sequence[Path]
    states: Mapping[str, State]
    """Every file that belongs to it, relative to ``folder``, as it was when it was listed."""
    digests: Mapping[str, str | None]
    """SHA-256 by the manifest; None of linked weights, and what has none may change."""
    left: Sequence[str]
    """Files, and folders ending in a slash, that do not."""

    @property
    def files(self) -> dict[str, int]:
        """File -> size in bytes."""
        return {name: state[0] for name, state in self.states.items()}

    @property
    def source(self) -> str | None:
        """The Hub id or name of what it was made from."""
        origin = self.config[PROVENANCE].get("source")
        return origin if isinstance(origin, str) else None

    def check_unchanged(self) -> None:
        """Raises ``SourceError`` for a file that is not as it was when it was listed, and then verified."""
        for name, state in self.states.items():
            try:
                found = _state(self.folder / name)
            except OSError:
                found = None
            if found != state:
                raise SourceError(
                    f"{name} was changed meanwhile; run the command again when nobody writes there"
                )

    def check_digests(self, found: Mapping[str, str]) -> None:
        """Raises ``SourceError`` for a file, by its SHA-256 found, that is not what was converted."""
        for name, digest in found.items():
            if self.digests.get(name) not in (None, digest):
                raise SourceError(
                    f"{name} is not as the conversion or export wrote it, so nobody has verified it; put it "
                    "back, or convert again (what you add yourself, `hf upload` sends after the push)"
                )


def read_contents(folder: Path) -> Contents:
    """Lists a converted repository. Of the weights, only headers are read; no code is run.

    Raises:
        SourceError: no converted repository, a damaged one, code that is not this version's, or a link
            that leads out of the folder.
    """
    if not (folder / CONFIG).is_file():
        raise SourceError(f"{folder} has no {CONFIG}; name a repository that ntk-convert wrote")
    config = read_object(folder / CONFIG)
    if not isinstance(config.get(PROVENANCE), Mapping):
        raise SourceError(
            f"{folder} is not converted; convert it first: ntk-convert MODEL --scale A --out DIR"
        )
    recipe = recipes.of_checkpoint(config)
    if not recipe.converted:
        raise SourceError(f"{folder}/{CONFIG} is damaged: it says who wrote it, but not what; convert again")
    checkpoint = read_checkpoint(folder)
    if checkpoint.format != "safetensors":
        raise SourceError(f"the weights of {folder} are no safetensors files; convert the checkpoint again")
    present = set(_walk(folder))
    listed = manifest.read(folder)
    code = check_code(folder, config, recipe.templates)
    index = [checkpoint.index] if checkpoint.index else []
    for name in (CONFIG, *code, *checkpoint.files, *index):
        if name not in listed:
            raise SourceError(f"{name} is not in {manifest.MANIFEST}; convert the source again")
    root = folder.resolve()
    wanted = [*listed, *(name for name in manifest.UNLISTED if name in present)]
    for name in wanted:
        path = folder / name
        if not path.is_file():
            raise SourceError(f"{folder} lacks {name}, which was written there; convert the source again")
        if not path.resolve().is_relative_to(root):
            raise SourceError(f"{name} is a link that leads out of {folder}; put the file itself there")
    graphs = [path for path in graphs_in(folder) if path.relative_to(folder).as_posix() in listed]
    states = {name: _state(folder / name) for name in sorted(wanted)}
    digests = {name: entry.sha256 for name, entry in listed.items()}
    contents = Contents(
        folder, config, recipe, checkpoint, graphs, states, digests, sorted(present - states.keys())
    )
    small = {name: sha256(folder / name) for name in listed if digests[name] and states[name][0] <= SMALL}
    contents.check_digests(small)
    return contents


def verify(contents: Contents, *, progress: bool = False) -> list[Check]:
    """Checks a converted repository as the conversion did, and its graphs as the export did.

    Nothing in the folder is changed.

    Raises:
        VerificationError, ValidationError: the first check that failed.
        MissingPackage: it has graphs, and onnxruntime is not installed.
    """
    recipe, folder = contents.recipe, contents.folder
    for key, value in recipe.stored(folder, contents.checkpoint, contents.config).items():
        if contents.config.get(key) != value:
            raise VerificationError(f"{CONFIG}: {key} is not what the weights say; convert the source again")
    checks = list(recipe.verify(folder, recipe.own_scaling))
    return [*checks, *_check_graphs(contents, progress=progress)]


def _check_graphs(contents: Contents, *, progress: bool) -> Iterator[Check]:
    if not contents.graphs:
        return
    check_requirements()
    from converter.onnx.build import open_repository
    from converter.onnx.validation import run
    from converter.verification import Check

    named = {path.relative_to(contents.folder).as_posix(): path for path in contents.graphs}
    report = run(open_repository(contents.folder), named, None, progress=progress)
    if report.failure:
        raise ValidationError(f"{report.failure}; export it again, or remove it")
    for graph in report.graphs:
        places = ", ".join(place.provider for place in graph.providers)
        yield Check("graph", f"{graph.file} gives what the model gives, on {places}")


def _walk(folder: Path) -> Iterator[str]:
    """All files, relative to the folder; hidden folders and links to folders by their own name alone."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        closed = [name for name in folders if name.startswith(".") or (here / name).is_symlink()]
        folders[:] = sorted(set(folders) - set(closed) - {"__pycache__"})
        yield from (f"{(here / name).relative_to(folder).as_posix()}/" for name in closed)
        yield from ((here / name).relative_to(folder).as_posix() for name in files)


def _state(path: Path) -> State:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
