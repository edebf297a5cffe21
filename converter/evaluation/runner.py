"""Text and losses out of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import GenerationConfig

from converter.evaluation.hardware import Hardware
from converter.progress import Advance

LOGITS_AT_ONCE = 1 << 26
"""Elements of logits that are held at a time: 256 MiB in float32."""


@torch.inference_mode()
def complete(
    model: Any,
    tokenizer: Any,
    hardware: Hardware,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    advance: Advance = int,
) -> list[str]:
    """What a model puts after each prompt: greedy, with no penalty that its generation config may ask for.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        hardware: how many rows are run at once.
        prompts: token ids of each prompt.
        max_new_tokens: tokens after which it ends, if the model does not end itself.
        advance: told the prompts' tokens that are done.

    Returns:
        The continuations as text, without special tokens, in the order of the prompts.
    """
    stated = model.generation_config
    ends = stated.eos_token_id if stated.eos_token_id is not None else tokenizer.eos_token_id
    pad = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, eos_token_id=ends, pad_token_id=pad
    )
    # What a call leaves open is read from the model's own config, so that is replaced.
    model.generation_config = greedy
    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    try:
        while order:
            longest = len(prompts[order[-1]])
            rows = order[-hardware.rows(longest + max_new_tokens) :]
            del order[-len(rows) :]
            ids = np.full((len(rows), longest), pad, dtype=np.int64)
            mask = np.zeros_like(ids)
            for row, index in enumerate(rows):
                ids[row, longest - len(prompts[index]) :] = prompts[index]
                mask[row, longest - len(prompts[index]) :] = 1
            output = model.generate(
                input_ids=torch.from_numpy(ids).to(hardware.device),
                attention_mask=torch.from_numpy(mask).to(hardware.device),
            )
            for row, index in enumerate(rows):
                texts[index] = tokenizer.decode(output[row, longest:].tolist(), skip_special_tokens=True)
            advance(sum(len(prompts[index]) for index in rows))
    finally:
        model.generation_config = stated
    return texts


@torch.inference_mode()
def losses(
    model: Any, hardware: Hardware, windows: NDArray[np.int64], advance: Advance = int
) -> NDArray[np.float64]:
    """The negative log-likelihood of each token but the first, given those before it in its window.

    Args:
        model: a causal language model.
        hardware: how many rows are run at once.
        windows: [windows, length] token ids, without padding.
        advance: told the tokens that are done.

    Returns:
        [windows, length - 1], nats.
    """
    count, length = windows.shape
    result = np.empty((count, length - 1))
    step = hardware.rows(length)
    for start in range(0, count, step):
        ids = torch.from_numpy(windows[start : start + step]).to(hardware.device)
        result[start : start + len(ids)] = _losses(model, ids).double().cpu().numpy()
        advance(ids.numel())
    return result


def _losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    rows, length = ids.shape
    targets = ids[:, 1:]
    if not hasattr(model, "project"):  # transformers' own class: some scale or cap their logits
        return _cross_entropy(model(ids, use_cache=False).logits[:, :-1], targets)
    hidden = model.base_model(ids, use_cache=False).last_hidden_state
    # Logits of a quarter of a million words at 8192 tokens are 8 GB; a few tokens' at a time are not.
    step = max(1, LOGITS_AT_ONCE // (rows * model.config.vocab_size))
    parts = [
        _cross_entropy(model.project(hidden[:, start : start + step]), targets[:, start : start + step])
        for start in range(0, length - 1, step)
    ]
    return torch.cat(parts, dim=1)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits[:, : targets.shape[1]]
    return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
