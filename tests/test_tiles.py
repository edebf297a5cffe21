"""Attention in tiles: keys are left out only where they cannot matter, and models compute the same."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModel

from converter import convert
from templates import ntk_alibi
from templates.ntk_alibi import Tile, needed_tiles, stock_slopes
from tests import tiny
from tests.dealt import dealt
from tests.patched import Convert, load, options_for

Array = NDArray[np.float64]

KEYS, BLOCKS = 8, 2
"""The size of tiles in the tests of single rows, which are short."""


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    sizes = {"SHORTEST": 1, "TILE_KEYS": KEYS, "BLOCKS": BLOCKS, "TILE_QUERIES": KEYS * BLOCKS}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(ntk_alibi, name, value)
        yield


def probabilities(
    query: Array, key: Array, slopes: Array, positions: Array, scaling: float, causal: bool
) -> Array:
    """Of every key, float64 [B, H, L, L]."""
    query, key, slopes = (part.astype(np.float64) for part in (query, key, slopes))
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    distances = np.abs(positions[:, None, :, None] - positions[:, None, None, :])
    scores = scaling * query @ key.swapaxes(-1, -2) - slopes[..., None] * distances
    if causal:
        scores = np.where(np.tri(query.shape[2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Rows whose keys have a common part, and single tokens with large queries or keys."""
    batch, groups, key_heads = (draw(st.integers(1, most)) for most in (2, 3, 3))
    length, size = draw(st.integers(1, 150)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    heads = groups * key_heads
    query, key = (rng.standard_normal((batch, n, length, size)) for n in (heads, key_heads))
    key += draw(st.sampled_from((0.0, 30.0))) * rng.standard_normal(size)
    for values in (query, key):
        for _ in range(draw(st.integers(0, 2))):
            values[:, :, draw(st.integers(0, length - 1))] *= draw(st.sampled_from((0.0, 10.0, 100.0)))
    slopes = 2.0 ** rng.uniform(-8, 1, (1, heads, draw(st.sampled_from((1, length)))))
    # Padding on the left, or a start beyond 0.
    positions = np.maximum(np.arange(length) - draw(st.integers(0, length - 1)), 0) + draw(st.integers(0, 9))
    return {
        "query": query.astype(np.float32),
        "key": key.astype(np.float32),
        "slopes": slopes.astype(np.float32),
        "positions": positions[None],
        "scaling": size**-0.5 * draw(st.sampled_from((0.25, 1.0, 4.0))),
        "causal": draw(st.booleans()),
    }


@given(rows())
def test_what_is_left_out_is_negligible(row: dict[str, Any]) -> None:
    tensors = {name: torch.from_numpy(row[name]) for name in ("query", "key", "slopes", "positions")}
    others = {name: row[name] for name in ("scaling", "causal")}
    with torch.inference_mode(), small_tiles():
        tiles = needed_tiles(**tensors, **others)
    if tiles is None:
        return
    expected = probabilities(**row)
    _, heads, length, _ = expected.shape
    groups = heads // row["key"].shape[1]
    times = np.zeros((heads, length), int)
    for tile in tiles:
        times[tile.heads, tile.queries] += 1
        expected[:, tile.heads, tile.queries, tile.keys] = 0
        assert groups == 1 or tile.heads.start // groups == (tile.heads.stop - 1) // groups
    assert (times == 1).all()
    assert expected.sum(axis=-1).max() <= ntk_alibi.NEGLIGIBLE


@pytest.mark.parametrize("causal", [True, False])
def test_steep_heads_look_at_few_keys(causal: bool) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 16, 4096, 64)
    slopes, positions = torch.tensor(stock_slopes(16))[None, :, None], torch.arange(4096)[None]
    with torch.inference_mode():
        tiles = needed_tiles(query, key, slopes, positions, 0.125, causal)
    seen = np.zeros((16, 4096, 4096), bool)
    for tile in tiles or []:
        seen[tile.heads, tile.queries, tile.keys] = True
    everything = np.tri(4096, dtype=bool) if causal else np.ones((4096, 4096), bool)
    shares = (seen & everything).sum(axis=(1, 2)) / everything.sum()
    assert shares.mean() < 0.6
    assert shares[0] < 0.15  # the steepest
    assert shares[-1] == 1  # the flattest


ROUNDING = 5e-5
LONG = 2200
"""Tokens; longer than ``SHORTEST``."""
SCALED, SIDES = ["none", "by-parts-position", "fitted"], ["left", "right"]


@torch.no_grad()
@pytest.mark.parametrize(("family", "scaling", "side"), dealt(tiny.FACTORIES, SCALED, SIDES, each=1))
def test_decoders_compute_the_same(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, family: str, scaling: str, side: str
) -> None:
    """In training, attention is computed whole; that is tested against the references elsewhere."""
    model = load(converted(family, 12, scaling), dtype=torch.float32)
    ids = torch.from_numpy(tiny.token_ids(2, LONG))
    mask = torch.from_numpy(tiny.padding_mask([LONG, LONG - 70], side, LONG))
    tiles = used_tiles(model, monkeypatch)
    found = model(ids, attention_mask=mask).logits
    assert any(tile.keys != slice(0, LONG) for tile in tiles)
    with torch.enable_grad():
        tiles.clear()
        expected = model(ids, attention_mask=mask).logits
        assert not tiles
    error = (found - expected)[mask.bool()].abs().max() / expected.abs().max()
    # Of rounding alone: in float32, slope * position is rounded too.
    assert error < ROUNDING


@torch.no_grad()
def test_steps_follow_tiles(converted: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds every key, those that no query of the prompt looked at too."""
    model = load(converted("mpt", 12, "by-parts-position"), dtype=torch.float32)
    ids = torch.from_numpy(tiny.token_ids(1, LONG))
    tiles = used_tiles(model, monkeypatch)
    cache = model(ids[:, :-2], use_cache=True).past_key_values
    assert tiles
    found = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in (LONG - 2, LONG - 1)]
    with torch.enable_grad():
        expected = model(ids).logits.detach()
    error = (torch.cat(found, 1) - expected[:, -2:]).abs().max() / expected.abs().max()
    assert error < ROUNDING


@torch.no_grad()
def test_half_precision(converted: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    length = ntk_alibi.SHORTEST_HALF
    model = load(converted("bloom", 12, "none"), dtype=torch.bfloat16)
    ids = torch.from_numpy(tiny.token_ids(1, length))
    tiles = used_tiles(model, monkeypatch)
    model(ids[:, 1:])
    assert not tiles
    found = model(ids).logits
    assert tiles
    with torch.enable_grad():
        whole = model(ids).logits.detach()
    exact = model.float()(ids, output_attentions=False).logits
    assert (found - exact).norm() < 1.05 * (whole - exact).norm()


@torch.no_grad()
@pytest.mark.parametrize(
    ("scaling", "family"), dealt(["none", "ntk-length", "fitted"], tiny.ENCODERS, each=1)
)
def test_encoders_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: str, family: str
) -> None:
    source = tiny.ENCODERS[family](tmp_path / "source", 12)
    convert(source, tmp_path / "out", verify=False, **options_for(scaling, 12))
    model = load(tmp_path / "out", AutoModel, dtype=torch.float32)
    ids = torch.from_numpy(tiny.token_ids(3, LONG))
    # Rows without tiles too; padding on either side and on both.
    mask = torch.zeros_like(ids)
    mask[0], mask[1, 40:], mask[2, 90:1000] = 1, 1, 1
    tiles = used_tiles(model, monkeypatch)
    for rows in (mask, mask.flip(1), None):
        tiles.clear()
        found = model(ids, attention_mask=rows).last_hidden_state
        assert any(tile.keys != slice(0, LONG) for tile in tiles)
        with torch.enable_grad():
            expected = model(ids, attention_mask=rows).last_hidden_state.detach()
        # Of padded tokens too, whose outputs are as in other models.
        assert (found - expected).abs().max() < ROUNDING * expected.abs().max()


@torch.no_grad()
def test_many_threads_compute_whole_rows(converted: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(converted("bloom", 12, "none"), dtype=torch.float32)
    tiles = used_tiles(model, monkeypatch)
    monkeypatch.setattr(alibi_of(model), "MOST_THREADS", 0)
    model(torch.from_numpy(tiny.token_ids(1, LONG)))
    assert not tiles


def alibi_of(model: Any) -> Any:
    """The copy of ntk_alibi.py that a model runs."""
    return sys.modules[f"{type(model).__module__.rpartition('.')[0]}.ntk_alibi"]


def used_tiles(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The tiles that this model computes from now on."""
    package = type(model).__module__.rpartition(".")[0]
    monkeypatch.setattr(alibi_of(model), "MOST_THREADS", 999)  # whatever the machine has
    tiles: list[Tile] = []
    for name in ("ntk_attention", "ntk_symmetric"):
        module = sys.modules.get(f"{package}.{name}")
        if module is not None:
            find = module.needed_tiles

            def keep(*args: Any, find: Any = find, **kwargs: Any) -> list[Tile] | None:
                found = find(*args, **kwargs)
                tiles.extend(found or [])
                return found

            monkeypatch.setattr(module, "needed_tiles", keep)
    return tiles
