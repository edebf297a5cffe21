"""Code of somebody else in a converted repository."""

from __future__ import annotations

import importlib.util
import py_compile
from collections.abc import Callable
from pathlib import Path

from tests.conftest import edit_json

MODELING, ALIBI = "modeling_ntk_bloom.py", "ntk_alibi.py"

Plant = Callable[[Path, str], object]


def mapped(folder: Path, reference: str) -> None:
    edit_json(folder / "config.json", {"auto_map": {"AutoModelForCausalLM": reference}})


def line_more(folder: Path, code: str) -> None:
    with (folder / MODELING).open("a") as file:
        file.write(f"\n{code}\n")


def module_more(folder: Path, code: str) -> None:
    (folder / "modeling_more.py").write_text(code)
    mapped(folder, "modeling_more.Model")


def module_linked(folder: Path, code: str) -> None:
    (folder.parent / "elsewhere.py").write_text(code)
    (folder / ALIBI).unlink()
    (folder / ALIBI).symlink_to(folder.parent / "elsewhere.py")


def tokenizer(folder: Path, code: str) -> None:
    (folder / "tokenization_ntk_sentencepiece.py").write_text(code)


REFUSED: dict[str, tuple[Plant, str]] = {
    "a line more": (line_more, MODELING),
    "a module more": (module_more, "auto_map"),
    "a module that is a link": (module_linked, ALIBI),
    "a module of another repository": (lambda folder, _: mapped(folder, "eve/code--m.Model"), "auto_map"),
    "a tokenizer": (tokenizer, "tokenization_ntk_sentencepiece.py"),
    "a module less": (lambda folder, _: (folder / ALIBI).unlink(), ALIBI),
    "a kernel": (
        lambda folder, _: edit_json(folder / "config.json", {"attn_implementation": "eve/code"}),
        "attn_implementation",
    ),
}


def bytecode(folder: Path, code: str) -> None:
    """Which Python prefers to the file, and does not compare with it when it says so."""
    text = folder.parent / "text.py"
    text.write_text(code)
    place = importlib.util.cache_from_source(str(folder / MODELING))
    py_compile.compile(
        str(text), place, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )


def package(folder: Path, code: str) -> None:
    """Which Python prefers to a file of its name."""
    (folder / "ntk_alibi").mkdir()
    (folder / "ntk_alibi/__init__.py").write_text(code)


UNSEEN: dict[str, Plant] = {"bytecode": bytecode, "a package": package}
