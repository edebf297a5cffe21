"""The process that runs cases: ``python -m tests.hostile.worker KIND NUMBER...``.

It prints the result of each case as one line of JSON. A case that does not end is ended by SIGALRM, with
the process. The memory of this process and of those that it starts is limited.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile.guard import Guard
from tests.hostile.outcomes import Outcome
from tests.hostile.sources import CODE_FILES, KINDS, build

LIMIT = 6 << 30
"""Bytes of memory that the process may allocate, torch included."""
SLOWEST, ENDLESS = 20.0, 60
"""Seconds that a case may take, on a machine that does other work too; and after which it is ended."""
MOST_MEMORY = 768 << 20
"""Bytes of memory that a case may use in addition to what the process had before."""
SECRET = "what only a file outside says"
LONGEST_LINE = 1100
"""Characters that an error message may have."""


def main() -> None:
    kind, numbers = sys.argv[1], map(int, sys.argv[2:])
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="hostile-hf-") as cache:
        os.environ |= {"HF_HOME": cache, "HF_HUB_OFFLINE": "1"}
        os.environ.pop("HF_TOKEN", None)
        _warm(torch=KINDS[kind].verify)
        guard = Guard()
        for number in numbers:
            signal.alarm(ENDLESS)
            print(json.dumps(asdict(run(kind, number, guard))), file=answers, flush=True)


def _warm(*, torch: bool) -> None:
    """Imports what the runs import, so that no run is watched and measured while importing."""
    for module in ("huggingface_hub", "safetensors", "yaml", "converter.inspection", "converter.conversion"):
        importlib.import_module(module)
    importlib.import_module("converter.cli.report")
    if torch:
        from tests import tiny

        # On its first import, matplotlib makes folders in the user's home.
        importlib.import_module("converter.pictures.per_head")
        with tempfile.TemporaryDirectory() as folder:
            tiny.FACTORIES["bloom"](Path(folder) / "x", 2)


def run(kind: str, number: int, guard: Guard) -> Outcome:
    """Runs one case in this process and checks its effects."""
    root, before = Path(tempfile.mkdtemp(prefix="hostile-")), Path.cwd()
    try:
        for folder in ("outside", "work"):
            (root / folder).mkdir()
        (root / "outside/secret.json").write_text(json.dumps({"outside": SECRET}))
        os.chdir(root / "work")
        made = build(kind, number, root / "source")
        words = made or _words(kind, number, str(root / "source"), root / "work/out")
        return _observed(kind, number, words, root, guard)
    finally:
        os.chdir(before)
        shutil.rmtree(root, ignore_errors=True)


def _words(kind: str, number: int, model: str, out: Path) -> list[str]:
    convert, ending = ["convert", model, "--out", str(out)], Random(number)
    if KINDS[kind].verify:
        return [*convert, "--scale", "2"]
    choice = ending.random()
    if choice < 0.2:
        return ["inspect", model, *ending.choice(([], ["--scale", "2"]))]
    strength = ending.choice(
        (["--scale", "2"], ["--scale", "1.5", "--method", "linear"], ["--target-length", "128"])
    )
    more = ending.choice(([], [], ["--json"], ["--verbose"]))
    return [*convert, *strength, "--dry-run" if choice < 0.4 else "--no-verify", *more]


def _observed(kind: str, number: int, words: list[str], root: Path, guard: Guard) -> Outcome:
    out, around = root / "work/out", (root / "source", root / "outside")
    before = [_fingerprint(folder) for folder in around]
    checked = Path(tempfile.gettempdir()) / "ntk-convert-*"
    writable = [out, root / "work/.out.ntk-convert-*", checked, Path(os.environ["HF_HOME"])]
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # sets this process's peak to what it uses now
    start_memory = _peak_memory()
    started = time.monotonic()
    with guard.watching(writable=writable, hostile=root / "source"):
        code, printed, said = _main(words)
    seconds, memory = time.monotonic() - started, max(_peak_memory() - start_memory, _children())
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
    return Outcome(kind, number, code, seconds, memory, problems)


def _main(words: list[str]) -> tuple[int | None, str, str]:
    """Runs the command line in this process; returns exit code (None for a traceback), stdout and stderr."""
    from converter.cli import main

    out, err = io.BytesIO(), io.BytesIO()
    code: int | None = None
    with (
        contextlib.redirect_stdout(io.TextIOWrapper(out, "utf-8", write_through=True)),
        contextlib.redirect_stderr(io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)),
    ):
        try:
            main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        return code, out.getvalue().decode("utf-8", "replace"), err.getvalue().decode("utf-8", "replace")


def _said(code: int | None, printed: str, said: str, words: list[str]) -> Iterator[str]:
    """The problems of the output."""
    verbose = "--verbose" in words
    line = said.splitlines()[-1] if said.strip() else ""
    if code not in (0, 1, 2) or ("Traceback" in said and not verbose) or "this is a bug" in said:
        yield f"crash {said.strip()[-600:]}"
        return
    if code:
        if not verbose and (said.count("\n") != 1 or not said.startswith("error: ")):
            yield f"crash more or less than one error line: {said[:300]!r}"
        if not line.isprintable() or len(line) > LONGEST_LINE:
            yield f"crash error line of {len(line)} characters, too long or not printable: {line[:300]!r}"
        if printed:
            yield f"crash a failed run printed output: {printed[:300]!r}"
    text = printed if code else printed + said
    unprintable = sorted({letter for letter in text if not letter.isprintable() and letter != "\n"})
    if unprintable and not verbose:
        yield f"crash printed {unprintable!r}"


def _complete(out: Path) -> Iterator[str]:
    """The problems of a result."""
    from safetensors import SafetensorError, safe_open

    missing = [name for name in ("config.json", "README.md") if not (out / name).is_file()]
    if missing:
        yield f"write the result lacks {missing}"
    extra = [path.name for path in out.rglob("*") if path.is_symlink() or path.name in CODE_FILES]
    if extra:
        yield f"write the result contains {extra}"
    files = [path for path in out.rglob("*") if path.is_file() and path.suffix != ".py"]
    if any(SECRET.encode() in path.read_bytes() for path in files):
        yield "write the result contains a file from outside"
    for path in sorted(out.rglob("*.json")):
        for named in re.findall(rb'"[^"]*evil\.Model[^"]*"', path.read_bytes()):
            yield f"code {path.name} of the result names {named!r}"
    for path in sorted(out.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                list(file.keys())
        except (SafetensorError, OSError) as error:
            yield f"write the safetensors library cannot read {path.name}: {error}"
    result, _, said = _main(["inspect", str(out)])
    if result != 0:
        yield f"write the result cannot be inspected: {said.strip()[:300]}"


def _violation(found: str) -> str:
    event = found.split(" ", 1)[0]
    ran = event in ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn")
    return f"{'write' if event.startswith(('open', 'os.', 'shutil.')) and not ran else 'code'} {found}"


def _fingerprint(folder: Path) -> dict[str, tuple[Any, ...]]:
    """The state of every entry in a folder; links are not followed."""
    found = {}
    for path in folder.rglob("*"):
        status, content = path.lstat(), ""
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file() and status.st_size < 1 << 20:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found


def _peak_memory() -> int:
    """Peak memory of this process in bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def _children() -> int:
    """Peak memory in bytes of the largest child process that has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


if __name__ == "__main__":
    main()
