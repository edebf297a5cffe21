"""Reading indexes and headers, valid and damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from converter.errors import SourceError
from converter.source.checkpoint import read_checkpoint, read_header
from tests.conftest import MakeSource, Pristine

FLOATS = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write_safetensors(path: Path, header: Any, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize("sharded", [False, True])
def test_names_shapes_and_types_are_those_of_the_library(pristine: Pristine, sharded: bool) -> None:
    folder = pristine("bloom", sharded=sharded)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.format == "safetensors"
    assert (checkpoint.index is not None) == sharded
    assert sum(checkpoint.files.values()) == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert checkpoint.dtypes == ("F32",)
    seen = {}
    for file in checkpoint.files:
        with safe_open(folder / file, framework="np") as library:
            for name in library.keys():  # noqa: SIM118 -- not a dict
                part = library.get_slice(name)
                seen[name] = (part.get_dtype(), tuple(part.get_shape()), file)
    assert {name: (t.dtype, t.shape, t.file) for name, t in checkpoint.tensors.items()} == seen
    assert checkpoint.parameters == 28640


def test_bin_files_are_listed_and_not_read(pristine: Pristine) -> None:
    folder = pristine("bloom", fmt="bin", sharded=True)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.format == "bin"
    assert list(checkpoint.files) == sorted(path.name for path in folder.glob("*.bin"))
    assert checkpoint.parameters is None
    assert checkpoint.weight_map["lm_head.weight"] in checkpoint.files


def test_safetensors_win_over_bin(make_source: MakeSource) -> None:
    folder = make_source()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert list(read_checkpoint(folder).files) == ["model.safetensors"]


def test_empty_tensors_and_metadata(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "empty": {"dtype": "I64", "shape": [0, 3], "data_offsets": [0, 0]},
        "scalar": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]},
    }
    tensors = read_header(write_safetensors(tmp_path / "a.safetensors", header, b"\0\0"))
    assert tensors["empty"].shape == (0, 3)
    assert tensors["scalar"].end == 2


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": FLOATS}, bytes(15), "truncated"),
        ({"a": FLOATS}, bytes(17), "beyond its last tensor"),
        ({"a": FLOATS, "b": {**FLOATS, "data_offsets": [8, 24]}}, bytes(24), "'b' overlaps"),
        ({"a": FLOATS, "b": {**FLOATS, "data_offsets": [20, 36]}}, bytes(36), "'b' leaves a gap"),
        ({"a": {**FLOATS, "shape": [3, 2]}}, bytes(16), "'a' is not valid"),
        ({"a": {**FLOATS, "shape": [2.0, 2]}}, bytes(16), "'a' is not valid"),
        ({"a": {**FLOATS, "shape": [1 << 62, 1 << 62]}}, bytes(16), "'a' is not valid"),
        ({"a": {**FLOATS, "data_offsets": [16, 0]}}, bytes(16), "'a' is not valid"),
        ({"a": {**FLOATS, "data_offsets": None}}, bytes(16), "'a' is not valid"),
        ({"a": {**FLOATS, "dtype": "F4"}}, bytes(16), "dtype 'F4'"),
        ({"a": {**FLOATS, "dtype": 3}}, bytes(16), "'a' is not valid"),
        ({"a": [1, 2]}, bytes(16), "'a' is not valid"),
        ({"a\n\x1b[2J": [1]}, b"", r"'a\\n\\x1b[2J'"),
        *(({name: FLOATS}, bytes(16), "is not a valid tensor name") for name in ("a\nb", "a\x00", "x" * 513)),
        ({"a": {**FLOATS, "shape": [1 << 62] * 100_000}}, bytes(16), "'a' is not valid"),
        ({"a": {**FLOATS, "dtype": "F" * 10_000}}, bytes(16), "has dtype 'FFFFFFFFFFFFFFFFFFFF', which"),
        ({"a": {**FLOATS, "\ud800": 1}}, bytes(16), "is not valid Unicode"),
        (b'{"a": 1, "a": 2}', b"", "'a' occurs twice"),
        (b"[]", b"", "JSON list"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any, data: bytes, words: str) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", header, data)
    with pytest.raises(SourceError) as error:
        read_header(path)
    assert words.replace("\\\\", "\\") in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 1 << 60), struct.pack("<Q", 100) + b"{}"]
)
def test_files_shorter_than_their_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.safetensors is truncated"):
        read_header(tmp_path / "model.safetensors")


def sharded(folder: Path, weight_map: Any) -> Path:
    """Two shards with the tensors a and b, and an index with this weight_map."""
    for name in "ab":
        write_safetensors(folder / f"{name}.safetensors", {name: FLOATS}, bytes(16))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "a.safetensors", "b": "c.safetensors"}, "1 of 2 shards are missing (first: 'c.safetensors')"),
        ({"a": "a.safetensors", "c": "b.safetensors"}, "'c', but b.safetensors does not have it"),
        (
            {"a": "b.safetensors", "b": "a.safetensors"},
            "places 'a' in b.safetensors, but it is in a.safetensors",
        ),
        ({"a": "../a.safetensors"}, "'../a.safetensors'"),
        ({"a": "/etc/a.safetensors"}, "'/etc/a.safetensors'"),
        ({"a": "sub/a.safetensors"}, "'sub/a.safetensors'"),
        ({"a": "a\nb.safetensors"}, r"'a\nb.safetensors'"),
        ({"a": "config.json"}, "'config.json'"),
        ({"a": "a.bin"}, "'a.bin'"),
        ({"a": "é" * 121 + ".safetensors"}, "of more than 240 bytes; give it a shorter name"),
        ({"a": "a" * 9999 + ".safetensors"}, "of more than 240 bytes; give it a shorter name"),
        ({"a": 3}, "3"),
        ({}, "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_indexes_that_do_not_fit(tmp_path: Path, weight_map: Any, words: str) -> None:
    with pytest.raises(SourceError) as error:
        read_checkpoint(sharded(tmp_path, weight_map))
    assert words in str(error.value)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    both = {"a": FLOATS, "b": {**FLOATS, "data_offsets": [16, 32]}}
    write_safetensors(tmp_path / "b.safetensors", both, bytes(32))
    with pytest.raises(SourceError, match=r"'a' is in both a\.safetensors and b\.safetensors"):
        read_checkpoint(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no weights"):
        read_checkpoint(tmp_path)
