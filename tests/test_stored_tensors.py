"""Stored tensors: indexes and headers, names and slopes, and heads that are stored beside the embeddings."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from converter import OnnxOptions, UnsupportedModel, convert, export, inspect
from converter.errors import SourceError
from converter.model.alibi import check_positions
from converter.result import manifest
from converter.source import values
from converter.source.checkpoint import read_checkpoint, read_header
from converter.source.open import open_folder
from tests import tiny
from tests.conftest import MakeSource, Pristine, Refused, edit_json
from tests.onnx_graphs import PROFILES, TRAIN_LENGTH, Engine, assert_close, expected
from tests.patched import config_of, load
from tests.reference import ENCODERS
from tests.reference import FAMILIES as REFERENCES
from tests.test_continuous_batching import OLD
from tests.tiny.layout import Format, change_tensors, write_json

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


# Damaged files: one table

Damage = Callable[[Path], object]


def one_file(header: Any, data: bytes) -> Damage:
    return lambda folder: write_safetensors(folder / "model.safetensors", header, data)


def shards(weight_map: Any) -> Damage:
    """Two shards with the tensors a and b, and an index with this weight_map."""

    def write(folder: Path) -> None:
        for name in "ab":
            write_safetensors(folder / f"{name}.safetensors", {name: FLOATS}, bytes(16))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def twice(folder: Path) -> None:
    shards({"a": "a.safetensors", "b": "b.safetensors"})(folder)
    both = {"a": FLOATS, "b": {**FLOATS, "data_offsets": [16, 32]}}
    write_safetensors(folder / "b.safetensors", both, bytes(32))


DAMAGED: list[tuple[Damage, tuple[str, ...]]] = [
    (one_file({"a": FLOATS}, bytes(15)), ("truncated",)),
    (one_file({"a": FLOATS}, bytes(17)), ("last tensor",)),
    (one_file({"a": FLOATS, "b": {**FLOATS, "data_offsets": [8, 24]}}, bytes(24)), ("'b' overlaps",)),
    (one_file({"a": FLOATS, "b": {**FLOATS, "data_offsets": [20, 36]}}, bytes(36)), ("'b' leaves a gap",)),
    (one_file({"a": {**FLOATS, "shape": [3, 2]}}, bytes(16)), ("'a' is not valid",)),
    (one_file({"a": {**FLOATS, "shape": [2.0, 2]}}, bytes(16)), ("'a' is not valid",)),
    (one_file({"a": {**FLOATS, "shape": [1 << 62, 1 << 62]}}, bytes(16)), ("'a' is not valid",)),
    (one_file({"a": {**FLOATS, "data_offsets": [16, 0]}}, bytes(16)), ("'a' is not valid",)),
    (one_file({"a": {**FLOATS, "data_offsets": None}}, bytes(16)), ("'a' is not valid",)),
    (one_file({"a": {**FLOATS, "dtype": "F4"}}, bytes(16)), ("dtype 'F4'",)),
    (one_file({"a": {**FLOATS, "dtype": 3}}, bytes(16)), ("'a' is not valid",)),
    (one_file({"a": [1, 2]}, bytes(16)), ("'a' is not valid",)),
    (one_file({"a\n\x1b[2J": [1]}, b""), (r"'a\n\x1b[2J'",)),
    *((one_file({name: FLOATS}, bytes(16)), ("tensor name",)) for name in ("a\nb", "a\x00", "x" * 513)),
    (one_file({"a": {**FLOATS, "shape": [1 << 62] * 100_000}}, bytes(16)), ("'a' is not valid",)),
    (one_file({"a": {**FLOATS, "dtype": "F" * 10_000}}, bytes(16)), ("'FFFFFFFFFFFFFFFFFFFF'",)),
    (one_file({"a": {**FLOATS, "\ud800": 1}}, bytes(16)), ("Unicode",)),
    (one_file(b'{"a": 1, "a": 2}', b""), ("'a'", "twice")),
    (one_file(b"[]", b""), ("list",)),
    (shards({"a": "a.safetensors", "b": "c.safetensors"}), ("1 of 2", "'c.safetensors'")),
    (shards({"a": "a.safetensors", "c": "b.safetensors"}), ("'c'", "b.safetensors")),
    (shards({"a": "b.safetensors", "b": "a.safetensors"}), ("'a'", "b.safetensors", "a.safetensors")),
    *(
        (shards({"a": file}), (repr(file),))
        for file in (
            *("../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "a\nb.safetensors"),
            *("config.json", "a.bin", 3),
        )
    ),
    *((shards({"a": f"{stem}.safetensors"}), ("240",)) for stem in ("é" * 121, "a" * 9999)),
    (shards({}), ("weight_map",)),
    (shards(None), ("weight_map",)),
    (twice, ("'a'", "a.safetensors", "b.safetensors")),
    (lambda folder: None, ("no weights",)),
]
"""What is wrong with the files of a folder, and words of the error."""


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 1 << 60), struct.pack("<Q", 100) + b"{}"]
)
def test_files_shorter_than_their_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.safetensors is truncated"):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("damage", "words"), DAMAGED)
def test_damaged_files(tmp_path: Path, damage: Damage, words: tuple[str, ...]) -> None:
    damage(tmp_path)
    with pytest.raises(SourceError) as error:
        read_checkpoint(tmp_path)
    for word in words:
        assert word in str(error.value)


# Tensors that are refused: one table

Change = Callable[[dict[str, torch.Tensor]], object]


def added(name: str, tensor: torch.Tensor) -> Change:
    """Adds a tensor to a checkpoint, or replaces it."""
    return lambda tensors: tensors.update({name: tensor})


def wrapped(prefix: str) -> Change:
    """All names begin with a wrapper's prefix."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[prefix + key] = tensors.pop(key)

    return change


SLOPES = "transformer.relative_pe.slopes"
FOREIGN = {
    "transformer.h.0.self_attention.rotary_emb.inv_freq": "rotary",
    "transformer.h.1.self_attention.maybe_rotary.inv_freq": "rotary",
    "model.layers.0.self_attn.rope.freqs": "rotary",
    "model.layers.0.self_attn.rotary_emb.inv_freq": "rotary",
    # Rewritten DNABERT-2 code stores such tensors (guyiyangyoung/LLM-DNABERT2).
    "bert.encoder.rope.sin": "rotary",
    "transformer.wpe.weight": "learned",
    "bert.embeddings.position_embeddings.weight": "learned",
}

MERGE = "model.merge_and_unload().save_pretrained(DIR)"
INNER = "model.pretrained_model.save_pretrained(DIR)"
BACKBONE = {"prefix": False}
"""A checkpoint of the backbone alone."""
REFUSED: list[tuple[str, dict[str, Any], Change, tuple[str, ...]]] = [
    *(
        ("bloom", {}, added(name, torch.ones(4, 4)), (repr(name), f"{positions} positions"))
        for name, positions in FOREIGN.items()
    ),
    *(
        ("jais", {}, added(SLOPES, torch.tensor(slopes)[:, None]), (repr(SLOPES),))
        for slopes in (
            [0.5, 0.25],
            *([0.5, 0.25, wrong, 0.2] for wrong in (-0.1, float("nan"), float("inf"), 0.0)),
            [4, 3, 2, 1],
        )
    ),
    *(
        (family, options, wrapped(prefix), (f"'{prefix}", remedy))
        for family, options, prefix, remedy in (
            ("bloom", {}, "pretrained_model.", INNER),
            ("bloom", {}, "base_model.model.", MERGE),
            ("bloom", BACKBONE, "pretrained_transformer.", "model.pretrained_transformer.save_pretrained"),
            ("llama", {}, "pretrained_model.", INNER),
            ("llama", {}, "base_model.model.", MERGE),
            ("jina_bert", {}, "module.", "model.module.save_pretrained(DIR)"),
        )
    ),
    *(
        ("bloom", {}, added(name, tensor), (repr(name), word))
        for name, tensor, word in (
            ("transformer.h.0.mlp.dense_h_to_4h.base_layer.weight", torch.zeros(4, 4), "adapter"),
            ("transformer.h.0.mlp.dense_h_to_4h.lora_A.default.weight", torch.zeros(4, 4), "adapter"),
            ("transformer.h.0.mlp.modules_to_save.default.weight", torch.zeros(4, 4), "adapter"),
            ("v_head.summary.weight", torch.zeros(1, 32), "value head"),
            ("transformer.ln_f.weight", torch.zeros(0), "ZeRO-3"),
        )
    ),
]
"""A tiny checkpoint and its options, what is done to its tensors, and words of the error."""


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize(("family", "options", "change", "words"), REFUSED)
def test_tensors_that_are_refused(
    make_source: MakeSource,
    refused: Refused,
    tmp_path: Path,
    family: str,
    options: dict[str, Any],
    change: Change,
    words: tuple[str, ...],
    fmt: Format,
) -> None:
    """Other positions, wrong slopes, the names of a wrapper, and what shows that something else was saved.

    Headers of safetensors are enough, so ``inspect`` and a dry run refuse other positions, too.
    """
    source = make_source(family, **options, fmt=fmt)
    change_tensors(source, change)
    commands: list[tuple[object, ...]] = [
        (source, "--scale", 2, "--train-length", 64, "--out", tmp_path / "out")
    ]
    if fmt == "safetensors" and words[0].strip("'") in FOREIGN:
        commands += [("inspect", source), (*commands[0], "--dry-run")]
    if fmt == "safetensors" and words[0] == repr(SLOPES):
        commands.append(("inspect", source))
    for command in commands:
        line = refused(*command)
        for word in words:
            assert word in line


def test_names_that_only_resemble_them_pass() -> None:
    check_positions(["transformer.h.0.mlp.europe.weight", "embeddings.position_ids", "h.0.property.weight"])
    for name in FOREIGN:
        with pytest.raises(UnsupportedModel):
            check_positions(["lm_head.weight", name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_stored_slopes_are_read_in_every_dtype(tmp_path: Path, fmt: Format, dtype: Any) -> None:
    source = tiny.FACTORIES["jais"](tmp_path / "source", 4, fmt=fmt)
    slopes = torch.tensor([0.75, 0.3, 0.11, 0.01]).to(dtype)
    change_tensors(source, added(SLOPES, slopes[:, None]))
    convert(source, tmp_path / "out", method="none")
    assert config_of(tmp_path / "out")["alibi_slopes"] == slopes.double().tolist()
    assert inspect(tmp_path / "out").slopes.stock == tuple(slopes.double().tolist())


# A language model's head and the embeddings are both stored, and config.json ties them or says nothing. These
# tests depend on the version of transformers.

Cast = Callable[[torch.Tensor], torch.Tensor]

TIE = "tie_word_embeddings"
STORED = {"true": {TIE: True}, "missing": {TIE: None}}
OTHERS = ("jais", "jina_bert", "mosaic_gpt", "mosaic_bert")
"""Families that transformers has no class for, whose own code would use the embeddings."""


def names(family: str) -> tuple[str, str]:
    known = tiny.FAMILY[family]
    return known.head, known.tensor_names(known.embeddings)[0]


def with_head(
    folder: Path, family: str, change: Cast, says: str = "true", fmt: Format = "safetensors"
) -> Path:
    """A checkpoint whose head is stored, made from the embeddings; ``says`` is a name of ``STORED``."""
    source = (tiny.FACTORIES | tiny.ENCODERS)[family](folder / "source", 4, fmt=fmt)
    head, table = names(family)
    change_tensors(source, lambda tensors: tensors.update({head: change(tensors[table])}))
    edit_json(source / "config.json", STORED[says])
    return source


def other(table: torch.Tensor) -> torch.Tensor:
    """Other values in the last block alone."""
    return torch.cat([table[:-1], 1 - table[-1:]])


@pytest.mark.version
@pytest.mark.parametrize("says", STORED)
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon", "refact"])
@torch.no_grad()
def test_a_head_that_differs_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, says: str
) -> None:
    monkeypatch.setattr(values, "BLOCK", 100)  # the difference is in the last of several
    source, out = with_head(tmp_path, family, other, says), tmp_path / "out"
    convert(source, out, scale=2.0, train_length=TRAIN_LENGTH)
    assert config_of(out)[TIE] is False
    ids = tiny.token_ids(2, 9)
    right = expected(out, family, ids)
    assert_close(load(out)(torch.from_numpy(ids)).logits.numpy(), right)
    for profile in PROFILES if family == "bloom" else PROFILES[:1]:
        # A repository that an older version converted may still say that they are tied. transformers 4.57
        # then loses the head, so validation rightly finds that the graph is not that model.
        for tied in (False, *[True] * (family == "bloom" and not OLD)):
            edit_json(out / "config.json", {TIE: tied})
            manifest.write(out, manifest.listed(open_folder(out)), {})
            export(out, OnnxOptions(profile))
            assert_close(Engine(out / "model.onnx").step(ids, np.ones_like(ids))[0], right)


@pytest.mark.version
@pytest.mark.parametrize("cast", [lambda table: table, lambda table: table.double()], ids=["same", "wider"])
@pytest.mark.parametrize("family", ["bloom", *OTHERS])
def test_an_equal_head_stays_tied(tmp_path: Path, family: str, cast: Cast) -> None:
    source = with_head(tmp_path, family, lambda table: cast(table.clone()))
    convert(
        source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH, verify=family in ("bloom", "jais")
    )
    assert config_of(tmp_path / "out").get(TIE, True)


@pytest.mark.version
def test_a_head_in_another_dtype_is_compared_by_value(tmp_path: Path) -> None:
    source = with_head(tmp_path, "bloom", lambda table: table.bfloat16())
    convert(source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH)
    assert config_of(tmp_path / "out")[TIE] is False


@pytest.mark.version
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize("says", STORED)
@pytest.mark.parametrize("family", OTHERS)
def test_it_is_refused_where_the_source_s_code_uses_the_embeddings(
    tmp_path: Path, refused: Refused, family: str, says: str, fmt: Format
) -> None:
    source = with_head(tmp_path, family, other, says, fmt)
    words = (source, "--scale", 2, "--train-length", TRAIN_LENGTH, "--no-verify", "--out")
    line = refused(*words, tmp_path / "out")
    assert repr(names(family)[0]) in line
    assert "remove it" in line
    remedy = f"--set {TIE}=false"
    assert (remedy in line) == (family != "mosaic_gpt")


@pytest.mark.version
@pytest.mark.parametrize("family", ["jais", "jina_bert", "mosaic_bert"])
@torch.no_grad()
def test_the_remedy_uses_it(tmp_path: Path, family: str) -> None:
    source, out = with_head(tmp_path, family, other), tmp_path / "out"
    convert(source, out, scale=2.0, train_length=TRAIN_LENGTH, overrides={TIE: False})
    export(out)
    ids = tiny.token_ids(2, 9)
    mask = np.ones_like(ids)
    _, tensors = tiny.read(out)
    right = (REFERENCES | ENCODERS)[family].logits(config_of(out), tensors, ids)
    auto = AutoModelForMaskedLM if family in ENCODERS else AutoModelForCausalLM
    assert_close(load(out, auto)(torch.from_numpy(ids)).logits.numpy(), right)
    if family in ENCODERS:
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        assert_close(Engine(out / "model.onnx").session.run(["logits"], inputs)[0], right)
    else:
        assert_close(Engine(out / "model.onnx").step(ids, mask)[0], right)


def only_listed(folder: Path) -> None:
    """One shard without a head, and an index that lists it: as some programs merge and save."""
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight", None))
    [file] = [*folder.glob("model.safetensors"), *folder.glob("pytorch_model.bin")]
    shard = file.rename(file.with_stem(f"{file.stem}-00001-of-00001"))
    stored = load_file(shard) if shard.suffix == ".safetensors" else torch.load(shard)
    places = dict.fromkeys([*stored, "lm_head.weight"], shard.name)
    write_json(folder / f"{file.name}.index.json", {"metadata": {}, "weight_map": places})


@pytest.mark.version
@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        ("bloom", {}, {}),
        ("bloom", {}, {"link": "hard"}),
        ("bloom", {}, {"dtype": "bf16"}),
        ("bloom", {"fmt": "bin"}, {}),
        ("bloom", {"head": "SequenceClassification"}, {}),
        ("llama", {TIE: True}, {}),
    ],
)
def test_a_tied_head_that_only_the_index_has(
    make_source: MakeSource, tmp_path: Path, name: str, options: dict[str, Any], how: dict[str, Any]
) -> None:
    source, out = make_source(name, **options), tmp_path / "out"
    only_listed(source)
    inspect(source)
    convert(source, out, scale=2.0, **how)
    for path in out.glob("*.index.json"):  # a single .bin gets none
        stored = {key for file in out.glob("*.safetensors") for key in load_file(file)}
        assert json.loads(path.read_text(encoding="utf-8"))["weight_map"].keys() == stored


@pytest.mark.version
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_a_head_of_its_own_that_only_the_index_has(
    make_source: MakeSource, refused: Refused, tmp_path: Path, fmt: Format
) -> None:
    source = make_source("bloom", {TIE: False}, fmt=fmt)
    only_listed(source)
    line = refused(source, "--scale", 2, "--out", tmp_path / "out")
    assert "'lm_head.weight'" in line
