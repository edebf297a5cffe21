"""Checkpoints with the vocabulary, heads, widths, dtype and files of published ones, but fewer layers.

``published/FAMILY.json`` has their configs, and ``tiny/NAME.py`` knows the names and shapes of the tensors.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch

from tests import tiny
from tests.tiny.layout import Format, Head, Random, Tensors, cast, tokenizer, write_json, write_weights

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "published").glob("*.json"))
}
"""Family -> its published checkpoints."""

LARGE = 1 << 20
"""Elements of a tensor whose values repeat."""
PERIOD = 7_999_993
"""A prime, so no two rows of a matrix have the same values."""


@dataclass(frozen=True)
class Repeated(Random):
    """As ``Random``, but the values of large tensors repeat: gigabytes then take seconds."""

    dtype: torch.dtype = torch.float32

    def __call__(
        self, name: str, *shape: int, fan_in: int | None = None, scale: float | None = None
    ) -> torch.Tensor:
        """See ``Random``; a tensor in ``dtype``."""
        size = torch.Size(shape).numel()
        if size < LARGE:
            return super().__call__(name, *shape, fan_in=fan_in, scale=scale).to(self.dtype)
        deviation = scale if scale is not None else 1.5 / (fan_in or shape[1]) ** 0.5
        pool = (deviation * normal(self.seed)).to(self.dtype)
        # Tensors of one shape begin at different values.
        pool = pool.roll(zlib.crc32(name.removeprefix(self.prefix).encode()) % PERIOD)
        result = torch.empty(size, dtype=self.dtype)
        for start in range(0, size, PERIOD):
            block = result[start : start + PERIOD]
            block.copy_(pool[: len(block)])
        return result.view(shape)


@cache
def normal(seed: int) -> torch.Tensor:
    """Standard normal values, float32 [PERIOD]."""
    return torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Stored:
    """How a published checkpoint is stored, beyond what its config says."""

    id: str
    """In ``published/``."""
    dtype: torch.dtype | None = None
    """Of the weights; None for the config's ``torch_dtype``."""
    fmt: Format = "safetensors"
    shard: str | None = None
    """How the names of shards go on after ``model`` or ``pytorch_model``; None for a single file."""
    prefix: bool = True
    """False if the trunk's tensors have no prefix, though there is a head."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json, beside the number of layers."""

    @property
    def family(self) -> str:
        """Name of the family."""
        return next(name for name, entries in PUBLISHED.items() if any(e["id"] == self.id for e in entries))

    def config(self, layers: int) -> dict[str, Any]:
        """The published config.json with that many layers."""
        [entry] = [entry for entry in PUBLISHED[self.family] if entry["id"] == self.id]
        key = next(key for key in ("num_hidden_layers", "n_layers", "n_layer") if key in entry["config"])
        return {**entry["config"], key: layers, **self.changes}

    def write(self, folder: Path, layers: int = 1) -> Path:
        """Writes the checkpoint into a new folder, which is returned."""
        config, checkpoint = self.config(layers), tiny.CHECKPOINTS[self.family]
        dtype = self.dtype or getattr(torch, config["torch_dtype"])
        head = head_of(config, tiny.FAMILY[self.family].kind)
        trunk = f"{tiny.FAMILY[self.family].base_prefix}."
        state: Tensors = cast(checkpoint.tensors(config, head, Repeated(0, trunk, dtype)), dtype)
        if not self.prefix or head == "Model":
            state = {name.removeprefix(trunk): tensor for name, tensor in state.items()}
        folder.mkdir(parents=True)
        write_json(folder / "config.json", config)
        tokenizer(folder, config["vocab_size"])
        write_weights(folder, state, self.fmt, self.shard is not None, self.shard or "")
        return folder


def head_of(config: dict[str, Any], kind: str) -> Head:
    """The head of the class that a config names; the language model's for a class of another name."""
    [name] = config.get("architectures") or [""]
    language_model: Head = "CausalLM" if kind == "decoder" else "MaskedLM"
    if name.endswith("LMHeadModel"):
        return language_model
    return next((head for head in get_args(Head) if name.endswith(head)), language_model)


FIVE = "-{number:05d}-of-{count:05d}"
"""How transformers names shards."""

SMALLEST = {
    "bloom": Stored("projecte-aina/FLOR-760M", torch.float16),
    "falcon": Stored("tiiuae/falcon-rw-1b (RefinedWebModel revision, by its fine-tunes)", fmt="bin"),
    "replit": Stored("replit/replit-code-v1_5-3b", fmt="bin", shard=FIVE),
    "refact": Stored("smallcloudai/Refact-1_6B-fim", torch.float32, fmt="bin"),
    "jais": Stored("inceptionai/Jais-family-256m"),
    "jina_bert": Stored("jinaai/jina-embeddings-v2-small-en", torch.float16),
    "mosaic_bert": Stored("zhihan1996/DNABERT-2-117M", fmt="bin"),
}
"""The smallest geometry of layouts; MPT and Baichuan are in ``LARGEST``."""
LARGEST = {
    # Tensors of BigScience's own repositories have no prefix.
    "bloom-7b1": Stored("bigscience/bloom-7b1 (by a fine-tune)", fmt="bin", shard=FIVE, prefix=False),
    "mpt-7b-storywriter": Stored("mosaicml/mpt-7b-storywriter", fmt="bin", shard=FIVE),
    "baichuan2-13b": Stored("baichuan-inc/Baichuan2-13B-Chat", fmt="bin", shard=FIVE),
}
