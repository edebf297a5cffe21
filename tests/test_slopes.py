"""Invariants of the formulas, for any number and order of slopes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converter.config import LONGEST
from converter.scaling import slopes as formulas
from converter.scaling.scaling import (
    CONCAVE,
    LARGEST_FACTOR,
    METHODS,
    TEMPERATURES,
    query_factors,
    read_scaling,
)
from templates import ntk_alibi
from tests.reference import alibi as reference

SCALED = [method for method in METHODS if method not in ("none", CONCAVE)]
RAMP = (8.0, 200.0)
"""Of by-parts, in tokens; no other method uses it."""
POWERS_OF_TWO = [1, 2, 4, 8, 16, 32, 64, 128]
heads = st.integers(1, 256)
factors = st.floats(1.0, 1e4)
bias_maxima = st.sampled_from([4.0, 8.0, 16.0])


def stock_slopes(num_heads: int, bias_max: float = 8.0) -> np.ndarray:
    return np.array(formulas.stock_slopes(num_heads, bias_max))


def exponents(method: str, slopes: np.ndarray, ramp: formulas.Ramp = RAMP) -> np.ndarray:
    return np.array(formulas.exponents(method, tuple(slopes.tolist()), ramp))


def scaled_slopes(slopes: np.ndarray, method: str, factor: float, ramp: formulas.Ramp = RAMP) -> np.ndarray:
    stock = tuple(slopes.tolist())
    return np.array(formulas.with_exponents(stock, formulas.exponents(method, stock, ramp), factor))


@st.composite
def any_slopes(draw: st.DrawFn) -> np.ndarray:
    """Arbitrary slopes: in any order, with ties, over many magnitudes."""
    return np.array(draw(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=48)))


@st.composite
def any_ramp(draw: st.DrawFn) -> formulas.Ramp:
    start = draw(st.floats(1.0, 1e5))
    return start, start * draw(st.floats(1.01, 1e3))


@given(heads, bias_maxima)
def test_stock_slopes_are_the_references_for_any_maximum(num_heads: int, bias_max: float) -> None:
    found = stock_slopes(num_heads, bias_max)
    np.testing.assert_allclose(found, reference.mpt_slopes(num_heads, bias_max), rtol=1e-14)
    if bias_max == 8:
        np.testing.assert_allclose(found, reference.press_slopes(num_heads), rtol=1e-14)


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        *((number, [2 ** (-8 * h / number) for h in range(1, number + 1)]) for number in POWERS_OF_TWO),
        (12, [*(2.0**-h for h in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_stock_slopes_are_the_paper_s(num_heads: int, expected: list[float]) -> None:
    np.testing.assert_allclose(stock_slopes(num_heads), expected, rtol=1e-15)


@given(any_slopes(), factors, st.randoms(use_true_random=False))
def test_ntk(slopes: np.ndarray, factor: float, random: Any) -> None:
    """The steepest stays, the flattest is divided by the factor, and the ranking stays, in any order."""
    scaled = scaled_slopes(slopes, "ntk", factor)
    steepest, flattest = slopes.argmax(), slopes.argmin()
    if slopes[steepest] > slopes[flattest]:
        assert scaled[steepest] == slopes[steepest]
    np.testing.assert_allclose(scaled[flattest], slopes[flattest] / factor, rtol=1e-9)
    assert np.all(scaled <= slopes * (1 + 1e-12))
    assert np.all(scaled >= slopes / factor * (1 - 1e-12))
    ranks = np.argsort(slopes)
    assert np.all(np.diff(scaled[ranks]) >= -1e-12 * scaled[ranks][1:])
    order = np.arange(len(slopes))
    random.shuffle(order)
    np.testing.assert_allclose(scaled_slopes(slopes[order], "ntk", factor), scaled[order], rtol=1e-12)


@given(any_slopes(), factors, any_ramp())
def test_by_parts(slopes: np.ndarray, factor: float, ramp: formulas.Ramp) -> None:
    """Near heads stay and far ones are divided; between, a head is scaled more the flatter it is."""
    scaled = scaled_slopes(slopes, "by-parts", factor, ramp)
    spans = 5 / slopes
    near, far = spans < ramp[0] * (1 - 1e-12), spans > ramp[1] * (1 + 1e-12)
    np.testing.assert_array_equal(scaled[near], slopes[near])
    np.testing.assert_allclose(scaled[far], slopes[far] / factor, rtol=1e-12)
    between = ~(near | far)
    assert np.all(scaled[between] <= slopes[between] * (1 + 1e-9))
    assert np.all(scaled[between] >= slopes[between] / factor * (1 - 1e-9))
    strengths = exponents("by-parts", slopes, ramp)
    assert np.all(np.diff(strengths[np.argsort(-slopes)]) >= 0)
    # A head does not depend on the others.
    alone = [exponents("by-parts", slopes[[head]], ramp)[0] for head in range(len(slopes))]
    np.testing.assert_array_equal(strengths, alone)


@given(any_slopes(), factors)
def test_linear_divides_every_head_and_a_factor_of_one_changes_nothing(
    slopes: np.ndarray, factor: float
) -> None:
    np.testing.assert_allclose(scaled_slopes(slopes, "linear", factor), slopes / factor, rtol=1e-12)
    for method in ("none", *SCALED):
        np.testing.assert_array_equal(scaled_slopes(slopes, method, 1.0), slopes)


@given(st.sampled_from(POWERS_OF_TWO[1:]), factors)
def test_ntk_is_the_published_formula_for_powers_of_two(num_heads: int, factor: float) -> None:
    slopes = stock_slopes(num_heads)
    b = factor ** (1 / (num_heads - 1))
    formula = np.array([b / (2 ** (8 / num_heads) * b) ** h for h in range(1, num_heads + 1)])
    np.testing.assert_allclose(scaled_slopes(slopes, "ntk", factor), formula, rtol=1e-9)
    np.testing.assert_allclose(scaled_slopes(slopes, "ntk-published", factor), formula, rtol=1e-9)


@pytest.mark.parametrize(("num_heads", "effective"), [(40, 3.01), (12, 2.42), (112, 2.20)])
def test_published_form_divides_the_flattest_head_by_less(num_heads: int, effective: float) -> None:
    slopes = stock_slopes(num_heads)
    divided = slopes / scaled_slopes(slopes, "ntk-published", 4.0)
    assert divided[slopes.argmin()] == pytest.approx(effective, abs=0.005)
    whole = 2 ** math.floor(math.log2(num_heads))
    np.testing.assert_array_equal(divided[whole:], 1.0)


@pytest.mark.parametrize(
    ("slopes", "method", "factor", "ramp", "divisors"),
    [
        *((stock_slopes(1), method, 4.0, RAMP, [4]) for method in SCALED),  # one head alone
        (np.full(5, 0.5), "ntk", 4.0, RAMP, [4] * 5),  # equal slopes
        # Spans of 8 heads: 10, 20, ..., 1280 tokens. From 20 to 320: t = 0, 0, 1/4, 1/2, 3/4, 1, 1, 1.
        (stock_slopes(8), "by-parts", 16.0, (20.0, 320.0), [1, 1, 2, 4, 8, 16, 16, 16]),
    ],
)
def test_by_hand(slopes: np.ndarray, method: str, factor: float, ramp: Any, divisors: list[float]) -> None:
    np.testing.assert_allclose(slopes / scaled_slopes(slopes, method, factor, ramp), divisors, rtol=1e-12)


# The templates, which state the formulas again


@given(heads, bias_maxima, st.sampled_from(SCALED), factors)
def test_the_template_states_the_same_formula(
    num_heads: int, bias_max: float, method: str, factor: float
) -> None:
    slopes = ntk_alibi.stock_slopes(num_heads, bias_max)
    np.testing.assert_allclose(slopes, stock_slopes(num_heads, bias_max), rtol=1e-14)
    ramp = {"ramp": list(RAMP)} if method == "by-parts" else {}
    scaled = ntk_alibi.Alibi(slopes, {"type": method, "factor": factor, **ramp}).slopes[0]
    np.testing.assert_allclose(scaled, scaled_slopes(np.array(slopes), method, factor), rtol=1e-12)
    stated_once_more = reference.scaled_slopes(np.array(slopes), method, factor, RAMP)
    np.testing.assert_allclose(scaled, stated_once_more, rtol=1e-12)


@given(
    st.lists(st.floats(*TEMPERATURES), min_size=1, max_size=64).filter(any),
    factors.filter(lambda factor: 1 < factor <= LARGEST_FACTOR),
    st.integers(1, LONGEST // 3),
)
def test_the_queries_of_a_head_are_multiplied_by_its_temperature(
    temperatures: list[float], factor: float, length: int
) -> None:
    """In the converter, the template and the reference: by a^u, from 1 / a to a."""
    heads = len(temperatures)
    value = {"type": "fitted", "exponents": [[0.0] * heads], "temperatures": [temperatures]}
    static = {**value, "factor": factor}
    found = np.array(query_factors(read_scaling(static), heads))
    assert np.all((found >= 1 / factor * (1 - 1e-12)) & (found <= factor * (1 + 1e-12)))
    stated_once_more = reference.temperatures(static, heads, 0)
    np.testing.assert_allclose(found, factor**stated_once_more, rtol=1e-9)
    np.testing.assert_allclose(ntk_alibi.Alibi([1.0] * heads, static).temperatures, [found], rtol=1e-9)
    # By position, nothing changes up to the trained length.
    growing = read_scaling({**value, "train_seq_len": length, "dynamic": "position"})
    assert set(query_factors(growing, heads, length)) == {1.0}
    np.testing.assert_allclose(query_factors(growing, heads, 3 * length), 3**stated_once_more, rtol=1e-9)


def test_a_key_has_the_digits_of_its_position() -> None:
    """The example in the docstring of ntk_alibi.py."""
    [channels] = ntk_alibi.key_channels(torch.tensor([[70_000]]), None).flatten(0, 2)
    assert channels.tolist() == [256, 17, 112 / 256, 256, 17, 112 / 256, 0, 0]


@pytest.mark.parametrize("method", ["linear", "ntk", "ntk-published"])
@pytest.mark.parametrize("basis", [None, "length", "position"])
def test_the_largest_factor_and_rate_are_exact_in_float32(method: Any, basis: str | None) -> None:
    """At the longest position, of the steepest and flattest slopes of published models."""
    largest, last = float(LONGEST), LONGEST - 1
    stock = formulas.stock_slopes(112, 16.0)
    grows = {"train_seq_len": 1, "dynamic": basis, "rate": largest}
    alibi = ntk_alibi.Alibi(stock, {"type": method, **({"factor": largest} if basis is None else grows)})
    factor = largest if basis is None else largest * LONGEST
    expected = scaled_slopes(np.array(stock), method, factor)
    found = alibi.slopes_at(torch.tensor([[last]]))[0, 0, :, 0]
    np.testing.assert_allclose(found.double(), expected, rtol=1e-5)
    channels = ntk_alibi.query_channels(found, 1 / 16)
    both = channels[..., 0].bfloat16().double() + channels[..., 3].bfloat16().double()
    np.testing.assert_allclose(both, expected * 256 * 16, rtol=2e-5)
