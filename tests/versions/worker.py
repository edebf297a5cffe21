"""``python -m tests.versions.worker FOLDER OUT TASK...``: the checks, in the environment that runs this.

A task is ``check:NAME`` for a model, ``convert:NAME`` for its source, or ``guard:NAME``: this version must
say in one line that it is too old. ``OUT`` gets the results as JSON: model -> check -> what is wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers

from tests.versions.environments import known

GUARD = (
    r"this model needs transformers>=4\.57; transformers {version} is installed: "
    r"pip install -U 'transformers>=4\.57'"
)
Checks = Iterator[tuple[str, Callable[[], Any]]]


def check(root: Path, name: str) -> Checks:
    from tests.versions.checks import CHECKS, Case

    case, left_out = Case(root / "converted" / name), known(transformers.__version__)
    for label, each in CHECKS.items():
        if each.has(case) and label not in left_out:
            yield label, lambda run=each.run: run(case)


def convert(root: Path, name: str) -> Checks:
    """The command line, which also runs and checks what it wrote."""
    from converter.cli import main

    def command() -> None:
        said, out = io.StringIO(), root / "again" / transformers.__version__.replace(".", "_") / name
        words = [root / "newest" / name, "--train-length", 16, "--dynamic", "position", "--out", out]
        try:
            with contextlib.redirect_stderr(said):
                main([str(word) for word in words])
        except SystemExit as end:
            if end.code:
                raise RuntimeError(said.getvalue().strip().splitlines()[-1]) from None

    yield "convert", command


def guard(root: Path, name: str) -> Checks:
    """Every way to load a model, or a tokenizer."""
    auto = transformers.AutoTokenizer if name.endswith("tokenizer") else transformers.AutoConfig
    ways = {"alone": auto.from_pretrained}
    if not name.endswith("tokenizer"):
        ways["model"] = transformers.AutoModelForCausalLM.from_pretrained
        ways["pipeline"] = lambda model, **options: transformers.pipeline("text-generation", model, **options)

    for label, way in ways.items():
        for place, model in {"folder": str(root / "converted" / name), "Hub": f"tests/{name}"}.items():
            yield f"{label}, {place}", lambda way=way, model=model: refused(way, model)


def refused(way: Callable[..., Any], model: str) -> None:
    try:
        way(model, trust_remote_code=True)
    except ImportError as error:
        if not re.fullmatch(GUARD.format(version=re.escape(transformers.__version__)), str(error)):
            raise
    else:
        raise RuntimeError("it is loaded")


def outcome(run: Callable[[], Any]) -> str | None:
    """None, or the error in one line."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind = "" if type(error).__name__ == "Wrong" else f"{type(error).__name__}: "
        return (kind + (lines or [""])[0])[:160]
    return None


TASKS = {"check": check, "convert": convert, "guard": guard}


def main(root: Path, out: Path, *tasks: str) -> None:
    results: dict[str, dict[str, str | None]] = {}
    for task in tasks:
        kind, _, name = task.partition(":")
        started = time.monotonic()
        found = {label: outcome(run) for label, run in TASKS[kind](root, name)}
        results.setdefault(name, {}).update(found)
        wrong = "; ".join(f"{label}: {error}" for label, error in found.items() if error)
        seconds = time.monotonic() - started
        print(f"{transformers.__version__} {kind} {name} ({seconds:.1f} s): {wrong or 'right'}", flush=True)
    out.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
