"""Where a checkpoint comes from: a local folder, or a repository on the Hub at one commit."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.checkpoint import INDEXES, weight_files, weight_index
from converter.errors import SourceError, UsageError
from converter.jsonfile import read_object

CONFIG, CARD = "config.json", "README.md"
PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)
"""A file's or folder's name that is no path, not hidden, and means the same everywhere."""


def plain_text(text: object) -> str:
    """Something that a source's file says, as it may stand in a card or on a terminal."""
    return re.sub(r"[^\w./ -]", "_", str(text))[:200]


@dataclass(frozen=True)
class Source:
    """A checkpoint's files. Those of a Hub repository are in ``folder`` once they were fetched."""

    name: str
    """The Hub id, or the local folder's own name: what config and card record."""
    folder: Path
    files: Mapping[str, int | None]
    """Files in the root and their sizes in bytes (None where the Hub does not tell)."""
    repo_id: str | None = None
    commit: str | None = None
    parameters: Mapping[str, int] | None = None
    """dtype -> number of elements, where the Hub knows it from the safetensors headers."""
    download: Callable[[str], None] | None = None
    offline: bool = False
    """The Hub cannot be reached, and ``files`` is what its cache holds of the repository."""
    nested: Mapping[str, int | None] | None = None
    """As ``files``, of those in folders, where the Hub has told; None if ``folder`` has to be asked."""

    @property
    def local(self) -> bool:
        """Whether every file is already in ``folder``."""
        return self.download is None

    def fetch(self, names: Iterable[str]) -> None:
        """Makes files ready to be read from ``folder``: every file passes here before its first use.

        Those of a Hub repository are downloaded. Those of a local folder are there, and are refused if
        they lead out of it.

        Raises:
            SourceError: a link to somewhere else; or see ``open_repository``.
        """
        for name in names:
            if self.download is not None:
                self.download(name)
            elif not belongs(self.folder / name, self.folder):
                raise SourceError(
                    f"{name} in {self.name} is a link that leads out of the folder; if that is meant, "
                    "replace the link by the file itself"
                )

    def inside(self, folder: str) -> dict[str, int | None]:
        """Files of a folder in the root, ``folder/name``, and their sizes; empty if there is none.

        A folder that is a link is left alone, and so is a file that leads elsewhere (see ``belongs``) or
        has a name that is not plain.
        """
        if not PLAIN.fullmatch(folder):
            return {}
        if self.nested is not None:
            found = dict(self.nested)
        else:
            path = self.folder / folder
            if path.is_symlink() or not path.is_dir():
                return {}
            found = {
                f"{folder}/{entry.name}": entry.stat().st_size
                for entry in sorted(path.iterdir())
                if entry.is_file() and belongs(entry, self.folder)
            }
        prefix = f"{folder}/"
        return {
            name: size
            for name, size in found.items()
            if name.startswith(prefix) and PLAIN.fullmatch(name.removeprefix(prefix))
        }

    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``.

        Raises:
            SourceError: missing or unreadable.
        """
        if CONFIG not in self.files:
            adapter = "; it is a LoRA adapter: merge it into its model first" * (
                "adapter_config.json" in self.files
            )
            raise SourceError(f"{self.name} has no {CONFIG}, so it is no checkpoint{adapter}")
        self.fetch([CONFIG])
        return read_object(self.folder / CONFIG)

    @property
    def index(self) -> str | None:
        """Name of the index of the weights that count, if they have one."""
        first = weight_index(self.files)
        return first if first in INDEXES else None

    def weights(self) -> dict[str, int | None]:
        """The weight files that count and their sizes in bytes, the index left out; empty if none.

        Raises:
            SourceError: an unreadable index, a Hub repository without all shards, or offline with
                no weights in the cache.
        """
        first = weight_index(self.files)
        if first is None:
            if self.offline:
                raise SourceError(
                    f"the cache holds no weights of {self.name}, and the Hub cannot be reached; check the "
                    "connection (and HF_HUB_OFFLINE, HF_ENDPOINT)"
                )
            return {}
        names = [first]
        if first in INDEXES:
            self.fetch([first])
            names = sorted(set(weight_files(first, lambda name: read_object(self.folder / name)).values()))
            missing = [name for name in names if name not in self.files]
            if missing and not (self.local or self.offline):
                raise SourceError(
                    f"{self.name} lacks {len(missing)} of its {len(names)} shards, {missing[0]!r} first; "
                    "give another --revision, or tell its owner"
                )
        if self.local:
            self.fetch(name for name in names if name in self.files)
        return {name: self.files.get(name) for name in names}


def belongs(path: Path, folder: Path) -> bool:
    """Whether a file of a checkpoint's folder is in it, or in the store of a Hub cache if it is a link.

    A cache keeps content in ``models--.../blobs`` and its snapshots are links to there; older versions of
    the client made such links in a ``--local-dir`` too. Any other link could have whatever the user can
    read copied into the result.
    """
    if path.parent == folder and not path.is_symlink():
        return True
    root, place = folder.resolve(), path.resolve()
    if place.is_relative_to(root):
        return True
    if root.parent.name == "snapshots" and place.is_relative_to(root.parent.parent / "blobs"):
        return True
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE).resolve()
    return place.is_relative_to(cache) and place.relative_to(cache).parts[1:2] == ("blobs",)


def open_source(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    progress: bool = False,
) -> Source:
    """Finds MODEL: a local folder if there is one of that name, else a repository on the Hub.

    Raises:
        SourceError: there is no such folder or repository, or it cannot be reached.
        UsageError: a revision of a local folder.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111 -- Path's raises for a user that is none
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError):  # a name that no file system takes
        exists = is_folder = False
    if not model.isprintable() and exists:
        raise SourceError(
            f"the name {model[:80]!r} has characters that cannot be printed; rename the folder, or change "
            "into it and give . as MODEL"
        )
    if not model.isprintable() or not model or len(model) > 4096:
        raise SourceError(f"MODEL {model[:80]!r} is neither a folder nor a Hub id")
    if is_folder:
        if revision is not None:
            raise UsageError(f"--revision {revision!r} is for Hub ids, but {model} is a local folder")
        return _local(path)
    if exists:
        raise SourceError(f"{model} is a file; give the folder that holds config.json and the weights")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise SourceError(f"there is no folder {model}; check the path, or give a Hub id, user/name")
    from converter.hub import open_repository

    return open_repository(model, revision=revision, token=token, cache_dir=cache_dir, progress=progress)


def _is_file(entry: Path) -> bool:
    """Whether it is one, or leads to one; nothing else, a pipe or a device, is ever opened."""
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SourceError(f"{entry.name} is a link that leads to itself; remove it") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise


def _local(path: Path) -> Source:
    try:
        files: dict[str, int | None] = {
            entry.name: entry.stat().st_size
            for entry in sorted(path.iterdir())
            # No file of a checkpoint has such a name, and none of what is listed may steer a terminal.
            if entry.name.isprintable() and _is_file(entry)
        }
        name = path.resolve().name
    except OSError as error:
        raise SourceError(f"cannot read the folder {path}: {error.strerror}") from error
    printable = "".join(letter if letter.isprintable() else "_" for letter in name)
    return Source(printable or "checkpoint", path, files)
