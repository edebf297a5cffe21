"""Writing an export into its repository: all of it or nothing.

An export writes its files under other names. When all of them are finished, they are put in place together
with the export's section of the card and its entries in the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from converter.errors import OutputError
from converter.interrupts import Interrupted, held
from converter.result import manifest
from converter.result.card import with_section
from converter.result.staging import workspace
from converter.source.source import CARD
from converter.weights.files import sha256


@dataclass
class Draft:
    """An export that is being written."""

    folder: Path
    """The repository."""
    work: Path
    """An empty folder in it, for files that are not in place yet."""
    files: dict[str, Path] = field(default_factory=dict)
    """Name in the repository -> where the file is for now. They are put in place last to first, so that a
    file comes before the files that it needs."""
    reports: dict[str, Path] = field(default_factory=dict)
    """The same, for files that the manifest does not list."""
    obsolete: list[str] = field(default_factory=list)
    """Names of files of an older export that are no longer right and are removed."""
    section: tuple[str, str] | None = None
    """Title and text of the card's section, Markdown; None to leave the card as it is."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Once all is in place: file -> bytes, without the card."""


@contextmanager
def draft(folder: Path, name: str) -> Iterator[Draft]:
    """Puts an export in place when the block ends, or leaves the repository as it was if the block raises.

    Raises:
        OutputError: the folder cannot be written to.
        Interrupted: the user stopped it; says whether the export is in place.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"no permission to write in {folder}; export a copy of it")
    made: Draft | None = None
    try:
        with workspace(folder / name) as work:
            made = Draft(folder, work)
            yield made
            _put_in_place(made)
    except KeyboardInterrupt as error:
        if made is not None and made.sizes:
            raise Interrupted(f"the export is in place: {', '.join(made.sizes)}") from error
        raise


def _put_in_place(made: Draft) -> None:
    folder = made.folder
    named = {**made.files, **made.reports}
    # Nothing is written to a file that is there: in the Hub's cache it is a link to one that others share.
    card = _new_card(made)
    digests = {name: sha256(path) for name, path in made.files.items()}
    with held() as waiting:
        for name, path in reversed([*named.items(), *card.items()]):
            (folder / name).parent.mkdir(exist_ok=True)
            path.replace(folder / name)
        for name in made.obsolete:
            (folder / name).unlink(missing_ok=True)
        manifest.update(folder, digests)
        made.sizes = {name: (folder / name).stat().st_size for name in named}
    if waiting:
        raise KeyboardInterrupt


def _new_card(made: Draft) -> dict[str, Path]:
    """Writes the card with the export's section into the working folder; nothing for a repository without."""
    card = made.folder / CARD
    if made.section is None or not card.is_file():
        return {}
    text = with_section(card.read_text(encoding="utf-8", errors="surrogateescape"), *made.section)
    (made.work / CARD).write_text(text, encoding="utf-8", errors="surrogateescape")
    return {CARD: made.work / CARD}
