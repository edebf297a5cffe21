"""Headers of safetensors files."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import mutate
from tests.hostile.source import TENSORS, data_bytes, framed, header

WEIGHTS = "model.safetensors"
NAME = "wte.weight"


def raw(content: bytes) -> Any:
    """A complete file with this content."""

    def make(folder: Path, rng: Random) -> None:
        (folder / WEIGHTS).write_bytes(content)

    return make


def entry(**changes: Any) -> Any:
    """The first tensor's entry with some values changed, and the zeros that it asks for, at most 1 kB."""
    entries = header(TENSORS)
    entries[NAME] = {**entries[NAME], **changes}
    return raw(framed(json.dumps(entries).encode(), data_bytes(header(TENSORS))))


def named(name: str) -> Any:
    """A tensor with this name."""
    return raw(framed(json.dumps({name: header(TENSORS)[NAME]}).encode(), 32))


def sparse(folder: Path, rng: Random) -> None:
    """A sparse file of an exabyte, or as large as the file system allows."""
    size = 1 << 43
    with (folder / WEIGHTS).open("wb") as file:
        content = json.dumps({NAME: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + size)


def slopes(folder: Path, rng: Random) -> None:
    """Stored slopes of 2 GB."""
    size = 1 << 31
    (folder / "config.json").write_text(json.dumps(dict(json.loads((folder / "config.json").read_text()))))
    from tests.hostile.source import CONFIGS

    (folder / "config.json").write_text(json.dumps(CONFIGS["jais"]))
    name = "transformer.relative_pe.slopes"
    content = json.dumps({name: {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + size)


GOOD = json.dumps(header(TENSORS)).encode()
BYTES = data_bytes(header(TENSORS))
MANY = b"{" + b",".join(b'"a%d":{}' % number for number in range(300_000)) + b"}"
EXAMPLES = {
    "empty": raw(b""),
    "seven bytes": raw(b"\0" * 7),
    "length 0": raw(bytes(8)),
    "length beyond the file": raw(framed(GOOD, BYTES, length=1 << 20)),
    "length 2^64 - 1": raw(framed(GOOD, BYTES, length=(1 << 64) - 1)),
    "length 2^63": raw(framed(GOOD, BYTES, length=1 << 63)),
    "length one less": raw(framed(GOOD, BYTES, length=len(GOOD) - 1)),
    "length one more": raw(framed(GOOD, BYTES, length=len(GOOD) + 1)),
    "a header of 40 MB": raw(framed(b"{" + b" " * (40 << 20) + b"}", 0)),
    "a header of empty lists": raw(framed(b'{"a":[' + b"[]," * (8 << 20) + b"[]]}", 0)),
    "300000 entries": raw(framed(MANY, 0)),
    "the last key twice": raw(framed(MANY[:-1] + b',"a299999":{}}', 0)),
    "the first key twice": raw(framed(MANY[:-1] + b',"a0":{}}', 0)),
    "a tensor twice": raw(
        framed(GOOD[:-1] + b"," + json.dumps({NAME: header(TENSORS)[NAME]}).encode()[1:], BYTES)
    ),
    "__metadata__ twice": raw(framed(GOOD[:-1] + b',"__metadata__":{}}', BYTES)),
    "__metadata__ no text": raw(framed(GOOD[:-1] + b',"__metadata__x":1}', BYTES)),
    "deep": raw(framed(b'{"a":' * 100_000, 0)),
    "endless number": raw(framed(b'{"a":{"shape":[' + b"9" * 100_000 + b"]}}", 0)),
    "a million dimensions": raw(
        framed(
            json.dumps(
                {NAME: {"dtype": "U8", "shape": [(1 << 63) - 1] * 300_000, "data_offsets": [0, 0]}}
            ).encode(),
            0,
        )
    ),
    "a list": raw(framed(b"[]", 0)),
    "null": raw(framed(b"null", 0)),
    "no UTF-8": raw(framed(b'{"\xff":1}', 0)),
    "half a surrogate pair": entry(**{"\ud800": 1}),
    "overlap": entry(data_offsets=[8, 40]),
    "hole": entry(shape=[3, 2], data_offsets=[0, 24]),
    "backwards": entry(data_offsets=[32, 0]),
    "negative": entry(data_offsets=[-32, 0]),
    "offset 2^63": entry(data_offsets=[0, 1 << 63]),
    "offset 10^30": entry(data_offsets=[0, 10**30]),
    "offset 1.5": entry(data_offsets=[0, 1.5]),
    "offset true": entry(data_offsets=[False, True], shape=[1], dtype="U8"),
    "three offsets": entry(data_offsets=[0, 32, 64]),
    "no offsets": entry(data_offsets=None),
    "negative shape": entry(shape=[-4, -2]),
    "shape beyond": entry(shape=[1 << 62, 8]),
    "shape as text": entry(shape="42"),
    "dtype unknown": entry(dtype="F128"),
    "dtype a list": entry(dtype=["F32"]),
    "dtype long": entry(dtype="F" * 100_000),
    "dtype other": entry(dtype="F16"),
    "an entry that is a list": raw(framed(b'{"a":[]}', 0)),
    "name with a line break": named("a\nerror: forged"),
    "name with an escape": named("\x1b[2J\x07"),
    "name with a surrogate": named("\ud800"),
    "name with a null": named("a\x00b"),
    "name right to left": named("\u202egnp.exe"),
    "name of 1 MB": named("x" * (1 << 20)),
    "name empty": named(""),
    "name a path": named("../../outside/x"),
    "no tensors": raw(framed(b"{}", 0)),
    "metadata alone": raw(framed(b'{"__metadata__":{"format":"pt"}}', 0)),
    "blanks around": raw(framed(b" \n" + GOOD + b"   ", BYTES)),
    "bytes at the end": raw(framed(GOOD, BYTES + 1)),
    "a byte short": raw(framed(GOOD, BYTES - 1)),
    "8 TB, sparse": sparse,
    "slopes of 2 GB": slopes,
    "a pickle": raw(b"\x80\x02cos\nsystem\n(S'touch ran'\ntR."),
}


def vary(folder: Path, rng: Random) -> None:
    entries = header(TENSORS)
    if rng.random() < 0.5:
        content = framed(mutate.dumps(mutate.worse(entries, rng)), BYTES)
    else:
        content = mutate.worse_bytes(framed(GOOD, BYTES), rng)
    (folder / WEIGHTS).write_bytes(content)
