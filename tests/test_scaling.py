"""Options become an alibi_scaling, which can be read back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.errors import SourceError, UsageError
from converter.formatting import argv
from converter.scaling.request import RAMP, Defaults, Request, TrainLength, request_for
from converter.scaling.scaling import UNSCALED, Scaling, read_scaling, short_names, stretched
from converter.scaling.slopes import exponents, stock_slopes, with_exponents
from tests.messages import Words, raises

TRAINED, UNKNOWN = TrainLength(2048, "told"), TrainLength(None, "not known")
DECODER, ENCODER, ROTARY = (
    Defaults("position", "by-parts", RAMP),
    Defaults("length", "ntk", RAMP),
    Defaults(None, "ntk", RAMP),
)
NAN, INF = math.nan, math.inf


def static(method: str, factor: float, **more: Any) -> dict[str, Any]:
    return {"type": method, "factor": factor, **more}


def dynamic(method: str, basis: str, rate: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"type": method, "train_seq_len": 2048, "dynamic": basis, "rate": rate, **more}


CONCAVE = {"type": "concave", "train_seq_len": 2048, "dynamic": "position", "power": 8}


def by_parts(basis: str, rate: float = 1.0) -> dict[str, Any]:
    return dynamic("by-parts", basis, rate, ramp=[256.0, 1024.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": 2.0}, static("ntk", 2.0)),
        ({"scale": 2, "method": "linear"}, static("linear", 2.0)),
        ({"scale": 1.0}, static("ntk", 1.0)),
        ({"target_length": 8192}, static("ntk", 4.0)),
        ({"scale": 4, "ramp": (0.0625, 0.25)}, static("by-parts", 4.0, ramp=[128.0, 512.0])),
        ({"target_length": 3000, "method": "ntk-published"}, static("ntk-published", 3000 / 2048)),
        (
            {"method": "by-parts", "scale": 4, "ramp": (0.0625, 0.25)},
            static("by-parts", 4.0, ramp=[128.0, 512.0]),
        ),
        ({"dynamic": "length"}, by_parts("length")),
        ({"dynamic": "length", "method": "ntk"}, dynamic("ntk", "length")),
        ({"dynamic": "position", "rate": 1.5, "method": "linear"}, dynamic("linear", "position", 1.5)),
        ({"dynamic": "length", "method": "by-parts"}, by_parts("length")),
        ({"method": "none"}, None),
        ({}, by_parts("position")),
        ({"rate": 2.0}, by_parts("position", 2.0)),
        ({"method": "by-parts"}, by_parts("position")),
        ({"method": "ntk"}, dynamic("ntk", "position")),
        ({"method": "concave"}, CONCAVE),
        ({"method": "concave", "dynamic": "position"}, CONCAVE),
    ],
)
def test_request_to_config(options: dict[str, Any], expected: dict[str, Any] | None) -> None:
    scaling = Request(**options).resolve(TRAINED, "a model", DECODER)
    assert scaling.to_json() == expected
    assert read_scaling(expected) == scaling


def test_an_encoder_s_default_goes_by_length() -> None:
    assert Request().resolve(TRAINED, "a model", ENCODER) == Scaling(
        "ntk", dynamic="length", train_length=2048
    )


NO_RAMP = ("`ramp`", "two parts of the trained length")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "linear"}, ("`scale`", "`target_length`", "`dynamic`")),
        ({"method": "ntk-published", "rate": 2.0}, ("`scale`", "`target_length`", "`dynamic`")),
        ({"scale": 2.0, "dynamic": "length"}, ("`scale`", "`dynamic`")),
        ({"scale": 2.0, "target_length": 4096}, ("`scale`", "`target_length`")),
        ({"target_length": 4096, "dynamic": "position"}, ("`target_length`", "`dynamic`")),
        *(({"scale": scale}, f"`scale` {scale}") for scale in (0.99, -2.5, NAN, INF, True)),
        *(({"scale": scale}, f"`scale` {scale}") for scale in (1e308, 10**400)),
        *(({"scale": float(scale)}, f"`scale` {scale}") for scale in (-2, 2200000000)),
        ({"scale": 2.0, "rate": 1.0}, ("`rate`", "`dynamic` length", "`dynamic` position")),
        *(({"dynamic": "length", "rate": rate}, f"`rate` {rate}") for rate in (0, INF, NAN)),
        ({"dynamic": "length", "rate": 1e308}, "`rate` 1e+308"),
        ({"dynamic": "sometimes"}, "`dynamic` 'sometimes'"),
        (
            {"method": "yarn", "scale": 2.0},
            ("`method` 'yarn'", "ntk, by-parts, concave"),
        ),
        *(
            ({"method": "none", **more}, ("`method` none", f"`{next(iter(more))}`"))
            for more in ({"scale": 2.0}, {"target_length": 4096}, {"dynamic": "length"}, {"rate": 1.0})
        ),
        *(
            ({"method": "concave", **more}, ("`method` concave", f"`{next(iter(more))}`"))
            for more in ({"scale": 2.0}, {"target_length": 4096}, {"dynamic": "length"}, {"rate": 1.0})
        ),
        ({"method": "concave", "ramp": (0.1, 0.5)}, ("`ramp`", "`method` by-parts")),
        ({"target_length": 0}, "`target_length` 0"),
        ({"scale": 2.0, "train_length": -1}, "`train_length` -1"),
        ({"scale": 2.0, "train_length": 1 << 40}, f"`train_length` {1 << 40}"),
        ({"method": "ntk", "scale": 2.0, "ramp": (0.1, 0.5)}, ("`ramp`", "`method` by-parts")),
        ({"method": "none", "ramp": (0.1, 0.5)}, ("`ramp`", "`method` by-parts")),
        *(
            ({"method": "by-parts", "scale": 2.0, "ramp": ramp}, NO_RAMP)
            for ramp in [
                *((0.5, 0.5), (0.5, 0.5000001), (0.5, 1e300), (0.5, 0.25), (0.0, 0.5), (-1.0, 1.0)),
                *((0.1, INF), (NAN, 1.0), (0.1, NAN), (True, 2.0), (0.1,), (0.1, 0.2, 0.3)),
                *((1e-320, 0.5), (1e-10, 0.5), (0.5, 10**400)),
            ]
        ),
    ],
)
def test_requests_that_make_no_sense(options: dict[str, Any], words: Words) -> None:
    with raises(UsageError, words):
        Request(**options)


@pytest.mark.parametrize(
    ("options", "trained", "defaults", "words"),
    [
        ({"target_length": 1024}, TRAINED, DECODER, ("1024", "2048")),
        ({}, TRAINED, ROTARY, "no default strength"),
        (
            {"target_length": 4096},
            UNKNOWN,
            DECODER,
            ("`target_length`", "trained length"),
        ),
        ({"dynamic": "length"}, UNKNOWN, DECODER, ("`dynamic`", "a model", "add `train_length`")),
        ({}, UNKNOWN, DECODER, ("default scaling", "trained length")),
        (
            {"method": "by-parts", "scale": 2.0},
            UNKNOWN,
            DECODER,
            ("`method` by-parts", "trained length"),
        ),
        ({"method": "concave"}, UNKNOWN, DECODER, ("`method` concave", "trained length")),
    ],
)
def test_requests_that_a_model_cannot_meet(
    options: dict[str, Any], trained: TrainLength, defaults: Defaults, words: Words
) -> None:
    with raises(UsageError, words):
        Request(**options).resolve(trained, "a model", defaults)


@pytest.mark.parametrize("options", [{"scale": 2.0}, {"method": "none"}])
def test_who_needs_no_trained_length(options: dict[str, Any]) -> None:
    request = Request(**options)
    assert request.resolve(UNKNOWN, "m", DECODER) == request.resolve(TRAINED, "m", DECODER)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "linear", "factor": 2}, Scaling("linear", 2.0)),
        ({"type": "linear", "train_seq_len": 8192}, Scaling("linear", dynamic="length", train_length=8192)),
    ],
)
def test_what_btlm_and_jais_write_is_understood(value: dict[str, Any], expected: Scaling) -> None:
    assert read_scaling(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *("ntk", [], {}, {"type": "none"}, {"type": "ntk"}, {"type": "yarn", "factor": 2.0}),
        *({"type": "ntk", "factor": factor} for factor in (0.5, "2", NAN, 2.2e9, 10**299)),
        {"type": "ntk", "factor": 2.0, "train_seq_len": 2048},
        *({"type": "ntk", "train_seq_len": length} for length in (2048.5, 0, True, 1 << 40)),
        *({"type": "ntk", "train_seq_len": 2048, "rate": rate} for rate in (0, 1e308)),
        {"type": "ntk", "train_seq_len": 2048, "dynamic": "sometimes"},
        {"type": "ntk", "factor": 2.0, "ramp": [128, 512]},
        *({"type": "ntk", "factor": 2.0, "temperature": value} for value in (0.2, 0, None)),
        *({"type": method, "factor": 2.0, "temperature": 0.2} for method in ("linear", "ntk-published")),
        {"type": "by-parts", "factor": 2.0, "ramp": [128, 512], "temperature": 0.2},
        {"type": "fitted", "factor": 2.0, "exponents": [[0, 1]], "temperature": 0.2},
        {"type": "by-parts", "factor": 2.0},
        {"type": "by-parts", "train_seq_len": 2048, "ramp": None},
        *(
            {key: value for key, value in {**CONCAVE, **changes}.items() if value != "left out"}
            for changes in [
                *({"power": power} for power in (4, 16, 8.5, "8", True, None, "left out")),
                *({"dynamic": dynamic} for dynamic in ("length", None, "left out")),
                *({"train_seq_len": length} for length in (0, 2048.5, None, "left out")),
                *({"rate": 1.0}, {"factor": 2.0}, {"ramp": [128, 512]}),
            ]
        ),
        *(
            {"type": "by-parts", "factor": 2.0, "ramp": ramp}
            # The logarithms of the third are equal.
            for ramp in [
                *([512, 128], [128, 128], [1e15, 1e15 + 0.125], [0, 128], [128, INF], [128]),
                *(["1", "2"], 128, [True, 2]),
            ]
        ),
    ],
)
def test_what_is_no_scaling_is_refused(value: object) -> None:
    with pytest.raises(SourceError, match="alibi_scaling"):
        read_scaling(value)


@given(st.integers(1, 1 << 20), st.floats(0.1, 8.0), st.sampled_from(["length", "position"]))
def test_dynamic_factor_grows_from_one(tokens: int, rate: float, basis: Any) -> None:
    scaling = Scaling("ntk", dynamic=basis, rate=rate, train_length=2048)
    factor = scaling.factor_at(tokens)
    assert factor == max(1.0, rate * tokens / 2048)
    slopes = stock_slopes(12)
    np.testing.assert_array_equal(
        scaling.slopes(slopes, tokens), with_exponents(slopes, exponents("ntk", slopes), factor)
    )


@pytest.mark.parametrize(
    ("scaling", "text", "words"),
    [
        (UNSCALED, "none", "--method none"),
        (Scaling("ntk", 2.0), "ntk, factor 2", "--scale 2"),
        (Scaling("ntk", 16384 / 3000), "ntk, factor 5.461333333333333", "--scale 5.461333333333333"),
        (Scaling("ntk", 40960.0), "ntk, factor 40960", "--scale 40960"),
        (
            Scaling("by-parts", 4.0, (128.0, 512.5)),
            "by-parts, factor 4, ramp 128 to 512.5 tokens",
            "--method by-parts --scale 4 --ramp 0.0625 0.250244140625",
        ),
        (
            Scaling("linear", dynamic="length", rate=1.5, train_length=2048),
            "linear, length-dynamic, rate 1.5 from 2048 tokens",
            "--method linear --dynamic length --rate 1.5",
        ),
        (
            Scaling("by-parts", dynamic="position", rate=4 / 3, train_length=2048, ramp=(128.0, 512.0)),
            "by-parts, position-dynamic, rate 1.3333333333333333 from 2048 tokens, ramp 128 to 512 tokens",
            "--method by-parts --dynamic position --rate 1.3333333333333333 --ramp 0.0625 0.25",
        ),
        (
            Scaling("concave", dynamic="position", train_length=2048, power=8),
            "concave, position-dynamic, power 8 from 2048 tokens",
            "--method concave",
        ),
        (
            Scaling("fitted", 2.0, exponents=((0.0, 1.0),), temperatures=((0.25, 0.0),)),
            "fitted, factor 2, 2 heads, all layers alike, with temperatures",
            "--slopes slopes.json",
        ),
        (
            Scaling("fitted", dynamic="position", train_length=2048, exponents=((0.0, 1.0), (1 / 3, 0.0))),
            "fitted, position-dynamic, rate 1 from 2048 tokens, 2 heads, 2 layers",
            "--slopes slopes.json",
        ),
    ],
)
def test_descriptions_make_the_same_scaling_again(scaling: Scaling, text: str, words: str) -> None:
    """The request for a scaling resolves to it, whether it names the trained length or not."""
    assert str(scaling) == text
    untold = request_for(scaling, 2048, told=False)
    assert " ".join(argv(None, "M", **untold.options)[2:]) == words
    assert untold.train_length is None
    assert untold.resolve(TRAINED, "a model", DECODER) == scaling
    told = request_for(scaling, 2048)
    assert told.resolve(TrainLength(told.train_length, "told"), "a model", DECODER) == scaling


BY_PARTS = Scaling("by-parts", dynamic="position", train_length=2048, ramp=(256.0, 1024.0))
FITTED = Scaling("fitted", dynamic="position", train_length=2048, exponents=((0.0, 1.0),))


@pytest.mark.parametrize(
    ("scalings", "short"),
    [
        ([UNSCALED, Scaling("ntk", 2.5)], ["none", "ntk, factor 2.5"]),
        (
            [BY_PARTS, replace(BY_PARTS, rate=2.0), FITTED, replace(FITTED, temperatures=((0.2, 0.1),))],
            [
                "by-parts by position",
                "by-parts by position, rate 2",
                "fitted by position",
                "fitted by position, with temperatures",
            ],
        ),
        (
            [
                BY_PARTS,
                replace(BY_PARTS, ramp=(512.0, 1024.0)),
                Scaling("ntk", dynamic="length", rate=0.5, train_length=2048),
            ],
            [
                "by-parts by position, ramp 256 to 1024 tokens",
                "by-parts by position, ramp 512 to 1024 tokens",
                "ntk by length, rate 0.5",
            ],
        ),
        (
            [Scaling("ntk", dynamic="length", train_length=length) for length in (1024, 2048)],
            ["ntk by length, from 1024 tokens", "ntk by length, from 2048 tokens"],
        ),
        ([Scaling("fitted", 4.0, exponents=((0.5, 1.0),))], ["fitted, factor 4"]),
        (["another text", "", "ntk by length"], ["another text", "", "ntk by length"]),
        (["ntk by length", "ntk, length-dynamic"], ["ntk by length", "ntk, length-dynamic"]),
    ],
)
def test_short_names_are_distinct(scalings: list[Scaling], short: list[str]) -> None:
    """Of stored results too, whose names may be any text."""
    assert list(short_names(map(str, scalings)).values()) == short


@given(st.floats(0.01, 100), st.integers(1, 64))
def test_a_stretched_scaling_has_the_same_exponents_for_flatter_slopes(ratio: float, heads: int) -> None:
    stock = stock_slopes(heads)
    flatter = tuple(slope / ratio for slope in stock)
    scaling = Scaling("by-parts", 4.0, (20.0, 300.0))
    scaled = np.array(stretched(scaling, ratio).slopes(flatter)) * ratio
    np.testing.assert_allclose(scaled, scaling.slopes(stock), rtol=1e-9)
    assert stretched(Scaling("ntk", 4.0), ratio) == Scaling("ntk", 4.0)
