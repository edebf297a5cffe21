"""Makes many faults at many points of many kinds of runs; each row of the table is one fault and kind."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests import tiny
from tests.faults.hook import CHANGES, PLANTED, Fault, Role
from tests.faults.launcher import Launcher
from tests.faults.trial import GOLDEN, KINDS, Kind, Trial, scattered
from tests.hub_server import HubServer

SIGNALS = {
    "SIGKILL": Fault("", signal=signal.SIGKILL),
    "SIGTERM": Fault("", signal=signal.SIGTERM),
    "Ctrl-C": Fault("", signal=signal.SIGINT, group=True),
    "Ctrl-C, held down": Fault("", signal=signal.SIGINT, group=True, repeat=True),
}
LIMITS = {
    "no file may grow": Fault("", limit=0),
    "no file may exceed 10 kB": Fault("", limit=10_000),
}
FULL = {
    "disk full": Fault("", fill="filler"),
    "disk full but for 16 kB": Fault("", fill="filler", leave=16_384),
}
STOPPED = {"another run meanwhile": Fault("", signal=signal.SIGSTOP)}
IN_WORKER = {
    "its process killed": Fault("", role="worker", signal=signal.SIGKILL),
    "its process crashed": Fault("", role="worker", signal=signal.SIGSEGV),
}
TIMED = ("SIGKILL", "SIGTERM", "Ctrl-C")
DISK = 64 << 20
"""Bytes of the disk that is filled; more than the free space that a run requires."""


@dataclass
class Row:
    """The outcome of one fault at several points of one kind of run."""

    fault: str
    kind: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    """What went wrong, each with its point."""

    @property
    def survived(self) -> int:
        """Number of points after which every promise held."""
        return self.tried - len(self.failures)


def can_mount() -> bool:
    """Whether this user may mount a small disk in a private mount namespace."""
    if shutil.which("unshare") is None:
        return False
    try:
        with Launcher((), namespace=True) as launcher, tempfile.TemporaryDirectory() as folder:
            return launcher.execute("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder) == 0
    except (RuntimeError, BrokenPipeError):
        return False


@contextmanager
def trial(kind: Kind, home: Path, *, disk: bool = False, planted: str | None = None) -> Iterator[Trial]:
    """Prepares runs of a kind in a folder.

    Args:
        kind: what to run.
        home: an empty folder.
        disk: mount a small disk on it.
        planted: a defect of ``tests.faults.planted``.
    """
    with ExitStack() as stack:
        environment = {}
        modules = kind.modules
        if planted is not None:
            environment = {PLANTED: planted}
            modules = (*modules, "tests.faults.planted")
        if kind.hub:
            server = stack.enter_context(HubServer())
            environment = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home / "hf")}
        launcher = stack.enter_context(Launcher(modules, environment, namespace=disk))
        if disk:
            mounted = launcher.execute("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", home)
            assert mounted == 0, "no small disk can be mounted"
        here = launcher.root / str(home).lstrip("/")
        (here / "work").mkdir()
        checkpoint = here / ("checkpoint" if kind.hub else "work/source")
        checkpoint.mkdir()
        tiny.FACTORIES["bloom"](checkpoint, **kind.source)
        if kind.hub:
            server.commit("org/tiny", checkpoint)
        yield Trial(kind, launcher, home, "org/tiny" if kind.hub else home / "work/source")


def rows(
    trial: Trial,
    faults: Mapping[str, Fault],
    points: int | None = None,
    *,
    last: int | None = None,
    end: float = float("inf"),
    options: Sequence[str] = (),
) -> list[Row]:
    """Makes each fault at several points, spread over a run: first one point of every fault, then the next.

    Args:
        trial: the runs.
        faults: name -> fault.
        points: most points of each fault; None for every event.
        last: use only this many events at the end of a run.
        end: value of ``time.monotonic()`` after which no new run starts.
        options: options of the run after the fault.
    """
    label = ", then ".join([trial.kind.name, *options])
    result = {name: Row(name, label) for name in faults}
    orders = {role: scattered(len(events), last) for role, events in trial.events.items()}
    for index in range(max(map(len, orders.values()))):
        for name, fault in faults.items():
            if index >= len(orders[fault.role]) or (points is not None and index >= points):
                continue
            if time.monotonic() > end:
                return list(result.values())
            at = replace(fault, at=orders[fault.role][index])
            if fault.signal == signal.SIGSTOP:
                wrong = trial.survives_another(at)
            else:
                wrong = trial.survives_change(at) if fault.change else trial.survives(at, options)
            result[name].tried += 1
            if wrong:
                event = trial.events[fault.role][at.at - 1]
                result[name].failures.append(f"{fault.role} {event}: {'; '.join(wrong)}")
    return list(result.values())


def rows_in_time(trial: Trial, points: int | None = None, *, end: float = float("inf")) -> list[Row]:
    """Like ``rows``, but sends signals at times instead of events, so also in the middle of computations."""
    result = {name: Row(f"{name}, timed", trial.kind.name) for name in TIMED}
    index = 0
    while index != points and time.monotonic() < end:
        for name in TIMED:
            after = trial.seconds * (index * GOLDEN % 1)
            wrong = trial.survives(replace(SIGNALS[name], after=after))
            result[name].tried += 1
            if wrong:
                result[name].failures.append(f"{after:.3f} s: {'; '.join(wrong)}")
        index += 1
    return list(result.values())


def changes(trial: Trial) -> dict[str, Fault]:
    """Faults that change a shard, in all ways, while it is copied or read by a worker."""
    shard = sorted(path.name for path in (trial.here / "source").glob("*-of-*"))[1]
    role: Role = "worker" if trial.events["worker"] else "main"
    return {f"a shard: {how}": Fault("", role=role, change=shard, how=how) for how in CHANGES}


def faults_of(trial: Trial) -> dict[str, Fault]:
    """The faults that make sense for a kind of run, except a full disk."""
    faults = {**SIGNALS, **LIMITS, **STOPPED}
    if trial.events["worker"]:
        faults |= IN_WORKER
    if not trial.kind.hub and trial.kind.source.get("sharded") and "--hard-link" not in trial.kind.words:
        faults |= changes(trial)
    return faults


def report(seconds: float = 300, kinds: Sequence[Kind] = KINDS) -> list[Row]:
    """Makes all faults in about this many seconds; more seconds allow more points."""
    result: list[Row] = []
    end = time.monotonic() + seconds
    disk = can_mount()
    for index, kind in enumerate(kinds):
        now = time.monotonic()
        share = (end - now) / (len(kinds) - index)
        with tempfile.TemporaryDirectory() as home, trial(kind, Path(home)) as here:
            result += rows(here, faults_of(here), end=now + share * 0.5)
            result += rows_in_time(here, end=now + share * 0.6)
            if here.keeps_files:
                result += rows(here, SIGNALS, end=now + share * 0.8, options=["--resume"])
        if disk:
            with tempfile.TemporaryDirectory() as home, trial(kind, Path(home), disk=True) as here:
                result += rows(here, FULL, end=now + share)
    return result


def table(result: Sequence[Row]) -> str:
    """The rows as text, followed by the failures."""
    width = max(len(row.kind) for row in result), max(len(row.fault) for row in result)
    lines = [f"{'run':{width[0]}}  {'fault':{width[1]}}  {'tried':>6}  {'survived':>8}"]
    lines += [
        f"{row.kind:{width[0]}}  {row.fault:{width[1]}}  {row.tried:6}  {row.survived:8}" for row in result
    ]
    tried, survived = sum(row.tried for row in result), sum(row.survived for row in result)
    lines.append(f"{'all':{width[0]}}  {'':{width[1]}}  {tried:6}  {survived:8}")
    lines += [f"FAILED  {row.kind}, {row.fault}, at {failure}" for row in result for failure in row.failures]
    return "\n".join(lines)
