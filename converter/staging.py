"""All or nothing: a repository is built in a folder beside its place and renamed when it is done.

The folder is called ``.<name>.ntk-convert-<pid>-<random>`` and stays locked (flock) as long as its
process lives, however that ends. A later run removes those whose lock is free, and only those, or
with ``--resume`` goes on in one of them; so runs side by side, in other containers too, leave each
other alone.
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
from converter.weights.journal import Journal, finished_bytes, kept, prune

OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
LONGEST = 200
"""Bytes of the out folder's name, to which the staging folder's adds some; file systems allow 255."""
ASIDE = ".old"
"""End of the name under which ``--overwrite`` moves the old folder aside for an instant."""


def check_output(out: Path, source: Path, *, overwrite: bool) -> Path:
    """The absolute path to write to, links resolved, if it may be written.

    Raises:
        OutputError: occupied without ``overwrite``, in or around the source, or in no folder.
    """
    place = _place(out)
    origin = Path(os.path.realpath(source))
    if not place.parent.is_dir():
        raise OutputError(f"the folder {place.parent} does not exist; create it or change --out {out}")
    if place.is_symlink():
        raise OutputError(f"--out {out} is a link that leads round in a circle; name another folder")
    if len(os.fsencode(place.name)) > LONGEST:
        raise OutputError(f"the name of --out is longer than {LONGEST} bytes; choose a shorter one")
    if place.exists() and not place.is_dir():
        raise OutputError(f"--out {out} is a file; name a folder that does not exist yet")
    weights = {Path(os.path.realpath(entry)) for entry in source.iterdir()} if source.is_dir() else set()
    if place.is_relative_to(origin) or any(path.is_relative_to(place) for path in {origin, *weights}):
        raise OutputError(f"--out {out} and the source {source} overlap; the source is never written to")
    if Path.cwd().is_relative_to(place) and place.is_dir():
        raise OutputError(f"--out {out} is or holds the current folder; name a new folder")
    if place.is_mount():
        raise OutputError(f"--out {out} is a mount point, which cannot be replaced; name a folder inside it")
    if place.is_dir() and any(place.iterdir()) and not overwrite:
        raise OutputError(f"--out {out} exists and is not empty; name another folder or give --overwrite")
    if place.is_dir() and any(place.iterdir()) and not (place / "config.json").is_file():
        raise OutputError(
            f"--out {out} holds no config.json, so it is no model's folder; --overwrite replaces "
            "only such folders, name another one"
        )
    for folder in (place.parent, place):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise OutputError(f"no permission to write in {folder}; change --out {out}")
    return place


def clear(out: Path, *, resume: bool) -> None:
    """Makes room beside ``out``: puts back what a killed run had moved aside, and removes what it left.

    Args:
        out: as the user gave it.
        resume: leave what can be gone on from.
    """
    place = _place(out)
    if resume:
        restore(place)
    else:
        remove_leftovers(place)


def _place(out: Path) -> Path:
    # Path's own ways to say these raise for a user that is none, and for links in a circle.
    return Path(os.path.realpath(os.path.expanduser(out)))  # noqa: PTH111


def check_space(folder: Path, needed: int, what: str, remedy: str) -> None:
    """Looks whether the file system of ``folder`` has ``needed`` bytes free.

    Raises:
        OutputError: it has not; ``what`` needs them, and ``remedy`` is what the user may do.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{folder} has {free / 1e9:.1f} GB free, and {what} {needed / 1e9:.1f} GB; "
            f"free some space or {remedy}"
        )


@contextmanager
def staged(place: Path, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """A folder that becomes ``place`` when the block ends, and vanishes when it raises.

    It is empty at first, or with ``resume`` holds the weight files that an earlier run to the same place
    finished, and their journal. When the block was ended by the user, the disk, or something else that
    another attempt may mend, and there are such files, the folder stays for the next run.

    Args:
        place: absolute path, from ``check_output``.
        overwrite: replace what is at ``place``; the old folder stays until the new one is complete.
        resume: go on from what an earlier run left.

    Raises:
        OutputError: ``place`` was filled by somebody else meanwhile, or the disk failed and finished
            files are kept.
        Interrupted: the user ended it; says what is kept, or that the new folder is in place.
    """
    with workspace(place, resume=resume) as staging:
        yield staging
        _publish(staging, place, overwrite=overwrite)


@contextmanager
def workspace(place: Path, *, resume: bool = False) -> Iterator[Path]:
    """A folder beside ``place``, locked while the block runs and removed when it ends; see ``staged``.

    What earlier runs to the same place left beside it when they were killed is removed first.
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
        raise OutputError(f"{what}; {files}, once that is mended") from error
    finally:
        if files is None:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers(place: Path, *, but: Path | None = None) -> None:
    """Removes what runs to the same place left beside it when they were killed.

    A folder that ``--overwrite`` had just moved aside goes back, if nothing took its place.

    Args:
        place: where the runs' results were to go.
        but: one that this run goes on in.
    """
    restore(place)
    for folder, lock in _leftovers(place):
        try:
            if folder != but:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def restore(place: Path) -> None:
    """Puts a folder back that a run which was killed had moved aside, if nothing took its place."""
    for folder, lock in _leftovers(place):
        try:
            if folder.name.endswith(ASIDE) and not place.exists():
                folder.rename(place)
        finally:
            os.close(lock)


def _leftovers(place: Path) -> Iterator[tuple[Path, int]]:
    """The folders that runs which have ended left beside ``place``, each locked."""
    for folder in sorted(place.parent.glob(f".{_escaped(place.name)}.ntk-convert-*")):
        lock = _lock(folder)
        if lock is not None:
            yield folder, lock


def _adopt(place: Path) -> tuple[Path, int] | None:
    """The folder with most finished bytes of those that this user's runs left; locked, under a new name."""
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
    # What is in place is complete, even if the power fails the moment after.
    _flush(staging)
    aside = staging.with_name(staging.name + ASIDE)
    with held() as waiting:
        Journal(staging).remove()
        try:
            while True:
                try:
                    # Replaces nothing or an empty folder, atomically.
                    staging.rename(place)
                    break
                except OSError as error:
                    if error.errno not in OCCUPIED:
                        raise
                    if not overwrite:
                        raise OutputError(
                            f"{place} was filled while this run worked; give --overwrite"
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
    with suppress(FileNotFoundError):  # another run saw to it
        if place.exists():
            # Under a name that is never restored: half of it may be all that is left.
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
        with suppress(OSError):  # not every file system does that for folders
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
        # Another run took the new folder for a leftover before it was locked.


def _staging_name(place: Path) -> Path:
    return place.with_name(f".{place.name}.ntk-convert-{os.getpid()}-{_host()}{secrets.token_hex(4)}")


def _host() -> str:
    """This machine, in four letters: a process id means nothing on another."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:4]


def _lock(folder: Path) -> int | None:
    """Locks a folder; None if a living process holds it, or it is gone."""
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
        # A file system without locks: the process id in the name has to do.
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
