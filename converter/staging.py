"""All or nothing: a repository is built in a folder beside its place and renamed when it is done.

The folder is called ``.<name>.ntk-convert-<pid>-<random>`` and stays locked (flock) as long as its
process lives, however that ends. A later run removes those whose lock is free, and only those, or
with ``--resume`` goes on in one of them; so runs side by side, in other containers too, leave each
other alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from converter.errors import OutputError
from converter.weights.journal import kept, prune

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
    # Path's own ways to say these raise for a user that is none, and for links in a circle.
    place = Path(os.path.realpath(os.path.expanduser(out)))  # noqa: PTH111
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


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; says what became of it."""


@contextmanager
def staged(place: Path, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """A folder that becomes ``place`` when the block ends, and vanishes when it raises.

    It is empty at first, or with ``resume`` holds the weight files that an earlier run to the same place
    finished, and their journal. When the user or the disk ends the block and such files are there, the
    folder stays for the next run.

    Args:
        place: absolute path, from ``check_output``.
        overwrite: replace what is at ``place``; the old folder stays until the new one is complete.
        resume: go on from what an earlier run left.

    Raises:
        OutputError: ``place`` was filled by somebody else meanwhile, or the disk failed and finished
            files are kept.
        Interrupted: the user ended it, and finished files are kept.
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
    remove_leftovers(place)
    folder, lock = adopted or _create(place)
    keep = False
    try:
        yield folder
    except (KeyboardInterrupt, OSError) as error:
        files = kept(folder)
        keep = files is not None
        if isinstance(error, KeyboardInterrupt):
            if not folder.exists():
                raise
            raise Interrupted(files or "nothing was written") from error
        if files is None:
            raise
        raise OutputError(f"{error.strerror or error}; {files}, once that is mended") from error
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers(place: Path) -> None:
    """Removes what runs to the same place left beside it when they were killed.

    A folder that ``--overwrite`` had just moved aside goes back, if nothing took its place.
    """
    for folder, lock in _leftovers(place):
        try:
            if folder.name.endswith(ASIDE) and not place.exists():
                folder.rename(place)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _leftovers(place: Path) -> Iterator[tuple[Path, int]]:
    """The folders that runs which have ended left beside ``place``, each locked."""
    for folder in sorted(place.parent.glob(f".{_escaped(place.name)}.ntk-convert-*")):
        lock = _lock(folder)
        if lock is not None:
            yield folder, lock


def _adopt(place: Path) -> tuple[Path, int] | None:
    """A folder with finished weight files that an earlier run left, under a name of this run's, locked."""
    for folder, lock in _leftovers(place):
        if kept(folder) is not None and not folder.name.endswith(ASIDE):
            prune(folder)
            return folder.rename(_staging_name(place)), lock
        os.close(lock)
    return None


def _publish(staging: Path, place: Path, *, overwrite: bool) -> None:
    aside = staging.with_name(staging.name + ASIDE)
    with _signals_held() as held:
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
            if aside.exists() and not place.exists():
                aside.rename(place)
            shutil.rmtree(aside, ignore_errors=True)
    if held:
        raise Interrupted(f"{place} is complete")


@contextmanager
def _signals_held() -> Iterator[list[int]]:
    """Yields the interruptions that came meanwhile, which end nothing.

    For the moments in which the new folder takes the old one's place: half of it would be no right end.
    """
    held: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # signals reach no other
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, lambda number, _: held.append(number))
    try:
        yield held
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _create(place: Path) -> tuple[Path, int]:
    while True:
        folder = _staging_name(place)
        folder.mkdir()
        lock = _lock(folder)
        if lock is not None:
            return folder, lock
        # Another run took the new folder for a leftover before it was locked.


def _staging_name(place: Path) -> Path:
    return place.with_name(f".{place.name}.ntk-convert-{os.getpid()}-{secrets.token_hex(4)}")


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
    pid = folder.name.partition(".ntk-convert-")[2].partition("-")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
