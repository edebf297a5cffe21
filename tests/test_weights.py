"""Weights arrive with every name and byte, from safetensors and from .bin files of every age."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import os
import pickle
import re
import struct
import tarfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from converter import recipe
from converter.checkpoint import read_checkpoint
from converter.errors import SourceError
from converter.progress import Advance
from converter.rotary.models import MODELS
from converter.weights import files
from converter.weights import transfer as transfer_module
from converter.weights.files import copy_file
from converter.weights.rewrite import rewrite
from converter.weights.transfer import Order, transfer
from converter.weights.worker import Request, Worker
from tests import tiny
from tests.conftest import Run, edit_json
from tests.tiny.rotary import rotary


class SameProcess(Worker):
    """Rewrites here: a process of its own for each of so many files would take minutes."""

    def rewrite(self, request: Request, advance: Advance, _: object) -> None:
        values = vars(request)
        rewrite(Path(values.pop("source")), Path(values.pop("target")), **values, advance=advance)


@pytest.fixture(autouse=True)
def _same_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "own_process" not in request.keywords:
        monkeypatch.setattr(transfer_module, "Worker", SameProcess)


def convert_weights(source: Path, target: Path, *, tied: Collection[str] = ()) -> dict[str, torch.Tensor]:
    target.mkdir()
    transfer(read_checkpoint(source), source, target, Order(tied=tied))
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
    source = tiny.FACTORIES[family](tmp_path / "source", dtype=dtype, fmt="bin", sharded=sharded)
    bins = sorted(source.glob("*.bin"))
    expected: dict[str, torch.Tensor] = {}
    for file in bins:
        expected |= torch.load(file, weights_only=True)
    assert "lm_head.weight" in expected
    del expected["lm_head.weight"]  # tied: stored once, under the embedding's name
    tied = recipe.of_source(json.loads((source / "config.json").read_text())).tied_tensors
    actual = convert_weights(source, tmp_path / "out", tied=tied)
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


def test_every_name_is_written(tmp_path: Path) -> None:
    """Two names of one tensor are two tensors of a model, as of two layers with one norm."""
    shared, zeros = torch.randn(4, 4), torch.zeros(4)
    state = {"z.embedding": shared, "h.0.bias": zeros, "h.1.bias": zeros, "lm_head.weight": shared}
    assert_same(convert_weights(save_bin(tmp_path / "in", state), tmp_path / "out"), state)


def test_a_tied_head_is_left_out_if_it_is_the_very_tensor(tmp_path: Path) -> None:
    table = torch.randn(4, 4)
    heads = {"same": table, "copy": table.clone(), "turned": table.T, "part": table[:2]}
    for kind, head in heads.items():
        for names in (("a.head", "embedding"), ("embedding", "z.head")):
            state = {name: head if "head" in name else table for name in names}
            place = tmp_path / f"{kind}-{names[0]}"
            actual = convert_weights(
                save_bin(place, state), place / "out", tied=["a.head", "z.head", "not.there"]
            )
            assert_same(actual, {"embedding": table} if kind == "same" else state)


def test_a_tied_head_alone_stays(tmp_path: Path) -> None:
    state = {"head": torch.ones(2)}
    assert_same(convert_weights(save_bin(tmp_path / "in", state), tmp_path / "out", tied=["head"]), state)


def aliased(source: Path) -> str:
    """Makes the head of a ``.bin`` checkpoint a second name of its embeddings, before them."""
    file = source / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    table = next(name for name in state if re.search(r"(word_embeddings|wte|embed_tokens)\.weight$", name))
    head = "cls.predictions.decoder.weight" if table.startswith("bert.") else "lm_head.weight"
    state.pop(head, None)
    torch.save({head: state[table], **state}, file)
    return head


@pytest.mark.parametrize("ties", [True, False, None])
@pytest.mark.parametrize("family", [*tiny.FACTORIES, "llama", "gemma"])
def test_an_aliased_head_of_every_family(
    tmp_path: Path, run: Callable[..., Run], family: str, *, ties: bool | None
) -> None:
    """Left out where the result's class ties it, written where not, and verified either way."""
    source = tmp_path / "source"
    if family in tiny.FACTORIES:
        tiny.FACTORIES[family](source, fmt="bin")
    else:
        rotary(source, family)
        torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    edit_json(source / "config.json", {"tie_word_embeddings": ties})
    head = aliased(source)
    words = ("--scale", "2", "--train-length", "24", "--out", tmp_path / "out")
    done = run(source, *words, "--json")
    if (family, ties) in (("baichuan", True), ("mosaic_gpt", False)):
        assert f"tie_word_embeddings is {ties}" in done.err.replace("true", "True")
        return
    assert done.code == 0, done.err
    if family in ("baichuan", "refact", "mosaic_gpt"):  # whose codes read no such key
        left_out = family == "mosaic_gpt"
    else:
        left_out = family != "llama" if ties is None else ties
    assert (head not in read_checkpoint(tmp_path / "out").tensors) == left_out


@pytest.mark.parametrize("model_type", MODELS)
def test_rotary_models_that_tie_by_default(model_type: str) -> None:
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type).tie_word_embeddings
    assert MODELS[model_type].ties == bool(default)


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
