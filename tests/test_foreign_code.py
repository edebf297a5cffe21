"""A converted repository of somebody else: whatever code it holds, no command runs it."""

from __future__ import annotations

import importlib.util
import py_compile
from collections.abc import Callable
from pathlib import Path

import pytest

from converter.onnx.export import export
from converter.onnx.options import OnnxOptions
from tests.conftest import Refused, RunCli, edit_json
from tests.onnx_graphs import Make

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


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Exists once planted code was run."""
    return tmp_path / "ran"


@pytest.fixture
def folder(repository: Make) -> Path:
    """A converted repository with a graph."""
    made = repository()
    export(made, OnnxOptions(validate=False))
    return made


@pytest.mark.parametrize("kind", REFUSED)
def test_other_code_is_refused_and_not_run(
    folder: Path, run: RunCli, refused: Refused, trace: Path, tmp_path: Path, kind: str
) -> None:
    plant, part = REFUSED[kind]
    plant(folder, f"open({str(trace)!r}, 'w')")
    for words in (("export", folder), ("push", folder, "ada/bloom-ntk")):
        assert part in refused(*words)
    checked = run("validate", folder)
    assert (checked.code, part in checked.out) == (1, True)
    assert run("inspect", folder).code == 0
    (tmp_path / "text").write_text("w5 w6 " * 100)
    measured = ("eval", folder, "--text", tmp_path / "text", "--lengths", 32)
    for words in (measured, (folder, "--out", tmp_path / "new")):
        done = run(*words)  # with this version's code
        assert done.code == 0 or "is a link that leads out" in done.err
    assert not trace.exists()


def test_an_adapter_has_to_be_merged_for_every_command(
    folder: Path, refused: Refused, tmp_path: Path
) -> None:
    """Some of them would apply it, under the name of the model without it."""
    (folder / "adapter_config.json").write_text("{}")
    (tmp_path / "text").write_text("w5 w6")
    text = ("--text", tmp_path / "text")
    for words in (
        *(("export", folder), ("validate", folder), ("push", folder, "ada/x")),
        (folder, "--out", tmp_path / "new"),
        *(("eval", folder, "--lengths", 64, *text), ("tune", folder, "--target-length", 128, *text)),
        *(("inspect", folder), ("plot", folder, "--out", tmp_path / "x.png")),
    ):
        line = refused(*words)
        assert " holds an adapter (adapter_config.json); merge it into its model and save that: " in line


@pytest.mark.parametrize("kind", UNSEEN)
def test_code_that_takes_the_place_of_a_file_is_not_run(
    folder: Path, run: RunCli, trace: Path, kind: str
) -> None:
    UNSEEN[kind](folder, f"open({str(trace)!r}, 'w')")
    for command in ("export", "validate", "inspect"):
        result = run(command, folder)
        assert result.code == 0, result.err
    assert not trace.exists()
