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


RAISED: dict[str, tuple[str, tuple[object, object], dict[str, Any], tuple[int | None, int | None]]] = {
    "encoder": ("jina_bert", (512, 1000), {}, (2048, 2048)),
    # Without a trained length, the config's own limit takes its place in both.
    "by the config": ("jina_bert", (8192, 8192), {"train_length": None, "scale": 2.0}, (16384, 16384)),
    # Of a decoder, only the tokenizer's. BLOOM's own config has no limit; MPT's has.
    "bloom": ("bloom", (512, 1000), {}, (None, 2048)),
    "mpt": ("mpt", (512, 1000), {}, (None, 2048)),
    # Other values are left as they are.
    "reached": ("jina_bert", (2048, 4096), {}, (None, None)),
    "absent": ("jina_bert", (None, None), {}, (None, None)),
    "no limit": ("jina_bert", ("512", VERY_LARGE), {}, (None, None)),
    "no integer": ("jina_bert", (512.0, "2147483648"), {}, (None, None)),
    "boolean": ("jina_bert", (True, False), {}, (None, None)),
    "not positive": ("jina_bert", (0, -1), {}, (None, None)),
    "list": ("jina_bert", ([512], {"tokens": 512}), {}, (None, None)),
    # Only a static scaling has a reach, and a decoder's needs the trained length.
    "unscaled": ("jina_bert", (100, 100), {"method": "none", "scale": None}, (None, None)),
    "dynamic": ("jina_bert", (100, 100), {"scale": None}, (None, None)),
    "not known": ("falcon", (100, 100), {"train_length": None}, (None, None)),
}
"""Family, limits in the source, options, and to what each limit is raised."""


@pytest.mark.parametrize("case", RAISED)
def test_limits_follow_the_reach(tmp_path: Path, case: str) -> None:
    name, before, options, after = RAISED[case]
    folder = source(tmp_path / "source", name, *before)
    notes, files, differ = converted(folder, tmp_path, **options)
    raised = []
    for file, key, old, new in zip(files, ("max_seq_length", "model_max_length"), before, after, strict=True):
        if new is not None:
            raised.append(f"{key} in {file} from {old}")
            assert [*files[file].items()] == [*{**read(folder, file), key: new}.items()]
            text = (tmp_path / "out" / file).read_text(encoding="utf-8")
            assert text == json.dumps(files[file], indent=2) + "\n"
    start = f"the input limit was raised to the {after[1]} tokens that the scaling reaches: "
    assert notes == ([start + " and ".join(raised)] if raised else [])
    assert differ == {file for file, new in zip(files, after, strict=True) if new is not None}
    if after[0] is not None:
        assert read(tmp_path / "out", "config.json")["max_position_embeddings"] >= after[0]


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
