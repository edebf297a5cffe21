"""The content of pictures, read back from the figures; and the files that ``plot`` writes."""

from __future__ import annotations

import io
import json
import math
import runpy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from scipy import stats

from converter import convert
from converter.errors import UsageError
from converter.evaluation.results import Bucket, Measurement, Results
from converter.pictures.curves import APART, draw_curves, draw_models
from converter.pictures.per_head import (
    card_figure,
    card_picture,
    draw_penalty,
    draw_slopes,
    draw_span,
    draw_wavelengths,
)
from converter.pictures.plotting import curves, plot
from converter.pictures.positions import Positions, read_positions
from converter.pictures.style import DPI, MARGIN, MOST_LINES, WIDEST_LABEL, plain, render
from converter.scaling.scaling import Scaling
from converter.scaling.slopes import stock_slopes
from tests import tiny
from tests.conftest import Pristine, Refused, RunCli, fingerprint
from tests.messages import says
from tests.reference.alibi import concave_penalties, press_slopes, scaled_slopes

ROOT = Path(__file__).parent.parent
PNG = b"\x89PNG\r\n\x1a\n"
HEADS = (1, 12, 112)
OF_A_MODEL = ["slopes.png", "span.png", "penalty.png"]
HOSTILE = ("$\\frac{1$", "a$b$c^^", "\x00\x1b[31mred\n", "模型-13B", "_hidden", "x" * 500, "", '<&">')


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """Makes matplotlib's warnings errors: missing glyphs, omitted labels, numbers that cannot be drawn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="matplotlib|converter")
        warnings.filterwarnings("error", message="Glyph|.*legend|.*layout|.*log")
        yield


def model(heads: int = 16, *scalings: Scaling, **changes: Any) -> Positions:
    return Positions("a/model", stock_slopes(heads), scalings, train_length=2048, **changes)


def series(axes: Axes) -> dict[str, NDArray[np.float64]]:
    """Label -> y values, for the lines in the legend."""
    return {
        str(line.get_label()): np.asarray(line.get_ydata(), dtype=np.float64)
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_and_spans_of_every_head(heads: int) -> None:
    drawn = model(heads, Scaling("ntk", 4.0), Scaling("linear", 2.0))
    stock = press_slopes(heads)
    expected = {
        "stock": stock,
        "ntk, factor 4": scaled_slopes(stock, "ntk", 4),
        "linear, factor 2": stock / 2,
    }
    slopes, spans = draw_slopes(drawn), draw_span(drawn)
    found, reach = series(slopes.axes[0]), series(spans.axes[0])
    assert list(found) == list(reach) == list(expected) == legend_texts(slopes) == legend_texts(spans)
    for label, values in expected.items():
        np.testing.assert_allclose(found[label], values, rtol=1e-12)
        np.testing.assert_allclose(reach[label], 5 / values, rtol=1e-12)
    across = [line for line in spans.axes[0].get_lines() if str(line.get_label()).startswith("_")]
    assert [line.get_ydata()[0] for line in across] == [2048, 4 * 2048]
    low, high = slopes.axes[0].get_ylim()
    assert low < min(map(np.min, expected.values()))
    assert high > max(map(np.max, expected.values()))
    falcon = model(heads, bias_scale=64**-0.5)  # it divides the bias by 8
    reach = series(draw_span(falcon).axes[0])
    np.testing.assert_allclose(reach["stock"], 5 * 8 / stock, rtol=1e-12)
    assert "0.125" in draw_slopes(falcon).axes[0].get_ylabel()


def test_a_concave_penalty_has_no_slopes() -> None:
    """Its spans are where the formula reaches 5 nats; a head that never does has none."""
    drawn = model(8, Scaling("concave", dynamic="position", train_length=2048, power=8))
    labels = [f"concave by position, at {tokens} tokens" for tokens in (4096, 8192)]
    assert list(series(draw_slopes(drawn).axes[0])) == ["stock"]
    reach = series(draw_span(drawn).axes[0])
    assert list(reach) == ["stock", *labels]
    for label, tokens in zip(labels, (4096, 8192), strict=True):
        for slope, span in zip(press_slopes(8), reach[label], strict=True):
            farthest = concave_penalties(slope, tokens, 2048, 8, np.array([tokens - 1.0]))
            assert np.isnan(span) == (farthest < 5)
            if farthest >= 5:
                assert concave_penalties(slope, tokens, 2048, 8, np.array([span])) == pytest.approx([5.0])
    # Head 7 sees 1280 tokens, which is nearest to the trained length.
    axes = draw_penalty(drawn).axes[0]
    assert axes.get_title("left") == "Penalty of head 7 by distance"
    for line, label in zip(axes.get_lines()[1:], labels, strict=True):
        assert line.get_label() == label
        distances = np.asarray(line.get_xdata(), dtype=np.float64)
        tokens = int(distances[-1])
        wanted = concave_penalties(2.0**-8, tokens, 2048, 8, distances)
        np.testing.assert_allclose(
            np.asarray(line.get_ydata(), dtype=np.float64), wanted, rtol=1e-9, atol=1e-12
        )
    assert card_figure(drawn).axes[0].get_title("left") == "Penalty of head 7"


@pytest.mark.parametrize(
    ("rate", "name", "factors"),
    [
        (2.0, "ntk by position, rate 2", {100: 2, 200: 4, 400: 8}),
        (1.0, "ntk by position", {200: 2, 400: 4}),
        (0.1, "ntk by position, rate 0.1", {400: 1}),
    ],
)
def test_a_dynamic_scaling_is_shown_where_it_changes_something(
    rate: float, name: str, factors: dict[int, float]
) -> None:
    figure = draw_slopes(model(8, Scaling("ntk", dynamic="position", rate=rate, train_length=100)))
    found = series(figure.axes[0])
    assert list(found) == ["stock", *(f"{name}, at {tokens} tokens" for tokens in factors)]
    for values, factor in zip(list(found.values())[1:], factors.values(), strict=True):
        np.testing.assert_allclose(values, scaled_slopes(press_slopes(8), "ntk", factor), rtol=1e-12)


def test_no_more_lines_than_can_be_told_apart() -> None:
    factors = range(2, 12)
    figure = draw_slopes(model(8, *(Scaling("ntk", float(factor)) for factor in factors)))
    assert list(series(figure.axes[0])) == ["stock", *(f"ntk, factor {n}" for n in range(2, 1 + MOST_LINES))]
    assert "8 of 11 lines" in figure.legends[0].get_title().get_text()
    scaled = [(f"ntk, factor {factor}", 0.9 - 0.01 * factor) for factor in factors]
    results = [
        *(measurement(length=512, scaling=name, value=value) for name, value in [("none", 0.1), *scaled]),
        measurement(scaling="linear, factor 2", value=1.0),
    ]
    figure = draw_curves(Results(results, {}), "m", "lines")
    assert list(bars(figure.axes[0])) == ["none", *(f"ntk, factor {n}" for n in range(2, 1 + MOST_LINES))]
    says(figure.legends[0].get_title().get_text(), "8 of 12 lines", "512 tokens")


def test_wavelengths_of_rotary_pairs() -> None:
    frequencies = tuple(10000.0 ** (-2 * pair / 16) for pair in range(8))
    drawn = replace(model(), stock=frequencies, rotary=True)
    expected = 2 * np.pi * 10000 ** (2 * np.arange(8) / 16)
    np.testing.assert_allclose(series(draw_wavelengths(drawn).axes[0])["stock"], expected, rtol=1e-12)
    np.testing.assert_allclose(series(card_figure(drawn).axes[0])["stock"], expected, rtol=1e-12)


def measurement(**changes: Any) -> Measurement:
    return replace(
        Measurement("m", "none", "lines", "accuracy", 256, (1.0, 0.0), 0.5, 0.1, 0.9, (0.1, 0.95)), **changes
    )


def perplexity(value: float = 20.0, **changes: Any) -> Measurement:
    return measurement(metric="perplexity", task="perplexity", value=value, depths=(), **changes)


def bars(axes: Axes) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]]:
    """Label -> x values, y values, and the ends of the error bars [points, 2]."""
    found = {}
    for container in axes.containers:
        line, _, (collection,) = container.lines  # type: ignore[attr-defined]
        ends = np.array([segment[:, 1] for segment in collection.get_segments() if len(segment)])
        places, values = (np.asarray(data, dtype=np.float64) for data in line.get_data())
        found[str(container.get_label())] = (places, values, ends)
    return found


def test_scores_by_length_and_place_of_the_answer() -> None:
    results = Results(
        [
            measurement(),
            measurement(length=1024, value=0.25, low=0.125, high=0.5),
            measurement(
                length=512, scaling="ntk, factor 4", value=1.0, low=0.75, high=1.0, scores=(1.0,) * 2
            ),
            measurement(model="other", value=0.0, low=0.0, high=0.0),
            measurement(task="passkey", value=0.0, low=0.0, high=0.0),
        ],
        {"m": {"train_length": 256}},
    )
    figure = draw_curves(results, "m", "lines")
    by_length, by_place = figure.axes
    found = bars(by_length)
    assert list(found) == ["none", "ntk, factor 4"]
    places, values, ends = found["none"]
    np.testing.assert_allclose(places, np.array([256, 1024]) * 2 ** (-APART / 2))
    np.testing.assert_allclose(values, [50, 25])
    np.testing.assert_allclose(ends, [[10, 90], [12.5, 50]])
    np.testing.assert_allclose(found["ntk, factor 4"][1], [100])
    assert sorted(legend_texts(figure)) == ["none", "ntk, factor 4", "trained length (256)"]
    assert "512 to 1024" in by_place.get_title(loc="left")  # beyond the trained length
    (places, first, _), (_, second, _) = bars(by_place).values()
    np.testing.assert_allclose(places, [0.5 - APART / 2, 4.5 - APART / 2])  # in the first and the last fifth
    np.testing.assert_allclose([first, second], [[100, 0], [100, 100]])


def test_models_are_drawn_together(tmp_path: Path) -> None:
    results = Results(
        [
            measurement(),
            measurement(length=512, value=0.25, low=0.125, high=0.5),
            measurement(model="other", scaling="ntk, factor 4", length=512, value=1.0, low=0.75, high=1.0),
            measurement(task="passkey"),
        ],
        {"m": {"train_length": 256}, "other": {"train_length": 512}},
    )
    figure = draw_models(results, "lines")
    (axes,) = figure.axes
    found = bars(axes)
    assert list(found) == ["m: none", "other: ntk, factor 4"]
    np.testing.assert_allclose(found["m: none"][0], np.array([256, 512]) * 2 ** (-APART / 2))
    np.testing.assert_allclose(found["m: none"][1], [50, 25])
    np.testing.assert_allclose(found["other: ntk, factor 4"][1], [100])
    np.testing.assert_allclose(found["other: ntk, factor 4"][2], [[75, 100]])
    marks = ["trained length (256)", "trained length (512)"]
    assert sorted(legend_texts(figure)) == [*found, *marks]
    with pytest.raises(UsageError, match="no topics"):
        draw_models(results, "topics")
    drawn = {path.name for path in plot(results, tmp_path / "out")}
    assert drawn == {"lines.png", "lines-m.png", "lines-other.png", "passkey-m.png"}


def test_perplexity_by_length_and_position() -> None:
    positions = (Bucket(0, 2, 3.0), Bucket(2, 8, 1.0), Bucket(8, 16, 800.0))
    results = Results(
        [
            perplexity(low=18.0, high=25.0),
            perplexity(math.inf, length=512, low=-math.inf, high=math.inf, positions=positions),
        ],
        {"m": {"train_length": None}},
    )
    figure = draw_curves(results, "m", "perplexity")
    by_length, by_position = figure.axes
    assert render(figure).startswith(PNG)
    _, values, ends = bars(by_length)["none"]
    np.testing.assert_array_equal(values, [20, np.nan])
    np.testing.assert_allclose(ends[0], [18, 25])
    (line,) = by_position.get_lines()
    np.testing.assert_allclose(line.get_xdata(), [1, 5, 12])
    np.testing.assert_allclose(line.get_ydata(), [np.exp(3), np.exp(1), np.nan])


PARTS = (Bucket(0, 8, 3.0), Bucket(8, 16, 1.0))
WINDOWS = perplexity(scores=(3.0, 2.0, 2.5, 3.5), positions=PARTS)
"""Four windows without scaling."""
SCALED = perplexity(
    21.0,
    scaling="ntk, factor 4",
    scores=(3.1, 2.2, 2.6, 3.6),
    positions=(Bucket(0, 8, 3.5), Bucket(8, 16, 1.0)),
)


def test_perplexities_are_compared_on_the_same_windows() -> None:
    figure = draw_curves(Results([WINDOWS, SCALED], {}), "m", "perplexity")
    by_length, by_position = figure.axes
    assert by_length.get_ylabel() == by_position.get_ylabel() == "perplexity, times that of none"
    mean = np.exp(0.125)
    low, high = np.exp(stats.t.interval(0.95, 3, 0.125, stats.sem([0.1, 0.2, 0.1, 0.1])))
    found = bars(by_length)
    np.testing.assert_allclose(found["none"][1], [1.0])
    np.testing.assert_allclose(found["ntk, factor 4"][1], [mean])
    np.testing.assert_allclose(found["ntk, factor 4"][2], [[low, high]])
    figure.canvas.draw()
    assert [text.get_text() for text in by_length.get_xticklabels()] == ["256\n20.0"]
    first, second = by_position.get_lines()
    np.testing.assert_allclose(first.get_ydata(), [1, 1])
    np.testing.assert_allclose(second.get_ydata(), [np.exp(0.5), 1])


@pytest.mark.parametrize(
    "other",
    [
        replace(SCALED, length=512),
        replace(SCALED, scores=(3.1, 2.2, 2.6)),
        replace(SCALED, positions=PARTS[:1]),
        replace(SCALED, model="other"),  # no comparison: its windows have other tokens
    ],
)
def test_perplexities_of_other_windows_are_not(other: Measurement) -> None:
    axes = draw_models(Results([WINDOWS, other], {}), "perplexity").axes[0]
    assert axes.get_ylabel() == "perplexity"
    assert [list(values) for _, values, _ in bars(axes).values()] == [[20], [21]]


def test_nothing_measured_is_nothing_drawn(tmp_path: Path) -> None:
    results = Results([measurement(depths=(None, None))], {})
    assert len(draw_curves(results, "m", "lines").axes) == 1
    with pytest.raises(UsageError, match="no passkey"):
        draw_curves(results, "m", "passkey")
    with pytest.raises(UsageError, match="no measurement"):
        plot(Results([], {}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_hostile_names_are_drawn_as_plain_text(tmp_path: Path) -> None:
    for shown in map(plain, HOSTILE):
        assert shown.isascii()
        assert shown.isprintable()
        assert 0 < len(shown) <= WIDEST_LABEL
        assert not set(shown) & set("$\\^{}<>&")
    name = HOSTILE[0]
    results = Results([measurement(model=name, task=name, scaling=each) for each in HOSTILE], {})
    figure = draw_curves(results, name, name)
    assert legend_texts(figure) == [plain(each) for each in HOSTILE]
    (path,) = plot(results, tmp_path / "out")
    assert path.parent == tmp_path / "out"
    assert path.read_bytes().startswith(PNG)
    assert render(draw_slopes(replace(model(4), name=name)), dpi=40).startswith(PNG)


def test_nothing_is_cut_off_and_everything_is_seen_on_dark_pages() -> None:
    flat = tuple(2 ** (-16 * (head + 1) / 32) for head in range(32))
    scaling = Scaling("by-parts", dynamic="position", rate=1.5, train_length=65536, ramp=(8192.0, 32768.0))
    story = Positions("m" * WIDEST_LABEL, flat, [scaling, replace(scaling, rate=1e-5)], train_length=65536)
    results = Results([measurement(model="m" * WIDEST_LABEL, scaling="s" * 90)], {})
    for figure in (
        card_figure(story),
        draw_span(story),
        draw_curves(results, "m" * WIDEST_LABEL, "lines"),
    ):
        picture = Image.open(io.BytesIO(render(figure)))
        assert "transparency" not in picture.info
        dark = np.asarray(picture.convert("L")) < 250
        rows, columns = np.flatnonzero(dark.any(axis=1)), np.flatnonzero(dark.any(axis=0))
        margins = (rows[0], columns[0], picture.height - 1 - rows[-1], picture.width - 1 - columns[-1])
        assert min(margins) > 0.5 * MARGIN * DPI
        assert max(margins) < 3 * MARGIN * DPI


def test_names_that_look_alike_keep_their_files(tmp_path: Path) -> None:
    results = Results([measurement(model=name, depths=()) for name in ("x/a$", "a_")], {})
    paths = plot(results, tmp_path / "out")
    assert [path.name for path in paths] == ["lines.png", "lines-a.png", "lines-a-2.png"]
    assert sorted(paths) == sorted((tmp_path / "out").iterdir())
    assert list(curves(results).values()) == [path.read_bytes() for path in paths]


def test_the_same_numbers_give_the_same_bytes_whatever_the_users_settings() -> None:
    drawn = model(12, Scaling("ntk", 2.0))

    def files() -> list[bytes]:
        return [card_picture(drawn), render(draw_span(drawn))]

    first = files()
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "text.usetex": True}):
        before = dict(matplotlib.rcParams)
        assert files() == first
        assert dict(matplotlib.rcParams) == before
    for content in first:
        assert b"matplotlib.org" not in content


@pytest.mark.parametrize("heads", HEADS)
def test_the_cards_picture_is_small(heads: int) -> None:
    drawn = model(heads, Scaling("ntk", dynamic="length", rate=2.0, train_length=2048))
    content = card_picture(drawn)
    assert len(content) < 60_000
    picture = Image.open(io.BytesIO(content))
    assert picture.format == "PNG"
    assert 800 <= picture.width <= 1000
    left, right = card_figure(drawn).axes
    np.testing.assert_allclose(series(left)["stock"], press_slopes(heads), rtol=1e-12)
    np.testing.assert_allclose(series(right)["stock"], 5 / press_slopes(heads), rtol=1e-12)


@pytest.mark.parametrize(("family", "scale"), [("bloom", 1.0), ("falcon", 8**-0.5), ("jina_bert", 1.0)])
def test_what_is_read_of_a_model(tmp_path: Path, family: str, scale: float) -> None:
    source = {**tiny.FACTORIES, **tiny.ENCODERS}[family](tmp_path / family, num_heads=6)
    drawn = read_positions(str(source), train_length=16)
    np.testing.assert_allclose(drawn.stock, press_slopes(6))
    assert (drawn.name, drawn.rotary, drawn.train_length) == (family, False, 16)
    assert drawn.bias_scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("name", "own", "words", "drawn"),
    [
        ("bloom", None, "", OF_A_MODEL),
        ("bloom", 4, "", OF_A_MODEL),  # its own scaling
        (
            "bloom",
            None,
            "--methods none,by-parts --scales 2 --ramp 0.125 0.5 --ramp 0.25 0.5 --train-length 64",
            OF_A_MODEL,
        ),
        ("falcon", None, "--dynamic position --rates 2 --train-length 64", OF_A_MODEL),
        ("llama", None, "--scales 2", ["wavelengths.png"]),
    ],
)
def test_plot_a_model(
    run: RunCli, pristine: Pristine, tmp_path: Path, name: str, own: int | None, words: str, drawn: list[str]
) -> None:
    source, out = pristine(name), tmp_path / "pictures"
    if own:
        source = convert(source, tmp_path / "scaled", scale=own, verify=False).path
    before = fingerprint(source)
    out.mkdir()
    (out / "mine.txt").touch()
    done = run("plot", source, *words.split(), "--overwrite", "--out", out)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [str(out / each) for each in drawn]
    assert sorted(path.name for path in out.iterdir()) == sorted([*drawn, "mine.txt"])
    for path in (out / each for each in drawn):
        picture = Image.open(path)
        picture.load()
        assert picture.format == "PNG"
        assert picture.width > 500
    assert fingerprint(source) == before


def test_plot_results(run: RunCli, refused: Refused, tmp_path: Path) -> None:
    results = Results([measurement(), measurement(length=512)], {"m": {"train_length": 256}})
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results.to_json()), encoding="utf-8")
    done = run("plot", file, "--out", tmp_path / "out")
    assert (done.code, done.out, done.err) == (0, f"{tmp_path / 'out' / 'lines.png'}\n", "")
    assert (tmp_path / "out" / "lines.png").read_bytes() == render(draw_curves(results, "m", "lines"))
    assert f"give {file}" in refused("plot", tmp_path, "--out", tmp_path / "new", code=2)


def test_the_documentations_pictures_are_what_their_script_draws() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for name, figure in script["FIGURES"].items():
        shipped = script["IMAGES"] / f"{name}.png"
        assert shipped.stat().st_size <= 120_000
        files = (shipped, io.BytesIO(render(figure)))
        pictures = [np.asarray(Image.open(file).convert("RGB"), float) for file in files]
        # Other versions of matplotlib draw fonts a little differently.
        assert np.abs(pictures[0] - pictures[1]).mean() < 1
