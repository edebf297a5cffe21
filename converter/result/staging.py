"""Writes all or nothing: builds a repository in a folder beside its destination and renames it when done.

The folder is called ``.<name>.ntk-convert-<pid>-<host><random>`` and stays locked (flock) as long as its
process lives, however that ends. A later run removes only folders whose lock is free, or continues in one of
them with ``--resume``. So parallel runs do not disturb each other, not even from other containers.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from converter.errors import OutputError, Unfinished
from converter.interrupts import Interrupted, came, held
from converter.paths import out_path
from converter.weights.journal import Journal, finished_bytes, kept, prune

OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
LONGEST = 200
"""Most bytes in the name of the out folder. The staging folder's name is longer; file systems allow 255."""
ASIDE = ".old"
"""Suffix of the name under which ``--overwrite`` moves the old folder aside for an instant."""


def check_output(out: Path, source: Path, *, overwrite: bool) -> Path:
    """The absolute path to write to, with links resolved.

    Raises:
        OutputError: the path is occupied and ``overwrite`` was not given, overlaps the source, has no parent
            folder, or cannot be written or replaced.
    """
    place = out_path(out)
    origin = Path(os.path.realpath(source))
    if not place.parent.is_dir():
        raise OutputError(f"the folder {place.parent} does not exist; create it or change --out {out}")
    if place.is_symlink():
        raise OutputError(f"--out {out} is a symbolic link that points back to itself; name another folder")
    if len(os.fsencode(place.name)) > LONGEST:
        raise OutputError(f"the name of --out is longer than {LONGEST} bytes; choose a shorter one")
    if place.exists() and not place.is_dir():
        raise OutputError(f"--out {out} is a file; name a folder that does not exist yet")
    weights = {Path(os.path.realpath(entry)) for entry in source.iterdir()} if source.is_dir() else set()
    if place.is_relative_to(origin) or any(path.is_relative_to(place) for path in {origin, *weights}):
        raise OutputError(f"--out {out} and the source {source} overlap; name another folder")
    if Path.cwd().is_relative_to(place) and place.is_dir():
        raise OutputError(f"--out {out} is or contains the current folder; name a new folder")
    if place.is_mount():
        raise OutputError(f"--out {out} is a mount point, which cannot be replaced; name a folder inside it")
    if place.is_dir() and any(place.iterdir()) and not overwrite:
        raise OutputError(f"--out {out} exists and is not empty; name another folder or give --overwrite")
    if place.is_dir() and any(place.iterdir()) and not (place / "config.json").is_file():
        raise OutputError(
            f"--out {out} holds no config.json, so it is not a model's folder; --overwrite replaces only "
            "those, name another folder"
        )
    for folder in (place.parent, place):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise OutputError(f"no permission to write in {folder}; change --out {out}")
    return place


def clear(out: Path, *, resume: bool) -> None:
    """Cleans up beside ``out``: restores a folder that a killed run had moved aside, and removes leftovers.

    Args:
        out: the out folder as the user gave it.
        resume: keep the leftovers, so that a run can continue from them.
    """
    place = out_path(out)
    if resume:
        restore(place)
    else:
        remove_leftovers(place)


def check_space(folder: Path, needed: int, what: str, remedy: str) -> None:
    """Checks that the file system of ``folder`` has ``needed`` bytes free.

    Args:
        folder: a folder on that file system.
        needed: bytes.
        what: the start of the message's clause that ends with the bytes, such as "the weights need".
        remedy: what the user can do besides freeing space.

    Raises:
        OutputError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{folder} has {free / 1e9:.1f} GB free, and {what} {needed / 1e9:.1f} GB; "
            f"free some space or {remedy}"
        )


@contextmanager
def staged(place: Path, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """A folder that becomes ``place`` when the block ends, and is removed if the block raises.

    It is empty at first, or with ``resume`` holds the weight files that an earlier run to the same place
    finished, with their journal. It is kept for the next run if it holds finished weight files and the block
    was ended by the user, by the disk, or by something else that another attempt may not meet.

    Args:
        place: absolute path, from ``check_output``.
        overwrite: replace the folder at ``place``, which stays until the new one is complete.
        resume: continue from what an earlier run left.

    Raises:
        OutputError: another program filled ``place`` meanwhile, or the disk failed and finished files are
            kept.
        Interrupted: the user stopped the run; says what is kept, or that the new folder is in place.
    """
    with workspace(place, resume=resume) as staging:
        yield staging
        _publish(staging, place, overwrite=overwrite)


@contextmanager
def workspace(place: Path, *, resume: bool = False) -> Iterator[Path]:
    """A folder beside ``place``, locked while the block runs and removed when it ends; see ``staged``.

    First removes what earlier runs to the same place left there when they were killed.
    """
    adopted = _adopt(place) if resume else None
    remove_leftovers(place, but=adopted[0] if adopted else None)
    folder, lock = adopted or _create(place)
    files = None
    try:
        yield folder
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt) or came()
        if interrupted or isinstance(error, (OSError, OutputError, Unfinished)):
            files = kept(folder)
        if interrupted and folder.exists():
            raise Interrupted(files or "nothing was written") from error
        if files is None:
            raise
        what = (error.strerror if isinstance(error, OSError) else None) or error
        raise OutputError(f"{what}; {files}, once this is fixed") from error
    finally:
        if files is None:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers(place: Path, *, but: Path | None = None) -> None:
    """Removes what killed runs to the same place left beside it.

    A folder that ``--overwrite`` had just moved aside is put back if nothing has taken its place.

    Args:
        place: where the runs' results were to go.
        but: a folder to keep, in which this run continues.
    """
    restore(place)
    for folder, lock in _leftovers(place):
        try:
            if folder != but:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def restore(place: Path) -> None:
    """Puts back a folder that a killed run had moved aside, if nothing has taken its place."""
    for folder, lock in _leftovers(place):
        try:
            if folder.name.endswith(ASIDE) and not place.exists():
                folder.rename(place)
        finally:
            os.close(lock)


def _leftovers(place: Path) -> Iterator[tuple[Path, int]]:
    """The folders that ended runs left beside ``place``, each locked for the caller."""
    for folder in sorted(place.parent.glob(f".{_escaped(place.name)}.ntk-convert-*")):
        lock = _lock(folder)
        if lock is not None:
            yield folder, lock


def _adopt(place: Path) -> tuple[Path, int] | None:
    """Of the folders that this user's runs left, the one with most finished bytes: locked and renamed."""
    found = []
    for folder, lock in _leftovers(place):
        usable = kept(folder) is not None and not folder.name.endswith(ASIDE)
        if usable and not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
            found.append((finished_bytes(folder), folder, lock))
        else:
            os.close(lock)
    if not found:
        return None
    *others, (_, folder, lock) = sorted(found)
    for _, _, other in others:
        os.close(other)
    prune(folder)
    return folder.rename(_staging_name(place)), lock


def _publish(staging: Path, place: Path, *, overwrite: bool) -> None:
    # Flush first: the folder must be complete even if the power fails right after the rename.
    _flush(staging)
    aside = staging.with_name(staging.name + ASIDE)
    with held() as waiting:
        Journal(staging).remove()
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
                            f"{place} was filled by another program meanwhile; give --overwrite"
                        ) from error
                shutil.rmtree(aside, ignore_errors=True)
                with suppress(FileNotFoundError):  # another run moved it first
                    place.rename(aside)
        finally:
            if aside.exists():
                _remove_or_restore(aside, place)
        _flush_folder(place.parent)
    if waiting:
        raise Interrupted(f"{place} is complete")


def _remove_or_restore(aside: Path, place: Path) -> None:
    with suppress(FileNotFoundError):  # another run has done this
        if place.exists():
            # Rename it first: a half-removed folder must not be restored by a later run.
            shutil.rmtree(aside.rename(_staging_name(place)), ignore_errors=True)
        else:
            aside.rename(place)


def _flush(folder: Path) -> None:
    """Waits until all files of a folder are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _flush_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot do that for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(place: Path) -> tuple[Path, int]:
    while True:
        folder = _staging_name(place)
        folder.mkdir()
        lock = _lock(folder)
        if lock is not None:
            return folder, lock
        # Another run took the new folder for a leftover and locked it first.


def _staging_name(place: Path) -> Path:
    return place.with_name(f".{place.name}.ntk-convert-{os.getpid()}-{_host()}{secrets.token_hex(4)}")


def _host() -> str:
    """Four characters that identify this machine: a process id means nothing on another one."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:4]


def _lock(folder: Path) -> int | None:
    """Locks a folder and returns its descriptor; None if a living process holds it, or if it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except BlockingIOError:
        held = False
    except OSError:
        # The file system has no locks: rely on the process id in the name.
        held = not _alive(folder)
    if held and folder.exists():
        return descriptor
    os.close(descriptor)
    return None


def _alive(folder: Path) -> bool:
    pid, _, rest = folder.name.rpartition(".ntk-convert-")[2].partition("-")
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    if not rest.startswith(_host()):
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
