"""Runs transformers' own common tests on the classes of converted repositories, and on stock classes.

Every model in transformers must pass the tests of ``ModelTesterMixin`` and, if it generates, of
``GenerationTesterMixin``. This script runs them, with common_cases.py, on a tiny checkpoint of each family
and on its conversions. It fails if a test fails that the stock classes pass. The checkout of transformers
must have the tag of the installed release, or one near it. Its tests need ``parameterized``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import transformers
from measuring import workplace
from report import finish, load, table

from converter import convert, families
from tests import tiny

FAMILIES = {family.name: family for family in families.FAMILIES}
STOCK = {"decoder": "bloom", "encoder": "distilbert"}
"""The stock model beside a family that transformers has no classes for."""
SCALINGS: dict[str, dict[str, dict[str, Any]]] = {
    kind: {"none": {"method": "none"}, "dynamic": {"dynamic": basis, "train_length": 4}}
    for kind, basis in (("decoder", "position"), ("encoder", "length"))
}
"""The two conversions. The trained length is shorter than the tests' inputs, so the dynamic scaling acts."""
SIDES = ("stock", "none", "dynamic")

Outcomes = dict[str, tuple[str, str]]
"""Test -> "passed", "failed" or "skipped", and why."""
Results = dict[str, dict[str, Outcomes]]
"""Family -> side -> outcomes."""


def stock_of(name: str) -> str:
    """The stock model beside a family."""
    return name if FAMILIES[name].stock else STOCK[FAMILIES[name].kind]


def write_tiny(name: str, folder: Path) -> Path:
    """A tiny checkpoint of a family, or the config of a DistilBERT."""
    if name in FAMILIES:
        # The config of some families switches the cache off; the tests need it.
        cache = {"use_cache": True} if FAMILIES[name].kind == "decoder" else {}
        return tiny.CHECKPOINTS[name].write(folder, **cache)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    transformers.DistilBertConfig(vocab_size=tiny.VOCAB_SIZE, **sizes).save_pretrained(folder)
    return folder


def run_tests(tests: Path, checkpoint: Path) -> Outcomes:
    """Runs the common tests of a checkpoint's classes in a new process."""
    print(f"{checkpoint.parent.name}/{checkpoint.name} ...", file=sys.stderr)
    environment = {
        "CHECKPOINT": str(checkpoint),
        "PYTHONPATH": str(tests),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(checkpoint.parent / "hub"),
        "OMP_NUM_THREADS": "1",
    }
    results = checkpoint.parent / f"{checkpoint.name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tests)]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", f"--junitxml={results}", "--tb=short"]
    command += ["--show-capture=no", "--disable-warnings", str(Path(__file__).with_name("common_cases.py"))]
    log = results.with_suffix(".log")
    with log.open("w") as output:
        ended = subprocess.run(command, cwd=tests, env=os.environ | environment, stdout=output, stderr=output)
    if ended.returncode not in (0, 1):  # 1 means that tests failed
        sys.exit(f"the tests of {checkpoint} did not run:\n{log.read_text()[-2000:]}")
    return read_outcomes(results.read_text())


def read_outcomes(xml: str) -> Outcomes:
    """The outcomes in pytest's XML. A test failed if a subtest failed; if not, it was skipped if one was."""
    outcomes: Outcomes = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        words = {each.tag: re.sub(r"/\S+", "PATH", each.get("message") or "") for each in case}
        failed = words.get("failure", words.get("error"))
        reason = failed if failed is not None else words.get("skipped", "")
        kind = "failed" if failed is not None else "skipped" if "skipped" in words else "passed"
        outcomes[case.attrib["name"]] = (kind, reason.partition("\n")[0][:120].replace("|", "\\|"))
    return outcomes


def measure(names: Sequence[str], tests: Path, work: Path) -> Results:
    """Runs the tests of the families' stock classes and conversions."""
    results: Results = {}
    stock: dict[str, Outcomes] = {}
    for name in names:
        beside = stock_of(name)
        if beside not in stock:
            stock[beside] = run_tests(tests, write_tiny(beside, work / beside / "stock"))
        sides = {"stock": stock[beside]}
        source = write_tiny(name, work / name / "source")
        for side, scaling in SCALINGS[FAMILIES[name].kind].items():
            convert(source, work / name / side, verify=False, **scaling)
            sides[side] = run_tests(tests, work / name / side)
        results[name] = sides
    return results


def failures(results: Results) -> list[list[str]]:
    """A row for each test that a conversion fails, or skips though the stock classes pass it.

    Its cells: the test, the outcomes of the conversion and of the stock classes, the conversions, the reason.
    """
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for family, sides in results.items():
        for side in SIDES[1:]:
            for test, (outcome, reason) in sides[side].items():
                stock, _ = sides["stock"].get(test, ("missing", ""))
                if outcome == "failed" or (outcome, stock) == ("skipped", "passed"):
                    found.setdefault((outcome, stock, test, reason), []).append(f"{family} {side}")
    return [
        [test, outcome, stock, ", ".join(where), reason]
        for (outcome, stock, test, reason), where in sorted(found.items())
    ]


def summary(results: Results) -> Iterator[list[str]]:
    """The rows of the first table: how many tests each side of a family passed, failed and skipped."""
    for family, sides in results.items():
        kinds = [[kind for kind, _ in sides[side].values()] for side in SIDES]
        counts = [[str(each.count(kind)) for kind in ("passed", "failed", "skipped")] for each in kinds]
        yield [family, stock_of(family), *(" / ".join(each) for each in counts)]


def sections(results: Results, checkout: Path) -> list[str]:
    """The results in Markdown."""
    head = ("test", "converted", "stock", "conversions", "reason")
    rows = failures(results)
    code = (checkout / "src/transformers/__init__.py").read_text(encoding="utf-8")
    release = re.findall(r'^__version__ = "(.+)"', code, re.MULTILINE)
    return [
        f"transformers {version('transformers')} with the tests of {release[0]}. "
        "The cells count the tests that passed / failed / were skipped. The classes are those of tiny "
        "checkpoints: converted without scaling (none), and with one that grows (dynamic) with the position, "
        "or with the length for encoders.",
        table(("family", "beside", *SIDES), summary(results)),
        "## Failed by a conversion, or skipped by it and passed by the stock classes\n\n"
        + (table(head, rows) if rows else "None."),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run transformers' common tests on converted repositories.")
    parser.add_argument("names", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--checkout", type=Path, required=True, help="checkout of transformers' repository")
    parser.add_argument("--write", action="store_true", help="write results/common_tests-VERSION-KIND.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(FAMILIES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not (arguments.checkout / "tests/generation").is_dir():
        parser.error(f"{arguments.checkout} has no folder tests/generation")
    names = arguments.names or list(FAMILIES)
    busy = load()
    with workplace() as work:
        results = measure(names, arguments.checkout.resolve(), work)
    for kind in SCALINGS:
        part = {name: sides for name, sides in results.items() if FAMILIES[name].kind == kind}
        if not part:
            continue
        found = sections(part, arguments.checkout)
        title = f"transformers' common tests on converted {kind}s"
        finish(f"common_tests-{version('transformers')}-{kind}", title, found, busy, write=arguments.write)
    return int(any(row[1:3] == ["failed", "passed"] for row in failures(results)))


if __name__ == "__main__":
    sys.exit(main())
