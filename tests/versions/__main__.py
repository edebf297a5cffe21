"""``python -m tests.versions``: checks converted models on many versions of transformers; prints a table."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from tests.hub_server import HubServer
from tests.versions import environments, models
from tests.versions.checks import CHECKS
from tests.versions.environments import KNOWN, ROOT, SUPPORTED, TOO_OLD, key

PAGE = ROOT / "docs/transformers.md"
MARKED = re.compile(r"(<!-- versions: .*?-->\n).*?\n(<!-- end of versions -->)", re.DOTALL)
AT_ONCE = 2
GROUPS = [*dict.fromkeys(check.group for check in CHECKS.values()), "convert"]
Results = dict[str, dict[str, str | None]]
"""Model -> check -> what is wrong, if anything is."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    add = parser.add_argument
    add("--short", action="store_true", help="few versions and models")
    add("--versions", nargs="+", metavar="V", choices=[*TOO_OLD, *SUPPORTED], help="only these")
    add("--models", nargs="+", metavar="NAME", choices=list(models.MODELS), help="only these")
    add("--write", action="store_true", help="write the table into docs/transformers.md")
    options = parser.parse_args()
    versions = options.versions or (environments.SHORT if options.short else [*TOO_OLD, *SUPPORTED])
    names = options.models or (models.SHORT if options.short else list(models.MODELS))

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="versions") as folder, HubServer() as server:
        # Clients 1.x compare the names of hosts without the ports, and the real storage has another name.
        server.storage = server.storage.replace("127.0.0.1", "localhost")
        root = Path(folder)
        environments.python(SUPPORTED[0])  # which both threads use
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(lambda share: prepare(root, share), [names[0::2], names[1::2]]))
            list(threads.map(lambda share: save_again(root, share), [names[0::2], names[1::2]]))
            for name in names:
                server.commit(f"tests/{name}", root / "converted" / name)
            print(f"converted in {time.monotonic() - started:.0f} s", flush=True)
            found = threads.map(lambda version: run(root, version, names, server.endpoint), versions)
            results = dict(zip(versions, found, strict=True))
    text = table(results)
    print(f"\n{text}\n\n{time.monotonic() - started:.0f} s")
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(MARKED.sub(lambda mark: f"{mark[1]}{text}\n{mark[2]}", page), encoding="utf-8")
    return any(map(failures, results.values()))


def save_again(root: Path, names: Sequence[str]) -> None:
    """Converts the same sources as the oldest libraries save them."""
    if not names:
        return
    oldest = environments.python(SUPPORTED[0])
    errors = process(root, oldest, "save", f"oldest-{names[0]}", *names)
    errors = errors or process(root, sys.executable, "models", names[0], "--oldest", *names)
    if errors:
        sys.exit(errors)


def process(root: Path, program: object, module: str, name: str, *words: object, **more: str) -> str:
    """Runs a module of this package, without the user's settings and caches; what it says if it fails."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
    env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(root / "homes" / name)}
    command = [str(word) for word in (program, "-m", f"tests.versions.{module}", root, *words)]
    done = subprocess.run(command, cwd=ROOT, env=env | more, stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def prepare(root: Path, names: Sequence[str]) -> None:
    if names and (errors := process(root, sys.executable, "models", names[0], *names)):
        sys.exit(errors)


def run(root: Path, version: str, names: Sequence[str], endpoint: str) -> Results:
    """All checks of one version."""
    tasks = [f"guard:{name}" for name in models.GUARDED if name in names]
    if version not in TOO_OLD:
        tasks = [f"check:{name}" for name in names]
        tasks += [f"convert:{name}" for name in models.CONVERTED_AGAIN if name in names]
    out, program = root / f"{version}.json", environments.python(version)
    if errors := process(root, program, "worker", version, out, *tasks, HF_ENDPOINT=endpoint):
        print(f"{version}: {errors}", flush=True)
        return {"all": {"process": errors.splitlines()[-1]}}
    results: Results = json.loads(out.read_text(encoding="utf-8"))
    return results


def failures(results: Results) -> list[tuple[str, str, str]]:
    """(check, model, error) of all that fail."""
    return [
        (check, model, error) for model, checks in results.items() for check, error in checks.items() if error
    ]


def cells(version: str, results: Results) -> list[str]:
    """Of a version: for each group the first check that fails, for how many models, and one error."""
    groups: dict[str, list[tuple[str, str, str]]] = {group: [] for group in GROUPS}
    for each in failures(results):
        # What is no check of a model concerns everything: the guard, or a process that broke.
        group = (
            CHECKS[each[0]].group if each[0] in CHECKS else "convert" if each[0] == "convert" else GROUPS[0]
        )
        groups[group].append(each)
    texts = [cell(found) if found else "right" for found in groups.values()]
    if version in TOO_OLD:
        return [texts[0].replace("right", "one line asks for 4.57"), *[""] * (len(GROUPS) - 1)]
    return texts


def cell(found: Sequence[tuple[str, str, str]]) -> str:
    order = list(CHECKS)
    check, _, error = min(found, key=lambda each: order.index(each[0]) if each[0] in CHECKS else -1)
    broken = [model for label, model, _ in found if label == check]
    which = ", ".join(broken) if len(broken) < 3 else f"{len(broken)} models"
    others = len({label for label, *_ in found}) - 1
    short = re.sub(r" by [\d.e+-]+ of the largest|: \[.*", "", error)[:70]
    return f"{check} ({which}): {short}{f'; {others} more' if others else ''}".replace("|", "/")


def table(results: dict[str, Results]) -> str:
    """In Markdown; neighbours with the same results share a row."""
    rows = [["transformers", *GROUPS], ["---"] * (len(GROUPS) + 1)]
    for same, group in groupby(
        sorted(results, key=key), key=lambda version: cells(version, results[version])
    ):
        first, *rest = group
        rows.append([f"{first} to {rest[-1]}" if rest else first, *same])
    spans = [(first if first == last else f"{first} to {last}", reason) for first, last, _, reason in KNOWN]
    notes = [f"* {span}, with stock models too: {reason}." for span, reason in spans]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *notes])


if __name__ == "__main__":
    sys.exit(main())
