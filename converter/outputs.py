"""A folder of small files: results, pictures. All of them are written, or none."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from converter.errors import OutputError


def check_folder(out: str | Path, *, overwrite: bool) -> Path:
    """The absolute path of a folder that may be written to; looked at before the work begins.

    Raises:
        OutputError: it is a file, is in no folder, cannot be read and written, or holds something and
            ``overwrite`` was not given.
    """
    place = Path(os.path.realpath(os.path.expanduser(out)))  # noqa: PTH111 -- Path's raises for no user
    if place.exists() and not place.is_dir():
        raise OutputError(f"--out {out} is a file; name a folder")
    if not place.parent.is_dir():
        raise OutputError(f"the folder {place.parent} does not exist; create it or change --out {out}")
    folder = place if place.is_dir() else place.parent
    if not os.access(folder, os.W_OK | os.X_OK) or (folder == place and not os.access(place, os.R_OK)):
        raise OutputError(f"no permission to read and write in {folder}; change --out {out}")
    if folder == place and any(place.iterdir()) and not overwrite:
        raise OutputError(f"--out {out} exists and is not empty; name another folder or give --overwrite")
    return place


def write_files(place: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes files, by name, into a folder from ``check_folder``; files of other names there are left alone.

    They are written into a hidden folder in it first, so that a full disk leaves nothing half done. In it,
    not beside it: it may be a mount point, and files are moved only within a file system.

    Returns:
        Their paths, in the order given.
    """
    made = not place.exists()
    place.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".ntk-convert-", dir=place) as hidden:
            work = Path(hidden)
            for name, content in files.items():
                (work / name).write_bytes(content)
            for name in files:
                (work / name).replace(place / name)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # somebody else put something there
                place.rmdir()
        raise
    return [place / name for name in files]
