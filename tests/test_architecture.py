"""The package as a whole: what stands apart imports nothing of the rest, and every file has its licence.

``make lint`` checks the imports between the folders of converter/.
"""

from __future__ import annotations

import ast
import hashlib
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

from converter.families import FAMILIES, Family

ROOT = Path(__file__).parent.parent
TOKENIZER = "tokenization_ntk_sentencepiece.py"
# What the code of a converted repository may import: transformers and what that needs, and modules of the
# standard library that neither open nor start anything.
ALLOWED = {
    *("collections", "contextlib", "copy", "functools", "inspect", "itertools", "math", "numpy"),
    *("os.PathLike", "re", "sys", "torch", "transformers", "typing"),
}
# Its tokenizer reads its vocabulary, and copies it.
ALLOWED_TO_TOKENIZER = {"pathlib", "sentencepiece", "shutil"}
# Functions that open a file or a connection, start a process, or run a text or bytes as code: of Python
# itself, and methods of whatever is imported.
BUILT_IN = {"__import__", "compile", "eval", "exec", "open"}
METHODS = {
    *("SentencePieceProcessor", "copyfile", "cpp_extension", "from_pretrained", "fromfile", "hub"),
    *("import_module", "load", "loadtxt", "memmap", "open", "read_bytes", "read_text", "save", "savetxt"),
    *("system", "tofile", "unlink", "write_bytes", "write_text"),
}
# Where such functions stand. The modeling files say so.
EXCEPTIONS = {
    "ntk_heads.py": {"from_pretrained"},  # extends that of transformers
    "ntk_encoder.py": {"from_pretrained"},  # the tokenizer, for ``encode``
    TOKENIZER: {"SentencePieceProcessor", "copyfile", "write_bytes"},
}


def imported_names(code: str) -> set[str]:
    """The packages that code imports; of the module ``os``, what it imports from there."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found |= {f"os.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


def opening_functions(code: str) -> set[str]:
    """The functions among ``BUILT_IN`` and ``METHODS`` that code names."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names & BUILT_IN | attributes & METHODS


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
    code = template.read_text(encoding="utf-8")
    first, second, third, *_ = code.splitlines()
    assert first == "# SPDX-License-Identifier: Apache-2.0"
    assert second == "# Copyright 2026 the ntk-convert authors"
    assert third.startswith('"""')
    if template.name == TOKENIZER:
        assert imported_names(code) <= ALLOWED | ALLOWED_TO_TOKENIZER
    else:
        assert imported_names(code) <= ALLOWED
    assert opening_functions(code) == EXCEPTIONS.get(template.name, set())


@pytest.mark.parametrize(
    "code",
    [
        "import socket",
        "import urllib.request",
        "import pickle",
        "from os import system",
        "open('a')",
        "eval('1')",
        "torch.load('a')",
        "torch.hub.list('a')",
        "np.fromfile('a')",
    ],
)
def test_code_that_opens_or_starts_something_is_found(code: str) -> None:
    assert opening_functions(code) or not imported_names(code) <= ALLOWED


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_modeling_file_lists_the_files_of_code(family: Family) -> None:
    code = (ROOT / "templates" / f"modeling_ntk_{family.name}.py").read_text(encoding="utf-8")
    table = str(ast.get_docstring(ast.parse(code))).partition("\n\nntk-convert wrote")[0]
    assert {*re.findall(r"\w+\.py\b", table)} - {TOKENIZER} == {*family.templates}


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
