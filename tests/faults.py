"""Runs of the command line with a fault at one event; afterwards all or nothing is there.

An event is an open for writing, a write, a flush, a rename or the like on a path in the run's folder. A fault
"at event 17" happens between the 16th and the 17th thing that the run does to its files, and always at the
same point. ``python -m tests.faults`` (``make hostile``) tries as many points as it has time for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import forks, tiny
from tests.conftest import fingerprint
from tests.fault_hook import SHARD, SIGNALS
from tests.messages import errors

ROOT = Path(__file__).parent.parent
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples modulo 1 are spread evenly, however many there are."""
OLD = {"config.json": "{}", "model.safetensors": "old", "README.md": "old"}
LIGHT = ("--no-verify",)
STOPPED = "error: interrupted; "
WORK = ".onnx.ntk-convert-"
"""Begins the name of the folder in which an export writes. A killed one leaves it, the next removes it."""
KINDS: dict[str, tuple[str, ...]] = {
    "copy": LIGHT,
    "overwrite": (*LIGHT, "--overwrite"),
    "hard links": (*LIGHT, "--hard-link"),
    "another dtype": (*LIGHT, "--dtype", "bf16"),
    "verified": (),
    "a graph": (*LIGHT, "--onnx"),
}
"""Kind of run -> its options."""
FAULTS = (*SIGNALS, "Ctrl-C, held down", "one failure", "disk full", "source cut", "source replaced")


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


@dataclass
class Trial:
    """Runs of one kind in a folder of their own; ``planted`` is code that breaks the converter first."""

    kind: str
    home: Path
    planted: str = ""
    failures: list[str] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        self.work, self.out = self.home / "work", self.home / "work/out"
        self.source, self.pristine = self.work / "source", self.home / "pristine"
        self.work.mkdir()
        tiny.FACTORIES["bloom"](self.pristine, sharded=self.kind != "a graph")
        self.converted: dict[str, str] = {}
        if self.kind == "a graph":
            self.kind, kind = "copy", self.kind
            self.reset()
            self.events()
            self.kind, self.converted = kind, contents(self.out) or {}
        self.reset()
        self.log = self.events()
        self.complete = contents(self.out)

    def reset(self) -> None:
        """Removes what runs left, and makes what the kind needs: an older folder."""
        shutil.rmtree(self.work)
        shutil.copytree(self.pristine, self.source)
        if self.kind == "overwrite":
            self.out.mkdir()
            for name, text in OLD.items():
                (self.out / name).write_text(text)

    def start(self, *more: str, log: str | None = None, at: int = 0, fault: str = "") -> Any:
        """Starts one run."""
        words = [str(self.source), "--scale", "2", "--out", str(self.out), *KINDS[self.kind], *more]
        code = (
            "from tests.fault_hook import install; import os, shutil, signal, subprocess\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup may have started this
            "from pathlib import Path\n"
            f"from converter import conversion, plan; from converter.result import staging\n{self.planted}\n"
            f"install({str(self.work)!r}, {log!r}, {at!r}, {fault!r})\n"
            f"from converter.cli import main; main({words!r})"
        )
        pipes = {"stdout": forks.PIPE, "stderr": forks.PIPE}
        return forks.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, start_new_session=True, **pipes)

    def run(self, *more: str, **how: Any) -> tuple[int, str]:
        """Makes one run; its exit code, and what it said."""
        process = self.start(*more, **how)
        _, err = process.communicate(timeout=300)
        return process.returncode, err

    def events(self) -> list[str]:
        """The events of a run without a fault."""
        log = self.home / "events"
        log.unlink(missing_ok=True)
        code, err = self.run(log=str(log))
        assert code == 0, err
        return log.read_text().splitlines()

    def leftovers(self) -> list[Path]:
        """The files and folders that runs left beside out."""
        return sorted(path for path in self.work.iterdir() if path.name not in ("source", "out"))

    def survives(self, fault: str, at: int) -> None:
        """Makes a run with a fault and one without; notes what was wrong afterwards."""
        self.reset()
        before, source = contents(self.out), fingerprint(self.source)
        code, err = self.run(at=at, fault=fault)
        wrong = list(self.after(code, err, before, fault))
        if not fault.startswith("source") and fingerprint(self.source) != source:
            wrong.append("the source was changed")
        again = ["--overwrite"] * (self.out.exists() and self.kind != "overwrite")
        if fault.startswith("source"):
            shutil.rmtree(self.source)
            shutil.copytree(self.pristine, self.source)
        code, err = self.run(*again)
        if code or contents(self.out) != self.complete or self.leftovers():
            wrong.append(f"the next run ended with {code}: {err.strip()} {self.leftovers()}")
        self.note(fault, at, wrong)

    def exports(self, now: Mapping[str, str] | None) -> bool:
        """Whether ``out`` is a conversion to which an export has added all, some or none of its files."""
        shown = {name: digest for name, digest in (now or {}).items() if not name.startswith(WORK)}
        either = {*self.converted.items(), *(self.complete or {}).items()}
        return bool(self.converted) and self.converted.keys() <= shown.keys() and {*shown.items()} <= either

    def note(self, fault: str, at: int, wrong: list[str]) -> None:
        self.tried += 1
        if wrong:
            self.failures.append(f"{self.kind}, {fault} at {at} ({self.log[at - 1]}): {'; '.join(wrong)}")

    def after(self, code: int, err: str, before: Mapping[str, str] | None, fault: str) -> Iterator[str]:
        """What is wrong after a run that may have failed."""
        now, left = contents(self.out), self.leftovers()
        if fault.startswith("source") and code == 0:  # it may have read the file before it changed, or after
            now = now and {**now, SHARD: "", "ntk_convert.json": ""}
            if now != {**(self.complete or {}), SHARD: "", "ntk_convert.json": ""}:
                yield "it succeeded, and out is not complete"
            return
        if code == 0 and now != self.complete:
            yield "it succeeded, and out is not complete"
        # Where folders cannot be exchanged, a kill leaves the old one beside out; the next run puts it back.
        hopeless = code < 0 or fault in ("Ctrl-C, held down", "disk full", "one failure")
        aside = any(path.name.endswith(".old") for path in left)
        moved = now is None and hopeless and aside and "_exchange" in self.planted
        if now not in (before, self.complete) and not moved and not self.exports(now):
            yield "out is neither as before nor complete"
        if code > 0 and not one_line(err):
            yield f"not one line, but {err!r}"
        if code and fault in SIGNALS and fault != "SIGKILL" and not errors(err).startswith(STOPPED):
            yield f"not interrupted, but {code} and {err!r}"
        if code > 0 and "nothing was written" in err and now != before and not moved:
            yield "it says that nothing was written, and out is new"
        if code >= 0 and left and not hopeless:
            yield f"left beside out: {left}"


def one_line(err: str) -> bool:
    """Whether a failed run said one line of an error."""
    said = errors(err)
    return said.startswith("error: ") and "\n" not in said and "this is a bug" not in said


def scattered(count: int, last: int | None = None) -> list[int]:
    """1 to ``count``, or only the ``last`` of these, in an order whose first items are spread evenly."""
    first = 1 if last is None else max(1, count - last + 1)
    numbers = range(first, count + 1)
    return sorted(numbers, key=lambda number: (number not in (first, count), number * GOLDEN % 1))


def main() -> None:
    """Tries every kind of run, and prints a table; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="approximate time; 300 by default")
    seconds = parser.parse_args().seconds
    failures = []
    for kind in KINDS:
        end = time.monotonic() + seconds / len(KINDS)
        with tempfile.TemporaryDirectory() as home:
            trial = Trial(kind, Path(home))
            for at in scattered(len(trial.log)):
                for fault in FAULTS:
                    if time.monotonic() < end and not (kind == "a graph" and fault.startswith("source")):
                        trial.survives(fault, at)
        print(f"{kind:15} {trial.tried:5} tried {trial.tried - len(trial.failures):5} survived", flush=True)
        failures += trial.failures
    print("\n".join(failures))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
