"""What benchmarks compute from what they measure."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, BertConfig, BertModel, BloomConfig, BloomForCausalLM, DynamicCache

from converter import convert
from tests import tiny

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def common_tests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("common_tests")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("limits")


@pytest.fixture
def encoder_speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("encoder_speed")


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


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
def test_limits_of_an_encoder(tmp_path: Path, limits: ModuleType, gated: bool) -> None:
    """Two texts cost what they cost one by one, so padding does not count."""
    if gated:
        sizes = {"hidden_size": 24, "intermediate_size": 40}
        source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 3, head="Model", **sizes)
        convert(source, tmp_path / "out", method="none", verify=False)
        options = {"trust_remote_code": True, "attn_implementation": "eager"}
        model = AutoModel.from_pretrained(tmp_path / "out", **options).eval()
        model.pooler = None
    else:
        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
        config = BertConfig(**sizes, attn_implementation="eager")
        model = BertModel(config, add_pooling_layer=False).eval()
    lengths, unit = (5, 9), limits.Machine(1, 1)
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            model(torch.ones(1, length, dtype=torch.long))
    geometry = limits.Encoder(hidden=24, layers=2, inner=40, gated=gated)
    assert geometry.seconds(unit, lengths) == counter.get_total_flops()
    assert geometry.attention_seconds(unit, [3]) == 2 * 2 * 24 * 9


def test_texts_have_unequal_lengths(encoder_speed: ModuleType) -> None:
    texts = encoder_speed.make_texts(64, 12)
    lengths = [len(text) for text in texts]
    assert texts == encoder_speed.make_texts(64, 12)
    assert (max(lengths), min(lengths) >= 16, len(set(lengths)) > 6) == (64, True, True)
    assert encoder_speed.padding([4, 1, 3], 2) == 1 - 8 / 11
    assert encoder_speed.padding([4, 3, 1], 2) == 1 - 8 / 9
    assert encoder_speed.padding([4, 3, 1], 1) == 0


@pytest.mark.parametrize("ordered", [True, False])
def test_vectors_are_in_the_order_of_the_texts(encoder_speed: ModuleType, ordered: bool) -> None:
    side = importlib.import_module(encoder_speed.Job.__module__)
    texts, sizes = [[7], [5, 6, 8], [3, 3], [1, 2, 3, 4]], []

    def pooled(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        sizes.append(ids.shape)
        total: np.ndarray = (ids * mask).sum(1, keepdims=True)
        return total

    vectors = side.batched(pooled, ordered)(texts, 2)
    assert vectors[:, 0].tolist() == [sum(text) for text in texts]
    assert sizes == ([(2, 4), (2, 2)] if ordered else [(2, 3), (2, 4)])


def test_a_side_without_memory_is_not_tried_again(
    tmp_path: Path, encoder_speed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"layers": 1, "heads": 1, "head_dim": 8, "inner": 8, "threads": 1, "longest": 32}
    setup = encoder_speed.Setup(tmp_path, **sizes, quantised=False, original_python=None, original_code=None)
    tried = []

    def run(_: object, side: str, texts: Path, rows: int) -> tuple[object, object]:
        tried.append((side, texts.stem, rows))
        if side == encoder_speed.UNSORTED and texts.stem == "texts-16":
            return encoder_speed.Measured(failure="out of memory"), None
        return encoder_speed.Measured(2.0, 10**6, 10**7), np.ones((2, 8), np.float32)

    monkeypatch.setattr(encoder_speed, "run", run)
    texts = {length: encoder_speed.make_texts(length, 2) for length in (8, 16, 32)}
    rows = {8: 4, 16: 2, 32: 1}
    results = encoder_speed.measure(setup, texts, rows, 2, 60.0)
    encoder_speed.check(results)
    assert [stem for side, stem, _ in tried if side == encoder_speed.UNSORTED] == [
        *("texts-8", "texts-8", "texts-16")
    ]
    assert {(stem, rows) for _, stem, rows in tried} == {("texts-8", 4), ("texts-16", 2), ("texts-32", 1)}
    machine = encoder_speed.limits.Machine(1e9, 1e9)
    lines = {line[0]: line[1:] for line in encoder_speed.rows_of(setup, results[32], [32, 8], machine)}
    assert lines[encoder_speed.UNSORTED] == ["out of memory", *["-"] * 7]
    assert lines[encoder_speed.SENTENCES][:6] == ["1", "2", "1.00x", "1", "1.00x", "10"]
    results[32][encoder_speed.GRAPH].vectors = np.zeros((2, 8))
    with pytest.raises(Exception, match="ONNX, float32 at 32 tokens: vectors are off by 1"):
        encoder_speed.check(results)


@pytest.mark.slow
def test_encoder_speed(encoder_speed: ModuleType) -> None:
    """It runs, and every side but the original code, which needs an environment, gives the same vectors."""
    sizes = "--layers 1 --heads 2 --head-dim 16 --inner 32 --lengths 16,32 --batch-tokens 64 --batches 2"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "encoder_speed.py", *sizes.split(), "--repeats", "1", "--quantised"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = ("CONVERTED", "UNSORTED", "SENTENCES", "BERT", "GRAPH")
    for side in (*(getattr(encoder_speed, name) for name in names), *encoder_speed.QUANTISED):
        assert done.stdout.count(f"| {side} |") == 2


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
