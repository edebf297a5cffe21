"""Heads whose number of channels is not a multiple of 8, such as the 86 of TurkuNLP/gpt3-finnish-xl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModel

from converter import OnnxOptions, convert
from converter.exports.onnx.choices import Profile
from tests import tiny
from tests.onnx_graphs import PROFILES, Engine, assert_close, build, expected
from tests.patched import SCALINGS, assert_logits, batch, load
from tests.reference import ENCODERS, FAMILIES
from tests.tiny.layout import Factory

# Family, heads, the key of the model's width, the heads' size, scaling.
CASES: dict[str, tuple[str, int, str, int, str]] = {
    "bloom-86": ("bloom", 3, "hidden_size", 86, "ntk"),
    "replit-10": ("replit", 12, "d_model", 10, "ntk-position"),
    "refact-13": ("refact", 4, "n_embd", 13, "linear-length"),
}


def write(folder: Path, case: str, factories: dict[str, Factory] = tiny.FACTORIES) -> Path:
    family, heads, width, size, _ = CASES[case]
    return factories[family](folder, heads, use_cache=True, **{width: heads * size})


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def test_a_decoder(case: str, tmp_path: Path) -> None:
    """Verified, and the same numbers fused, eager, and from a cache."""
    family, *_, scaling = CASES[case]
    source, folder = write(tmp_path / "source", case), tmp_path / "out"
    result = convert(source, folder, **SCALINGS[scaling])
    assert not any(check.skipped for check in result.checks if check.name in ("tensors", "slopes", "paths"))
    config, tensors = tiny.read(folder)
    ids, mask = batch(rows=2, length=40)
    right = FAMILIES[family].logits(config, tensors, ids.numpy(), mask.numpy())
    for attention in ("sdpa", "eager"):
        model = load(folder, attn_implementation=attention)
        assert_logits(model(ids, attention_mask=mask).logits, right, mask)
    model = load(folder, dtype=torch.bfloat16)
    step = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert step.shape == (2, 44)
    model = load(folder)
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    if "length" not in scaling:  # where cached keys keep the scaling of their own step
        longer = torch.cat([mask, torch.ones(2, 4, dtype=mask.dtype)], dim=1)
        rows = FAMILIES[family].logits(config, tensors, generated.numpy(), longer.numpy())
        assert np.array_equal(rows[:, 39:43].argmax(-1), generated[:, 40:].numpy())


@pytest.mark.any_version
@pytest.mark.parametrize("profile", PROFILES)
def test_its_graph(case: str, profile: Profile, tmp_path: Path) -> None:
    family, *_, size, scaling = CASES[case]
    folder = tmp_path / "out"
    convert(write(tmp_path / "source", case), folder, verify=False, **SCALINGS[scaling])
    engine = Engine(build(folder, profile))
    padded = -(-(size + 8) // 8) * 8
    assert {value.shape[3] for value in engine.caches.values()} == {padded if profile == "ort" else size}
    for side in ("left", "right"):
        ids = tiny.token_ids(2, 40)
        mask = tiny.padding_mask([40, 29], side, 40)
        assert_close(engine.step(ids, mask)[0], expected(folder, family, ids, mask), mask)
    ends = (30, *range(31, 41))
    assert_close(engine.steps(ids[:1], mask[:1], ends), expected(folder, family, ids[:1], mask[:1], ends))


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("profile", "dtype"),
    [
        pytest.param(profile, dtype, marks=() if (profile, dtype) == ("ort", "int4") else pytest.mark.slow)
        for profile in PROFILES
        for dtype in ("fp16", "int8", "int4")
    ],
)
def test_rounded_and_quantised_graphs(profile: Profile, dtype: str, tmp_path: Path) -> None:
    """The export validates them, also with past and present in one buffer."""
    options = OnnxOptions(profile=profile, dtype=dtype)
    source, out = write(tmp_path / "source", "bloom-86"), tmp_path / "out"
    result = convert(source, out, scale=2.0, train_length=32, verify=False, onnx=options)
    assert result.onnx is not None
    assert result.onnx.report is not None
    assert result.onnx.report.passed
    for file in out.rglob("genai_config.json"):
        genai = json.loads(file.read_text(encoding="utf-8"))
        assert genai["model"]["decoder"]["head_size"] == 96


@torch.no_grad()
def test_an_encoder(tmp_path: Path) -> None:
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 3, head="Model", hidden_size=30)
    convert(source, tmp_path / "out", scale=2.0, train_length=32, onnx=OnnxOptions())
    config, tensors = tiny.read(tmp_path / "out")
    ids, mask = batch(rows=2, length=40)
    numbers: dict[str, Any] = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    right = ENCODERS["jina_bert"].logits(config, tensors, *numbers.values(), "Model")
    for attention in ("sdpa", "eager"):
        model = load(tmp_path / "out", AutoModel, attn_implementation=attention)
        assert_logits(model(ids, attention_mask=mask).last_hidden_state, right, mask)
    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"))
    numbers["token_type_ids"] = np.zeros_like(numbers["input_ids"])
    [hidden] = session.run(["last_hidden_state"], numbers)
    assert_logits(torch.from_numpy(hidden), right, mask)
