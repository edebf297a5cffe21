"""What benchmarks compute from what they measure."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def common_tests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("common_tests")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("limits")


@torch.no_grad()
def test_limits_are_those_of_the_model(limits: ModuleType) -> None:
    """A cached model computes token by token, so it computes no score that causal attention does not need."""
    sizes = {"hidden_size": 24, "n_head": 3, "n_layer": 2, "vocab_size": 50}
    model, cache = BloomForCausalLM(BloomConfig(**sizes)).eval(), DynamicCache()
    geometry, unit = limits.Bloom(hidden=24, layers=2, vocabulary=50), limits.Machine(1, 1)
    with FlopCounterMode(display=False) as counter:
        for token in range(7):
            model(torch.tensor([[token]]), past_key_values=cache)
    assert geometry.prefill_seconds(unit, 7, logits=7) == counter.get_total_flops()
    head = 2 * 24 * 50
    assert geometry.prefill_seconds(unit, 7, logits=1) == counter.get_total_flops() - 6 * head

    read = [one for name, one in model.named_parameters() if one.dim() == 2 and "lm_head" not in name]
    read += [states for layer in cache.layers for states in (layer.keys, layer.values)]
    assert geometry.decode_seconds(unit, 7) == sum(4 * states.numel() for states in read)
    assert limits.Machine(1, 20).or_better(limits.Machine(2, 10)) == (2, 20)


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
