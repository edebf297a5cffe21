"""The list of what a conversion and an export wrote, by which a push knows its files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from converter import convert, export
from converter.errors import SourceError
from converter.publish.contents import read_contents
from converter.result.manifest import MANIFEST, read
from tests.conftest import edit_json

Pristine = Callable[..., Path]


@pytest.fixture
def out(pristine: Pristine, tmp_path: Path) -> Path:
    """A converted repository."""
    source = Path(shutil.copytree(pristine("bloom", sharded=True), tmp_path / "source"))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (source / "modules.json").write_text(json.dumps(modules))
    return convert(source, tmp_path / "out", scale=2, verify=False).path


def actual(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file that is listed."""
    return {
        path.relative_to(folder).as_posix(): (
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (MANIFEST, "README.md", "onnx_validation.json")
    }


def listed(folder: Path) -> dict[str, tuple[int, str | None]]:
    return {name: (entry.size, entry.sha256) for name, entry in read(folder).items()}


def test_a_conversion_lists_what_it_wrote(out: Path) -> None:
    assert listed(out) == actual(out)
    assert "1_Pooling/config.json" in listed(out)


def test_an_export_adds_to_the_list(out: Path) -> None:
    before = listed(out)
    export(out)
    assert listed(out) == actual(out)
    assert {"model.onnx", "genai_config.json"} <= listed(out).keys() - before.keys()
    (out / "model.onnx").unlink()
    (out / "genai_config.json").unlink()
    from converter import OnnxOptions

    export(out, OnnxOptions(standalone=True, validate=False, profile="portable"))
    assert listed(out) == actual(out)
    assert {"onnx/model.onnx", "onnx/model.onnx_data"} == listed(out).keys() - before.keys()


def test_linked_weights_are_listed_without_being_read(pristine: Pristine, tmp_path: Path) -> None:
    out = convert(pristine("bloom"), tmp_path / "out", scale=2, verify=False, link="hard").path
    assert read(out)["model.safetensors"].sha256 is None
    assert {name: size for name, (size, _) in listed(out).items()} == {
        name: size for name, (size, _) in actual(out).items()
    }
    assert read_contents(out).files.keys() == {*listed(out), "README.md", MANIFEST}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of the weights": (
        lambda out: flip(out / "model-00002-of-00004.safetensors"),
        "model-00002-of-00004.safetensors is not as",
    ),
    "generation config": (
        lambda out: edit_json(out / "generation_config.json", {"temperature": 2.0}),
        "generation_config.json is not as",
    ),
    "tokenizer code": (
        lambda out: edit_json(out / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": "eve/x--t.T"}}),
        "tokenizer_config.json is not as",
    ),
    "nested": (lambda out: (out / "1_Pooling/config.json").write_text("[]"), "1_Pooling/config.json is not"),
    "gone": (lambda out: (out / "tokenizer.json").unlink(), "lacks tokenizer.json"),
    "no list": (lambda out: (out / MANIFEST).unlink(), "has no ntk_convert.json"),
    "a path": (lambda out: (out / MANIFEST).write_text('{"files": {"../x": {"size": 1}}}'), "is damaged"),
    "not a list": (lambda out: (out / MANIFEST).write_text('{"files": [1]}'), "is not in ntk_convert.json"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_not_as_it_was_written_is_refused(
    out: Path, change: tuple[Callable[[Path], object], str]
) -> None:
    change[0](out)
    with pytest.raises(SourceError) as error:
        read_contents(out)
    assert change[1] in str(error.value)
