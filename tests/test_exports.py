"""The seam for exports: a second kind, known to ``tests/made_up_export.py`` alone, takes part everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import converter
from tests.conftest import Run, edit_json
from tests.hub_commands import TOKEN, Command
from tests.hub_server import Account, HubServer
from tests.test_push import relist

ID = "ada/made-up"
START = ("-c", "import tests.made_up_export; from converter.cli import main; main()")
"""The command line, with the made-up export registered."""

Pristine = Callable[..., Path]


@pytest.fixture
def made_up(command: Command) -> Command:
    # Afresh, because a fork has built the command line already, without this export.
    return lambda *words, **environment: command(*words, start=START, fresh=True, **environment)


def test_convert(pristine: Pristine, made_up: Command, work: Path) -> None:
    words = (pristine("bloom"), "--scale", "2", "--no-verify", "--out", "out", "--made-up")
    words += ("--made-up-size", "3")

    planned = made_up(*words, "--dry-run")
    assert planned.code == 0, planned.err
    assert {"made_up.bin", "made_up_report.json"} <= {line.strip() for line in planned.out.splitlines()}
    assert list(work.iterdir()) == []

    done = made_up(*words, "--json")
    assert done.code == 0, done.err
    out = work / "out"
    assert (out / "made_up.bin").read_bytes() == b"***"
    files = {"made_up.bin": 3, "made_up_report.json": 2}
    assert done.json["made_up"] == {"path": str(out), "files": files}
    assert done.json["onnx"] is None
    assert done.json["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    listed = json.loads((out / "ntk_convert.json").read_text())["files"]
    assert "made_up.bin" in listed
    assert "made_up_report.json" not in listed
    card = (out / "README.md").read_text()
    assert card.endswith("\n## Made up\n\n`made_up.bin` has 3 bytes.\n")
    assert " --made-up --made-up-size 3 --no-verify\n" in card


def test_export(pristine: Pristine, made_up: Command, work: Path) -> None:
    """A section of the card replaces its older self and no other; one export leaves another alone."""
    words = (pristine("bloom"), "--scale", "2", "--train-length", "32", "--no-verify", "--out", "out")
    assert made_up(*words, "--made-up").code == 0
    assert made_up("export", "out", "--no-validate").code == 0
    done = made_up("export", "out", "--made-up", "--made-up-size", "5", "--no-validate")
    assert (done.code, done.out) == (0, f"{work / 'out'}\nmade_up.bin of 5 bytes\n"), done.err
    card = (work / "out/README.md").read_text()
    assert [line for line in card.splitlines() if line.startswith("## ")][-2:] == ["## ONNX", "## Made up"]
    assert card.count("## Made up") == 1
    assert "has 5 bytes" in card
    assert (work / "out/model.onnx").is_file()
    assert not [path for path in (work / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("SOURCE", "--scale", "2", "--out", "new", "--made-up-size", "3"), "need --made-up"),
        (("export", "out", "--made-up-size", "3"), "need --made-up"),
        (("export", "out", "--made-up", "--last-logits"), "need --onnx"),
        (("export", "out", "--made-up", "--onnx"), "one kind of export at a time: --onnx or --made-up"),
    ],
)
def test_options_of_another_export(
    pristine: Pristine, made_up: Command, work: Path, words: tuple[str, ...], part: str
) -> None:
    done = made_up(*(pristine("bloom") if word == "SOURCE" else word for word in words))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert part in done.err
    assert list(work.iterdir()) == []


def test_what_cannot_be_exported(made_up: Command, tmp_path: Path, work: Path) -> None:
    from tests import tiny

    source = tiny.ENCODERS["jina_bert"](tmp_path / "encoder")
    done = made_up(source, "--scale", "2", "--train-length", "32", "--out", "out", "--made-up")
    assert (done.code, done.out, done.err) == (1, "", "error: only decoders are made up\n")
    assert list(work.iterdir()) == []


def test_help(made_up: Command) -> None:
    for page in (("--help",), ("convert", "--help"), ("export", "--help")):
        shown = made_up(*page).out
        assert "Make a file up." in shown
        assert "Bytes to make up." in shown
        assert "--onnx-profile" in shown


def test_a_report_of_the_source_is_not_copied(
    make_source: Callable[..., Path], made_up: Command, run: Callable[..., Run], work: Path
) -> None:
    source = make_source()
    (source / "made_up_report.json").write_text("{}")
    words = (source, "--scale", "2", "--no-verify", "--out")
    assert made_up(*words, "out").code == 0
    assert not (work / "out/made_up_report.json").exists()
    assert run(*words, work / "other").code == 0
    assert (work / "other/made_up_report.json").exists()


@pytest.mark.slow
def test_push(pristine: Pristine, made_up: Command, hub: HubServer, work: Path) -> None:
    hub.accounts[TOKEN] = Account("ada", ())
    words = (pristine("bloom"), "--scale", "2", "--no-verify", "--out", "out", "--made-up")
    assert made_up(*words).code == 0
    out = work / "out"
    (out / "stray.bin").write_bytes(b"mine")
    (out / "made_up_report.json").write_text('{"written": "again"}')
    done = made_up("push", "out", ID, "--json", HF_TOKEN=TOKEN)
    assert done.code == 0, done.err
    assert {"made_up.bin", "made_up_report.json"} <= hub.files(ID).keys()
    assert done.json["left"] == ["stray.bin"]
    assert done.json["checks"][-1] == {
        "name": "made up",
        "detail": "made_up.bin is all made up",
        "skipped": False,
    }

    asked = len(hub.requests)
    (out / "made_up.bin").write_bytes(b"!")
    done = made_up("push", "out", ID, HF_TOKEN=TOKEN)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: made_up.bin is not as the conversion or export wrote it")
    (out / "made_up_report.json").unlink()
    relist(out)
    done = made_up("push", "out", ID, "--overwrite", HF_TOKEN=TOKEN)
    assert (done.code, done.out, done.err) == (1, "", "error: made_up.bin is not made up\n")
    assert [request for request in hub.requests[asked:] if request.method not in ("GET", "HEAD")] == []


def test_a_report_cannot_be_listed(pristine: Pristine, made_up: Command, work: Path) -> None:
    words = (pristine("bloom"), "--scale", "2", "--no-verify", "--out", "out", "--made-up")
    assert made_up(*words).code == 0
    listed = json.loads((work / "out/ntk_convert.json").read_text())["files"]
    entry = {"size": 2, "sha256": None}
    edit_json(work / "out/ntk_convert.json", {"files": listed | {"made_up_report.json": entry}})
    done = made_up("push", "out", ID)
    assert done.code == 1
    assert "ntk_convert.json is damaged ('made_up_report.json')" in done.err


def test_only_the_public_api_names_an_export() -> None:
    """``convert(onnx=...)`` in the pipeline, and the command ``validate``."""
    package = Path(converter.__file__).parent
    folders = [package / name for name in ("cli", "publish", "result", "weights", "source", "verification")]
    modules = [*package.glob("*.py"), *(path for folder in folders for path in folder.glob("*.py"))]
    named = {path.relative_to(package).as_posix() for path in modules if "exports.onnx" in path.read_text()}
    assert named == {"__init__.py", "catalogue.py", "cli/graphs.py", "pipeline.py"}
