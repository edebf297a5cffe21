"""Tiny random checkpoints of the stock architectures, written as the real ones are.

``bloom``, ``mpt`` and ``falcon`` each write a folder with config.json, weights, a generation
config where the head has one, and a tokenizer. The models are transformers' own classes, so names,
shapes and configs are real; only the weights are new, and large enough that attention is peaked
and a wrong bias changes the logits by far more than rounding does. The same arguments give the
same weights on every version of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

Tensors = dict[str, torch.Tensor]
Head = Literal["CausalLM", "Model", "SequenceClassification", "TokenClassification", "QuestionAnswering"]

HEAD_DIM = 8
VOCAB_SIZE = 97
UNKNOWN, START, END, PAD = range(4)
SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


class Factory(Protocol):
    """What ``bloom``, ``mpt`` and ``falcon`` have in common."""

    def __call__(
        self,
        folder: Path,
        num_heads: int = 4,
        *,
        head: Head = "CausalLM",
        dtype: torch.dtype = torch.float32,
        fmt: Literal["safetensors", "bin"] = "safetensors",
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
                ``"Model"`` for the trunk alone, whose tensors have no ``transformer.`` prefix.
            dtype: of the stored weights.
            fmt: ``"safetensors"``, or ``"bin"`` for pickled state dicts as in older repositories,
                with a tied head stored as a second name of the embedding.
            sharded: several files and an index instead of one file.
            prefix: False strips ``transformer.`` and leaves a tied head out, which is how
                BigScience's own repositories name the tensors of BloomForCausalLM.
            seed: of the weights.
            config_changes: keys of the stock config.
        """
        ...


def bloom(folder: Path, num_heads: int = 4, **options: Any) -> Path:
    """A BLOOM; options as ``Factory`` lists them."""
    sizes = {"n_head": num_heads, "hidden_size": HEAD_DIM * num_heads, "n_layer": 2}
    return _write_checkpoint("Bloom", folder, sizes, **options)


def mpt(folder: Path, num_heads: int = 4, **options: Any) -> Path:
    """An MPT; options as ``Factory`` lists them.

    Transformers' class knows no ``attn_config.qk_ln``, ``expansion_ratio`` other than 4 or
    ``no_bias: false``, though checkpoints have them: for these the tensors are added or resized.
    """
    sizes = {"n_heads": num_heads, "d_model": HEAD_DIM * num_heads, "n_layers": 2}
    return _write_checkpoint("Mpt", folder, sizes, **options)


def falcon(folder: Path, num_heads: int = 4, **options: Any) -> Path:
    """A Falcon, by default as Falcon-RW is (ALiBi, sequential, biases); options as in ``Factory``."""
    sizes = {
        "num_attention_heads": num_heads,
        "hidden_size": HEAD_DIM * num_heads,
        "num_hidden_layers": 2,
        "alibi": True,
        "parallel_attn": False,
        "multi_query": False,
        "bias": True,
    }
    return _write_checkpoint("Falcon", folder, sizes, **options)


FACTORIES: dict[str, Factory] = {"bloom": bloom, "mpt": mpt, "falcon": falcon}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
    """config.json as a dict, and every tensor of the folder in float64, however it is stored."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    for file in sorted(folder.glob("*.bin")):
        tensors.update(torch.load(file, map_location="cpu", weights_only=True))
    return config, {name: tensor.double().numpy() for name, tensor in tensors.items()}


def token_ids(batch: int, length: int, seed: int = 0) -> NDArray[np.int64]:
    """Random tokens, none of them special, [batch, length]."""
    return np.random.default_rng(seed).integers(PAD + 1, VOCAB_SIZE, size=(batch, length))


def padding_mask(
    lengths: list[int], side: Literal["left", "right"], width: int | None = None
) -> NDArray[np.int64]:
    """[rows, width]: 1 for each of a row's real tokens, 0 for padding; as wide as the longest row."""
    width = max(lengths) if width is None else width
    columns = np.arange(width)
    if side == "left":
        return np.stack([columns >= width - length for length in lengths]).astype(np.int64)
    return np.stack([columns < length for length in lengths]).astype(np.int64)


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
    _write_json(folder / "tokenizer_config.json", settings)


def _write_checkpoint(
    camel: str,
    folder: Path,
    sizes: Mapping[str, Any],
    *,
    head: Head = "CausalLM",
    dtype: torch.dtype = torch.float32,
    fmt: Literal["safetensors", "bin"] = "safetensors",
    sharded: bool = False,
    prefix: bool = True,
    seed: int = 0,
    **config_changes: Any,
) -> Path:
    specials = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
    settings = {"vocab_size": VOCAB_SIZE, **specials, **sizes, **config_changes}
    config = getattr(transformers, f"{camel}Config")(**settings)
    model = getattr(transformers, f"{camel}Model" if head == "Model" else f"{camel}For{head}")(config)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data.copy_(_random(name, parameter.shape, seed))
    model.to(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    state: Tensors = model.state_dict()
    model.save_pretrained(folder, max_shard_size=_bytes(state) // 3 if sharded else 2 * _bytes(state))
    tokenizer(folder)

    added = _beyond_stock_mpt(config, state, seed) if camel == "Mpt" else {}
    if added or fmt == "bin" or not prefix:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        state = {**state, **added}
        if fmt == "safetensors" or not prefix:
            state = _without_aliases(state)
        if not prefix:
            state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
        _write_weights(folder, state, fmt, sharded)
    return folder


def _random(name: str, shape: torch.Size | tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor in float32 that depends on its name, shape and ``seed`` alone.

    Matrices have a gain of 1.5: scores then vary by about two between keys, so that attention is
    peaked but no head is stuck to one key. Norms are near 1, biases are not zero.
    """
    entropy = [seed, *name.removeprefix("transformer.").encode()]
    values: torch.Tensor = torch.from_numpy(
        np.random.default_rng(entropy).standard_normal(tuple(shape), dtype=np.float32)
    )
    if name.endswith("bias"):
        return 0.2 * values
    if len(shape) == 1:
        return 1.0 + 0.2 * values
    if name.endswith(("word_embeddings.weight", "wte.weight")):
        return 0.3 * values
    return 1.5 * values / math.sqrt(shape[1])


def _beyond_stock_mpt(config: Any, state: Tensors, seed: int) -> Tensors:
    """The tensors that an MPT with this config has and transformers' class lacks or shapes otherwise."""
    trunk = "transformer." if "transformer.wte.weight" in state else ""
    width, inner = config.d_model, int(config.expansion_ratio * config.d_model)
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(config.n_layers):
        block = f"{trunk}blocks.{n}"
        if config.attn_config.qk_ln:
            shapes[f"{block}.attn.q_ln.weight"] = (width,)
            shapes[f"{block}.attn.k_ln.weight"] = (width,)
        if config.expansion_ratio != 4:
            shapes[f"{block}.ffn.up_proj.weight"] = (inner, width)
            shapes[f"{block}.ffn.down_proj.weight"] = (width, inner)
    if not config.no_bias:
        for name, shape in ({name: tensor.shape for name, tensor in state.items()} | shapes).items():
            if name.startswith((f"{trunk}blocks.", f"{trunk}norm_f.")):
                shapes[name.removesuffix("weight") + "bias"] = (shape[0],)
    dtype = state[f"{trunk}wte.weight"].dtype
    return {name: _random(name, shape, seed).to(dtype) for name, shape in shapes.items()}


def _without_aliases(tensors: Tensors) -> Tensors:
    """``tensors`` less every name whose storage an earlier name has."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[tensor.data_ptr()] == name}


def _write_weights(folder: Path, tensors: Tensors, fmt: str, sharded: bool) -> None:
    stem, suffix = ("model", "safetensors") if fmt == "safetensors" else ("pytorch_model", "bin")
    shards = _split(tensors) if sharded else [tensors]
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
        metadata = {"total_size": _bytes(_without_aliases(tensors))}
        index = {"metadata": metadata, "weight_map": weight_map}
        _write_json(folder / f"{stem}.{suffix}.index.json", index)


def _split(tensors: Tensors) -> list[Tensors]:
    """About three shards in the order of ``tensors``; names of one storage stay together."""
    limit = _bytes(tensors) // 3
    shards: list[Tensors] = [{}]
    home: dict[int, Tensors] = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in home:
            if shards[-1] and _bytes({**shards[-1], name: tensor}) > limit:
                shards.append({})
            home[tensor.data_ptr()] = shards[-1]
        home[tensor.data_ptr()][name] = tensor
    return shards


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
