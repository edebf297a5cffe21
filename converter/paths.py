"""Paths as users write them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from converter.errors import OutputError, option

LONGEST_PATH = 3500
"""Bytes; systems allow 4095."""


def expand(path: str | Path) -> Path:
    """``path`` with ``~`` and ``~user`` replaced; as it is if there is no such user."""
    try:
        return Path(os.path.expanduser(path))  # noqa: PTH111 -- Path.expanduser raises for an unknown user
    except ValueError:  # the name has a NUL character
        return Path(path)


def listed(given: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    """One path or several, as a sequence."""
    return [given] if isinstance(given, str | Path) else given


def out_path(out: str | Path) -> Path:
    """The absolute path of an output folder, with all links followed.

    Raises ``OutputError`` for what is no path, or one that a card or a terminal cannot show.
    """
    try:
        place = Path(os.path.realpath(expand(out)))  # Path.resolve raises for circular links
    except ValueError as error:
        raise OutputError(f"{option.out} {str(out)[:80]!r} is not a path ({error}); name a folder") from error
    if not str(place).isprintable():
        raise OutputError(
            f"{option.out} {str(place)[-80:]!r} has characters that cannot be printed; name another folder, "
            "or set a UTF-8 locale if it has none"
        )
    # Files in it have names too, and a staging folder is beside it.
    if any(len(os.fsencode(part)) > 255 for part in place.parts) or len(os.fsencode(place)) > LONGEST_PATH:
        raise OutputError(
            f"{option.out} {str(out)[:80]}... is too long: file systems allow 255 bytes in a name, and about "
            f"{LONGEST_PATH} in a path; choose a shorter one"
        )
    return place


def name_output(error: BaseException, place: Path) -> None:
    """Lets a failed write say where it was, which it does not know: files are written by descriptor."""
    if isinstance(error, OSError) and error.filename is None and error.errno not in (None, errno.EIO):
        error.filename = str(place)
