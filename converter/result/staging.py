"""Writes all or nothing: builds a repository in a folder beside its destination and renames it when done.

The folder is called ``.<name>.ntk-convert-<random>`` and stays locked (flock) as long as its process lives,
however that ends. A later run removes only folders whose lock is free. So parallel runs do not disturb each
other, not even from other containers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from converter.errors import OutputError, SourceError, option
from converter.formatting import bytes_text
from converter.interrupts import Interrupted, came, held
from converter.paths import name_output, out_path
from converter.result.manifest import MANIFEST
from converter.result.outputs import check_folder
from converter.source.jsonfile import read_object

OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
LONGEST_NAME = 200
"""Most bytes in the name of the out folder. The staging folder's name is longer; file systems allow 255."""
MARK = ".ntk-convert-"
"""In the name of every staging folder."""
ASIDE = ".old"
"""Suffix of the name under which ``--overwrite`` moves the old folder aside for an instant, where it cannot
exchange it with the new one."""
HERE, EXCHANGE = -100, 2
"""Linux' AT_FDCWD and RENAME_EXCHANGE, of renameat2."""

BESIDE = re.compile(
    r"README\.md|ntk_convert\.json|onnx_validation\.json|.*\.onnx\.failed|\.gitattributes"
    r"|\.cache/huggingface/.*|(.*/)?__pycache__/.*"
    # An export that was killed leaves these.
    r"|(onnx/)?model\w*\.onnx(_data)?|genai_config\.json|\.onnx\.ntk-convert-[^/]*/.*"
)
"""What tools put beside the files that a result's manifest lists, and beside a model's files."""
MODEL = re.compile(
    r"(.*/)?((config|generation_config|tokenizer|special_tokens|added_tokens|vocab|merges|chat_template"
    r"|modules|sentence|spiece|(pytorch_)?model)([_.-][\w.-]*)?"
    r"\.(json|txt|model|jinja|tiktoken|safetensors|bin|onnx|onnx_data)"
    r"|(modeling|configuration|tokenization|ntk)_\w+\.py|(licen[sc]e|notice|use_policy)[\w.-]*)",
    re.IGNORECASE,
)
"""The names of a model's files."""


def check_output(out: Path, source: Path, *, overwrite: bool) -> Path:
    """The absolute path to write to; ``OutputError`` if it cannot be written or replaced."""
    place = out_path(out)
    origin = Path(os.path.realpath(source))
    if place.is_symlink():
        raise OutputError(
            f"{option.out} {out} is a symbolic link that points back to itself; name another folder"
        )
    if len(os.fsencode(place.name)) > LONGEST_NAME:
        raise OutputError(
            f"the name of {option.out} is longer than {LONGEST_NAME} bytes; choose a shorter one"
        )
    weights = {Path(os.path.realpath(entry)) for pattern in ("*", "*/*") for entry in source.glob(pattern)}
    overlap = OutputError(f"{option.out} {out} and the source {source} overlap; name another folder")
    sources = _folders(above for path in {origin, *weights} for above in (path, *path.parents))
    if sources & _folders([place]) or _folders([origin]) & _folders(place.parents):
        raise overlap
    if Path.cwd().is_relative_to(place) and place.is_dir():
        raise OutputError(f"{option.out} {out} is or contains the current folder; name a new folder")
    if place.is_mount():
        raise OutputError(
            f"{option.out} {out} is a mount point, which cannot be replaced; name a folder inside it"
        )
    for name in _foreign(place):
        raise OutputError(
            f"{option.out} {out} holds {name!r}, and {option.overwrite} replaces only a result or a folder "
            "with nothing but a model's files; move it away, or name another folder"
        )
    if sources & _folders(Path(here) for here, _, _ in os.walk(place)):  # one is mounted as the source
        raise overlap
    return check_folder(out, overwrite=overwrite)


def _folders(paths: Iterable[Path]) -> set[tuple[int, int]]:
    """What identifies each folder that exists: another path may lead to it too, through a bind mount."""
    found = set()
    for path in set(paths):
        with suppress(OSError):
            status = path.stat()
            found.add((status.st_dev, status.st_ino))
    return found


def _foreign(place: Path) -> Iterator[str]:
    """The files of a folder that ``--overwrite`` must not delete, since they may be a user's own."""
    listed = _listed(place)
    model = (place / "config.json").is_file()
    for here, folders, files in os.walk(place):
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        for name in (Path(here, name).relative_to(place).as_posix() for name in (*files, *links)):
            known = name in listed if listed is not None else model and MODEL.fullmatch(name)
            if not known and not (BESIDE.fullmatch(name) and (model or listed is not None)):
                yield name


def _listed(place: Path) -> Container[str] | None:
    """The files that the manifest of a result lists, in any version's form; None without one."""
    try:
        files = read_object(place / MANIFEST).get("files")
    except SourceError:
        return None
    return files if isinstance(files, (dict, list)) else None


def check_space(folder: Path, needed: int, what: str, remedy: str) -> None:
    """Raises ``OutputError`` if the file system of ``folder`` has fewer than ``needed`` bytes free.

    ``what`` starts its clause that ends with the bytes, such as "the weights need".
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{folder} has {bytes_text(free)} free, and {what} {bytes_text(needed)}; "
            f"free some space or {remedy}"
        )


@contextmanager
def staged(place: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty folder that becomes ``place`` when the block ends, and is removed if the block raises.

    Raises ``OutputError`` if another program filled ``place`` meanwhile, and ``Interrupted``, which says
    whether the new folder is in place.
    """
    with workspace(place) as staging:
        yield staging
        _publish(staging, place, overwrite=overwrite)


@contextmanager
def workspace(place: Path) -> Iterator[Path]:
    """An empty folder beside ``place``, locked while the block runs and removed when it ends; see ``staged``.

    First removes what earlier runs to the same place left there when they were killed.
    """
    with held() as waiting:
        remove_leftovers(place)
        folder, lock = _create(place)
    try:
        if waiting:
            raise KeyboardInterrupt
        yield folder
    except BaseException as error:
        name_output(error, place)
        if (isinstance(error, KeyboardInterrupt) or came()) and folder.exists():
            raise Interrupted("nothing was written") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers(place: Path) -> None:
    """Removes what killed runs to the same place left beside it, or puts back what they had moved aside."""
    restore(place)
    for folder, lock in _leftovers(place):
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def restore(place: Path) -> None:
    """Puts back a folder that a killed run had moved aside, if nothing has taken its place."""
    for folder, lock in _leftovers(place):
        if folder.name.endswith(ASIDE) and not place.exists():
            folder.rename(place)
        os.close(lock)


def _leftovers(place: Path) -> Iterator[tuple[Path, int]]:
    """The folders that ended runs left beside ``place``, each locked for the caller."""
    for folder in sorted(place.parent.glob(f".{glob.escape(place.name)}{MARK}*")):
        try:
            lock = _lock(folder)
        except OSError:  # a living run holds it or has removed it, or it is not this user's
            continue
        yield folder, lock


def _publish(staging: Path, place: Path, *, overwrite: bool) -> None:
    # Flush first: the folder must be complete even if the power fails right after the rename.
    for path in [*staging.rglob("*"), staging]:
        _flush(path)
    aside = staging.with_name(staging.name + ASIDE)
    with held() as waiting:
        try:
            while True:
                try:
                    # Atomic; succeeds only if ``place`` does not exist or is an empty folder.
                    staging.rename(place)
                    break
                except OSError as error:
                    if error.errno not in OCCUPIED:
                        raise
                    if not overwrite:
                        raise OutputError(
                            f"{option.out} was filled by another program meanwhile; give {option.overwrite}"
                        ) from error
                if _exchange(staging, place):
                    # The old folder; a kill leaves it to the next run.
                    shutil.rmtree(staging, ignore_errors=True)
                    break
                shutil.rmtree(aside, ignore_errors=True)
                with suppress(FileNotFoundError):  # another run moved it first
                    place.rename(aside)
        finally:
            with suppress(FileNotFoundError):  # there was nothing to replace, or another run has done this
                if place.exists():
                    # Rename it first: a half-removed folder must not be restored by a later run.
                    shutil.rmtree(aside.rename(_staging_name(place)), ignore_errors=True)
                else:
                    aside.rename(place)
        _flush(place.parent)
    if waiting:
        raise Interrupted("the output folder is complete")


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step, so neither place is ever empty; False where the system cannot."""
    with suppress(AttributeError):  # the C library has no such call
        rename = ctypes.CDLL(None).renameat2
        return bool(rename(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0)
    return False


def _flush(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot do that for folders
            raise
    finally:
        os.close(descriptor)


def _create(place: Path) -> tuple[Path, int]:
    """A new folder beside ``place``, locked; raises ``OSError`` or ``OutputError`` if it cannot be opened."""
    while True:
        folder = _staging_name(place)
        folder.mkdir()
        try:
            return folder, _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another run took the new folder for a leftover, and locked or removed it
        except OSError as error:
            folder.rmdir()
            if isinstance(error, PermissionError):
                raise OutputError(
                    f"a new folder in {place.parent} cannot be opened ({error.strerror}); set another umask, "
                    "such as umask 022"
                ) from error
            raise


def _staging_name(place: Path) -> Path:
    return place.with_name(f".{place.name}{MARK}{secrets.token_hex(8)}")


def _lock(folder: Path) -> int:
    """Locks a folder and returns its descriptor.

    Raises ``BlockingIOError`` if a living process holds it, ``FileNotFoundError`` if it is gone, or another
    ``OSError`` if it cannot be opened. On a file system without locks every folder is free, so of two runs to
    one place the later goes on alone.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # the file system has no locks
            pass
        folder.lstat()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
