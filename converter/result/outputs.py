"""Writes a folder of small files, such as results and pictures: all of them or none."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from converter.errors import OutputError, option
from converter.paths import name_output, out_path


def check_folder(out: str | Path, *, overwrite: bool) -> Path:
    """The absolute path of a folder that may be written to, else ``OutputError``; call it before the work."""
    place = out_path(out)
    if place.exists() and not place.is_dir():
        raise OutputError(f"{option.out} {out} is a file; name a folder")
    if not place.is_dir():  # its missing parents can be made too
        above = next(parent for parent in place.parents if os.path.lexists(parent))
        if not above.is_dir():
            raise OutputError(
                f"{option.out} {out} lies below {above.name}, which is not a folder; name another one"
            )
        if not os.access(above, os.W_OK | os.X_OK):
            raise OutputError(f"no permission to write in {above}; change {option.out} {out}")
        return place
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        raise OutputError(f"no permission to read and write in {option.out} {out}; name another folder")
    if any(place.iterdir()) and not overwrite:
        raise OutputError(
            f"{option.out} {out} exists and is not empty; name another folder or give {option.overwrite}"
        )
    return place


def write_files(place: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes files into a folder from ``check_folder``; leaves files with other names alone.

    The files are first written into a hidden folder inside it, so a full disk leaves nothing half done.
    The hidden folder is not beside it because the folder may be a mount point, and a file can be renamed only
    within its file system.
    """
    made = not place.exists()
    place.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".ntk-convert-", dir=place) as hidden:
            work = Path(hidden)
            for name, content in files.items():
                (work / name).write_bytes(content)
            for name in files:
                (work / name).replace(place / name)
    except BaseException as error:
        name_output(error, place)
        if made:
            with contextlib.suppress(OSError):  # another program has put a file there
                place.rmdir()
        raise
    return [place / name for name in files]
