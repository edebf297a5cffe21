"""The package as a whole: what stands apart imports nothing of the rest, and every file has its licence.

``make lint`` checks the imports between the folders of converter/.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What a converted repository may need: transformers and what that needs, and sentencepiece for tokenizers.
ALLOWED = {*sys.stdlib_module_names, "numpy", "sentencepiece", "torch", "transformers"}


def imported_by(file: Path) -> set[str]:
    """The packages that a file imports, those beside it as ``.``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize("template", sorted((ROOT / "templates").glob("*.py")), ids=lambda file: file.stem)
def test_a_converted_repository_needs_nothing_of_this_project_and_names_its_licence(template: Path) -> None:
    assert imported_by(template) <= ALLOWED | {"."}
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


def test_the_converter_copies_the_templates_and_imports_none() -> None:
    for module in (ROOT / "converter").rglob("*.py"):
        assert not {"templates", "tests", "."} & imported_by(module), module


def test_the_references_are_independent() -> None:
    """They state the network once more; only the table of them knows the families' names."""
    for module in (ROOT / "tests/reference").glob("*.py"):
        if module.stem != "__init__":
            assert not {"converter", "templates", "torch", "transformers"} & imported_by(module), module
