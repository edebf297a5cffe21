"""Options become an alibi_scaling, which can be read back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.errors import SourceError, UsageError
from converter.scaling.request import RAMP, Defaults, Request, request_for
from converter.scaling.scaling import UNSCALED, Dynamic, Scaling, Static, read_scaling, stretched
from converter.scaling.slopes import exponents, stock_slopes, with_exponents
from converter.scaling.train_length import TrainLength

TRAINED = TrainLength(2048, "told")
DEFAULTS = Defaults("position", "by-parts", RAMP)
"""A decoder's."""
BY_PARTS = {"type": "by-parts", "train_seq_len": 2048, "ramp": [256.0, 1024.0]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": 2.0}, {"type": "ntk", "factor": 2.0}),
        ({"scale": 2, "method": "linear"}, {"type": "linear", "factor": 2.0}),
        ({"scale": 1.0}, {"type": "ntk", "factor": 1.0}),
        ({"target_length": 8192}, {"type": "ntk", "factor": 4.0}),
        ({"target_length": 2048}, {"type": "ntk", "factor": 1.0}),
        (
            {"target_length": 3000, "method": "ntk-published"},
            {"type": "ntk-published", "factor": 3000 / 2048},
        ),
        ({"dynamic": "length"}, {**BY_PARTS, "dynamic": "length", "rate": 1.0}),
        (
            {"dynamic": "length", "method": "ntk"},
            {"type": "ntk", "train_seq_len": 2048, "dynamic": "length", "rate": 1.0},
        ),
        (
            {"dynamic": "position", "rate": 1.5, "method": "linear"},
            {"type": "linear", "train_seq_len": 2048, "dynamic": "position", "rate": 1.5},
        ),
        (
            {"method": "by-parts", "scale": 4, "ramp": (0.0625, 0.25)},
            {"type": "by-parts", "factor": 4.0, "ramp": [128.0, 512.0]},
        ),
        (
            {"method": "by-parts", "dynamic": "length"},
            {**BY_PARTS, "dynamic": "length", "rate": 1.0},
        ),
        ({"method": "none"}, None),
        ({}, {**BY_PARTS, "dynamic": "position", "rate": 1.0}),
        ({"rate": 2.0}, {**BY_PARTS, "dynamic": "position", "rate": 2.0}),
        ({"method": "by-parts"}, {**BY_PARTS, "dynamic": "position", "rate": 1.0}),
        ({"method": "ntk"}, {"type": "ntk", "train_seq_len": 2048, "dynamic": "position", "rate": 1.0}),
    ],
)
def test_request_to_config(options: dict[str, Any], expected: dict[str, Any] | None) -> None:
    scaling = Request(**options).resolve(TRAINED, "a model", DEFAULTS)
    assert scaling.to_json() == expected
    assert read_scaling(expected) == scaling


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "linear"}, ["--scale", "--target-length", "--dynamic"]),
        ({"method": "ntk-published", "rate": 2.0}, ["--scale", "--target-length", "--dynamic"]),
        ({"scale": 2.0, "dynamic": "length"}, ["--scale", "--dynamic", "cannot be combined"]),
        ({"scale": 2.0, "target_length": 4096}, ["--scale", "--target-length", "cannot be combined"]),
        ({"target_length": 4096, "dynamic": "position"}, ["--target-length", "--dynamic"]),
        ({"scale": 0.99}, ["0.99", "at least 1"]),
        ({"scale": -2.0}, ["-2.0"]),
        ({"scale": math.nan}, ["nan"]),
        ({"scale": math.inf}, ["inf"]),
        ({"scale": True}, ["True"]),
        ({"scale": 2.0, "rate": 1.0}, ["--rate", "--dynamic"]),
        ({"dynamic": "length", "rate": 0.0}, ["0.0", "above 0"]),
        ({"dynamic": "length", "rate": math.inf}, ["inf"]),
        ({"dynamic": "length", "rate": math.nan}, ["nan"]),
        ({"dynamic": "sometimes"}, ["'sometimes'"]),
        ({"method": "yarn", "scale": 2.0}, ["'yarn'", "ntk, by-parts, linear"]),
        ({"method": "none", "scale": 2.0}, ["none", "--scale"]),
        ({"method": "none", "target_length": 4096}, ["none", "--target-length"]),
        ({"method": "none", "dynamic": "length"}, ["none", "--dynamic"]),
        ({"method": "none", "rate": 1.0}, ["none", "--rate"]),
        ({"target_length": 0}, ["--target-length 0"]),
        ({"scale": 2.0, "train_length": -1}, ["--train-length -1"]),
        ({"scale": 2.0, "ramp": (0.1, 0.5)}, ["--ramp", "--method by-parts"]),
        ({"method": "none", "ramp": (0.1, 0.5)}, ["--ramp", "--method by-parts"]),
        *(
            ({"method": "by-parts", "scale": 2.0, "ramp": ramp}, ["--ramp", "not a ramp", "trained length"])
            for ramp in [
                (0.5, 0.5),
                (0.5, 0.5000001),
                (0.5, 1e300),
                (0.5, 0.25),
                (0.0, 0.5),
                (-1.0, 1.0),
                (0.1, math.inf),
                (math.nan, 1.0),
                (0.1, math.nan),
                (True, 2.0),
                (0.1,),
                (0.1, 0.2, 0.3),
            ]
        ),
        ({"scale": 2.0, "train_length": 1 << 40}, ["--train-length", str(1 << 40)]),
    ],
)
def test_requests_that_make_no_sense(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        Request(**options)
    assert all(word in str(error.value) for word in words), error.value


def test_an_encoder_s_default_goes_by_length() -> None:
    defaults = Defaults("length", "ntk", RAMP)
    assert Request().resolve(TrainLength(512, "told"), "a model", defaults) == Dynamic(
        "ntk", "length", 1.0, 512
    )


def test_target_below_trained_length() -> None:
    with pytest.raises(UsageError, match=r"1024 .* 2048"):
        Request(target_length=1024).resolve(TRAINED, "a model", DEFAULTS)


@pytest.mark.parametrize(
    ("options", "user"),
    [
        ({"scale": 2.0}, None),
        ({"method": "none"}, None),
        ({"target_length": 4096}, "--target-length"),
        ({"dynamic": "length"}, "--dynamic"),
        ({}, "--dynamic, the default,"),
        ({"method": "by-parts", "scale": 2.0}, "--method by-parts"),
    ],
)
def test_who_needs_the_trained_length(options: dict[str, Any], user: str | None) -> None:
    unknown, request = TrainLength(None, "not known"), Request(**options)
    if user is None:
        assert request.resolve(unknown, "m", DEFAULTS) == request.resolve(TRAINED, "m", DEFAULTS)
        return
    with pytest.raises(
        UsageError, match=f"^{user} needs the trained length of a model, which is not known; add"
    ):
        request.resolve(unknown, "a model", DEFAULTS)


def test_without_a_default_a_strength_is_asked_for() -> None:
    with pytest.raises(UsageError, match="no default strength"):
        Request().resolve(TRAINED, "a model", Defaults(None, "ntk", RAMP))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "linear", "factor": 2}, Static("linear", 2.0)),
        ({"type": "linear", "train_seq_len": 8192}, Dynamic("linear", "length", 1.0, 8192)),
    ],
)
def test_what_btlm_and_jais_write_is_understood(value: dict[str, Any], expected: Scaling) -> None:
    assert read_scaling(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        "ntk",
        [],
        {},
        {"type": "none"},
        {"type": "yarn", "factor": 2.0},
        {"type": "ntk"},
        {"type": "ntk", "factor": 0.5},
        {"type": "ntk", "factor": "2"},
        {"type": "ntk", "factor": math.nan},
        {"type": "ntk", "factor": 2.0, "train_seq_len": 2048},
        {"type": "ntk", "train_seq_len": 2048.5},
        {"type": "ntk", "train_seq_len": 0},
        {"type": "ntk", "train_seq_len": True},
        {"type": "ntk", "train_seq_len": 2048, "rate": 0},
        {"type": "ntk", "train_seq_len": 2048, "dynamic": "sometimes"},
        {"type": "ntk", "factor": 2.0, "ramp": [128, 512]},
        {"type": "by-parts", "factor": 2.0},
        {"type": "by-parts", "train_seq_len": 2048, "ramp": None},
        *(
            {"type": "by-parts", "factor": 2.0, "ramp": ramp}
            for ramp in [
                [512, 128],
                [128, 128],
                [1e15, 1e15 + 0.125],  # their logarithms are equal
                [0, 128],
                [128, math.inf],
                [128],
                ["1", "2"],
                128,
                [True, 2],
            ]
        ),
    ],
)
def test_what_is_no_scaling_is_refused(value: object) -> None:
    with pytest.raises(SourceError, match="alibi_scaling"):
        read_scaling(value)


@given(st.integers(1, 1 << 20), st.floats(0.1, 8.0), st.sampled_from(["length", "position"]))
def test_dynamic_factor_grows_from_one(tokens: int, rate: float, dynamic: Any) -> None:
    scaling = Dynamic("ntk", dynamic, rate, 2048)
    factor = scaling.factor_at(tokens)
    assert factor == max(1.0, rate * tokens / 2048)
    slopes = stock_slopes(12)
    np.testing.assert_array_equal(
        scaling.slopes(slopes, tokens), with_exponents(slopes, exponents("ntk", slopes), factor)
    )


def test_descriptions() -> None:
    assert str(UNSCALED) == "none"
    assert str(Static("ntk", 2.0)) == "ntk, factor 2"
    assert str(Static("by-parts", 2.0, (16, 64.5))) == "by-parts, factor 2, ramp 16 to 64.5 tokens"
    assert str(Dynamic("linear", "length", 1.5, 2048)) == "linear, length-dynamic, rate 1.5 from 2048 tokens"


@pytest.mark.parametrize(
    "scaling",
    [
        UNSCALED,
        Static("ntk", 2.5),
        Static("by-parts", 4.0, (128.0, 512.0)),
        Dynamic("by-parts", "position", 1.5, 2048, (128.0, 512.0)),
    ],
    ids=str,
)
def test_the_request_for_a_scaling_resolves_to_it(scaling: Scaling) -> None:
    request = request_for(scaling, 2048)
    assert request.resolve(TrainLength(request.train_length, "told"), "a model", DEFAULTS) == scaling
    untold = request_for(scaling, 2048, told=False)
    assert untold.train_length is None
    assert untold.resolve(TRAINED, "a model", DEFAULTS) == scaling


def test_the_words_of_a_ramp() -> None:
    request = request_for(Static("by-parts", 4.0, (128.0, 512.0)), 2048, told=False)
    assert request.words == ["--method", "by-parts", "--scale", "4", "--ramp", "0.0625", "0.25"]


@given(st.floats(0.01, 100), st.integers(1, 64))
def test_a_stretched_scaling_has_the_same_exponents_for_flatter_slopes(ratio: float, heads: int) -> None:
    stock = stock_slopes(heads)
    flatter = tuple(slope / ratio for slope in stock)
    scaling = Static("by-parts", 4.0, (20.0, 300.0))
    scaled = np.array(stretched(scaling, ratio).slopes(flatter)) * ratio
    np.testing.assert_allclose(scaled, scaling.slopes(stock), rtol=1e-9)
    assert stretched(Static("ntk", 4.0), ratio) == Static("ntk", 4.0)
