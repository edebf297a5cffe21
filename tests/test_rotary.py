"""Rotary checkpoints: formulas, configs, complete conversions of many model types, and logits."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from converter import VerificationError, convert, inspect
from converter.config import Provenance
from converter.model.open import open_model
from converter.model.rotary import RotaryModel
from converter.rotary import settings
from converter.rotary.models import MODELS
from converter.scaling.frequencies import ROTARY_METHODS, frequencies, scaled_frequencies, yarn_attention
from converter.scaling.scaling import UNSCALED, Scaling
from converter.source.open import open_folder
from converter.verification.check import Check
from converter.verification.rotary import verify
from tests import tiny
from tests.conftest import MakeSource, Pristine, Refused, RunCli, edit_json
from tests.dealt import dealt
from tests.messages import Words, says
from tests.patched import config_of
from tests.reference import rotary as reference
from tests.tiny import rotary as tiny_rotary

BASES = st.floats(min_value=100, max_value=1e8)
DIMS = st.integers(min_value=2, max_value=256).map(lambda half: 2 * half)
FACTORS = st.floats(min_value=1, max_value=64)


# Formulas


@given(BASES, DIMS, FACTORS)
def test_the_formulas(base: float, dim: int, factor: float) -> None:
    stock, scaled = frequencies(base, dim), scaled_frequencies(base, dim, "ntk", factor)
    assert scaled[0] == stock[0] == 1
    assert stock[-1] / scaled[-1] == pytest.approx(factor, rel=1e-9)
    divisors = [before / after for before, after in zip(stock, scaled, strict=True)]
    assert all(low <= high * (1 + 1e-12) for low, high in pairwise(divisors))
    divided = scaled_frequencies(base, dim, "linear", factor)
    assert divided == pytest.approx([frequency / factor for frequency in stock])
    for method in ROTARY_METHODS:
        unscaled = scaled_frequencies(base, dim, method, 1.0, (64, 2048))
        assert unscaled == pytest.approx(stock, rel=1e-15)


@given(
    st.sampled_from([64, 2048]),
    st.sampled_from([1.0, 2.5, 16.0]),
    st.sampled_from([8, 20, 128]),
    st.sampled_from([(1 / 32, 1.0), (0.125, 0.5), (0.1, 8.0)]),
)
def test_transformers_yarn_is_this_projects(
    trained: int, factor: float, dim: int, parts: tuple[float, float]
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=round(trained * factor),
        rope_theta=10_000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": trained,
            "beta_fast": 1 / parts[0],
            "beta_slow": 1 / parts[1],
        },
    )
    theirs, attention = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ramp = (parts[0] * trained, parts[1] * trained)
    expected = scaled_frequencies(10_000.0, dim, "by-parts", factor, ramp)
    assert theirs.double().tolist() == pytest.approx(expected, rel=1e-5)
    assert attention == pytest.approx(yarn_attention(factor))


@given(
    st.sampled_from([16, 64, 4096]),
    st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    st.integers(min_value=1, max_value=100_000),
    st.sampled_from([4, 20, 128]),
)
def test_transformers_dynamic_with_factor_one_is_this_projects(
    trained: int, rate: float, tokens: int, dim: int
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=round(trained / rate),
        rope_theta=10_000.0,
        rope_scaling={"rope_type": "dynamic", "factor": 1.0},
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=tokens)
    ours = Scaling("ntk", dynamic="length", rate=rate, train_length=trained)
    expected = scaled_frequencies(10_000.0, dim, "ntk", ours.factor_at(tokens))
    assert theirs.double().tolist() == pytest.approx(expected, rel=1e-5)


# Conversions


@pytest.mark.parametrize(("model_type", "spelling"), dealt(sorted(MODELS), ["classic", "parameters"]))
def test_every_scaling_of_every_model_type(
    model_type: str, spelling: str, pristine: Pristine, tmp_path: Path
) -> None:
    """Verification measures the frequencies in the class of the installed transformers."""
    source = pristine(model_type, spelling=spelling)
    before = config_of(source)
    scalings: dict[str, dict[str, Any]] = {"ntk": {"scale": 4}, "none": {"method": "none"}}
    if "linear" in MODELS[model_type].reads:
        scalings["linear"] = {"scale": 2.5, "method": "linear"}
    if "yarn" in MODELS[model_type].reads:
        scalings["by-parts"] = {"scale": 2.5, "method": "by-parts", "train_length": 48}
    if "dynamic" in MODELS[model_type].reads:
        scalings["dynamic"] = {"dynamic": "length", "rate": 2, "train_length": 64}
    for name, options in scalings.items():
        result = convert(source, tmp_path / name, **options)
        assert [check.name for check in result.checks] == ["tensors", "frequencies"]
        config = config_of(tmp_path / name)
        assert config["model_type"] == result.model_type == model_type
        assert config["architectures"] == before["architectures"]
        assert "auto_map" not in config
        assert "rope_parameters" not in config
        assert hashes(tmp_path / name, "*.safetensors*") == hashes(source, "*.safetensors*")
        assert not list((tmp_path / name).glob("*.py"))
    assert config_of(source) == before


def hashes(folder: Path, pattern: str) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)}


LOGITS: list[dict[str, Any]] = [
    {"method": "none"},
    {"scale": 4},
    {"scale": 4, "method": "linear"},
    {"scale": 4, "method": "by-parts"},
    {"scale": 4, "method": "by-parts", "ramp": (0.1, 2.0)},
    {"dynamic": "length"},
    {"dynamic": "length", "rate": 2},
]


@pytest.mark.parametrize(
    ("model_type", "options"), dealt(["llama", "mistral", "qwen2", "gpt_neox"], LOGITS, each=4), ids=str
)
def test_logits(model_type: str, options: dict[str, Any], pristine: Pristine, tmp_path: Path) -> None:
    source = pristine(model_type)
    result = convert(source, tmp_path / "out", **options)
    config, tensors = tiny.read(source)
    tokens = tiny.token_ids(1, 3 * tiny_rotary.LENGTH)[0]
    rotary = settings.read_rotary(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].double().numpy()
    # The expected frequencies are computed again, from the result's numbers alone.
    factor = result.scaling.factor_at(len(tokens))
    base, divisors, amplitude = rotary.base, np.ones(rotary.dim // 2), 1.0
    if result.scaling.method == "linear":
        divisors *= factor
    elif result.scaling.method == "by-parts":
        divisors = yarn_divisors(rotary.dim, base, factor, options.get("ramp", (1 / 32, 1)))
        amplitude = 0.1 * math.log(factor) + 1
    else:
        base *= factor ** (rotary.dim / (rotary.dim - 2))
    expected = tuple(base ** (-np.arange(0, rotary.dim, 2) / rotary.dim) / divisors)
    wanted = reference.logits(config, tensors, tokens, expected, amplitude)
    assert np.abs(logits - wanted).max() < 1e-4 * np.abs(wanted).max()
    if factor != 1:
        stock = reference.logits(config, tensors, tokens, rotary.frequencies)
        assert np.abs(stock - wanted).max() > 1e-2 * np.abs(wanted).max()


def yarn_divisors(dim: int, base: float, factor: float, ramp: tuple[float, float]) -> np.ndarray:
    """What the code of YaRN's authors divides each frequency by; the ramp in parts of the trained length."""
    # A pair turns rotations = length / wavelength times: beta_fast at the ramp's start, beta_slow at its end.
    rotations = 1 / np.array(ramp)
    ends = dim * np.log(tiny_rotary.LENGTH / (rotations * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
    kept = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - kept) / factor + kept)
    return divisors


def near(value: float) -> Any:
    return pytest.approx(value)


def linear(rope_type: str, factor: float, **more: float) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": rope_type, "type": rope_type, "factor": factor, **more}}


RAISED = 10_000 * 2 ** (16 / 14)
YARN = {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
LENGTH = "max_position_embeddings"


@pytest.mark.parametrize(
    ("model_type", "options", "changes"),
    [
        ("llama", {"scale": 2}, {"rope_theta": near(RAISED), LENGTH: 128}),
        # A dynamic config starts where it scales.
        ("gpt_neox", {"dynamic": "length", "rate": 2}, {**linear("dynamic", 1.0), LENGTH: 32}),
        ("llama", {"scale": 2.5, "method": "linear"}, {**linear("linear", 2.5), LENGTH: 160}),
        (
            "llama",
            {"scale": 4, "method": "by-parts", "train_length": 32},
            {**linear("yarn", 4.0, **YARN), LENGTH: 128},
        ),
        ("llama", {"target_length": 160}, {"rope_theta": near(10_000 * 2.5 ** (16 / 14)), LENGTH: 160}),
        # A config may allow more tokens than were trained. Only a dynamic scaling lowers that limit.
        ("llama", {"scale": 2, "train_length": 16}, {"rope_theta": near(RAISED)}),
        ("llama", {"dynamic": "length", "train_length": 16}, {**linear("dynamic", 1.0), LENGTH: 16}),
        ("llama", {"method": "none"}, {}),
    ],
)
def test_what_changes_in_the_config(
    model_type: str, options: dict[str, Any], changes: dict[str, Any], pristine: Pristine, tmp_path: Path
) -> None:
    source = pristine(model_type)
    result = convert(source, tmp_path / "out", verify=False, **options)
    before, after = config_of(source), config_of(tmp_path / "out")
    record = after.pop("ntk_convert")["rotary"]
    assert after == {**before, **changes}
    assert record["source_config"] == {key: before.get(key) for key in changes}
    assert record["scaling"] == result.scaling.to_json()
    assert set(result.config_changes) == {*changes, "ntk_convert"}


def test_a_second_spelling_is_kept_true(make_source: MakeSource, tmp_path: Path) -> None:
    """transformers 4.57 writes GPT-NeoX's base under two keys."""
    source = make_source("gpt_neox", {"rope_theta": 10_000, "partial_rotary_factor": 0.5})
    convert(source, tmp_path / "out", scale=2)
    config = config_of(tmp_path / "out")
    assert config["rope_theta"] == config["rotary_emb_base"] == pytest.approx(10_000 * 2 ** (8 / 6))


def test_old_pickles(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source("llama")
    _, tensors = tiny.read(source)
    (source / "model.safetensors").unlink()
    state = {name: torch.from_numpy(value).float() for name, value in tensors.items()}
    # A buffer that checkpoints from 2023 contain.
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    torch.save(state, source / "pytorch_model.bin")
    result = convert(source, tmp_path / "out", scale=2)
    assert "model.safetensors" in result.files
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def verified(source: Path, folder: Path, scaling: Scaling) -> list[Check]:
    """The checks of ``folder`` as if it were the source converted with this scaling."""
    model = replace(
        open_model(source),
        source=open_folder(folder),
        config_json=config_of(folder),
        scaling=scaling,
        provenance=Provenance(None, None, None),
    )
    assert isinstance(model, RotaryModel)
    return verify(model, [])


@pytest.mark.parametrize("model_type", [name for name, model in MODELS.items() if model.base is not None])
def test_what_a_config_leaves_out(model_type: str, make_source: MakeSource, tmp_path: Path) -> None:
    """The installed transformers' class uses the default base and fraction that this project assumes."""
    model = MODELS[model_type]
    source = make_source(model_type, {model.base_key: None, model.partial_key: None})
    rotary = settings.read_rotary(config_of(source))
    assert (rotary.base, rotary.partial) == (model.base, model.partial)
    verified(source, source, UNSCALED)
    convert(source, tmp_path / "out", method="none")
    assert config_of(tmp_path / "out")[model.base_key] == rotary.base


FORGED: dict[str, Any] = {"rms_norm_eps": 0.5, "num_hidden_layers": 1, "rope_theta": 5000.0, "own": 1}


@pytest.mark.parametrize("key", FORGED)
def test_a_record_that_is_not_of_this_config(
    key: str, pristine: Pristine, tmp_path: Path, run: RunCli, refused: Refused
) -> None:
    """Converted again, the record's values would take the place of those in config.json."""
    folder = convert(pristine("llama"), tmp_path / "out", scale=2).path
    record = config_of(folder)["ntk_convert"]
    record["rotary"]["source_config"][key] = FORGED[key]
    edit_json(folder / "config.json", {"ntk_convert": record})
    done = run("validate", folder)
    assert done.code == 1
    assert f"FAILED  config: config.json has {key}" in done.out
    assert key in refused(folder, "--out", tmp_path / "again")


def test_a_merge_of_qlora_leaves_a_key_behind(pristine: Pristine, tmp_path: Path, run: RunCli) -> None:
    folder = convert(pristine("llama"), tmp_path / "out", scale=2).path
    edit_json(folder / "config.json", {"quantization_config": {"load_in_4bit": True}})
    assert "convert it again" in run("validate", folder).err
    done = run(folder, "--out", tmp_path / "again")
    assert done.code == 0, done.err
    assert "quantization_config" not in config_of(tmp_path / "again")


def test_a_graph_that_somebody_else_put_beside_it(pristine: Pristine, tmp_path: Path, run: RunCli) -> None:
    folder = convert(pristine("llama"), tmp_path / "out", scale=2).path
    (folder / "model.onnx").write_bytes(b"mine")
    done = run("validate", folder)
    assert done.code == 0
    says(done.out, "note", "model.onnx")


# What people see


def test_inspect(pristine: Pristine, tmp_path: Path, run: RunCli) -> None:
    source = pristine("gpt_neox")
    found = inspect(source, scale=2)
    assert (found.family, found.model_type, found.converted) == ("rotary", "gpt_neox", False)
    assert (found.num_heads, found.head_dim, found.num_layers, found.train_length) == (4, 16, 2, 64)
    assert found.slopes.stock == ()
    assert found.frequencies.stock == pytest.approx((1, 0.1, 0.01, 0.001))
    assert found.frequencies.scaled is not None
    assert found.frequencies.scaled[-1] == pytest.approx(0.0005)
    text = run("inspect", source).out
    assert "rotary (model_type gpt_neox)" in text
    assert "config.json's max_position_embeddings" in text
    assert "pair       stock\n   0  1.00000000" in text

    convert(source, tmp_path / "out", dynamic="length", rate=2)
    found = inspect(tmp_path / "out")
    assert found.converted
    assert found.rotary is not None
    assert found.rotary.dynamic_from == 32
    assert found.frequencies.stock == pytest.approx((1, 0.1, 0.01, 0.001))
    assert (found.frequencies.factor, found.frequencies.at_length) == (4, 128)
    assert found.train_length_origin == "recorded when it was converted"
    assert "beyond 32 tokens" in run("inspect", tmp_path / "out").out


# Trained length


@pytest.mark.parametrize(
    ("changes", "tokens", "words"),
    [
        ({}, 64, "config.json's max_position_embeddings"),
        ({"max_position_embeddings": None}, None, "no max_position_embeddings"),
        ({"sliding_window": 32}, None, ("sliding_window", "32 tokens")),
        ({"sliding_window": 64}, 64, "config.json's max_position_embeddings"),
        ({"sliding_window": 32, "use_sliding_window": False}, 64, "config.json's max_position_embeddings"),
    ],
)
def test_trained_length(
    changes: dict[str, Any], tokens: int | None, words: Words, make_source: MakeSource
) -> None:
    found = inspect(make_source("mistral", changes))
    assert found.train_length == tokens
    says(found.train_length_origin, words)


# Verification

NTK, DYNAMIC = {"scale": 2}, {"dynamic": "length"}
YARNED = {"scale": 2, "method": "by-parts"}


def rope(**changes: float) -> dict[str, Any]:
    return {"rope_scaling": {**linear("yarn", 2.0, **YARN)["rope_scaling"], **YARN_64, **changes}}


YARN_64 = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("options", "wrong", "changes", "words"),
    [
        *(
            (NTK, wrong, {}, "turns pair")
            for wrong in (Scaling("ntk", 2.001), Scaling("linear", 2.0), UNSCALED)
        ),
        (NTK, None, {"head_dim": 32}, "has shape"),
        (DYNAMIC, None, {LENGTH: 128}, "at 128 tokens"),
        (YARNED, None, rope(attention_factor=1.0), "by 1, not 1.069"),
        (YARNED, None, rope(beta_fast=2.0), "turns pair"),  # 4 rounds to the same pairs as 32
        (YARNED, None, rope(original_max_position_embeddings=32), "turns pair"),
        (YARNED, None, rope(factor=2.01), "turns pair"),
    ],
)
def test_verification_measures_the_running_class(
    options: dict[str, Any],
    wrong: Scaling | None,
    changes: dict[str, Any],
    words: str,
    pristine: Pristine,
    tmp_path: Path,
) -> None:
    source, out = pristine("llama"), tmp_path / "out"
    scaling = convert(source, out, **options).scaling
    verified(source, out, scaling)
    edit_json(out / "config.json", changes)
    with pytest.raises(VerificationError, match=words):
        verified(source, out, wrong or scaling)


def test_experts_are_said_to_be_skipped(pristine: Pristine, tmp_path: Path) -> None:
    tensors, frequencies_ = convert(pristine("mixtral"), tmp_path / "out", scale=2).checks
    assert tensors.skipped
    assert "experts" in tensors.detail
    assert not frequencies_.skipped
