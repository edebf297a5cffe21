"""Verification of encoders: correct ones pass with every scaling, and each mistake is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from converter import VerificationError, convert
from tests import tiny
from tests.dealt import dealt
from tests.patched import CHECKED, FITTED, SCALINGS, Mistaken, options_for
from tests.test_encoders import LAYERS
from tests.test_verification import run


def converted(folder: Path, family: str, scaling: str, **changes: Any) -> Path:
    convert(
        tiny.ENCODERS[family](folder / "source", 12, **changes),
        folder / "out",
        verify=False,
        **options_for(scaling, 12),
    )
    return folder / "out"


@pytest.mark.parametrize(
    ("layer", "scaling"), [*dealt(LAYERS, SCALINGS, each=1), *dealt(LAYERS, FITTED, each=1)]
)
def test_right_repositories_pass(tmp_path: Path, layer: str, scaling: str) -> None:
    family, changes = LAYERS[layer]
    checks = run(converted(tmp_path, family, scaling, **changes), tmp_path / "source")
    assert list(checks) == CHECKED
    assert [name for name, check in checks.items() if check.skipped] == ["stock model"]


SLOPES, PATHS, TILED = "runs with slope", "fused attention differs", "tiled attention differs"
WRONG_CODE = {
    # file, the correct code, the mistake that replaces it, the scaling, the message
    "one-sided": (
        "ntk_symmetric.py",
        "(slots[:, None] - keys[None, :]).abs()",
        "(slots[:, None] - keys[None, :])",
        "ntk",
        SLOPES,
    ),
    "rightwards-steeper": (
        "ntk_symmetric.py",
        "(slots[:, None] - keys[None, :]).abs()",
        "torch.where(keys > slots[:, None], 2, 1) * (slots[:, None] - keys[None, :]).abs()",
        "ntk",
        SLOPES,
    ),
    "padding-counts": ("ntk_symmetric.py", "(real.cumsum(-1) - 1)", "(0 * real + 200)", "ntk-length", SLOPES),
    "not-scaled": (
        "ntk_alibi.py",
        "[m * factor**-t for m, t in zip(slopes, row, strict=True)]",
        "list(slopes)",
        "ntk",
        SLOPES,
    ),
    "other-layer's-slopes": (
        "ntk_encoder.py",
        "plans[index if len(plans) > 1 else 0]",
        "plans[0]",
        "fitted",
        SLOPES,
    ),
    "temperatures-dropped": (
        "ntk_symmetric.py",
        "query = multiplied(query, plan.query_factors)",
        "pass",
        "fitted",
        "runs with queries",
    ),
    "other-layer's-temperatures": (
        "ntk_symmetric.py",
        "zip(slopes, each, strict=True)",
        "zip(slopes, reversed(each), strict=True)",
        "fitted",
        "runs with queries",
    ),
    "toeplitz-shifted": ("ntk_tiles.py", "(start - queries + 1)", "(start - queries)", "ntk", PATHS),
    "row-without-its-last-token": ("ntk_symmetric.py", "start + count)", "start + count - 1)", "ntk", PATHS),
    "row-without-its-padding": ("ntk_tiles.py", "scale, span.start)", "scale, 0)", "ntk", PATHS),
    "tile-shifted": ("ntk_tiles.py", "keys.start - queries.start", "keys.start", "ntk", TILED),
    "tile-of-other-heads": (
        "ntk_tiles.py",
        "key[:, heads, keys]",
        "key.flip(1)[:, heads, keys]",
        "ntk",
        TILED,
    ),
    "far-keys": ("ntk_tiles.py", "] * distances", "] * 100 * distances", "ntk", TILED),
    "only-earlier-keys": (
        "ntk_tiles.py",
        "lasts = torch.maximum(lasts.clamp(max=length), stops)",
        "lasts = stops.expand_as(firsts)",
        "ntk",
        TILED,
    ),
    "toeplitz-not-reversed": ("ntk_tiles.py", "reverse = query.flip(2)", "reverse = query", "ntk", PATHS),
    "padding-seen": (
        "ntk_symmetric.py",
        "(~real)[:, None, :, None]",
        "(real & False)[:, None, :, None]",
        "ntk",
        "training attention differs",
    ),
    "later-blocks-at-the-start": (
        "ntk_symmetric.py",
        "[attend(q, key, value, m, at) for q, m, at in blocks]",
        "[attend(q, key, value, m, slots[0][: len(at)]) for q, m, at in blocks]",
        "ntk-position",
        PATHS,
    ),
    "first-block-s-slopes": (
        "ntk_symmetric.py",
        "[attend(q, key, value, m, at) for q, m, at in blocks]",
        "[attend(q, key, value, own[0][..., : len(at)], at) for q, m, at in blocks]",
        "ntk-position",
        PATHS,
    ),
}


@pytest.mark.parametrize("mistake", WRONG_CODE)
def test_wrong_code_is_caught(mistaken: Mistaken, tmp_path: Path, mistake: str) -> None:
    *where, scaling, message = WRONG_CODE[mistake]
    mistaken(*where)
    folder = converted(tmp_path, "mosaic_bert", scaling)
    with pytest.raises(VerificationError, match=message):
        run(folder, tmp_path / "source")
