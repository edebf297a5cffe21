"""Fitted slopes: their file, its refusals, and what a conversion, a picture and a card do with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converter import convert
from converter.errors import SourceError, UsageError
from converter.formatting import argv
from converter.scaling.request import GivenSlopes, Request, request_for
from converter.scaling.scaling import averaged, first_layers, query_factors, read_scaling
from converter.scaling.slopes import stock_slopes
from converter.source.slopes_file import read_slopes_file
from tests import tiny
from tests.conftest import Pristine, Refused, RunCli, edit_json
from tests.dealt import dealt, quick
from tests.messages import Words, raises, says
from tests.patched import FAMILIES, TRAIN_LENGTH, batch, config_of, fitted_scaling, load, scaled
from tests.reference import alibi as reference

SCALING = {"type": "fitted", "factor": 8.0, "exponents": [[0.0, 0.25, 0.5, 1.0], [-0.5, 0.0, 1.0, 1.5]]}
GROWING = {
    "type": "fitted",
    "train_seq_len": 64,
    "dynamic": "position",
    "rate": 1.0,
    "exponents": [[0.0, 0.25, 0.5, 1.0]],
}
TEMPERATURES = [[0.0, 0.1, 0.2, -0.1], [0.3, 0.0, -0.2, 0.1]]
rows = st.integers(1, 4).flatmap(
    lambda heads: st.lists(
        st.lists(st.floats(-1.0, 4.0), min_size=heads, max_size=heads), min_size=1, max_size=3
    )
)


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "value",
    [
        SCALING,
        GROWING,
        {**SCALING, "temperatures": TEMPERATURES},
        {**SCALING, "exponents": [[0.0] * 4] * 2, "temperatures": TEMPERATURES},
    ],
    ids=["static", "position", "temperatures", "temperatures alone"],
)
def test_json_and_back(value: dict[str, Any]) -> None:
    scaling = read_scaling(value)
    assert scaling.to_json() == value
    request = request_for(scaling, 64)
    assert request.slopes == GivenSlopes("slopes.json", scaling)
    assert argv(None, "M", **request.options)[2:] == ["--train-length", "64", "--slopes", "slopes.json"]


@given(rows, st.floats(1.01, 65536.0))
def test_each_layer_has_its_own_exponents(exponents: list[list[float]], factor: float) -> None:
    from templates import ntk_alibi

    exponents[0][0] = 1.0
    temperatures = [[t / 4 for t in row] for row in exponents]
    value = {"type": "fitted", "factor": factor, "exponents": exponents, "temperatures": temperatures}
    scaling, stock = read_scaling(value), stock_slopes(len(exponents[0]))
    alibi = ntk_alibi.Alibi(stock, value, len(exponents))
    code = alibi.slopes
    assert alibi.temperatures is not None
    for layer, row in enumerate(exponents):
        factors = np.array(query_factors(scaling, len(stock), layer=layer))
        assert np.all(np.isfinite(np.float32(factors)) & (np.float32(factors) > 0))
        np.testing.assert_allclose(alibi.temperatures[layer], factors, rtol=1e-12)
        np.testing.assert_allclose(factors, factor ** np.array(temperatures[layer]), rtol=1e-12)
        found = np.array(scaling.slopes(stock, layer=layer))
        assert np.all(np.isfinite(np.float32(found)) & (np.float32(found) > 0))
        np.testing.assert_allclose(code[layer], found, rtol=1e-12)
        stated_once_more = reference.scaled_slopes(np.array(stock), "fitted", factor, fitted=row)
        np.testing.assert_allclose(found, stated_once_more, rtol=1e-12)


def test_rows_of_layers() -> None:
    growing = read_scaling(GROWING)  # one row is for all layers
    assert growing.slopes((1.0,) * 4, 128, layer=5) == pytest.approx([1, 2**-0.25, 2**-0.5, 0.5])
    assert growing.slopes((1.0,) * 4, 64) == (1.0,) * 4
    scaling = read_scaling({**SCALING, "temperatures": TEMPERATURES})
    assert query_factors(scaling, 4, layer=1) == pytest.approx([8**0.3, 1, 8**-0.2, 8**0.1])
    assert query_factors(read_scaling(SCALING), 4) == (1.0,) * 4
    growing = read_scaling({**GROWING, "temperatures": TEMPERATURES[:1]})
    assert query_factors(growing, 4, 64, layer=1) == (1.0,) * 4
    assert query_factors(growing, 4, 128, layer=1) == pytest.approx([1, 2**0.1, 2**0.2, 2**-0.1])
    # The mean is geometric.
    assert averaged(scaling).temperatures == (pytest.approx([0.15, 0.05, 0.0, 0.0]),)
    each = np.array([scaling.slopes(stock_slopes(4), layer=layer) for layer in range(2)])
    np.testing.assert_allclose(averaged(scaling).slopes(stock_slopes(4)), np.sqrt(each[0] * each[1]))
    assert first_layers(scaling, 1).temperatures == (tuple(TEMPERATURES[0]),)
    assert first_layers(scaling, 1).slopes(stock_slopes(4)) == pytest.approx(each[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exponents": None}, "needs exponents"),
        ({"exponents": [[]]}, "needs exponents"),
        ({"exponents": [0.5, 1.0]}, "needs exponents"),
        ({"exponents": [[0.5], [0.5, 1.0]]}, "numbers of heads"),
        ({"exponents": [[0.5, 4.1]]}, ("exponent 4.1", "head 1 of layer 0")),
        ({"exponents": [[0.5], [-1.1]]}, ("exponent -1.1", "head 0 of layer 1")),
        ({"exponents": [["1"]]}, "exponent '1'"),
        ({"exponents": [[float("nan")]]}, ("'exponents'", "finite", "correct it")),
        ({"exponents": [[0.0, 0.0], [0, 0]]}, "would scale no head"),
        ({"temperatures": [0.5, 1.0]}, "temperatures"),
        ({"temperatures": TEMPERATURES[:1]}, ("temperatures", "shape")),
        ({"temperatures": [[0.1], [0.1, 0.2]]}, ("temperatures", "numbers of heads")),
        ({"temperatures": [[0, 0, 0, 1.1]] * 2}, ("temperature 1.1", "head 3 of layer 0")),
        ({"temperatures": [[-1.5, 0, 0, 1]] * 2}, ("temperature -1.5", "head 0 of layer 0")),
        ({"factor": 1.0}, "factor 1"),
        ({"factor": "8"}, "factor '8'"),
        ({"train_seq_len": 64}, ("factor", "train_seq_len", "not both")),
        ({"factor": None}, ("factor", "train_seq_len", "not both")),
        ({"factor": None, "train_seq_len": -1}, "train_seq_len -1"),
        ({"factor": None, "train_seq_len": 64, "rate": 0}, "rate 0"),
        ({"ramp": [1, 2]}, "key ramp"),
        ({"type": "ntk"}, "/mine.json"),
        ({"factor": None, "train_seq_len": 64, "rate": 20}, "rate 20"),
        (
            {"factor": None, "train_seq_len": 64, "dynamic": "row"},
            ("dynamic 'row'", "length or position"),
        ),
    ],
    ids=str,
)
def test_files_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], words: Words) -> None:
    value = {key: value for key, value in {**SCALING, **changes}.items() if value is not None}
    no_sense(write(tmp_path / "mine.json", value), words)


def no_sense(path: Path, words: Words) -> None:
    """The one line names the file and the key, and what can be done about a file of the user's own."""
    with raises(SourceError, "mine.json", words) as error:
        read_slopes_file(path)
    assert "download" not in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_exponents_belong_to_fitted_scalings_and_notes_to_none(tmp_path: Path) -> None:
    for key in ("exponents", "temperatures"):
        with pytest.raises(SourceError, match=f"the key '{key}'"):
            read_scaling({"type": "ntk", "factor": 2.0, key: [[1.0]]})
    given = read_slopes_file(write(tmp_path / "mine.json", {**SCALING, "fitted": {"text": "a book"}}))
    assert given == GivenSlopes("mine.json", read_scaling(SCALING))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "linear"},
        {"method": "none"},
        {"scale": 2.0},
        {"target_length": 128},
        {"dynamic": "position"},
        {"rate": 2.0},
        {"ramp": (0.1, 0.5)},
    ],
    ids=str,
)
def test_slopes_exclude_a_method_and_its_strength(options: dict[str, Any]) -> None:
    given = read_slopes_file(SCALING)
    with raises(UsageError, "`slopes`", f"`{next(iter(options))}`"):
        Request(slopes=given, **options)


def test_the_command_line(pristine: Pristine, run: RunCli, refused: Refused, tmp_path: Path) -> None:
    source, out, value = pristine("bloom"), tmp_path / "out", {**SCALING, "temperatures": TEMPERATURES}
    slopes = write(tmp_path / "mine.json", value)
    planned = run("convert", source, "--slopes", slopes, "--out", out, "--dry-run", "--json").json
    assert (planned["method"], planned["alibi_scaling"]) == ("fitted", value)
    assert not out.exists()
    result = run("convert", source, "--slopes", slopes, "--out", out, "--json").json
    assert result["alibi_scaling"] == config_of(out)["alibi_scaling"] == value
    [check] = [check for check in result["checks"] if check["name"] == "slopes"]
    assert "4 slopes and temperatures in each of 2 layers measured" in check["detail"]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "--slopes mine.json" in card
    assert json.loads((out / "slopes.json").read_text(encoding="utf-8")) == value
    assert "fitted, factor 8, 4 heads, 2 layers, with temperatures" in card
    assert "mean of 2 layers" in run("inspect", out).out
    assert run("inspect", source, "--slopes", slopes, "--json").json["alibi_scaling"] == value
    # The default named is a method too.
    other = ("--out", tmp_path / "other")
    message = refused("convert", source, "--slopes", slopes, "--method", "ntk", *other, code=2)
    says(message, "--slopes", "--method")
    assert "not a file" in refused("convert", source, "--slopes", tmp_path / "none", *other)


@torch.no_grad()
@pytest.mark.parametrize("scaling", ["fitted-position", "by-parts-position-tempered"])
@pytest.mark.parametrize("family", quick(FAMILIES, "mpt"))
def test_the_trained_length_stays_bit_for_bit(tmp_path: Path, family: str, scaling: str) -> None:
    scaled(tiny.FACTORIES[family](tmp_path / "source", 4), tmp_path / "out", scaling, 4)
    value = {**config_of(tmp_path / "out")["alibi_scaling"], "rate": 1.0}
    edit_json(tmp_path / "out" / "config.json", {"alibi_scaling": value})
    ids, _ = batch(length=TRAIN_LENGTH + 1)
    ours, stock = (load(tmp_path / "out", **options)(ids).logits for options in ({}, {"alibi_scaling": None}))
    assert torch.equal(ours[:, :-1], stock[:, :-1])
    assert not torch.equal(ours[:, -1], stock[:, -1])


@torch.no_grad()
@pytest.mark.parametrize(
    ("dynamic", "dtype"), dealt([None, "position"], [torch.bfloat16, torch.float16], each=1)
)
def test_half_precision_stays_near_float32(
    pristine: Pristine, tmp_path: Path, dynamic: str | None, dtype: torch.dtype
) -> None:
    value = fitted_scaling(4, 2, dynamic)
    convert(pristine("bloom"), tmp_path / "out", slopes=value, train_length=TRAIN_LENGTH, verify=False)
    ids, mask = batch(rows=2)
    model, half = load(tmp_path / "out"), load(tmp_path / "out", dtype=dtype)
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    found = [half(ids, attention_mask=mask, output_attentions=weights).logits for weights in (False, True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(model(ids, attention_mask=mask).logits)
    for logits, bound in zip(found, [0.01 if dtype == torch.float16 else 0.05] * 2 + [0.05], strict=True):
        assert (logits.float()[mask.bool()] - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("bloom", fitted_scaling(5, 2), ("5 heads", "has 4")),
        ("bloom", fitted_scaling(4, 3), ("3 layers", "has 2")),
        ("bloom", {**GROWING, "train_seq_len": 128}, ("128 tokens", "trained length is 64")),
        ("llama", SCALING, "`slopes`"),
    ],
    ids=["heads", "layers", "trained-length", "rotary"],
)
def test_slopes_of_another_model(
    pristine: Pristine, tmp_path: Path, name: str, value: dict[str, Any], words: Words
) -> None:
    with raises(UsageError, words):
        convert(pristine(name), tmp_path / "out", slopes=value, train_length=64)
