"""What every tiny checkpoint is made of: random values, a tokenizer, weight files in every storage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

PUBLISHED = Path(__file__).parents[1] / "published"

Tensors = dict[str, torch.Tensor]
Head = Literal[
    "CausalLM",
    "MaskedLM",
    "Model",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
]
Format = Literal["safetensors", "bin"]

HEAD_DIM = 8
VOCAB_SIZE = 97
UNKNOWN, START, END, PAD = range(4)
SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL_IDS = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}


@dataclass(frozen=True)
class Wanted:
    """What a checkpoint is to be."""

    num_heads: int = 4
    """Attention heads, of 8 channels each."""
    head: Head | None = None
    """The class to write, as it ends in transformers: ``"CausalLM"``, ..., or ``"Model"`` for the trunk
    alone, whose tensors have no prefix (as ``transformer.``); by default the language model."""
    dtype: torch.dtype = torch.float32
    """Of the stored weights."""
    fmt: Format = "safetensors"
    """``"bin"`` is for pickled state dicts as in older repositories, with a tied head stored as a second name
    of the embedding."""
    sharded: bool = False
    """Several files and an index instead of one file."""
    prefix: bool = True
    """False strips the trunk's prefix and leaves a tied head out, which is how BigScience's own repositories
    name the tensors of BloomForCausalLM."""
    seed: int = 0
    """Of the weights."""


Factory = Callable[..., Path]
"""What writes a checkpoint of a family; see ``factory``."""
OPTIONS = {field.name for field in fields(Wanted)}


def factory(make: Callable[[Path, Wanted, dict[str, Any]], None]) -> Factory:
    """What writes a family's checkpoints, given what writes config.json and the weights into a folder.

    It takes the folder, the fields of ``Wanted`` and, as other keywords, changes of the config: an object's
    keys are merged into it. It makes the folder if need be, and returns it.
    """

    def write(folder: Path, num_heads: int = 4, **options: Any) -> Path:
        wanted = Wanted(num_heads, **{name: options.pop(name) for name in OPTIONS & options.keys()})
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, wanted, options)
        tokenizer(folder)
        return folder

    return write


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


class State(Tensors):
    """The tensors of a checkpoint, added one by one.

    Args:
        random: gives their values.
        trunk: how the names of the trunk's tensors begin.
    """

    def __init__(self, random: Random, trunk: str) -> None:
        super().__init__()
        self.random, self.trunk = random, trunk

    def embeddings(self, name: str, rows: int, width: int) -> None:
        """The matrix of an embedding in the trunk."""
        full = f"{self.trunk}{name}.weight"
        self[full] = self.random(full, rows, width, scale=0.3)

    def add(self, name: str, *shape: int, bias: bool = True) -> None:
        """A norm [width] or a linear map [outputs, inputs] in the trunk, perhaps with a bias."""
        self.above(f"{self.trunk}{name}", *shape, bias=bias)

    def above(self, name: str, *shape: int, bias: bool = True) -> None:
        """The same above the trunk."""
        for kind, sizes in (("weight", shape), ("bias", shape[:1]))[: 1 + bias]:
            self[f"{name}.{kind}"] = self.random(f"{name}.{kind}", *sizes)

    def classifier(self, head: str, width: int, config: Mapping[str, Any]) -> None:
        """The layer of a classification head, as transformers names it."""
        labels = config.get("num_labels", 2)
        if head == "SequenceClassification":
            self.above("score", labels, width, bias=False)
        elif head == "TokenClassification":
            self.above("classifier", labels, width)
        elif head == "QuestionAnswering":
            self.above("qa_outputs", 2, width)


MakeTensors = Callable[[dict[str, Any], str, Random], Tensors]
"""Config, head and random values -> name -> floating point values, as the original stores them."""
Describe = Callable[[dict[str, Any], str, State], None]
"""Adds the tensors of a config and a head, as the original stores them."""


@dataclass(frozen=True)
class Tiny:
    """The tiny checkpoints of a family, and what the tests of all families need to know of them."""

    write: Factory
    tensors: MakeTensors
    """The tensors of any config of the family, of published sizes too."""
    layers: str
    """Key of config.json that holds the number of layers."""
    queries: tuple[str, ...]
    """How the names of the linear layers end that get an adapter; the first of them computes the queries."""
    kv_heads: int = 4
    """Heads of the keys and values where there are 4 of the queries."""
    dropout: Mapping[str, Any] | None = None
    """Config changes that drop half of a decoder's attention weights in training; None if it drops none."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options that change the network, but not its number of heads: name -> config changes."""
    beyond_stock: tuple[str, ...] = ()
    """Variants that transformers' own class computes wrongly."""
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other layers of an encoder, tested as thoroughly as the first one: name -> config changes."""
    others: Mapping[str, Tiny] = field(default_factory=dict)
    """Other checkpoints of the same family, tested as thoroughly as the first one: name -> checkpoints."""
    tied: bool | None = None
    """Whether the head is the embedding; None where ``tie_word_embeddings`` decides, by default true."""
    refused_ties: tuple[bool, ...] = ()
    """Values of ``tie_word_embeddings`` that the family refuses."""
    bert: bool = False
    """Whether an encoder has BERT's modules: token types, dropout, and its prediction head."""
    zeroes_padding: bool = False
    """Whether an encoder returns zeros for padded tokens."""


def published(family: str, name: str, **changes: Any) -> dict[str, Any]:
    """config.json of a checkpoint in ``published/``, changed and with few tokens; None removes a key."""
    entries = json.loads((PUBLISHED / f"{family}.json").read_text(encoding="utf-8"))
    [entry] = [entry for entry in entries if entry["id"] == name]
    config = merged({**entry["config"], "pad_token_id": PAD, "vocab_size": VOCAB_SIZE}, changes)
    return {key: value for key, value in config.items() if value is not None or key not in changes}


def classes(original: str, language_model: str = "CausalLM", **others: str) -> dict[str, str]:
    """Head -> the original's class, as ``architectures`` names it; the language model's first."""
    heads = (language_model, "SequenceClassification", "TokenClassification", "QuestionAnswering")
    return {**{head: f"{original}For{head}" for head in heads}, "Model": f"{original}Model", **others}


def own(
    trunk: str,
    heads: Mapping[str, str],
    config: Callable[[int], dict[str, Any]],
    describe: Describe,
    **facts: Any,
) -> Tiny:
    """The checkpoints of an architecture that transformers does not have.

    Args:
        trunk: how the names of the trunk's tensors begin in a model with a head: ``"model."``.
        heads: see ``classes``.
        config: number of heads -> config.json in the original's own keys and spellings.
        describe: see ``Describe``.
        facts: the other fields of ``Tiny``.
    """

    def tensors(config: dict[str, Any], head: str, random: Random) -> Tensors:
        state = State(random, trunk)
        describe(config, head, state)
        return state

    def make(folder: Path, wanted: Wanted, changes: dict[str, Any]) -> None:
        chosen = wanted.head or next(iter(heads))
        settings = merged(config(wanted.num_heads), {"architectures": [heads[chosen]], **changes})
        settings["torch_dtype"] = str(wanted.dtype).removeprefix("torch.")
        state = cast(tensors(settings, chosen, Random(wanted.seed, trunk)), wanted.dtype)
        if not wanted.prefix or chosen == "Model":
            state = {name.removeprefix(trunk): tensor for name, tensor in state.items()}
        write_json(folder / "config.json", settings)
        write_weights(folder, state, wanted.fmt, wanted.sharded)

    return Tiny(write=factory(make), tensors=tensors, **facts)


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """``tensors`` with those of floating point numbers in ``dtype``."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }


def merged(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``changes``; where both have an object, its keys are merged."""
    result = dict(config)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def tokenizer(folder: Path, size: int = VOCAB_SIZE) -> None:
    """Writes tokenizer.json and tokenizer_config.json: four special tokens, then words w4, w5, ..."""
    specials = list(SPECIAL_TOKENS.values())
    words = specials + [f"w{index}" for index in range(len(specials), size)]
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


def write_weights(
    folder: Path, tensors: Tensors, fmt: str, sharded: bool, which: str = "-{number:05d}-of-{count:05d}"
) -> None:
    """Writes tensors in one file, or in several and an index.

    Args:
        which: how the names of several files go on after ``model`` or ``pytorch_model``.
    """
    stem, suffix = ("model", "safetensors") if fmt == "safetensors" else ("pytorch_model", "bin")
    shards = split(tensors) if sharded else [tensors]
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        count = which.format(number=number, count=len(shards)) if sharded else ""
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


def change_tensors(folder: Path, change: Callable[[Tensors], Any], **metadata: str) -> Path:
    """Changes the stored tensors of a checkpoint of one file, and returns its folder."""
    [file] = [*folder.glob("model.safetensors"), *folder.glob("pytorch_model.bin")]
    safe = file.suffix == ".safetensors"
    tensors = load_file(file) if safe else torch.load(file)
    change(tensors)
    if safe:
        save_file(tensors, file, {"format": "pt", **metadata})
    else:
        torch.save(tensors, file)
    return folder


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
