"""The operators of all graphs are those that docs/onnx.md lists for people who use other providers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from converter import convert
from converter.exports.onnx.choices import QUANTISED, Profile
from tests import tiny
from tests.onnx_graphs import PROFILES, nodes_of
from tests.patched import FITTED, SCALINGS, options_for
from tests.test_oldest_onnxruntime import KINDS, graphs

PAGE = Path(__file__).parent.parent / "docs/onnx.md"
ALL = [*SCALINGS, *FITTED]


def operators(path: Path) -> set[str]:
    """Names of a graph's operators, those of onnxruntime alone with their domain."""
    model = onnx.load(path, load_external_data=False)
    return {f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes_of(model.graph)}


def listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A converted repository of each kind, and of each scaling of a decoder and of an encoder."""
    folder = tmp_path_factory.mktemp("kinds")
    found = {name: make(folder / name) for name, make in KINDS.items()}
    factories: dict[str, Any] = {"bloom": tiny.FACTORIES, "jina_bert": tiny.ENCODERS}
    for family, made in factories.items():
        source = made[family](folder / family, 12)
        for scaling in ALL:
            name = f"{family} {scaling}"
            convert(source, folder / name, verify=False, **options_for(scaling, 12))
            found[name] = folder / name
    return found


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("encoders", [False, True], ids=["decoders", "encoders"])
def test_the_page_lists_them(
    repositories: dict[str, Path], tmp_path: Path, encoders: bool, profile: Profile
) -> None:
    found: dict[str, set[str]] = {}
    for dtype in ("fp32", "fp16", *QUANTISED):
        found[dtype] = set()
        for name, made in repositories.items():
            if (name.split()[0] in tiny.ENCODERS) == encoders:
                paths = graphs(tmp_path / name, name, made, profile, dtype)
                found[dtype] |= set().union(*(operators(path) for path in paths))
                shutil.rmtree(tmp_path / name)
    plain = found["fp32"]
    kind = "encoders" if encoders else "decoders"
    more = [
        listed(found["fp16"] - plain),
        listed(set().union(*(found[dtype] for dtype in QUANTISED)) - plain),
    ]
    row = f"| {kind}, `{profile}` | {listed(plain)} | {' | '.join(more)} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), f"the page should have the row\n{row}"
