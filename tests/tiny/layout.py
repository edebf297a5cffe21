"""What every tiny checkpoint is made of: random values, a tokenizer, weight files in every storage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

Tensors = dict[str, torch.Tensor]
Head = Literal[
    "CausalLM", "MaskedLM", "Model", "SequenceClassification", "TokenClassification", "QuestionAnswering"
]
Format = Literal["safetensors", "bin"]

HEAD_DIM = 8
VOCAB_SIZE = 97
UNKNOWN, START, END, PAD = range(4)
SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL_IDS = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}


class Factory(Protocol):
    """What writes a family's checkpoint."""

    def __call__(
        self,
        folder: Path,
        num_heads: int = 4,
        *,
        head: Head | None = None,
        dtype: torch.dtype = torch.float32,
        fmt: Format = "safetensors",
        sharded: bool = False,
        prefix: bool = True,
        seed: int = 0,
        **config_changes: Any,
    ) -> Path:
        """Writes a checkpoint into ``folder``, made if need be, and returns the folder.

        Args:
            folder: where to write.
            num_heads: attention heads, of 8 channels each.
            head: the class to write, as it ends in transformers: ``"CausalLM"``, ..., or
                ``"Model"`` for the trunk alone, whose tensors have no prefix (as ``transformer.``);
                by default the language model.
            dtype: of the stored weights.
            fmt: ``"safetensors"``, or ``"bin"`` for pickled state dicts as in older repositories,
                with a tied head stored as a second name of the embedding.
            sharded: several files and an index instead of one file.
            prefix: False strips the trunk's prefix and leaves a tied head out, which is how
                BigScience's own repositories name the tensors of BloomForCausalLM.
            seed: of the weights.
            config_changes: keys of the config; an object's keys are merged into it.
        """
        ...


@dataclass(frozen=True)
class Random:
    """Values that depend on a tensor's name, its shape and a seed alone, in float32.

    Matrices have a gain of 1.5: scores then vary by about two between keys, so that attention is
    peaked but no head is stuck to one key. Norms are near 1, biases are not zero.
    """

    seed: int
    prefix: str
    """Left out of the names, so that a trunk alone has the values that it has below a head."""

    def __call__(
        self, name: str, *shape: int, fan_in: int | None = None, scale: float | None = None
    ) -> torch.Tensor:
        """A tensor [shape].

        Args:
            fan_in: inputs of a matrix that is not stored as [outputs, inputs].
            scale: standard deviation of a matrix that is no linear map, such as the embeddings.
        """
        entropy = [self.seed, *name.removeprefix(self.prefix).encode()]
        values: torch.Tensor = torch.from_numpy(
            np.random.default_rng(entropy).standard_normal(shape, dtype=np.float32)
        )
        if scale is not None:
            return scale * values
        if name.endswith("bias"):
            return 0.2 * values
        if len(shape) == 1:
            return 1.0 + 0.2 * values
        return 1.5 * values / math.sqrt(fan_in or shape[1])


class Description(Protocol):
    """A module that describes the tiny checkpoint of an architecture that transformers does not have."""

    PREFIX: str
    """Of the trunk's tensors in a model with a head: ``"model."``."""
    HEADS: Mapping[str, str]
    """Head -> the name of the original's class, in ``architectures``; the language model's first."""

    def config(self, num_heads: int) -> dict[str, Any]:
        """config.json in the original's own keys and spellings."""
        ...

    def tensors(self, config: dict[str, Any], head: str, random: Random) -> Tensors:
        """Name -> float32 values, as the original stores them."""
        ...


def factory(described: Any) -> Factory:
    """What writes the checkpoints that a module (see ``Description``) describes."""

    def write(
        folder: Path,
        num_heads: int = 4,
        *,
        head: Head | None = None,
        dtype: torch.dtype = torch.float32,
        fmt: Format = "safetensors",
        sharded: bool = False,
        prefix: bool = True,
        seed: int = 0,
        **config_changes: Any,
    ) -> Path:
        chosen = head or next(iter(described.HEADS))
        config = merged(described.config(num_heads), config_changes)
        if described.HEADS[chosen] is not None and "architectures" not in config_changes:
            config["architectures"] = [described.HEADS[chosen]]
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        state = described.tensors(config, chosen, Random(seed, described.PREFIX))
        state = {name: tensor.to(dtype) for name, tensor in state.items()}
        if not prefix or chosen == "Model":
            state = {name.removeprefix(described.PREFIX): tensor for name, tensor in state.items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        tokenizer(folder)
        write_weights(folder, state, fmt, sharded)
        return folder

    return write


def merged(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``changes``; where both have an object, its keys are merged."""
    result = dict(config)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def head_tensors(hidden_size: int, head: str, labels: int, random: Random) -> Tensors:
    """The tensors of a decoder's classification heads, as transformers names them."""
    if head == "SequenceClassification":
        return {"score.weight": random("score.weight", labels, hidden_size)}
    name = {"TokenClassification": "classifier", "QuestionAnswering": "qa_outputs"}.get(head)
    if name is None:
        return {}
    outputs = labels if name == "classifier" else 2
    return {
        f"{name}.weight": random(f"{name}.weight", outputs, hidden_size),
        f"{name}.bias": random(f"{name}.bias", outputs),
    }


def tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: words w4 to w96, and four special tokens."""
    specials = list(SPECIAL_TOKENS.values())
    words = specials + [f"w{index}" for index in range(len(specials), VOCAB_SIZE)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tok = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok.add_special_tokens(specials)
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
    tok.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        **SPECIAL_TOKENS,
    }
    write_json(folder / "tokenizer_config.json", settings)


def without_aliases(tensors: Tensors) -> Tensors:
    """``tensors`` less every name whose storage an earlier name has."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[tensor.data_ptr()] == name}


def write_weights(folder: Path, tensors: Tensors, fmt: str, sharded: bool) -> None:
    stem, suffix = ("model", "safetensors") if fmt == "safetensors" else ("pytorch_model", "bin")
    shards = split(tensors) if sharded else [tensors]
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        count = f"-{number:05d}-of-{len(shards):05d}" if sharded else ""
        file = f"{stem}{count}.{suffix}"
        weight_map.update(dict.fromkeys(shard, file))
        if fmt == "safetensors":
            save_file(shard, folder / file, metadata={"format": "pt"})
        else:
            torch.save(shard, folder / file)
    if sharded:
        metadata = {"total_size": count_bytes(without_aliases(tensors))}
        index = {"metadata": metadata, "weight_map": weight_map}
        write_json(folder / f"{stem}.{suffix}.index.json", index)


def split(tensors: Tensors) -> list[Tensors]:
    """About three shards in the order of ``tensors``; names of one storage stay together."""
    limit = count_bytes(tensors) // 3
    shards: list[Tensors] = [{}]
    home: dict[int, Tensors] = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in home:
            if shards[-1] and count_bytes({**shards[-1], name: tensor}) > limit:
                shards.append({})
            home[tensor.data_ptr()] = shards[-1]
        home[tensor.data_ptr()][name] = tensor
    return shards


def count_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
