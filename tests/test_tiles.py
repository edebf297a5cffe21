"""Attention in tiles: keys are left out only where they cannot matter, and encoders compute the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModel

from templates import ntk_tiles
from templates.ntk_alibi import stock_slopes
from templates.ntk_tiles import Tile, needed_tiles
from tests import tiny
from tests.dealt import dealt
from tests.patched import load, scaled

Array = NDArray[np.float64]

# The tests of single rows have short ones.
SMALL = {"SHORTEST": 1, "TILE_KEYS": 8, "BLOCKS": 2, "TILE_QUERIES": 16}


def probabilities(query: Array, key: Array, slopes: Array, scale: float) -> Array:
    """Of every key, float64 [B, H, L, L]."""
    query, key, slopes = (part.astype(np.float64) for part in (query, key, slopes))
    places = np.arange(query.shape[2])
    scores = scale * query @ key.swapaxes(-1, -2) - slopes[..., None] * np.abs(places[:, None] - places)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Rows whose keys have a common part, and single tokens with large queries or keys."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    length, size = draw(st.integers(1, 150)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    query, key = rng.standard_normal((2, batch, heads, length, size))
    key += draw(st.sampled_from((0.0, 30.0))) * rng.standard_normal(size)
    for values in (query, key):
        for _ in range(draw(st.integers(0, 2))):
            values[:, :, draw(st.integers(0, length - 1))] *= draw(st.sampled_from((0.0, 10.0, 100.0)))
    return {
        "query": query.astype(np.float32),
        "key": key.astype(np.float32),
        "slopes": (2.0 ** rng.uniform(-8, 1, (1, heads, 1))).astype(np.float32),
        "scale": size**-0.5 * draw(st.sampled_from((0.25, 1.0, 4.0))),
    }


@given(rows())
def test_what_is_left_out_is_negligible(row: dict[str, Any]) -> None:
    tensors = {name: torch.from_numpy(row[name]) for name in ("query", "key", "slopes")}
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(ntk_tiles, name, value)
        tiles = needed_tiles(**tensors, scale=row["scale"])
    if tiles is None:
        return
    expected = probabilities(**row)
    times = np.zeros(expected.shape[1:3], int)
    for tile in tiles:
        times[tile.heads, tile.queries] += 1
        expected[:, tile.heads, tile.queries, tile.keys] = 0
    assert (times == 1).all()
    assert expected.sum(axis=-1).max() <= ntk_tiles.NEGLIGIBLE


def test_steep_heads_look_at_few_keys() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 16, 4096, 64)
    with torch.inference_mode():
        tiles = needed_tiles(query, key, torch.tensor(stock_slopes(16))[None, :, None], 0.125)
    shares = np.zeros(16)
    for heads, queries, keys in tiles or []:
        shares[heads] += (queries.stop - queries.start) * (keys.stop - keys.start) / 4096**2
    assert shares.mean() < 0.6
    assert shares[0] < 0.15  # the steepest
    assert shares[-1] == 1  # the flattest


SHORTEST, LONG = 1024, 1100
"""Tokens from which on the tests compute in tiles, and of their rows."""
ENCODERS = dealt(["none", "ntk-length", "fitted"], tiny.ENCODERS)


@torch.no_grad()
@pytest.mark.parametrize(("scaling", "family"), ENCODERS)
def test_encoders_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: str, family: str
) -> None:
    """In training, attention is computed whole; that is tested against the references elsewhere."""
    model, tiles = watched(tmp_path, monkeypatch, scaling, family)
    ids = torch.from_numpy(tiny.token_ids(3, LONG))
    # Rows without tiles too. There are none where padding is not at the ends of rows.
    mask = torch.zeros_like(ids)
    mask[0], mask[1, :-40], mask[2, :510] = 1, 1, 1
    for rows in (mask, None):
        tiles.clear()
        found = model(ids, attention_mask=rows).last_hidden_state
        assert any(tile.keys != slice(0, LONG) for tile in tiles)
        with torch.enable_grad():
            expected = model(ids, attention_mask=rows).last_hidden_state.detach()
        real = (torch.ones_like(ids) if rows is None else rows).bool()
        assert (found - expected)[real].abs().max() < 5e-5 * expected[real].abs().max()


@torch.no_grad()
def test_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tiles = watched(tmp_path, monkeypatch, "none", "mosaic_bert", torch.bfloat16)
    ids = torch.from_numpy(tiny.token_ids(1, SHORTEST))
    model(ids[:, 1:])
    assert not tiles
    found = model(ids).last_hidden_state
    assert tiles
    with torch.enable_grad():
        whole = model(ids).last_hidden_state.detach()
    exact = model.float()(ids).last_hidden_state
    assert (found - exact).norm() < 1.05 * (whole - exact).norm()


@torch.no_grad()
def test_many_threads_compute_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tiles = watched(tmp_path, monkeypatch, "none", "mosaic_bert")
    monkeypatch.setattr(tiles_of(model), "MOST_THREADS", 0)
    model(torch.from_numpy(tiny.token_ids(1, LONG)))
    assert not tiles


def tiles_of(model: Any) -> Any:
    """The copy of ntk_tiles.py that a model runs."""
    return sys.modules[f"{type(model).__module__.rpartition('.')[0]}.ntk_tiles"]


def watched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    scaling: str,
    family: str,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, list[Tile]]:
    """A converted encoder, and the tiles that it computes from now on, whatever threads the machine has."""
    source = tiny.ENCODERS[family](folder / "source", 12)
    scaled(source, folder / "out", scaling, 12)
    model = load(folder / "out", AutoModel, dtype=dtype)
    module, tiles = tiles_of(model), list[Tile]()
    find = module.needed_tiles

    def keep(*args: Any) -> list[Tile] | None:
        found: list[Tile] | None = find(*args)
        tiles.extend(found or [])
        return found

    for name, value in {"MOST_THREADS": 999, "SHORTEST": SHORTEST, "SHORTEST_HALF": SHORTEST}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "needed_tiles", keep)
    return model, tiles
