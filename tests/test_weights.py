"""Weights keep every name and byte, from safetensors and from .bin files in every format of torch."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import math
import os
import pickle
import re
import runpy
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from converter.errors import SourceError
from converter.families import FAMILIES
from converter.rotary.models import MODELS
from converter.source.checkpoint import ITEM_BYTES, Tensor, read_checkpoint
from converter.weights import files, worker
from converter.weights import rewrite as rewrite_module
from converter.weights.finite import Scan
from converter.weights.rewrite import rewrite
from converter.weights.transfer import TransferOptions, transfer
from tests import tiny
from tests.conftest import Run, edit_json, in_this_process
from tests.dealt import dealt
from tests.messages import Words, raises
from tests.tiny.rotary import rotary


@pytest.fixture(autouse=True)
def _same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process for each of so many files would take minutes."""
    monkeypatch.setattr(worker, "rewrite_apart", in_this_process)


def convert_weights(source: Path, target: Path, *, tied: Collection[str] = ()) -> dict[str, torch.Tensor]:
    target.mkdir()
    transfer(read_checkpoint(source), source, target, TransferOptions(tied=tied))
    loaded: dict[str, torch.Tensor] = {}
    for file in read_checkpoint(target).files:
        loaded |= load_file(target / file)
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


NOT_FINITE = (math.nan, -math.nan, math.inf, -math.inf)


@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    header=st.integers(0, 9),
    sizes=st.lists(st.integers(1, 40), min_size=1),
    at=st.integers(0, 59),
    value=st.sampled_from([*NOT_FINITE, -0.0, "largest", "least"]),
)
def test_values_that_are_not_finite_are_found(
    dtype: torch.dtype, header: int, sizes: list[int], at: int, value: float | str
) -> None:
    """In any block, at any alignment, and where a number lies in two blocks."""
    # Its largest and its least finite values have almost the bits of infinities.
    limits = {"largest": torch.finfo(dtype).max, "least": torch.finfo(dtype).min}
    number = torch.tensor(limits[value] if isinstance(value, str) else value, dtype=dtype)
    values = torch.linspace(-2, 3, 60).to(dtype)
    values[at] = number
    data = bytes(header) + values.view(torch.uint8).numpy().tobytes() + bytes(3)
    middle, name = 20 * dtype.itemsize, rewrite_module.NAMES[dtype]
    end = 3 * middle
    found = [
        Tensor("a", name, (20,), "file", 0, middle, header),
        Tensor("empty", name, (0,), "file", middle, middle, header + middle),
        Tensor("b.masked_bias", name, (20,), "file", middle, 2 * middle, header + middle),
        Tensor("c", name, (20,), "file", 2 * middle, end, header + 2 * middle),
        Tensor("bytes", "U8", (3,), "file", end, end + 3, header + end),
    ]
    scan = Scan(found, "file", re.compile(r"masked_bias$"), "what to do")
    wrong = "abc"[at // 20] if not number.isfinite() and at // 20 != 1 else None
    words = (f"'{wrong}'", "file", "NaN or infinite", "what to do")
    with raises(SourceError, words) if wrong else nullcontext():
        for size in itertools.cycle(sizes):
            scan(memoryview(data[:size]))
            data = data[size:]
            if not data:
                break


def test_values_of_a_bin_that_are_not_finite(tmp_path: Path) -> None:
    """Those of a tensor that nothing reads may be anything."""
    state = {"a": torch.ones(3), "masked_bias": torch.tensor(-math.inf)}
    torch.save(state, tmp_path / "a.bin")
    rewrite(tmp_path / "a.bin", tmp_path / "a", ignored=re.compile("masked_bias$"))
    torch.save({**state, "b": torch.tensor([0.0, math.nan])}, tmp_path / "b.bin")
    with raises(SourceError, "'b'", "b.bin", "NaN or infinite"):
        rewrite(tmp_path / "b.bin", tmp_path / "b", ignored=re.compile("masked_bias$"))


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


BASE = torch.arange(24.0).reshape(4, 6)
VIEWS = {
    "whole": BASE,
    "rows": BASE[1:3],
    "columns": BASE[:, ::2],
    "turned": BASE.T,
    "spread": BASE[:1].expand(3, 6),
    "number": torch.tensor(1.5).expand(7),
    "one": torch.tensor(1.5).expand(1),
    "deep": BASE.view(2, 2, 3, 2).permute(3, 1, 0, 2),
    "backwards": BASE.view(2, 2, 6)[:, 1:, ::5].transpose(0, 2),
    "nothing": BASE[:0, ::2],
}
SHARED, ZEROS = torch.arange(16.0).view(4, 4), torch.zeros(4)
STATES: dict[str, tuple[Mapping[str, torch.Tensor], dict[str, Any]]] = {
    "every type": (STATE, {}),
    "before torch 1.6": (STATE, {"_use_new_zipfile_serialization": False}),
    "views": (VIEWS, {}),
    # Two layers may share a norm: each name is written as a tensor of its own.
    "shared": ({"z.embedding": SHARED, "h.0.bias": ZEROS, "h.1.bias": ZEROS, "lm_head": SHARED}, {}),
    "parameters": (collections.OrderedDict(a=torch.nn.Parameter(torch.ones(2))), {}),
}


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("block", [4, 30, 4 << 20])
def test_every_tensor_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, block: int
) -> None:
    monkeypatch.setattr(rewrite_module, "BLOCK", block)
    state, options = STATES[case]
    assert_same(convert_weights(save_bin(tmp_path / "in", state, **options), tmp_path / "out"), state)
    for tensor in read_checkpoint(tmp_path / "out").tensors.values():
        assert tensor.offset % ITEM_BYTES[tensor.dtype] == 0


def anonymous() -> int:
    """Bytes of this process's memory that are not mapped from a file."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


LAYOUTS: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "dense": lambda flat: {"a": flat},
    "turned": lambda flat: {"a": flat.view(4096, -1).T},
    "parts": lambda flat: {str(n): part for n, part in enumerate(flat.chunk(8))},
    "turned parts": lambda flat: {str(n): part.view(64, -1).T for n, part in enumerate(flat.chunk(8))},
    "twice": lambda flat: {"a": flat, "b": flat},
    "one row": lambda flat: {"a": flat.view(2, 1, -1).transpose(0, 2)[::2]},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    torch.save(LAYOUTS[layout](torch.zeros(64 << 20)), tmp_path / "a.bin")
    before, peaks = anonymous(), [0]
    write = files.write_all

    def measured(*arguments: Any) -> None:
        peaks.append(anonymous())
        write(*arguments)

    monkeypatch.setattr(rewrite_module, "write_all", measured)
    rewrite(tmp_path / "a.bin", tmp_path / "a")
    assert len(peaks) > 10
    assert max(peaks) - before < 48 << 20


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
    alone = {"a.head": table}
    made = convert_weights(save_bin(tmp_path / "alone", alone), tmp_path / "out", tied=["a.head"])
    assert_same(made, alone)


EMBEDDINGS = ("embed_tokens.weight", *(family.embeddings for family in FAMILIES))


def aliased(source: Path) -> str:
    """Makes the head of a ``.bin`` checkpoint a second name for its embeddings, listed before them."""
    file = source / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    table = next(name for name in state if name.endswith(EMBEDDINGS))
    head = "cls.predictions.decoder.weight" if table.startswith("bert.") else "lm_head.weight"
    state.pop(head, None)
    torch.save({head: state[table], **state}, file)
    return head


@pytest.mark.parametrize(
    ("family", "ties"), dealt([*tiny.FACTORIES, "llama", "gemma"], [True, False, None], each=1)
)
def test_an_aliased_head_of_every_family(
    tmp_path: Path, run: Callable[..., Run], family: str, *, ties: bool | None
) -> None:
    """The head is left out where the result's class ties it and written where it does not; both verify."""
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
    described = tiny.CHECKPOINTS.get(family)
    if described and ties in described.refused_ties:
        assert f"tie_word_embeddings is {ties}" in done.err.replace("true", "True")
        return
    assert done.code == 0, done.err
    if described and described.tied is not None:  # its own code does not read that key
        left_out = described.tied
    else:
        left_out = family != "llama" if ties is None else ties
    assert (head not in read_checkpoint(tmp_path / "out").tensors) == left_out


@pytest.mark.parametrize("model_type", MODELS)
def test_rotary_models_that_tie_by_default(model_type: str) -> None:
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type).tie_word_embeddings
    assert MODELS[model_type].ties == bool(default)


class Attack:
    """A pickle that calls something when it is read."""

    def __init__(self, called: Callable[..., object], arguments: tuple[object, ...]):
        self.called, self.arguments = called, arguments

    def __reduce__(self) -> Any:
        return self.called, self.arguments


@pytest.mark.parametrize("form", ["zip", "before torch 1.6", "plain pickle"])
@pytest.mark.parametrize(
    ("called", "arguments"),
    [
        (Path.touch, (Path("it-ran"),)),
        (os.system, ("touch it-ran",)),
        (eval, ("open('it-ran', 'w')",)),
        (functools.partial, (os.system, "touch it-ran")),
        (runpy.run_path, ("it.py",)),
        (torch.hub.load, (".", "model")),
        (shutil.rmtree, ("it-ran",)),
    ],
)
def test_code_in_a_pickle_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, called: Any, arguments: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"a": torch.ones(1), "b": Attack(called, arguments)}
    source = save_bin(tmp_path / "in", state, _use_new_zipfile_serialization=form == "zip")
    if form == "plain pickle":
        (source / "pytorch_model.bin").write_bytes(pickle.dumps(state["b"]))
    with raises(SourceError, "pytorch_model.bin", "holds more than tensors"):
        convert_weights(source, tmp_path / "out")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"state_dict": {"a": torch.ones(1)}}, ("'state_dict'", "dict")),
        ({3: torch.ones(1)}, ("3 is a Tensor", "text name")),
        ([torch.ones(1)], "holds a list"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a' is a torch.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.ones(2, device="meta")}, "'a' is a"),
        ({"a": torch.ones(2, dtype=torch.complex64).conj().imag}, "negated torch.float32"),
        ({"a": torch.ones((1,) * 20)}, "of 20 dimensions"),
        ({"a\nb": torch.ones(1)}, (r"'a\nb'", "tensor name")),
        ({"__metadata__": torch.ones(1)}, ("'__metadata__'", "tensor name")),
        ({"a" * 1000: torch.ones(1)}, ("aaa...", "tensor name")),
        # They would fill the disk.
        (
            {str(n): torch.zeros(1).expand(1 << 40) for n in range(3)},
            ("13194139533312", "8 times"),
        ),
        # A whole file, cut off after so many bytes.
        (0, ("pytorch_model.bin", "empty", "download")),
        *((keep, ("pytorch_model.bin", "damaged")) for keep in (3, 1000, -1)),
    ],
)
def test_what_is_no_state_dict(tmp_path: Path, state: object, words: Words) -> None:
    path = save_bin(tmp_path / "in", STATE if isinstance(state, int) else state) / "pytorch_model.bin"
    if isinstance(state, int):
        path.write_bytes(path.read_bytes()[:state])
    with raises(SourceError, words) as error:
        convert_weights(tmp_path / "in", tmp_path / "out")
    assert str(error.value).isprintable()


def test_a_tensor_in_two_bins(tmp_path: Path) -> None:
    weight_map = {"a": "s0.bin", "b": "s1.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"a": torch.ones(1)}, tmp_path / "s0.bin")
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "s1.bin")
    with raises(SourceError, "'a'", "s0.bin", "s1.bin"):
        convert_weights(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "author": "somebody", "größe": "ä"}])
def test_doubles_as_halves(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    """The metadata of a safetensors file stay."""
    source = tmp_path / "a.safetensors"
    values = [1 / 3, math.nan, -0.0, math.inf, 65519.0]
    save_file({"a": torch.tensor(values, dtype=torch.float64)}, source, metadata)
    rewrite(source, tmp_path / "b", dtype="F16")
    expected = [0.333251953125, math.nan, -0.0, math.inf, 65504.0]
    with safe_open(tmp_path / "b", framework="pt") as library:
        assert repr(library.get_tensor("a").tolist()) == repr(expected)
        assert library.metadata() == (metadata or {"format": "pt"})
    for number, value in enumerate((65520.0, 1e39, -1e300)):
        save_file({"a": torch.tensor([value], dtype=torch.float64)}, source)
        with pytest.raises(SourceError, match="float16 cannot hold"):
            rewrite(source, tmp_path / str(number), dtype="F16")
