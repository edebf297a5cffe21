"""The licence: Apache-2.0, in the package and in every file that goes into other people's repositories."""

from __future__ import annotations

import hashlib
from importlib.metadata import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted((ROOT / "templates").glob("*.py"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_every_template_names_its_licence_first(template: Path) -> None:
    first, second, third, *_ = template.read_text(encoding="utf-8").splitlines()
    assert first == "# SPDX-License-Identifier: Apache-2.0"
    assert second == "# Copyright 2026 the ntk-convert authors"
    assert third.startswith('"""')


def test_the_package_has_the_licence() -> None:
    words = (ROOT / "LICENSE").read_text(encoding="utf-8").split()
    # Of the published text, whatever its white space.
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
    assert digest == "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"
    assert metadata("ntk-convert")["License-Expression"] == "Apache-2.0"
