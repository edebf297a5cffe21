"""What belongs to a converted repository: the manifest, and every way in which a folder is not right."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter import OnnxOptions, convert, export
from converter.errors import ConverterError, SourceError, VerificationError
from converter.publish.contents import read_contents, verify
from converter.result.manifest import MANIFEST, read_manifest, write
from tests import tiny
from tests.changes import Change, config
from tests.conftest import Pristine, Refused, edit_json
from tests.dealt import quick
from tests.messages import Words, raises, says
from tests.tiny import rotary as tiny_rotary

SHARD = "model-00002-of-00004.safetensors"
CODE = "modeling_ntk_bloom.py"


@pytest.fixture(scope="module")
def converted(pristine: Pristine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository in four shards, with a nested file; do not change it."""
    folder = tmp_path_factory.mktemp("manifest")
    source = Path(shutil.copytree(pristine("bloom", sharded=True), folder / "source"))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (source / "modules.json").write_text(json.dumps(modules))
    return convert(source, folder / "out", scale=2, verify=False).path


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(converted, tmp_path / "out"))


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
    return {name: (entry.size, entry.sha256) for name, entry in read_manifest(folder).items()}


def checked(folder: Path) -> list[Any]:
    """The checks of a folder, as a push runs them before it sends anything."""
    return verify(read_contents(folder))


def test_a_conversion_lists_what_it_wrote_and_an_export_adds_to_it(out: Path) -> None:
    before = listed(out)
    assert before == actual(out)
    assert "1_Pooling/config.json" in before
    export(out)
    assert listed(out) == actual(out)
    assert {"model.onnx", "genai_config.json"} <= listed(out).keys() - before.keys()
    (out / "model.onnx").unlink()
    (out / "genai_config.json").unlink()
    export(out, OnnxOptions(standalone=True, validate=False, profile="portable"))
    assert listed(out) == actual(out)
    assert {"onnx/model.onnx", "onnx/model.onnx_data"} == listed(out).keys() - before.keys()


def test_linked_weights_are_listed_without_being_read(pristine: Pristine, tmp_path: Path) -> None:
    out = convert(pristine("bloom"), tmp_path / "out", scale=2, verify=False, link="hard").path
    assert read_manifest(out)["model.safetensors"].sha256 is None
    assert {name: size for name, (size, _) in listed(out).items()} == {
        name: size for name, (size, _) in actual(out).items()
    }
    assert read_contents(out).files.keys() == {*listed(out), "README.md", MANIFEST}


# What is not right


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def relisted(**changes: Any) -> Callable[[Path], None]:
    """With a manifest of what is there then, as an attacker would make one."""

    def change(folder: Path) -> None:
        edit_json(folder / "config.json", changes)
        write(folder, actual(folder), {})

    return change


def infinite(folder: Path) -> None:
    """One weight of a token that verification does not run, in a linked file: nothing else has read it."""
    place = "transformer.word_embeddings.weight"
    [path] = [path for path in folder.glob("*.safetensors") if place in load_file(path)]
    tensors = load_file(path)
    tensors[place][1, 0] = -torch.inf
    save_file(tensors, path, {"format": "pt"})
    files = json.loads((folder / MANIFEST).read_text())["files"]
    files[path.name]["sha256"] = None
    edit_json(folder / MANIFEST, {"files": files})


def edit_header(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(path.read_bytes().replace(b'"shape":[', b'"shape":[1,', 1))


def link_out(path: Path) -> None:
    target = path.parent.parent / "outside"
    target.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(target)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


TAMPERED: dict[str, tuple[Change, Words]] = {
    "short weights": (lambda out: cut(out / SHARD), (SHARD, "truncated")),
    "missing weights": (lambda out: (out / SHARD).unlink(), (f"'{SHARD}'", "missing")),
    "a byte of the weights": (lambda out: flip(out / SHARD), (SHARD, "not as")),
    "header": (edit_header, SHARD),
    "linked weights": (lambda out: link_out(out / SHARD), (SHARD, "link")),
    "infinite weights": (infinite, "word_embeddings.weight"),
    "config": (config(n_layer=3), ("config.json", "not as")),
    "layers": (relisted(n_layer=3), "3 layers"),
    "scaling": (relisted(alibi_scaling={"type": "magic"}), "alibi_scaling"),
    "provenance": (config(ntk_convert=None), "convert it first"),
    "no config": (lambda out: (out / "config.json").unlink(), "config.json"),
    "no folder": (lambda out: shutil.rmtree(out), "ntk-convert wrote"),
    "nested": (lambda out: (out / "1_Pooling/config.json").write_text("[]"), "1_Pooling/config.json"),
    "gone": (lambda out: (out / "tokenizer.json").unlink(), "lacks tokenizer.json"),
    "link": (lambda out: link_out(out / "tokenizer.json"), ("tokenizer.json", "link")),
    "no list": (
        lambda out: (out / MANIFEST).unlink(),
        ("ntk_convert.json", "convert it"),
    ),
    "a path": (
        lambda out: (out / MANIFEST).write_text('{"files": {"../x": {"size": 1}}}'),
        (MANIFEST, "damaged"),
    ),
    "not a list": (lambda out: (out / MANIFEST).write_text('{"files": [1]}'), "ntk_convert.json"),
}
"""Name -> what somebody does to a repository, and words of the error; tests/test_push.py pushes some.

test_instructions_to_libraries.py has what is done to its code.
"""


@pytest.mark.parametrize("kind", TAMPERED)
def test_what_is_not_right_is_refused(out: Path, kind: str) -> None:
    change, words = TAMPERED[kind]
    change(out)
    with raises(ConverterError, words):
        checked(out)


@pytest.mark.parametrize("family", quick([*tiny.FACTORIES, *tiny.ENCODERS], "bloom", "refact", "jina_bert"))
def test_every_family_is_verified_from_its_result_alone(tmp_path: Path, family: str) -> None:
    """``verify`` is given the config of the source by a conversion, and of the result here."""
    source, out = tmp_path / "source", tmp_path / "out"
    {**tiny.FACTORIES, **tiny.ENCODERS}[family](source)
    made = convert(source, out, scale=2, train_length=64)
    assert [(check.name, check.skipped) for check in checked(out)] == [
        ("config", False),
        *((check.name, check.skipped) for check in made.checks),
    ]
    if tiny.FAMILY[family].stored_slopes:  # whose slopes are stored, and in config.json for the code to read
        slopes = json.loads((out / "config.json").read_text())["alibi_slopes"]
        relisted(alibi_slopes=[slope * 1.5 for slope in slopes])(out)
        with pytest.raises(VerificationError, match="alibi_slopes"):
            checked(out)


@pytest.mark.parametrize("how", [{"scale": 2}, {"dynamic": "length", "rate": 2}])
def test_rotary_too(tmp_path: Path, how: dict[str, Any]) -> None:
    source = tiny_rotary.rotary(tmp_path / "source", "llama")
    out = convert(source, tmp_path / "out", verify=False, **how).path
    assert [check.name for check in checked(out)] == ["config", "tensors", "frequencies"]
    assert not [name for name in read_contents(out).files if name.endswith(".py")]
    relisted(**({"rope_theta": 123.0} if "scale" in how else {"rope_scaling": None}))(out)
    with raises(SourceError, "record of the conversion"):
        checked(out)


# A damaged entry in config.json is one clear line in every command that reads it

COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "DIR"),
    "export": ("export", "DIR"),
    "validate": ("validate", "DIR"),
    "push": ("push", "DIR", "ada/bloom-ntk"),
    "eval": ("eval", "DIR", "--tasks", "passkey", "--lengths", "64"),
    "plot": ("plot", "DIR", "--out", "pictures"),
    "convert": ("DIR", "--scale", "2", "--out", "again"),
}
ENTRIES: dict[str, tuple[Any, str]] = {
    "a word": ({"train_length": "abc"}, "ntk_convert has train_length 'abc'"),
    "negative": ({"train_length": -5}, "ntk_convert has train_length -5"),
    "source": ({"source": 3}, "ntk_convert has source 3"),
    "a list": ([32], "ntk_convert is [32]"),
}


@pytest.fixture(scope="module")
def exported(pristine: Pristine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted repository with a graph; do not change it."""
    place = tmp_path_factory.mktemp("provenance") / "out"
    convert(pristine("bloom"), place, scale=2, train_length=32, verify=False)
    return export(place, OnnxOptions(validate=False)).path


@pytest.mark.parametrize(
    ("command", "kind"),
    [*((command, "a word") for command in COMMANDS), *(("plot", kind) for kind in ENTRIES)],
)
def test_a_damaged_entry(
    exported: Path, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
) -> None:
    entry, part = ENTRIES[kind]
    folder = Path(shutil.copytree(exported, tmp_path / "out"))
    if isinstance(entry, dict):
        entry = json.loads((folder / "config.json").read_text())["ntk_convert"] | entry
    edit_json(folder / "config.json", {"ntk_convert": entry})
    monkeypatch.chdir(tmp_path)
    line = refused(*(folder if word == "DIR" else word for word in COMMANDS[command]))
    says(line, "config.json", part, "convert the original checkpoint again")
