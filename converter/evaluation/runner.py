"""Where a model runs and in which dtype; generates text and computes losses with a loaded one."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from converter.errors import MissingPackage, SourceError, UsageError, option
from converter.evaluation import trainable
from converter.evaluation.batches import IGNORE, PADDING, Batch, batches_by_length, padded
from converter.progress import Advance

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 32768}
"""Tokens in a batch, with padding; larger batches are not faster on a CPU."""
AUTO = "auto"
"""The device that is all of them."""
SHARE = 0.6
"""Share of the free memory that weights may take."""
WHOLE_LOGITS = 1 << 29
"""Most logits of a model that computes all those of a row at once; this limits its rows per batch."""


@dataclass(frozen=True)
class Hardware:
    """A device, and how it is used."""

    device: torch.device
    dtype: torch.dtype | None
    """None: ``dtype_of`` chooses."""
    batch_size: int | None
    """Most rows at once; None: as many as ``TOKENS_AT_ONCE`` allows."""
    spread: bool = False
    """Whether accelerate spreads the layers over the GPUs, the CPU and the disk; ``device`` has the first."""

    def dtype_of(self, parameters: int | None) -> torch.dtype | str:
        """The dtype in which to load a model with so many parameters.

        On an accelerator, the dtype as stored. On a CPU, float32 if it fits into memory, since half precision
        is slow there.
        """
        if self.dtype is not None:
            return self.dtype
        if self.device.type == "cpu" and (parameters or 0) * 4 <= SHARE * free_memory(self.device):
            return torch.float32
        return "auto"

    def rows(self, length: int) -> int:
        """How many rows of ``length`` tokens to run at once."""
        fit = max(1, TOKENS_AT_ONCE[self.device.type] // max(length, 1))
        return fit if self.batch_size is None else min(fit, self.batch_size)


def choose(device: str | None, dtype: str | None, batch_size: int | None) -> Hardware:
    """The user's choice, checked; the default device is CUDA if there is one, else the CPU."""
    spread = device == AUTO
    if spread and find_spec("accelerate") is None:
        raise MissingPackage(f"{option.device} auto spreads a model with accelerate: pip install accelerate")
    name = (None if spread else device) or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in TOKENS_AT_ONCE:
        raise UsageError(
            f"{option.device} {name!r} is unknown; choose one of {', '.join((*TOKENS_AT_ONCE, AUTO))}"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"{option.device} cuda: torch finds no CUDA device; drop {option.device} to run on the CPU"
        )
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"{option.dtype} {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"{option.batch_size} {batch_size} is out of range; give at least 1")
    return Hardware(torch.device(name), DTYPES[dtype] if dtype else None, batch_size, spread)


MEMORY = Path("/proc/meminfo")


def free_memory(device: torch.device) -> int:
    """Bytes available without swapping, according to Linux or CUDA; on other systems, half of all memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", MEMORY.read_text(encoding="ascii"))
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@torch.inference_mode()
def complete(
    model: Any,
    tokenizer: Any,
    hardware: Hardware,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    advance: Advance = int,
) -> list[str]:
    """Continues each prompt greedily, as text without special tokens, in the order of the prompts.

    Ignores penalties and sampling in the model's generation config.
    """
    check_ids(model, max((max(prompt) for prompt in prompts), default=0))
    stated = model.generation_config
    ends = _ends(stated.eos_token_id, tokenizer.eos_token_id)
    # Padding is masked or comes after the end of a row, so the padding token can be any valid id.
    greedy = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=ends or None,
        pad_token_id=PADDING,
    )
    # generate() takes options that are not given from the model's own config, so replace that.
    model.generation_config = greedy
    texts = [""] * len(prompts)
    try:
        lengths = [len(prompt) + max_new_tokens for prompt in prompts]
        for places in batches_by_length(lengths, hardware.rows):
            ids, mask = padded([prompts[place] for place in places], hardware.device, left=True)
            _forget(model)
            output = model.generate(input_ids=ids, attention_mask=mask)
            for row, place in enumerate(places):
                said = output[row, ids.shape[1] :].tolist()
                before_end = list(itertools.takewhile(lambda token: token not in ends, said))
                texts[place] = tokenizer.decode(before_end, skip_special_tokens=True)
            advance(sum(len(prompts[place]) for place in places))
    finally:
        model.generation_config = stated
    return texts


def _ends(of_model: int | list[int] | None, of_tokenizer: int | None) -> list[int]:
    """The tokens that end a text: those of the generation config, else that of the tokenizer."""
    ends = of_tokenizer if of_model is None else of_model
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


@torch.inference_mode()
def losses(model: Any, hardware: Hardware, batch: Batch, advance: Advance = int) -> NDArray[np.float64]:
    """The negative log-likelihood of each target in nats, and 0 where nothing is predicted; as the batch."""
    check_ids(model, int(batch.ids.max()))
    length = batch.ids.shape[1]
    rows = hardware.rows(length)
    if not hasattr(model.base_model, "alibi"):
        rows = max(1, min(rows, WHOLE_LOGITS // (length * model.config.vocab_size)))
    found = []
    for ids, targets in zip(batch.ids.split(rows), batch.targets.split(rows), strict=True):
        part = Batch(ids, targets).on(hardware.device)
        _forget(model)
        found.append(trainable.losses(model, part).double().cpu())
        advance(ids.numel())
    result = np.zeros(batch.ids.shape)
    result[(batch.targets != IGNORE).numpy()] = torch.cat(found).numpy()
    return result


def check_ids(model: Any, largest: int) -> None:
    """Raises ``SourceError`` for token ids without an embedding in the model."""
    size = model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise SourceError(
            f"the tokenizer gives the token id {largest}, but the model has only {size} tokens; the two do "
            "not belong together"
        )


def _forget(model: Any) -> None:
    """Restores the rotary frequencies that transformers' dynamic scaling keeps after a longer text."""
    for module in model.modules():
        original = getattr(module, "original_inv_freq", None)
        if original is not None and hasattr(module, "max_seq_len_cached"):
            module.inv_freq = original.to(module.inv_freq.device)
            module.max_seq_len_cached = module.original_max_seq_len
