"""Shared by the benchmarks: a general description of the machine, Markdown tables, and result files."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("ntk-convert", "torch", "transformers", "safetensors")
PLACES = (
    *("--optimum-python", "--original-python", "--original-code", "--code", "--python"),
    *("--checkout", "--cache", "--earlier", "--text"),
)
"""Options whose values are paths on this machine."""
UNSAID = ("--folder", "--models", "--results")
"""Options that a result does not repeat, with their values."""

sys.path.insert(0, str(ROOT))  # use the checkout's converter even if another one is installed


def machine() -> str:
    """Processor, cores, memory, system and GPU, but nothing that identifies the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = found[1] if found else platform.processor() or platform.machine()
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.system()
    words = [processor, f"{os.cpu_count()} cores", f"{gigabytes:.0f} GiB", system, *gpus()]
    return ", ".join(words)


def gpus() -> list[str]:
    """The names of the GPUs that the driver lists."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def versions(more: Sequence[str] = ()) -> str:
    """The versions of Python, of the packages that the benchmarks measure, and of ``more`` if installed."""
    names = [f"Python {platform.python_version()}"]
    for package in (*PACKAGES, *more):
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            names += [f"{package} from the checkout"] if package in PACKAGES else []
    return ", ".join(names)


def load() -> str:
    """How busy the machine is, so that readers can judge the timings."""
    one, five, _ = os.getloadavg()
    return f"{one:.1f} over the last minute, {five:.1f} over five"


def command() -> str:
    """The command line without paths on this machine."""
    words, skip = [], False
    for word in sys.argv[1:]:
        option = word.split("=")[0]
        if option in PLACES:
            words.append(f"{option}=PATH")
        elif not skip and option not in (*UNSAID, "--write"):
            words.append(word)
        skip = word in (*UNSAID, *PLACES)
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def clean_up_when_terminated() -> None:
    """Makes SIGTERM an ordinary exit, which removes temporary folders."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """A Markdown table; the first columns, ``texts`` of them, hold text, and the others hold numbers."""
    lines = [head, ["---"] * texts + ["---:"] * (len(head) - texts), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(load_before: str, packages: Sequence[str] = ()) -> str:
    """What a reader must know about a run, as a list in Markdown."""
    lines = [
        f"* Date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        f"* Machine: {machine()}",
        f"* Versions: {versions(packages)}",
        f"* Command: `{command()}`",
        f"* Load average before the run (whatever else was running): {load_before}",
    ]
    return "\n".join(lines)


def write(
    name: str, title: str, sections: Sequence[str], load_before: str, packages: Sequence[str] = ()
) -> Path:
    """Writes ``results/NAME.md``, replacing that of the last run; ``packages`` are more versions to state."""
    path = RESULTS / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "\n\n".join([f"# {title}", facts(load_before, packages), *sections]) + "\n", encoding="utf-8"
    )
    return path
