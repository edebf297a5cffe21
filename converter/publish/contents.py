"""What belongs to a converted repository on the disk, and whether it is still right.

The files in its manifest belong to it, as a conversion or an export wrote them, and so do the card and the
reports of exports. All other files in the folder are the user's own and are not pushed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converter.config import read_provenance
from converter.errors import SourceError, VerificationError
from converter.onnx.files import REPORT
from converter.progress import byte_bar
from converter.result import manifest
from converter.result.converted import CONVERT_FIRST, ConvertedRepository, code_names, open_converted
from converter.source.source import CONFIG
from converter.weights.files import sha256

if TYPE_CHECKING:
    from converter.verification import Check

UNLISTED = (*manifest.UNLISTED, REPORT)
"""Files that belong to a repository, but are not in its manifest; they may be edited or written again."""


@dataclass(frozen=True)
class Contents:
    """A converted repository."""

    repository: ConvertedRepository
    files: Mapping[str, int]
    """Every file that belongs to it, relative to its folder -> bytes."""
    digests: Mapping[str, str]
    """File in the manifest -> SHA-256. Other files may change."""
    left: Sequence[str]
    """Files that do not belong to it, and folders, which end in a slash."""


def read_contents(folder: Path, *, progress: bool = False) -> Contents:
    """Reads a converted repository; no code is run.

    Raises ``SourceError`` for one that is not complete, or with a file that is not as it was written. Linked
    weights, which nothing has read before, are searched for NaN and infinity.
    """
    repository = open_converted(folder)
    if read_provenance(repository.config) is None:
        raise SourceError(f"{folder}/{CONFIG} does not say what it was made from; {CONVERT_FIRST}")
    checkpoint = repository.checkpoint
    present = set(_walk(folder))
    listed = manifest.read(folder, UNLISTED)
    code = code_names(folder, repository.recipe.templates)
    for name in (CONFIG, *code, *checkpoint.files, *filter(None, [checkpoint.index])):
        if name not in listed:
            raise SourceError(
                f"{name} is not in {manifest.MANIFEST}; {manifest.ADOPT.format(folder)}, otherwise convert "
                "the source again"
            )
    wanted = sorted([*listed, *(name for name in UNLISTED if name in present)])
    for name in wanted:
        if not (folder / name).is_file():
            raise SourceError(
                f"{folder} lacks {name}, which was written there; put it back, or convert or export again"
            )
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise SourceError(f"{name} is a link that leads out of {folder}; put the file itself there")
    files = {name: (folder / name).stat().st_size for name in wanted}
    written = {name: entry.sha256 for name, entry in listed.items()}
    digests = {}
    with byte_bar("reading files", sum(files[name] for name in listed), show=progress) as advance:
        for name in listed:
            look = (
                bool if written[name] else repository.scan(name, "download the source again, and convert it")
            )
            digests[name] = sha256(folder / name, advance, look=look)
    adopt = manifest.ADOPT.format(folder)
    remedy = (
        f"{adopt}, otherwise put it back, or convert again (what you add yourself, `hf upload` sends after "
    )
    manifest.check_digests(written, digests, remedy=f"{remedy}the push)")
    return Contents(repository, files, digests, sorted(present - files.keys()))


def verify(
    repository: ConvertedRepository, listed: Collection[str], *, progress: bool = False
) -> list[Check]:
    """Checks a converted repository as the conversion did, and its ``listed`` exports as ``export`` did."""
    from converter.onnx.validate import check_again
    from converter.verification import verify as check

    stored = repository.recipe.stored(repository.folder, repository.checkpoint, repository.config)
    for key, value in stored.items():
        if repository.config.get(key) != value:
            raise VerificationError(f"{CONFIG}: {key} is not what the weights say; convert the source again")
    checks = check(repository, progress=progress)
    return checks + check_again(repository, listed, progress=progress)


def _walk(folder: Path) -> Iterator[str]:
    """All files, relative to the folder. Hidden folders and links to folders are named, but not entered."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        closed = [name for name in folders if name.startswith(".") or (here / name).is_symlink()]
        folders[:] = sorted(set(folders) - set(closed) - {"__pycache__"})
        yield from (f"{(here / name).relative_to(folder).as_posix()}/" for name in closed)
        yield from ((here / name).relative_to(folder).as_posix() for name in files)
