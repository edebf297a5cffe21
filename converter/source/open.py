"""Finds the checkpoint that MODEL names: a folder or a Hub id."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

from converter.errors import SourceError, UsageError, option
from converter.paths import expand
from converter.source.source import Source, explain_missing, subfolder_path


def open_source(
    model: str,
    *,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    progress: bool = False,
) -> Source:
    """Opens MODEL, or a folder in it: a local folder if one of that name exists, else one on the Hub.

    Raises ``SourceError`` if there is neither, and ``UsageError`` for a revision of a local folder or a
    subfolder that leads elsewhere.
    """
    if subfolder is not None:
        subfolder = subfolder_path(subfolder)
    path = expand(model)
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError):  # not a valid name on this file system
        exists = is_folder = False
    if not model.isprintable() and exists:
        raise SourceError(
            f"the name {model[:80]!r} has characters that cannot be printed; rename the folder, or run "
            "the command in it with . as MODEL"
        )
    if not model.isprintable() or not model or len(model) > 4096:
        raise SourceError(f"MODEL {model[:80]!r} is neither a folder nor a Hub id")
    if is_folder:
        if revision is not None:
            raise UsageError(f"{model} is a local folder, and {option.revision} is for Hub ids; drop it")
        return open_folder(path, subfolder)
    if exists:
        explain_missing(str(path.parent), [path.name])
        raise SourceError(f"{model} is a file; give the folder that holds config.json and the weights")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise SourceError(f"there is no folder {model}; check the path, or give a Hub id such as user/name")
    from converter.source.hub import open_repository

    return open_repository(
        model, subfolder=subfolder, revision=revision, token=token, cache_dir=cache_dir, progress=progress
    )


def open_folder(path: Path, subfolder: str | None = None) -> Source:
    """A checkpoint in a local folder, or in a folder of it; a ``SourceError`` if it is unreadable."""
    folder = path / (subfolder or "")
    try:
        files: dict[str, int | None] = {
            entry.name: entry.stat().st_size
            for entry in sorted(folder.iterdir())
            # No checkpoint has other names, and listing them could send control codes to a terminal.
            if entry.name.isprintable() and _is_file(entry)
        }
        name = path.resolve().name
    except OSError as error:
        raise SourceError(f"cannot read the folder {folder}: {error.strerror}") from error
    printable = "".join(letter if letter.isprintable() else "_" for letter in name)
    name = "/".join(filter(None, (printable or "checkpoint", subfolder)))
    return Source(name, folder, files, subfolder=subfolder)


def _is_file(entry: Path) -> bool:
    """Whether an entry is a file or a link to one. Pipes and devices are never opened."""
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
