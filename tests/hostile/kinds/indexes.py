"""The index of a sharded checkpoint."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import mutate
from tests.hostile.source import shard, write_index

INDEX = "model.safetensors.index.json"
NAME = "wte.weight"


def placed(file: Any) -> Any:
    """An index that places the first tensor in another file."""

    def make(folder: Path, rng: Random) -> None:
        index = shard(folder)
        index["weight_map"][NAME] = file
        write_index(folder, index)

    return make


def raw(content: bytes) -> Any:
    """An index with this content."""

    def make(folder: Path, rng: Random) -> None:
        shard(folder)
        (folder / INDEX).write_bytes(content)

    return make


def good(folder: Path, rng: Random) -> None:
    shard(folder)


def linked(folder: Path, rng: Random) -> None:
    """A shard that is a link to a file outside."""
    shard(folder)
    path = folder / "model-00001-of-00002.safetensors"
    path.rename(folder.parent / "outside/shard.safetensors")
    path.symlink_to("../outside/shard.safetensors")


def missing(folder: Path, rng: Random) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def surplus(folder: Path, rng: Random) -> None:
    """A shard with tensors that the index does not list."""
    index = shard(folder)
    del index["weight_map"]["ln_f.bias"]
    write_index(folder, index)


def itself(folder: Path, rng: Random) -> None:
    """An index that names itself as a shard."""
    index = shard(folder)
    (folder / "x.safetensors").symlink_to(INDEX)
    index["weight_map"][NAME] = "x.safetensors"
    write_index(folder, index)


def crowd(folder: Path, rng: Random) -> None:
    """An index of a hundred thousand missing shards."""
    write_index(folder, {"weight_map": {f"t{number}": f"{number}.safetensors" for number in range(100_000)}})
    (folder / "model.safetensors").unlink()


EXAMPLES: dict[str, Any] = {
    "good": good,
    "../": placed("../outside/secret.safetensors"),
    "absolute": placed("/etc/passwd"),
    "absolute, suffix": placed("/outside/x.safetensors"),
    "..": placed(".."),
    "dot": placed("./model-00001-of-00002.safetensors"),
    "folder": placed("sub/model.safetensors"),
    "backslash": placed("..\\outside\\x.safetensors"),
    "null byte": placed("a\x00.safetensors"),
    "line break": placed("a\nb.safetensors"),
    "surrogate": placed("\ud800.safetensors"),
    "300 letters": placed("x" * 300 + ".safetensors"),
    "1 MB": placed("x" * (1 << 20) + ".safetensors"),
    "the suffix alone": placed(".safetensors"),
    "the config": placed("config.json"),
    "code": placed("modeling_evil.py"),
    "a pickle": placed("pytorch_model.bin"),
    "a number": placed(1),
    "null": placed(None),
    "a list": placed(["model-00001-of-00002.safetensors"]),
    "missing shard": missing,
    "tensors not listed": surplus,
    "link outside": linked,
    "itself": itself,
    "100000 shards": crowd,
    "no map": raw(b"{}"),
    "an empty map": raw(b'{"weight_map": {}}'),
    "a map that is a list": raw(b'{"weight_map": []}'),
    "a list as a whole": raw(b"[]"),
    "empty": raw(b""),
    "deep": raw(b'{"weight_map":' * 100_000),
    "no UTF-8": raw(b"\xff\xfe{}"),
    "a key twice": raw(b'{"weight_map": {}, "weight_map": {"a": "b"}}'),
    "empty lists": raw(b'{"weight_map": [' + b"[]," * (5 << 20) + b"[]]}"),
    "40 MB": raw(b'{"weight_map": "' + b"x" * (40 << 20) + b'"}'),
    "total_size of text": raw(b'{"metadata": {"total_size": "x"}, "weight_map": {"a": "../x.safetensors"}}'),
}


def vary(folder: Path, rng: Random) -> None:
    index = shard(folder)
    content = mutate.dumps(index)
    if rng.random() < 0.6:
        content = mutate.dumps(
            mutate.worse(index, rng, [("weight_map", {}), (NAME, "../outside/secret.json")])
        )
    else:
        content = mutate.worse_bytes(content, rng)
    (folder / INDEX).write_bytes(content)
    if rng.random() < 0.3:
        path = rng.choice(sorted(folder.glob("*.safetensors")))
        path.write_bytes(mutate.worse_bytes(path.read_bytes(), rng))
