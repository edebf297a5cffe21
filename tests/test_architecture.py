"""The package as a whole: imports point down and make no circles, and every file has its licence."""

from __future__ import annotations

import ast
import hashlib
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="import-linter needs Python 3.11, as tomllib does")

ROOT = Path(__file__).parent.parent
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
]
PLANTED = {
    # The exporter is above the config, so this points up, and the config is among what the exporter imports.
    "converter/config.py": "from converter.onnx.options import OnnxOptions\n",
    "converter/weights/worker.py": "from converter.weights.transfer import transfer\n",
}
"""File -> an import that it must not have; the second is a circle in one folder."""
# What a converted repository may need: transformers and what that needs, and sentencepiece for tokenizers.
ALLOWED = {*sys.stdlib_module_names, "numpy", "sentencepiece", "torch", "transformers"}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """``lint-imports`` on the package in ``folder``."""
    script = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache', '--no-logo'])"
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def copied(folder: Path) -> Path:
    """The package and the contracts, to be changed."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "converter", folder / "converter", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contracts_are_kept() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in result.stdout


def test_each_contract_is_broken_by_an_import_that_it_forbids(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    for file, line in PLANTED.items():
        with (folder / file).open("a", encoding="utf-8") as opened:
            opened.write(f"\n\n{line}")
    result = lint(folder)
    assert result.returncode == 1
    assert f"Contracts: 0 kept, {len(CONTRACTS)} broken." in result.stdout
    for found in (
        "converter.config -> converter.onnx",
        ".worker -> .transfer",
    ):
        assert found in result.stdout


def test_no_import_is_excepted_from_the_contracts() -> None:
    assert not any("ignore_imports" in contract for contract in CONTRACTS)


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
