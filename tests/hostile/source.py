"""A valid source of a few bytes: a config from the corpus, a card, a tokenizer, and three small tensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
CONFIGS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(CORPUS.glob("*.json"))
}
"""Family -> a config.json with the keys of real checkpoints."""
CARD = "---\nlicense: mit\nlanguage:\n- en\nbase_model: a/b\n---\n# Tiny\n"
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 64,
    "pad_token": "<pad>",
}
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"<pad>": 0}}}
GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "max_length": 20}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
# Code that no run may execute.
CODE = "import sys\nsys.audit('hostile.executed')\nopen('../outside/ran', 'w')\nclass Model: pass\n"
CODE_FILES = (
    "modeling_evil.py",
    "tokenization_evil.py",
    "configuration_evil.py",
    "evil.py",
    "setup.py",
    "conftest.py",
)

Header = dict[str, Any]
TENSORS: dict[str, list[int]] = {"wte.weight": [4, 2], "h.0.ln.weight": [2], "ln_f.bias": [2]}


def write(folder: Path, family: str = "bloom") -> None:
    """Writes an unsharded source, with code files that a hostile source would contain."""
    folder.mkdir(parents=True)
    texts = {
        "config.json": json.dumps(CONFIGS[family]),
        "README.md": CARD,
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG),
        "tokenizer.json": json.dumps(TOKENIZER),
        "generation_config.json": json.dumps(GENERATION_CONFIG),
        "LICENSE": "MIT",
        **dict.fromkeys(CODE_FILES, CODE),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(safetensors(header(TENSORS)))


def header(shapes: dict[str, list[int]]) -> Header:
    """The header of a file with these float32 tensors, one after another."""
    entries: Header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * _product(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    return entries


def data_bytes(entries: Header) -> int:
    """The number of bytes of tensors that a header describes."""
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return max(ends, default=0)


def safetensors(entries: Header) -> bytes:
    """A safetensors file with this header and zeros as data."""
    return framed(json.dumps(entries).encode(), data_bytes(entries))


def framed(raw: bytes, size: int, length: int | None = None) -> bytes:
    """A safetensors file of raw header bytes and ``size`` zeros; ``length`` overrides the header's length."""
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(size)


def shard(folder: Path) -> dict[str, Any]:
    """Splits the weights into two shards with an index; returns the index."""
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    names = list(TENSORS)
    for number, part in enumerate((names[:1], names[1:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        (folder / file).write_bytes(safetensors(header({name: TENSORS[name] for name in part})))
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 48}, "weight_map": weight_map}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _product(shape: list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
