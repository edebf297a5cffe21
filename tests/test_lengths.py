"""The limits on input in sentence_bert_config.json and tokenizer_config.json follow a static scaling."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converter import convert
from tests import tiny
from tests.conftest import Run, edit_json, fingerprint
from tests.tiny.rotary import rotary

SENTENCE, TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"
VERY_LARGE = int(1e30)
"""What transformers writes for a tokenizer without a limit."""


def source(folder: Path, name: str, sentence: object, limit: object) -> Path:
    """A tiny checkpoint with these limits; None leaves a key out."""
    (tiny.FACTORIES | tiny.ENCODERS)[name](folder, 4)
    content = {"do_lower_case": False, "max_seq_length": sentence, "name": "é"}
    if sentence is None:
        del content["max_seq_length"]
    (folder / SENTENCE).write_text(json.dumps(content), encoding="utf-8")
    if limit is not None:
        edit_json(folder / TOKENIZER, {"model_max_length": limit, "truncation_side": "right"})
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def converted(folder: Path, tmp_path: Path, **options: Any) -> tuple[list[str], dict[str, Any], set[str]]:
    """The notes, both files of the result, and which of them differ from the source's byte by byte."""
    out, before = tmp_path / "out", fingerprint(folder)
    options = {"train_length": 512, "scale": 4.0} | options
    result = convert(folder, out, verify=False, **options)
    assert fingerprint(folder) == before
    files = {name: read(out, name) for name in (SENTENCE, TOKENIZER)}
    differ = {name for name in files if (out / name).read_bytes() != (folder / name).read_bytes()}
    listed = read(out, "ntk_convert.json")["files"]
    for name in files:
        assert listed[name]["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
    dry = convert(folder, tmp_path / "dry", verify=False, dry_run=True, **options)
    assert dry.notes == result.notes
    assert dry.files.keys() == result.files.keys()
    card = (out / "README.md").read_text(encoding="utf-8")
    for note in result.notes:
        assert f"{note[1:]}." in card
    return list(result.notes), files, differ


def test_an_encoders_limits_are_raised(tmp_path: Path) -> None:
    folder = source(tmp_path / "source", "jina_bert", 512, 1000)
    notes, files, _ = converted(folder, tmp_path)
    assert notes == [
        "the input limit was raised to the 2048 tokens that the scaling reaches: max_seq_length in "
        "sentence_bert_config.json from 512 and model_max_length in tokenizer_config.json from 1000"
    ]
    for name, key in ((SENTENCE, "max_seq_length"), (TOKENIZER, "model_max_length")):
        assert list(files[name].items()) == list({**read(folder, name), key: 2048}.items())
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert text == json.dumps(files[name], indent=2) + "\n"


def test_the_limits_reach_as_far_as_the_config(tmp_path: Path) -> None:
    """Without a trained length, the config's own limit takes its place in both."""
    folder = source(tmp_path / "source", "jina_bert", 8192, 8192)
    _, files, _ = converted(folder, tmp_path, train_length=None, scale=2.0)
    assert read(tmp_path / "out", "config.json")["max_position_embeddings"] == 16384
    assert (files[SENTENCE]["max_seq_length"], files[TOKENIZER]["model_max_length"]) == (16384, 16384)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_decoder_has_only_the_tokenizers_limit_raised(tmp_path: Path, name: str) -> None:
    """BLOOM's own config has no limit; MPT's has."""
    notes, files, differ = converted(source(tmp_path / "source", name, 512, 1000), tmp_path)
    assert notes == [
        "the input limit was raised to the 2048 tokens that the scaling reaches: model_max_length in "
        "tokenizer_config.json from 1000"
    ]
    assert differ == {TOKENIZER}
    assert files[TOKENIZER]["model_max_length"] == 2048


@pytest.mark.parametrize(
    ("sentence", "limit"),
    [
        (2048, 4096),
        (None, None),
        ("512", VERY_LARGE),
        (512.0, "2147483648"),
        (True, False),
        (0, -1),
        ([512], {"tokens": 512}),
    ],
    ids=["reached", "absent", "no-limit", "no-integer", "boolean", "not-positive", "list"],
)
def test_other_limits_are_left_as_they_are(tmp_path: Path, sentence: object, limit: object) -> None:
    notes, _, differ = converted(source(tmp_path / "source", "jina_bert", sentence, limit), tmp_path)
    assert (notes, differ) == ([], set())


@pytest.mark.parametrize(
    "options", [{"method": "none", "scale": None}, {"scale": None}], ids=["none", "dynamic"]
)
def test_only_a_static_scaling_has_a_reach(tmp_path: Path, options: dict[str, Any]) -> None:
    notes, _, differ = converted(source(tmp_path / "source", "jina_bert", 100, 100), tmp_path, **options)
    assert (notes, differ) == ([], set())


def test_an_unknown_trained_length_raises_nothing(tmp_path: Path) -> None:
    folder = source(tmp_path / "source", "falcon", 100, 100)
    notes, _, differ = converted(folder, tmp_path, train_length=None)
    assert (notes, differ) == ([], set())


def test_a_rotary_models_tokenizer_is_copied(tmp_path: Path) -> None:
    """Of those, only config.json changes."""
    folder = tmp_path / "source"
    rotary(folder, "llama")
    edit_json(folder / TOKENIZER, {"model_max_length": 100})
    convert(folder, tmp_path / "out", verify=False, train_length=512, scale=4.0)
    assert (tmp_path / "out" / TOKENIZER).read_bytes() == (folder / TOKENIZER).read_bytes()


@pytest.mark.parametrize("content", ["[512]", "{", '{"max_seq_length": 512'])
def test_a_file_that_cannot_be_read_is_copied(tmp_path: Path, content: str) -> None:
    folder = source(tmp_path / "source", "jina_bert", 512, 4096)
    (folder / SENTENCE).write_text(content, encoding="utf-8")
    result = convert(folder, tmp_path / "out", verify=False, train_length=512, scale=4.0)
    assert result.notes == []
    assert (tmp_path / "out" / SENTENCE).read_text(encoding="utf-8") == content


def test_the_plan_of_a_dry_run_shows_it(run: Callable[..., Run], tmp_path: Path) -> None:
    folder = source(tmp_path / "source", "jina_bert", 512, 1000)
    shown = run(folder, "--train-length", "512", "--scale", "4", "--dry-run", "--out", tmp_path / "out")
    assert shown.code == 0
    assert "note: the input limit was raised to the 2048 tokens that the scaling reaches: " in shown.out
