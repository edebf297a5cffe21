"""One case: runs the command line on a hostile source and checks what it did."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import source
from tests.hostile.guard import Guard
from tests.hostile.kinds import KINDS, Kind

SLOWEST = 20.0
"""Seconds that a case may take, on a machine that does other work too."""
MOST_MEMORY = 768 << 20
"""Bytes of memory that a case may use in addition to what the process had before."""
SECRET = "what only a file outside says"
LONGEST_LINE = 1100
"""Characters that an error message may have."""


@dataclass
class Outcome:
    """The result of one case."""

    kind: str
    case: str
    command: str
    code: int | None
    """Exit code; None if there was a traceback."""
    line: str
    """The error message."""
    seconds: float
    memory: int
    """Peak in bytes, above that at the start; or the whole peak of a process that the run started."""
    problems: list[str]
    """Everything that must not happen; each starts with ``crash``, ``write``, ``code`` or ``limit``."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build(kind: Kind, case: str, seed: int, folder: Path) -> tuple[str | None, Random]:
    """Makes a case's source in ``folder``.

    Returns:
        The value of MODEL, or None for that folder; and the case's random generator.
    """
    rng = Random(f"{seed}/{kind.title}/{case}")
    source.write(folder)
    make = kind.examples.get(case, kind.vary)
    return make(folder, rng), rng


def run(name: str, case: str, seed: int, guard: Guard) -> Outcome:
    """Runs one case in this process.

    Args:
        name: the kind's name in ``KINDS``.
        case: an example's name, or the number of a random case.
        seed: the seed of the random cases.
        guard: the guard of this process.
    """
    kind = KINDS[name]
    root = Path(tempfile.mkdtemp(prefix="hostile-"))
    before = Path.cwd()
    try:
        for folder in ("outside", "work"):
            (root / folder).mkdir()
        (root / "outside/secret.json").write_text(json.dumps({"outside": SECRET}))
        os.chdir(root / "work")
        model, rng = build(kind, case, seed, root / "source")
        words = _words(kind, model or str(root / "source"), rng, root / "work/out")
        return _observed(name, case, words, root, guard)
    finally:
        os.chdir(before)
        _remove(root)


def _words(kind: Kind, model: str, rng: Random, out: Path) -> list[str]:
    convert = ["convert", model, "--scale", "2", "--out", str(out)]
    if kind.torch:
        return convert if kind.verify else [*convert, "--no-verify"]
    choice = rng.random()
    if choice < 0.2:
        return ["inspect", model, *rng.choice(([], ["--scale", "2"]))]
    more = rng.choice(([], [], ["--json"], ["--verbose"]))
    strength = rng.choice(
        (["--scale", "2"], ["--scale", "1.5", "--method", "linear"], ["--target-length", "128"])
    )
    return [*convert[:2], *strength, *convert[4:], "--dry-run" if choice < 0.4 else "--no-verify", *more]


def _observed(name: str, case: str, words: list[str], root: Path, guard: Guard) -> Outcome:
    out = root / "work/out"
    around = (root / "source", root / "outside")
    before = [_fingerprint(folder) for folder in around]
    cache = Path(os.environ["HF_HOME"])
    writable = [out, root / "work/.out.ntk-convert-*", cache]
    start_memory, start_children = _reset_memory(), _children()
    started = time.monotonic()
    with guard.watching(writable=writable, hostile=root / "source"):
        code, printed, said = _main(words)
    seconds = time.monotonic() - started
    memory = max(0, _peak_memory() - start_memory)
    if _children() > start_children:  # a process that the run started used more than any before it
        memory = max(memory, _children())

    problems = [_violation(found) for found in guard.take()]
    problems += [
        f"write {path} changed" for path, old in zip(around, before, strict=True) if _fingerprint(path) != old
    ]
    converted = code == 0 and words[0] == "convert" and "--dry-run" not in words
    left = sorted(path.name for path in (root / "work").iterdir())
    if left != ["out"] * converted:
        problems.append(f"write left {left} behind with exit code {code}")
    problems += _said(code, printed, said, words)
    if converted and left == ["out"]:
        problems += _complete(out)
    if seconds > SLOWEST:
        problems.append(f"limit {seconds:.0f} s")
    if memory > MOST_MEMORY:
        problems.append(f"limit {memory >> 20} MB")
    return Outcome(name, case, " ".join(words), code, said.strip()[:300], seconds, memory, problems)


def _main(words: list[str]) -> tuple[int | None, str, str]:
    """Runs the command line in this process; returns exit code (None for a traceback), stdout and stderr."""
    from converter.cli import main

    out, err = io.BytesIO(), io.BytesIO()
    streams = (
        io.TextIOWrapper(out, encoding="utf-8", write_through=True),
        io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace", write_through=True),
    )
    code: int | None = None
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
    return code, out.getvalue().decode("utf-8", "replace"), err.getvalue().decode("utf-8", "replace")


def _said(code: int | None, printed: str, said: str, words: list[str]) -> Iterator[str]:
    """The problems of the output."""
    if code not in (0, 1, 2) or ("Traceback" in said and "--verbose" not in words):
        yield f"crash {said.strip()[-600:]}"
        return
    line = said.splitlines()[-1] if said.strip() else ""
    if "this is a bug" in said:
        yield f"crash {line}"
    if code:
        if "--verbose" not in words and (said.count("\n") != 1 or not said.startswith("error: ")):
            yield f"crash more or less than one error line: {said[:300]!r}"
        if not line.isprintable() or len(line) > LONGEST_LINE:
            yield f"crash error line of {len(line)} characters, too long or not printable: {line[:300]!r}"
        if printed:
            yield f"crash a failed run printed output: {printed[:300]!r}"
    text = printed if code else printed + said
    unprintable = sorted({letter for letter in text if not letter.isprintable() and letter != "\n"})
    if unprintable and "--verbose" not in words:
        yield f"crash printed {unprintable!r}"


def _complete(out: Path) -> Iterator[str]:
    """The problems of a result."""
    from safetensors import SafetensorError, safe_open

    missing = [name for name in ("config.json", "README.md") if not (out / name).is_file()]
    if missing:
        yield f"write the result lacks {missing}"
    links = [path.name for path in out.rglob("*") if path.is_symlink()]
    code = [name for name in source.CODE_FILES if (out / name).exists()]
    if links or code:
        yield f"write the result contains {links + code}"
    if SECRET.encode() in b"".join(
        path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".py"
    ):
        yield "write the result contains a file from outside"
    for path in sorted(out.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                list(file.keys())
        except (SafetensorError, OSError) as error:
            yield f"write the safetensors library refuses {path.name}: {error}"
    result, _, said = _main(["inspect", str(out)])
    if result != 0:
        yield f"write the result cannot be inspected: {said.strip()[:300]}"


def _violation(found: str) -> str:
    starts = found.split(" ", 1)[0]
    wrote = starts == "open" or (
        starts.startswith(("os.", "shutil.")) and starts not in ("os.system", "os.exec", "os.fork")
    )
    return f"{'write' if wrote else 'code'} {found}"


def _fingerprint(folder: Path) -> dict[str, tuple[Any, ...]]:
    """The state of every entry in a folder; links are not followed."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file() and status.st_size < 1 << 20:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found


def _remove(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)


def _reset_memory() -> int:
    """Resets the peak memory of this process; returns what it uses now, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return _status("VmRSS")


def _children() -> int:
    """Peak memory in bytes of the largest child process that has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def _peak_memory() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    return 0


if sys.platform != "linux":  # pragma: no cover
    raise SystemExit("the hostile cases need Linux: /proc and resource limits")
