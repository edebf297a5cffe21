"""Weights arrive with every name and byte, from safetensors and from .bin files of every age."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import os
import pickle
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from converter.checkpoint import read_checkpoint
from converter.errors import SourceError
from converter.progress import Advance
from converter.weights import files
from converter.weights import transfer as transfer_module
from converter.weights.files import copy_file
from converter.weights.rewrite import rewrite
from converter.weights.transfer import transfer
from converter.weights.worker import Request, Worker


class SameProcess(Worker):
    """Rewrites here: a process of its own for each of so many files would take minutes."""

    def rewrite(self, request: Request, advance: Advance, _: object) -> None:
        values = vars(request)
        rewrite(Path(values.pop("source")), Path(values.pop("target")), **values, advance=advance)


@pytest.fixture(autouse=True)
def _same_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "own_process" not in request.keywords:
        monkeypatch.setattr(transfer_module, "Worker", SameProcess)


def convert_weights(source: Path, target: Path) -> dict[str, torch.Tensor]:
    target.mkdir()
    transfer(read_checkpoint(source), source, target)
    loaded: dict[str, torch.Tensor] = {}
    for file in read_checkpoint(target).files:
        loaded |= load_file(target / file)
        (target / "weights.journal").unlink(missing_ok=True)
        with safe_open(target / file, framework="pt") as library:
            assert library.metadata() == {"format": "pt"}
    return loaded


def save_bin(folder: Path, state: object, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "pytorch_model.bin", **options)
    return folder


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("sharded", [False, True])
def test_safetensors_are_copied_byte_for_byte(
    pristine: Callable[..., Path], tmp_path: Path, sharded: bool
) -> None:
    source, target = pristine("bloom", sharded=sharded), tmp_path / "out"
    convert_weights(source, target)
    names = {path.name for path in target.iterdir()}
    assert names == {path.name for path in source.iterdir() if path.name.startswith("model")}
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in names)


def test_only_the_files_that_count_are_copied(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source()
    for name in ("model.fp16.safetensors", "pytorch_model.bin", "tf_model.h5", "model.onnx"):
        (source / name).write_bytes(b"something else")
    convert_weights(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_copy_of_a_file_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 1000)
    (tmp_path / "a").write_bytes(os.urandom(12_345))
    done: list[int] = []
    digest = copy_file(tmp_path / "a", tmp_path / "b", 12_345, done.append)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert digest == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert sum(done) == 12_345
    assert max(done) <= 1000


def test_a_file_that_ended_short_meanwhile(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source()
    checkpoint = read_checkpoint(source)
    os.truncate(source / "model.safetensors", 1000)
    with pytest.raises(SourceError, match=r"model\.safetensors changed while it was read \(1000 of"):
        transfer(checkpoint, source, tmp_path)


def test_a_file_that_grew_meanwhile(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source()
    checkpoint = read_checkpoint(source)
    with (source / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(SourceError, match="changed while it was read"):
        transfer(checkpoint, source, tmp_path)


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bin_becomes_safetensors(tmp_path: Path, family: str, sharded: bool, dtype: torch.dtype) -> None:
    from tests import tiny

    source = tiny.FACTORIES[family](tmp_path / "source", dtype=dtype, fmt="bin", sharded=sharded)
    bins = sorted(source.glob("*.bin"))
    expected: dict[str, torch.Tensor] = {}
    for file in bins:
        expected |= torch.load(file, weights_only=True)
    assert "lm_head.weight" in expected
    del expected["lm_head.weight"]  # tied: stored once, under the embedding's name
    actual = convert_weights(source, tmp_path / "out")
    assert_same(actual, expected)
    if sharded:
        names = [f"model-{n:05}-of-{len(bins):05}.safetensors" for n in range(1, len(bins) + 1)]
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == names
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
        assert index["weight_map"].keys() == expected.keys()
    else:
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


STATE = {
    "float": torch.arange(12.0).reshape(3, 4),
    "half": torch.arange(5).half(),
    "brain": torch.arange(5).bfloat16(),
    "double": torch.tensor(1.5, dtype=torch.float64),
    "long": torch.tensor([1, -1]),
    "int": torch.tensor([1, -1], dtype=torch.int32),
    "short": torch.tensor([1, -1], dtype=torch.int16),
    "byte": torch.tensor([1, 255], dtype=torch.uint8),
    "char": torch.tensor([1, -1], dtype=torch.int8),
    "bool": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
}


def test_every_type_and_shape(tmp_path: Path) -> None:
    assert_same(convert_weights(save_bin(tmp_path / "in", STATE), tmp_path / "out"), STATE)


def test_tensors_are_aligned(tmp_path: Path) -> None:
    convert_weights(save_bin(tmp_path / "in", STATE), tmp_path / "out")
    for tensor in read_checkpoint(tmp_path / "out").tensors.values():
        items = max(1, torch.Size(tensor.shape).numel())
        assert tensor.start % max(1, (tensor.end - tensor.start) // items) == 0


def test_views_and_strides(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "whole": base,
        "rows": base[1:3],
        "columns": base[:, ::2],
        "turned": base.T,
        "spread": base[:1].expand(3, 6),
    }
    actual = convert_weights(save_bin(tmp_path / "in", state), tmp_path / "out")
    assert_same(actual, state)


def test_shared_tensors_are_stored_once_under_their_first_name(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    state = {"z.embedding": shared, "middle": torch.randn(4), "a.head": shared, "copy": shared.clone()}
    actual = convert_weights(save_bin(tmp_path / "in", state), tmp_path / "out")
    assert_same(actual, {name: tensor for name, tensor in state.items() if name != "a.head"})


def test_parameters_and_ordered_dicts(tmp_path: Path) -> None:
    state = collections.OrderedDict(a=torch.nn.Parameter(torch.ones(2)))
    assert_same(convert_weights(save_bin(tmp_path / "in", state), tmp_path / "out"), {"a": torch.ones(2)})


def test_files_of_torch_before_1_6(tmp_path: Path) -> None:
    source = save_bin(tmp_path / "in", STATE, _use_new_zipfile_serialization=False)
    assert_same(convert_weights(source, tmp_path / "out"), STATE)


class Attack:
    """A pickle that leaves a file behind if it runs."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, zipped: bool) -> None:
    trace = tmp_path / "it-ran"
    source = save_bin(
        tmp_path / "in", {"a": torch.ones(1), "b": Attack(trace)}, _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(SourceError, match=r"pytorch_model\.bin is damaged or holds more than tensors"):
        convert_weights(source, tmp_path / "out")
    assert not trace.exists()


def test_plain_pickle_with_code(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    (tmp_path / "in").mkdir()
    (tmp_path / "in/pytorch_model.bin").write_bytes(pickle.dumps(Attack(trace)))
    with pytest.raises(SourceError):
        convert_weights(tmp_path / "in", tmp_path / "out")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"state_dict": {"a": torch.ones(1)}}, "'state_dict' is a dict"),
        ({"a": torch.ones(1), "epoch": 3}, "'epoch' is a int"),
        ({3: torch.ones(1)}, "3 is a Tensor, not a tensor by its name"),
        (torch.ones(1), "holds a Tensor"),
        ([torch.ones(1)], "holds a list"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a' is a torch.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.ones(2, device="meta")}, "'a' is a"),
    ],
)
def test_what_is_no_state_dict(tmp_path: Path, state: object, words: str) -> None:
    with pytest.raises(SourceError) as error:
        convert_weights(save_bin(tmp_path / "in", state), tmp_path / "out")
    assert words in str(error.value)


@pytest.mark.parametrize("keep", [0, 3, 100, 1000, -100, -1])
def test_truncated_bin(tmp_path: Path, keep: int) -> None:
    path = save_bin(tmp_path / "in", STATE) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"pytorch_model\.bin is damaged"):
        convert_weights(tmp_path / "in", tmp_path / "out")


def write_tar(path: Path) -> None:
    """What torch saved before 2017: three pickles and the raw numbers, in a tar archive."""
    storages, views, pickled = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pickle.dump(1, storages, 2)
    pickle.dump((0, "cpu", torch.FloatStorage), storages, 2)
    storages.write(struct.pack("<q4f", 4, 1, 2, 3, 4))
    pickle.dump([], storages, 2)
    pickle.dump(1, views, 2)
    pickle.dump((1, 0, torch.FloatTensor), views, 2)
    views.write(struct.pack("<iiqqq", 1, 0, 4, 1, 0))

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> int | None:
            return 1 if value == "tensor" else None

    Pickler(pickled, 2).dump({"a": "tensor"})
    files = {"sys_info": pickle.dumps({}), "pickle": pickled.getvalue(), "tensors": views.getvalue()}
    with tarfile.open(path, "w") as tar:
        for name, content in {**files, "storages": storages.getvalue()}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def test_tar_format_is_refused(tmp_path: Path) -> None:
    """torch reads it, but not without running what is in it."""
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in/pytorch_model.bin")
    loaded = torch.load(tmp_path / "in/pytorch_model.bin", weights_only=False)  # our own
    assert loaded["a"].tolist() == [1, 2, 3, 4]
    with pytest.raises(SourceError, match=r"pytorch_model\.bin is damaged or .*\.tar format\); convert"):
        convert_weights(tmp_path / "in", tmp_path / "out")


def sharded_bin(folder: Path, shards: list[dict[str, torch.Tensor]], weight_map: dict[str, int]) -> Path:
    folder.mkdir()
    for number, shard in enumerate(shards):
        torch.save(shard, folder / f"s{number}.bin")
    files = {name: f"s{number}.bin" for name, number in weight_map.items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize(
    ("shards", "weight_map", "words"),
    [
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], {"a": 0, "c": 1}, "lists the tensor 'c', but s1.bin"),
        (
            [{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}],
            {"a": 0, "b": 1},
            "'a' is in both s0.bin and s1.bin",
        ),
        ([{"a": torch.ones(1)}], {"a": 0, "b": 1}, "1 of 2 shards are missing, 's1.bin'"),
    ],
)
def test_bin_indexes_that_do_not_fit(
    tmp_path: Path, shards: list[dict[str, torch.Tensor]], weight_map: dict[str, int], words: str
) -> None:
    with pytest.raises(SourceError) as error:
        convert_weights(sharded_bin(tmp_path / "in", shards, weight_map), tmp_path / "out")
    assert words in str(error.value)
