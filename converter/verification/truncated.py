"""Writes truncated folders: a checkpoint's small files, its first layers, and some rows of its vocabulary.

They load as the whole checkpoint does, and take the memory of a few layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converter.config import Config
from converter.source.checkpoint import ITEM_BYTES, SAFETENSORS, Tensor, read_metadata
from converter.source.jsonfile import read_object
from converter.source.source import CONFIG
from converter.source.tokenizer import TEMPLATE
from converter.verification.imported import ImportedRepository, build
from converter.weights.rewrite import FLOATS, header

LAYERS, ROWS, TOKENS = 2, 2, 24
# Limits on memory, in elements. If two layers have more than LARGEST_PAIR, only one is taken. If it has more
# than LARGEST_FLOAT32, it is not run in float32, but in its own dtype.
LARGEST_PAIR, LARGEST_FLOAT32 = 32_000_000, 256_000_000
BLOCK = 1 << 24
"""Bytes that are copied at a time."""
UNSCALED = ("alibi_scaling", "logit_scale")
"""Keys that a truncated folder has no values for. transformers' own MPT class ignores ``logit_scale``."""


@dataclass(frozen=True)
class TruncatedCheckpoint:
    """Which layers and tokens of a converted repository a truncated folder has."""

    imported: ImportedRepository
    layers: int
    """How many layers, from the first."""
    total: int
    """How many layers the model has."""
    tokens: tuple[int, ...]
    """Ids in the full vocabulary, ascending; in a truncated folder they are 0, 1, 2, ..., the last to pad."""
    dtype: torch.dtype
    """In which its model is run."""

    @classmethod
    def of(cls, imported: ImportedRepository) -> TruncatedCheckpoint:
        """Chooses them for a repository whose tensors are known to fit its model."""
        sizes: dict[int, int] = {}
        for tensor in imported.model.checkpoint.tensors.values():
            layer = imported.layer_of(tensor.name)
            if layer is not None:
                sizes[layer] = sizes.get(layer, 0) + math.prod(tensor.shape)
        pair = sum(size for layer, size in sizes.items() if layer < LAYERS)
        layers = min(LAYERS, len(sizes)) if pair <= LARGEST_PAIR else 1
        vocabulary = imported.build_config().vocab_size
        tokens = tuple(range(0, vocabulary, max(1, vocabulary // (ROWS * TOKENS))))[: ROWS * TOKENS]
        large = sum(size for layer, size in sizes.items() if layer < layers) > LARGEST_FLOAT32
        stored = FLOATS.get(imported.model.checkpoint.dtypes[0], torch.float32)
        return cls(imported, layers, len(sizes), tokens, stored if large else torch.float32)

    @property
    def which(self) -> str:
        """The layers, as messages call them."""
        if self.total == 1:
            return "the only layer"
        first = "the first layer" if self.layers == 1 else f"the first {self.layers} layers"
        return f"{first} of {self.total}"

    @property
    def ids(self) -> torch.Tensor:
        """The test's tokens in the truncated vocabulary, none for padding, int64 [ROWS, TOKENS]."""
        return torch.arange(ROWS * TOKENS).remainder(max(1, len(self.tokens) - 1)).view(ROWS, TOKENS)

    def settings(self, config: Config) -> dict[str, Any]:
        """The truncated form of a config with the template's keys, the result's or the source's."""
        changed = {key: None for key in config if key.endswith("_token_id") or key in UNSCALED}
        types = config.get("layer_types")
        return {
            **config,
            **changed,
            **({"layer_types": types[: self.layers]} if isinstance(types, list) else {}),
            self.imported.model.family.sizes[2]: self.layers,
            "vocab_size": len(self.tokens),
            "pad_token_id": len(self.tokens) - 1,
        }

    def write_result(self, folder: Path) -> Path:
        """Writes the result's folder and returns its weights' file. What is not truncated is linked.

        Files keep their names, so one that transformers reads in the place of another is seen, and the index
        and the weights' header keep their metadata. The code is this tool's own, which is equal to the
        repository's; a conversion writes it.
        """
        imported, checkpoint = self.imported, self.imported.model.checkpoint
        file = next(iter(checkpoint.files))
        skipped = {CONFIG, checkpoint.index, *checkpoint.files}
        for path in imported.model.folder.iterdir():
            if path.is_file() and path.name not in skipped and path.suffix != ".py":
                (folder / path.name).symlink_to(path.resolve())
        for name in (*imported.model.templates, TEMPLATE):
            (folder / name).symlink_to(Path(imported.modeling.__file__ or "").with_name(name))
        write_json(folder / CONFIG, self.settings(imported.model.result_config))
        tensors = self.cut()
        if checkpoint.index is not None:
            index = read_object(imported.model.folder / checkpoint.index)
            index["weight_map"] = {tensor.name: file for tensor, _ in tensors}
            write_json(folder / checkpoint.index, index)
        metadata = read_metadata(imported.model.folder / file) or {}
        with (folder / file).open("wb") as target:
            shapes = {tensor.name: (tensor.dtype, shape) for tensor, shape in tensors}
            target.write(header(shapes, metadata))
            for tensor, shape in tensors:
                for block in self.blocks(tensor, shape):
                    target.write(block)
        return folder / file

    def write_source(self, folder: Path, config: Config, weights: Path) -> None:
        """Writes the source's folder; its tensors have the names that they have in the result."""
        write_json(folder / CONFIG, self.settings(config))
        (folder / SAFETENSORS).symlink_to(weights)

    def cut(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The stored tensors of a truncated folder, and their shapes in it; the widest first, as aligned."""
        imported = self.imported
        config = imported.build_config(**self.settings(imported.model.result_config))
        model = build(imported.architecture, config, "meta")
        shapes = {
            imported.stored_name(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()
        }
        found = [
            (tensor, shapes.get(tensor.name, tensor.shape))
            for tensor in imported.model.checkpoint.tensors.values()
            if (imported.layer_of(tensor.name) or 0) < self.layers
        ]
        return sorted(found, key=lambda each: -ITEM_BYTES[each[0].dtype])

    def blocks(self, tensor: Tensor, shape: tuple[int, ...]) -> Iterator[bytes]:
        """The bytes of a stored tensor, or else of its rows for the test's tokens."""
        size = tensor.end - tensor.start
        spans = [(0, size)]
        if shape != tensor.shape:
            row = size // tensor.shape[0]
            spans = [(row * token, row * (token + 1)) for token in self.tokens]
        with (self.imported.model.folder / tensor.file).open("rb") as file:
            for start, end in spans:
                file.seek(tensor.offset + start)
                yield from (file.read(min(BLOCK, end - at)) for at in range(start, end, BLOCK))


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
