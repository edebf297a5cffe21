"""The input limit, after which programs cut a text: in files, in the card, and where it is told."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from converter import convert
from tests import tiny
from tests.conftest import Pristine, RunCli, edit_json, fingerprint
from tests.tiny.rotary import rotary

SENTENCE, TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"
VERY_LARGE = int(1e30)
"""What transformers writes for a tokenizer without a limit."""


def source(folder: Path, name: str, sentence: object, limit: object) -> Path:
    """A tiny checkpoint with these limits; None leaves a key out."""
    (tiny.FACTORIES | tiny.ENCODERS)[name](folder, 4)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")  # without a card there would be a note
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


Limits = tuple[object, object]
OUTCOMES: dict[str, tuple[str, Limits, dict[str, Any], Limits, int | None]] = {
    "reach": ("mosaic_bert", (512, 1000), {}, (2048, 2048), 2048),
    # Without a trained length, the config's own limit takes its place.
    "by the config": ("jina_bert", (8192, 8192), {"train_length": None, "scale": 2.0}, (16384,) * 2, 16384),
    # Of a decoder, only the tokenizer's. BLOOM's own config has no limit; MPT's has.
    "bloom": ("bloom", (512, 1000), {}, (512, 2048), None),
    "mpt": ("mpt", (512, 1000), {}, (512, 2048), None),
    "decoder, reached": ("mpt", (512, 4096), {}, (512, 4096), None),
    "decoder without a limit": ("bloom", (512, VERY_LARGE), {}, (512, VERY_LARGE), None),
    # Never below the source: its config (8192), or what sentence-transformers or the tokenizer read.
    "config": ("jina_bert", (512, 1000), {}, (8192, 8192), 8192),
    "sentences": ("mosaic_bert", (4096, 512), {}, (4096, 4096), 4096),
    "tokenizer": ("mosaic_bert", (None, 4096), {}, (4096, 4096), 4096),
    # A tokenizer without a limit: fastembed needs one.
    "absent": ("mosaic_bert", (None, None), {}, (2048, 2048), 2048),
    "no limit": ("mosaic_bert", ("512", VERY_LARGE), {}, (2048, 2048), 2048),
    "no integer": ("mosaic_bert", (512.0, "2147483648"), {}, (2048, 2048), 2048),
    "not positive": ("mosaic_bert", (0, -1), {}, (2048, 2048), 2048),
    # Nobody chose the end of a dynamic scaling, so it is 8 times the trained length.
    "dynamic": ("mosaic_bert", (512, 512), {"train_length": 128, "scale": None}, (1024, 1024), 1024),
    "dynamic, as jina": ("jina_bert", (8192, 2147483648), {"scale": None}, (8192, 8192), 8192),
    "dynamic decoder": ("bloom", (512, 1000), {"scale": None}, (512, 1000), None),
    "chosen": ("jina_bert", (8192, 8192), {"scale": None, "max_length": 1500}, (1500, 1500), 1500),
    "chosen, static": ("mosaic_bert", (512, 512), {"max_length": 9000}, (9000, 9000), 9000),
    "unscaled": ("jina_bert", (100, 100), {"method": "none", "scale": None}, (100, 100), None),
    "not known": ("falcon", (100, 100), {"train_length": None}, (100, 100), None),
}
"""Family, limits in the source, options, limits in the result, and the one that is told."""


@pytest.mark.parametrize("case", OUTCOMES)
def test_the_input_limit(tmp_path: Path, case: str, run: RunCli) -> None:
    name, before, options, after, limit = OUTCOMES[case]
    folder = source(tmp_path / "source", name, *before)
    notes, files, differ = converted(folder, tmp_path, **options)
    changed = []
    for file, key, old, new in zip(files, ("max_seq_length", "model_max_length"), before, after, strict=True):
        content = {**read(folder, file), key: new} if new is not None else read(folder, file)
        assert [*files[file].items()] == [*content.items()]
        if (old, type(old)) != (new, type(new)):
            changed.append(file)
            text = (tmp_path / "out" / file).read_text(encoding="utf-8")
            assert text == json.dumps(files[file], indent=2) + "\n"
    assert differ == set(changed)
    assert len(notes) == bool(changed)
    for file in changed:
        assert file in notes[0]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    shown = run("inspect", tmp_path / "out", "--json").json["input_limit"]
    assert shown == limit
    assert (limit is not None) == ("| input limit |" in card)
    if limit is not None:
        assert f"after {limit} tokens" in card
        assert read(tmp_path / "out", "config.json")["max_position_embeddings"] == limit


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("bloom", "100", "is none"), ("llama", "100", "is none"), ("jina_bert", "0", "out of range")],
)
def test_a_limit_that_cannot_be(
    pristine: Pristine, run: RunCli, tmp_path: Path, name: str, value: str, error: str
) -> None:
    words = ("--max-length", value, "--scale", "2", "--train-length", "64", "--out", tmp_path / "out")
    done = run(pristine(name), *words)
    assert (done.code, done.out) == (2, "")
    assert error in done.err
    assert not (tmp_path / "out").exists()


def test_a_rotary_models_tokenizer_is_copied(tmp_path: Path) -> None:
    """Of those, only config.json changes."""
    folder = tmp_path / "source"
    rotary(folder, "llama")
    edit_json(folder / TOKENIZER, {"model_max_length": 100})
    convert(folder, tmp_path / "out", verify=False, train_length=512, scale=4.0)
    assert (tmp_path / "out" / TOKENIZER).read_bytes() == (folder / TOKENIZER).read_bytes()


@pytest.mark.parametrize("content", ["[512]", "{", '{"max_seq_length": 512'])
def test_a_file_that_cannot_be_read_is_copied(tmp_path: Path, content: str) -> None:
    folder = source(tmp_path / "source", "jina_bert", 512, 8192)
    (folder / SENTENCE).write_text(content, encoding="utf-8")
    result = convert(folder, tmp_path / "out", verify=False, train_length=512, scale=4.0)
    assert result.notes == []
    assert (tmp_path / "out" / SENTENCE).read_text(encoding="utf-8") == content
