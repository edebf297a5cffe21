"""What exports and validations do to files that are there, and what they say when something ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from converter.conversion import convert
from converter.onnx.export import export
from converter.onnx.options import OnnxOptions
from tests.conftest import Run, fingerprint
from tests.onnx_graphs import TRAIN_LENGTH, Make, edit
from tests.test_onnx_validation import MUTATIONS

CARD, REPORT = "README.md", "onnx_validation.json"

Command = Callable[..., Run]


def test_nothing_is_written_to_what_is_there(
    pristine: Callable[..., Path], run: Command, tmp_path: Path
) -> None:
    """The weights are the source's own files, and all others are somebody's as well."""
    source, folder, others = pristine("bloom"), tmp_path / "model", tmp_path / "others"
    convert(source, folder, scale=2, train_length=TRAIN_LENGTH, link="hard", verify=False)
    export(folder, OnnxOptions(standalone=True, validate=False))
    export(folder)
    for path in sorted(folder.rglob("*.*")):
        if path.is_file():
            same = others / path.relative_to(folder)
            same.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, same)
    before = fingerprint(source), fingerprint(others)
    assert REPORT in before[1]

    for words in (["--onnx-standalone"], ["--onnx-dtype", "int8"]):
        assert run("export", folder, "--no-validate", *words).code == 0
    assert run("export", folder, "--onnx-profile", "portable").code == 0
    graph = folder / "model.onnx"
    content = graph.read_bytes()
    graph.unlink()
    graph.write_bytes(content)
    edit(graph, MUTATIONS["epsilon"][2])
    assert run("validate", folder).code == 1
    assert graph.with_name("model.onnx.failed").exists()
    assert run("validate", folder).code == 0
    assert (fingerprint(source), fingerprint(others)) == before


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, signal.Signals], None]:
    """``signalled(name, number)``: the process gets the signal just before a file is put in place."""
    replace = Path.replace

    def arm(name: str, number: signal.Signals) -> None:
        def then(self: Path, target: Path) -> Path:
            if target.name == name:
                os.kill(os.getpid(), number)
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", then)

    return arm


@pytest.mark.parametrize(
    ("name", "number"),
    [(CARD, signal.SIGINT), ("genai_config.json", signal.SIGTERM), ("model.onnx", signal.SIGINT)],
)
def test_an_export_is_not_stopped_in_the_end(
    repository: Make,
    run: Command,
    signalled: Callable[[str, signal.Signals], None],
    name: str,
    number: signal.Signals,
) -> None:
    folder = repository()
    signalled(name, number)
    result = run("export", folder)
    assert (result.code, result.err) == (0, "")
    assert "## ONNX" in (folder / CARD).read_text(encoding="utf-8")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert run("validate", folder).code == 0
