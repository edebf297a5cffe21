"""The opened place of a checkpoint, a local folder or a commit on the Hub, and its small files.

For its weight files, which are trusted in another way, see ``weight_files``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from converter.errors import SourceError, UsageError, option
from converter.source.jsonfile import LARGEST, as_object, check_pointer, limited, parse

CONFIG, CARD = "config.json", "README.md"
QUANTISED_BY = ("quantize_config.json", "quant_config.json")
"""Files in which GPTQ and AWQ record how they quantised the weights. They are not copied."""
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
"""Files of a tokenizer. From the Hub they are downloaded with the weights, not before."""
LARGEST_VOCABULARY = 128 << 20
"""Bytes. That of Gemma, 262,000 tokens and their merges, has 33 MB."""
PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)
"""A file or folder name that is not a path, not hidden, and valid on every system."""


def subfolder_path(subfolder: str) -> str:
    """The path of a subfolder, without a slash at its end; a ``UsageError`` if it leads elsewhere."""
    path = subfolder.removesuffix("/")
    if not path.isprintable() or {"", ".", ".."} & {*path.split("/")}:
        raise UsageError(
            f"{option.subfolder} {subfolder[:80]!r} is not a folder inside MODEL; give its path from there, "
            "such as checkpoint-1000"
        )
    return path


def plain_text(text: object) -> str:
    """Text from a source's file, made safe for a model card and a terminal."""
    return re.sub(r"[^\w./ -]", "_", str(text))[:200]


@dataclass(frozen=True)
class Source:
    """A checkpoint's files, and the one reader of its small ones.

    All files but weights are small: configs, a tokenizer, code. What is read of them is what is judged, and
    what is copied. They belong to the folder: a link that leads out of it could copy a private file of the
    user into the result. Their size is limited, and each is compared with the Hub's digest as it is opened.
    """

    name: str
    """The Hub id, or the name of the local folder; then the subfolder, if it is in one."""
    folder: Path
    """Of the checkpoint: the repository, the local folder, or ``subfolder`` in it. Files of a Hub repository
    are there once they were downloaded."""
    files: Mapping[str, int | None]
    """Files in that folder and their sizes in bytes (None where the Hub does not give it)."""
    repo_id: str | None = None
    commit: str | None = None
    parameters: Mapping[str, int] | None = None
    """dtype -> number of elements, if the Hub has read it from the safetensors headers."""
    download: Callable[[str], None] | None = None
    """Downloads a file of a Hub repository, if it is not in ``folder`` yet."""
    offline: bool = False
    """The Hub cannot be reached, and ``files`` are those in its cache."""
    nested: Mapping[str, int | None] | None = None
    """Like ``files``, for files in subfolders, if the Hub listed them; None if ``folder`` must be read."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The Hub's digests of files: the SHA-256 or, of a file that is stored in git, git's SHA-1."""
    subfolder: str | None = None
    _contents: dict[str, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was read of small files."""

    @property
    def root(self) -> str:
        """``name`` without the subfolder, as config and model card record it."""
        return self.name if self.subfolder is None else self.name.removesuffix(f"/{self.subfolder}")

    @property
    def local(self) -> bool:
        """Whether every file is already in ``folder``."""
        return self.download is None

    # What there is

    def has(self, name: str) -> bool:
        """Whether there is a file of this name, in the folder or directly in a subfolder."""
        folder, _, _ = name.rpartition("/")
        return name in (self.inside(folder) if folder else self.files)

    def inside(self, folder: str) -> dict[str, int | None]:
        """Files of a subfolder as ``folder/name``, and their sizes in bytes; empty if it does not exist.

        A folder that is a link is skipped, and so are files that lead elsewhere (see ``belongs``) or have
        a name that does not match ``PLAIN``.
        """
        if not PLAIN.fullmatch(folder):
            return {}
        found: dict[str, int | None] = {}
        if self.nested is not None:
            found = dict(self.nested)
        else:
            path = self.folder / folder
            if path.is_symlink() or not path.is_dir():
                return {}
            for entry in sorted(path.iterdir()):
                if entry.is_file() and belongs(entry, entry.resolve(), self.folder):
                    found[f"{folder}/{entry.name}"] = entry.stat().st_size
        prefix = f"{folder}/"
        return {
            name: size
            for name, size in found.items()
            if name.startswith(prefix) and PLAIN.fullmatch(name.removeprefix(prefix))
        }

    def digest(self, name: str) -> str | None:
        """The Hub's digest of a file, from its listing or its cache; None for a file from elsewhere."""
        path = self.folder / name
        if name not in self.digests and path.is_symlink():
            blob = path.readlink()  # only this link: the cache may link on, to a name of another kind
            if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
                return blob.name
        return self.digests.get(name)

    # Small files

    def open(self, name: str) -> BinaryIO:
        """Opens a small file for reading; all that reads one does it through here.

        Raises ``SourceError`` if it is a link that leads out of a local folder (see ``belongs``), no file, a
        pointer of git-lfs, or not the file that the Hub has.
        """
        path = self.folder / name
        if self.download is not None:
            self.download(name)
        place = path.resolve()  # once: a link that is changed afterwards leads nowhere else
        if self.download is None and not belongs(path, place, self.folder):
            raise SourceError(
                f"{name} in {self.name} is a link that leads out of the folder; if this is intended, "
                "replace the link by a copy of the file"
            )
        try:
            handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
        file = os.fdopen(handle, "rb")
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise SourceError(f"cannot read {path}: it is not a file")
            check_pointer(path, file)
            check_digest(path, self.digest(name), file=file)
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return file

    def read(self, name: str) -> bytes:
        """The content of a small file, which is read once; a ``SourceError`` if it is too large."""
        if name not in self._contents:
            most = LARGEST_VOCABULARY if name in VOCABULARIES else LARGEST
            with self.open(name) as file:
                self._contents[name] = limited(file, name, most)
        return self._contents[name]

    def copy(self, name: str, target: Path) -> None:
        """Writes a small file to a new path; what was read of it, and so was judged, is what is written."""
        with target.open("xb") as writer:
            if name in self._contents:
                writer.write(self._contents[name])
                return
            with self.open(name) as reader:
                before = os.fstat(reader.fileno())
                shutil.copyfileobj(reader, writer)
                if os.fstat(reader.fileno()).st_mtime_ns != before.st_mtime_ns:
                    raise SourceError(f"{name} changed while it was read; try again")

    def json(self, name: str) -> Any:
        """What a JSON file holds; None if there is no such file, a ``SourceError`` if it is not JSON."""
        if not self.has(name):
            return None
        raw = self.read(name)
        if name == CONFIG:
            # Some editors write a byte order mark. It does no harm here: the result's config is written anew.
            raw = raw.removeprefix(BOM_UTF8)
        return parse(raw, name)

    def object(self, name: str) -> dict[str, Any]:
        """The object that a JSON file holds, empty if there is no such file; else a ``SourceError``."""
        return as_object(self.json(name), name) if self.has(name) else {}

    def contents(self, names: Iterable[str]) -> dict[str, Any]:
        """What these JSON files hold, by name.

        Files that are missing or that no JSON parser reads are left out; other errors are raised.
        """
        found = {}
        for name in names:
            if not self.has(name):
                continue
            try:
                found[name] = self.json(name)
            except SourceError as error:
                if not isinstance(error.__cause__, json.JSONDecodeError | UnicodeDecodeError):
                    raise
        return found

    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``, or a ``SourceError``."""
        if CONFIG in self.files:
            return self.object(CONFIG)
        inner = [f"{path.parent.name}/{CONFIG}" for path in sorted(self.folder.glob(f"*/{CONFIG}"))]
        raise no_config(self.name, [*self.files, *inner])


def no_config(source: str, names: Collection[str]) -> SourceError:
    """The error for files without a config.json; see ``explain_missing``."""
    explain_missing(source, names)
    problem = f"{source} has no {CONFIG}, so it is not a checkpoint"
    if "adapter_config.json" in names:
        problem += "; it is a LoRA adapter: merge it into its model first"
    elif "config.yaml" in names:
        problem += "; a model of FunASR such as emotion2vec (config.yaml) cannot be converted"
    return SourceError(problem)


def explain_missing(source: str, names: Iterable[str]) -> None:
    """Raises ``SourceError`` if other files say why config.json or the weights are missing.

    They are files in llama.cpp's format, and the config of a checkpoint in a subfolder.
    """
    for name in names:
        folder, _, file = name.rpartition("/")
        if file == CONFIG and all(map(PLAIN.fullmatch, folder.split("/"))):
            raise SourceError(
                f"{source} has no {CONFIG}, but its folder {folder} has one; give {option.subfolder} {folder}"
            )
        if name.lower().endswith(".gguf"):
            raise SourceError(
                f"{source} has {name}: GGUF files cannot be converted; give the repository with the original "
                "safetensors files"
            )


def check_digest(
    path: Path, wanted: str | None, sha256: str | None = None, file: BinaryIO | None = None
) -> None:
    """Compares a file with the Hub's digest, if it has one.

    ``sha256`` is the file's, if that is known; ``file`` is the file, if it is open.
    """
    if wanted is None or wanted == sha256:
        return
    if file is None:
        with path.open("rb") as opened:
            found = _digest_like(wanted, opened)
    else:
        found = _digest_like(wanted, file)
    if found != wanted:
        raise SourceError(
            f"{path.name} in the Hub's cache is not the file that the Hub has: its digest differs; delete "
            f"{path.resolve()}, and run the same command again"
        )


def _digest_like(wanted: str, file: BinaryIO) -> str:
    """The digest of a whole file, of the kind that another one is: SHA-256, or git's SHA-1."""
    digest = hashlib.sha256()
    if len(wanted) == 40:
        digest = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size)
    file.seek(0)
    while block := file.read(4 << 20):
        digest.update(block)
    return digest.hexdigest()


def belongs(path: Path, place: Path, folder: Path) -> bool:
    """Whether a file is inside a checkpoint's folder, or is a link to a file that a Hub cache stores.

    ``place`` is where it leads, links resolved.
    A cache stores content in ``models--.../blobs``, and its snapshots are links to it. Newer versions of
    huggingface_hub link on to ``blobs`` beside ``models--...``, and older ones also made such links in a
    ``--local-dir``. Any other link could copy a private file of the user into the result.
    """
    if path.parent == folder and not path.is_symlink():
        return True
    root = folder.resolve()
    if place.is_relative_to(root):
        return True
    snapshots = next((above for above in root.parents if above.name == "snapshots"), None)
    blobs = [] if snapshots is None else [above / "blobs" for above in snapshots.parents[:2]]
    if any(place.is_relative_to(each) for each in blobs):
        return True
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE).resolve()
    return place.is_relative_to(cache) and "blobs" in place.relative_to(cache).parts[:2]
