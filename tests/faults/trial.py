"""Makes one run with one fault, and checks what must be true afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.conftest import fingerprint
from tests.faults.hook import Fault, Role
from tests.faults.launcher import LIGHT, MODELS, ONNX, Ended, Launcher

JOURNAL = "weights.journal"
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples modulo 1 are spread evenly, however many there are."""
OLD = {"config.json": "{}", "model.safetensors": "old", "README.md": "old"}


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    name: str
    words: tuple[str, ...] = ("--no-verify",)
    source: Mapping[str, Any] = field(default_factory=lambda: {"sharded": True})
    """Options of the tiny checkpoint."""
    modules: tuple[str, ...] = LIGHT
    """Modules to import before the run."""
    hub: bool = False
    """Read the source from a Hub on loopback; the contents of its cache are not checked."""

    @property
    def resumes(self) -> bool:
        """Whether it continues from what an earlier run left."""
        return "--resume" in self.words

    @property
    def overwrites(self) -> bool:
        """Whether there is an older folder to replace."""
        return "--overwrite" in self.words


COPY = Kind("copy")
OVERWRITE = Kind("copy, --overwrite", ("--no-verify", "--overwrite"))
BIN = Kind(".bin converted", source={"fmt": "bin", "sharded": True})
DTYPE = Kind("--dtype bf16", ("--no-verify", "--dtype", "bf16"))
RESUME = Kind("--resume", ("--no-verify", "--resume"))
HARD_LINK = Kind("--hard-link", ("--no-verify", "--hard-link"))
VERIFIED = Kind("verified", (), modules=MODELS)
GRAPH = Kind("--onnx, validated", ("--no-verify", "--onnx"), source={}, modules=ONNX)
HUB = Kind("from the Hub", hub=True)
KINDS = (COPY, OVERWRITE, BIN, DTYPE, HARD_LINK, RESUME, HUB, VERIFIED, GRAPH)


def contents(folder: Path) -> dict[str, str] | None:
    """File or folder -> hash of its bytes; None if there is no such folder."""
    if not folder.is_dir():
        return None
    return {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(folder.rglob("*"))}


def _digest(path: Path) -> str:
    if path.is_dir():
        return "folder"
    if path.name == "onnx_validation.json":  # it holds times
        return str(json.loads(path.read_bytes())["passed"])
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Trial:
    """Runs of one kind in a folder of their own.

    Args:
        kind: what to run.
        launcher: what starts them.
        home: an empty folder, as the launcher names it.
        source: the checkpoint, in ``home / "work"``; or a Hub id.
    """

    def __init__(self, kind: Kind, launcher: Launcher, home: Path, source: Path | str) -> None:
        self.kind, self.launcher, self.source = kind, launcher, source
        self.work = home / "work"
        self.out = self.work / "out"
        self.log = home / "events"
        self.here = self._seen(self.work)
        """The work folder, as this process names it."""
        self.unfinished: Path | None = None
        """A copy of what an earlier run left, for the kind that continues from there."""
        if kind.resumes:
            self._leave_unfinished()
        self.reset()
        started = time.monotonic()
        self.events = self._events()
        """The file-system events of each process of a run."""
        self.seconds = time.monotonic() - started
        """Seconds that a run takes."""
        self.complete = contents(self.here / "out")
        """The result of a run without a fault."""

    def run(self, fault: Fault | None = None, *more: str, powerless: bool = False) -> Ended:
        """Makes one run, with a fault and more options if given."""
        words = [*self.words, *more]
        return self.launcher.run(words, fault, powerless=powerless)

    @property
    def keeps_files(self) -> bool:
        """Whether an interrupted run leaves finished files that another can continue from."""
        return "--hard-link" not in self.kind.words and not self.kind.resumes and len(self.kind.source) > 0

    @property
    def words(self) -> list[str]:
        """The command line."""
        cache = ["--cache-dir", str(self.work / "cache")] if self.kind.hub else []
        return [str(self.source), "--scale", "2", "--out", str(self.out), *self.kind.words, *cache]

    def reset(self) -> None:
        """Removes what runs left, and restores what the kind needs: an older folder, a leftover."""
        for path in self.here.iterdir():
            if path.name != "source":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if self.kind.overwrites:
            (self.here / "out").mkdir()
            for name, text in OLD.items():
                (self.here / "out" / name).write_text(text)
        if self.unfinished is not None:
            shutil.copytree(self.unfinished, self.here / self.unfinished.name)

    def leftovers(self) -> list[Path]:
        """The files and folders that runs left beside out."""
        known = {"source", "out", "cache", self.unfinished and self.unfinished.name}
        return sorted(path for path in self.here.iterdir() if path.name not in known)

    def survives(self, fault: Fault, options: Sequence[str] = ()) -> list[str]:
        """Makes a run with a fault and one without; returns what was wrong afterwards, in words.

        Args:
            fault: the fault; its files are within ``home``.
            options: options of the second run.
        """
        self.reset()
        before, source = contents(self.here / "out"), self._source()
        ended = self._ended_by(fault)
        if fault.fill is not None:
            self._seen(self.work.parent / fault.fill).unlink(missing_ok=True)
        wrong = [*self.after(ended, before, may_leave=fault.repeat), *self._unchanged(source)]
        wrong += self.again(options)
        return [*wrong, *self._unchanged(source)]

    def survives_another(self, fault: Fault) -> list[str]:
        """Pauses a run at an event, makes a second complete run, and then lets the first continue."""
        self.reset()
        source = self._source()
        first = self.launcher.start(self.words, self._placed(fault))
        wait_until_stopped(first)
        second = self.run()
        published = contents(self.here / "out")
        os.kill(first, signal.SIGCONT)
        ended = self.launcher.wait(first)
        wrong = [] if second.code == 0 else [f"the other run failed: {second.err.strip()}"]
        if published != self.complete:
            wrong.append(f"the other run's out is not complete: {differences(published, self.complete)}")
        if contents(self.here / "out") != self.complete:
            wrong.append("out is not complete")
        if self.kind.overwrites and ended.code:
            wrong.append(f"it failed: {ended.err.strip()}")
        elif ended.code:
            wrong += one_line(ended)
        if left := self.leftovers():
            wrong.append(f"left beside out: {[path.name for path in left]}")
        return [*wrong, *self._unchanged(source)]

    def survives_change(self, fault: Fault) -> list[str]:
        """Like ``survives``, for a fault that changes a file of the source.

        A run that succeeds must have written the file as it was either before the change or after it.
        """
        self.reset()
        kept = self.here.parent / "kept"
        shutil.copytree(self.here / "source", kept)
        before = contents(self.here / "out")
        ended = self._ended_by(fault)
        changed = self._source()
        published, wrong = contents(self.here / "out"), []
        if ended.code == 0 and published != self.complete:
            again = self.run(None, *["--overwrite"] * (not self.kind.overwrites))
            if again.code or contents(self.here / "out") != published:
                wrong.append(f"neither the old nor the new: {differences(published, self.complete)}")
            shutil.rmtree(self.here / "out")
        elif ended.code:
            wrong += self.after(ended, before)
        wrong += self._unchanged(changed)
        shutil.rmtree(self.here / "source")
        kept.rename(self.here / "source")
        return wrong + self.again()

    def _ended_by(self, fault: Fault) -> Ended:
        """Makes a run with a fault at an event or at a time."""
        if fault.after is None:
            return self.run(self._placed(fault))
        assert fault.signal is not None
        pid = self.launcher.start(self.words)
        time.sleep(fault.after)
        with suppress(ProcessLookupError):
            (os.killpg if fault.group else os.kill)(pid, fault.signal)
        return self.launcher.wait(pid)

    def _events(self) -> dict[Role, list[str]]:
        """Makes a complete run; returns the file-system events of its processes."""
        log = self._seen(self.log)
        log.unlink(missing_ok=True)
        ended = self.run(Fault(str(self.work), log=str(self.log)))
        assert ended.code == 0, ended.err
        events: dict[Role, list[str]] = {"main": [], "worker": []}
        for line in log.read_text(encoding="utf-8").splitlines():
            role, _, event = line.partition(" ")
            events["main" if role == "main" else "worker"].append(event)
        return events

    def _leave_unfinished(self) -> None:
        """Kills a run when half of its shards are finished, and keeps what it left."""
        self.reset()
        noted = [int(event.split()[0]) for event in self._events()["main"] if JOURNAL in event]
        self.reset()
        self.run(self._placed(Fault("", at=noted[len(noted) // 2], signal=signal.SIGKILL)))
        (left,) = self.leftovers()
        self.unfinished = self.here.parent / left.name
        left.rename(self.unfinished)

    def _placed(self, fault: Fault) -> Fault:
        """The fault with absolute paths, as the launcher names them."""
        return replace(
            fault,
            work=str(self.work),
            fill=fault.fill and str(self.work.parent / fault.fill),
            change=fault.change and str(self.work / "source" / fault.change),
        )

    def _seen(self, path: Path) -> Path:
        """A path as this process names it."""
        return self.launcher.root / str(path).lstrip("/")

    def after(self, ended: Ended, before: dict[str, str] | None, *, may_leave: bool = False) -> list[str]:
        """What is wrong after a run that may have failed.

        Args:
            ended: how it ended.
            before: the out folder's contents before it.
            may_leave: the run had no chance to clean up.
        """
        now = contents(self.here / "out")
        wrong = []
        if ended.survivors:
            wrong.append(f"{len(ended.survivors)} of its processes still ran")
        if ended.code == 0 and now != self.complete:
            wrong.append("it succeeded, and out is not complete")
        left = self.leftovers()
        # Killed between two renames, --overwrite leaves the old folder beside out, and puts it back later.
        aside = now is None and any(path.name.endswith(".old") for path in left)
        moved = aside and (ended.code < 0 or may_leave)
        if now not in (before, self.complete) and not moved:
            wrong.append(f"out is neither as before nor complete: {differences(now, self.complete)}")
        if ended.code > 0:
            wrong += one_line(ended)
            if "nothing was written" in ended.err and now != before and not moved:
                wrong.append("it says that nothing was written, and out is new")
        if ended.code >= 0 and left and not may_leave:
            if "--resume" not in ended.err:
                wrong.append(f"left beside out without saying so: {[path.name for path in left]}")
            elif [(path / JOURNAL).is_file() for path in left] != [True]:
                wrong.append(f"nothing to resume from in {[path.name for path in left]}")
        elif "--resume" in ended.err and not left:
            wrong.append("it mentions --resume, but there is nothing to resume")
        return wrong

    def again(self, options: Sequence[str] = ()) -> list[str]:
        """What is wrong with the next run, which has no fault."""
        more = ["--overwrite"] * ((self.here / "out").exists() and not self.kind.overwrites)
        finished = self._finished() if "--resume" in options else {}
        ended = self.run(None, *more, *options)
        wrong = []
        if ended.code or ended.survivors:
            wrong.append(f"the next run ended with {ended.code}: {ended.err.strip()}")
        elif contents(self.here / "out") != self.complete:
            now = contents(self.here / "out")
            wrong.append(f"the next run's out is not complete: {differences(now, self.complete)}")
        else:
            for name, inode in finished.items():
                if (self.here / "out" / name).stat().st_ino != inode:
                    wrong.append(f"{name} was finished, but was done again")
        if (left := self.leftovers()) or self._unfinished_is_there():
            wrong.append(f"the next run left {[path.name for path in left]}")
        return wrong

    def _unfinished_is_there(self) -> bool:
        return self.unfinished is not None and (self.here / self.unfinished.name).exists()

    def _finished(self) -> dict[str, int]:
        """Weight file that an ended run had finished -> its inode."""
        finished = {}
        for path in self.leftovers():
            if (path / JOURNAL).is_file():
                for line in (path / JOURNAL).read_text(encoding="utf-8").splitlines(keepends=True):
                    if line.endswith("\n"):
                        name = json.loads(line)["file"]
                        finished[name] = (path / name).stat().st_ino
        return finished

    def _source(self) -> dict[str, tuple[str, int]]:
        return {} if self.kind.hub else fingerprint(self.here / "source")

    def _unchanged(self, source: dict[str, tuple[str, int]]) -> list[str]:
        return ["the source was changed"] if self._source() != source else []


def wait_until_stopped(pid: int) -> None:
    """Waits until a process is stopped, or has ended without being stopped."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
        time.sleep(0.002)


def one_line(ended: Ended) -> list[str]:
    """What is wrong with the message of a run that failed."""
    lines = ended.err.strip().splitlines()  # a line feed comes first, after the terminal's ^C
    if len(lines) != 1 or not lines[0].startswith("error: ") or "this is a bug" in ended.err or ended.out:
        return [f"not one line, but {ended.err!r}"]
    return []


def differences(folder: Mapping[str, str] | None, complete: Mapping[str, str] | None) -> str:
    """How two folders' contents differ, in words."""
    if folder is None or complete is None:
        return "absent"
    parts = {
        "missing": [*complete.keys() - folder.keys()],
        "too many": [*folder.keys() - complete.keys()],
        "different": [name for name in folder.keys() & complete.keys() if folder[name] != complete[name]],
    }
    return ", ".join(f"{word}: {sorted(names)}" for word, names in parts.items() if names) or "the same"


def scattered(count: int, last: int | None = None) -> list[int]:
    """1 to ``count``, or only the ``last`` of these, in an order whose first items are spread evenly."""
    first = 1 if last is None else max(1, count - last + 1)
    numbers = range(first, count + 1)
    return sorted(numbers, key=lambda number: (number not in (first, count), number * GOLDEN % 1))
