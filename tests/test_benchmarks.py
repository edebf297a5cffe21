"""The tables of benchmarks/common_tests.py, from results of pytest."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def common_tests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("common_tests")


def junit(**outcomes: str) -> str:
    """What pytest writes: tests, and what happened in each."""
    cases = "".join(f'<testcase name="{name}">{inside}</testcase>' for name, inside in outcomes.items())
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>"


SKIPPED = '<skipped message="no /tmp/x">/tmp/test.py:3: no</skipped>'
FAILED = '<failure message="AssertionError: 1 | 2&#10;more">trace</failure>'


def test_outcomes(common_tests: ModuleType) -> None:
    """A subtest that failed counts more than one that was skipped."""
    text = junit(a="", b=SKIPPED, c=FAILED, d=SKIPPED + FAILED, e='<error message="in setUp"/>')
    assert common_tests.read_outcomes(text) == {
        "a": ("passed", ""),
        "b": ("skipped", "no PATH"),
        "c": ("failed", "AssertionError: 1 \\| 2"),
        "d": ("failed", "AssertionError: 1 \\| 2"),
        "e": ("failed", "in setUp"),
    }


def test_what_only_stock_passes_is_listed(common_tests: ModuleType) -> None:
    """And every failure; a test that a conversion alone passes is only counted."""
    stock = common_tests.read_outcomes(junit(a="", b="", c="", d=SKIPPED, e=SKIPPED))
    none = common_tests.read_outcomes(junit(a="", b=SKIPPED, c=FAILED, d=FAILED, e=""))
    dynamic = common_tests.read_outcomes(junit(a="", b="", c=FAILED, d="", e=""))
    results = {"jais": {"stock": stock, "none": none, "dynamic": dynamic}}
    reason = "AssertionError: 1 \\| 2"
    assert common_tests.failures(results) == [
        ["c", "failed", "passed", "jais none, jais dynamic", reason],
        ["d", "failed", "skipped", "jais none", reason],
        ["b", "skipped", "passed", "jais none", "no PATH"],
    ]
    assert list(common_tests.summary(results)) == [["jais", "bloom", "3 / 0 / 2", "2 / 2 / 1", "4 / 1 / 0"]]
