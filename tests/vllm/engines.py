"""Engines of vLLM, and what transformers computes for the same converted repository."""

from __future__ import annotations

import gc
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from lines_task import evaluation_prompt
from safetensors.torch import load_file, save_file
from vllm import LLM, PoolingParams, SamplingParams

from tests import tiny
from tests.patched import load, scaled

TINY_BLOOM = Path(__file__).parents[2] / "examples" / "tiny-bloom"
BOUND = 1e-3
"""Largest difference of log-probabilities in float32."""
FELT = 0.1
"""What a wrong slope must change, at least."""

LONGEST = 1024
"""Tokens of a prompt and its answer."""
BLOCKS = 32
"""Blocks of 128 tokens in the cache; filling one with zeros takes time."""

LogProbs = list[dict[int, float]]
"""For every token of a prompt but the first: token id -> log-probability, of the likeliest ones."""


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    """A float32 engine in this process, not compiled unless ``enforce_eager=False``."""
    llm = LLM(
        str(folder),
        **{
            "dtype": "float32",
            "max_model_len": LONGEST,
            "max_logprobs": 20,
            "num_gpu_blocks_override": BLOCKS,
            "enforce_eager": True,
            "disable_log_stats": True,
            **options,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def prompt_log_probs(llm: LLM, prompts: Sequence[Sequence[int]], adapter: Any = None) -> list[LogProbs]:
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=20, detokenize=False)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=adapter)
    return [
        [
            {token: entry.logprob for token, entry in position.items()}
            for position in output.prompt_logprobs[1:]
        ]
        for output in outputs
    ]


def next_log_probs(llm: LLM, prompt: Sequence[int]) -> tuple[LogProbs, int]:
    """Those of the token after the prompt, and how many tokens came from the prefix cache."""
    sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    [output] = llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
    found = [{token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}]
    return found, output.num_cached_tokens


class Reference:
    """The repository in transformers, with its own code."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, **options: Any):
        self.model = load(folder, dtype=dtype, **options)

    @torch.no_grad()
    def __call__(self, prompt: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] of what follows each token."""
        return self.model(torch.tensor([list(prompt)])).logits[0].log_softmax(-1)

    @torch.no_grad()
    def felt(self, prompt: Sequence[int]) -> float:
        """How far log-probabilities move without slopes."""
        right, alibi = self(prompt), self.model.base_model.alibi
        slopes, alibi.slopes = alibi.slopes, [[0.0] * len(row) for row in alibi.slopes]
        alibi._tensors.clear()
        moved = (self(prompt) - right).abs().max().item()
        alibi.slopes = slopes
        alibi._tensors.clear()
        return moved


class HeadReference(Reference):
    """Its embeddings or classes, in float64 and with the whole bias written out."""

    def __init__(self, folder: Path, head: str):
        auto_class = getattr(transformers, f"Auto{head if head == 'Model' else f'ModelFor{head}'}")
        super().__init__(folder, torch.float64, auto_class=auto_class, attn_implementation="eager")

    @torch.no_grad()
    def __call__(self, prompt: Sequence[int]) -> torch.Tensor:
        """[classes], [tokens, classes], or a vector: the mean of an encoder, a decoder's last token's."""
        output = self.model(torch.tensor([list(prompt)]))
        if "logits" in output:
            return output.logits[0]
        states = output.last_hidden_state[0]
        return states[-1] if hasattr(self.model.config, "head_dim") else states.mean(0)


TASKS = {"Model": "embed", "SequenceClassification": "classify", "TokenClassification": "token_classify"}


def pooled(llm: LLM, head: str, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Vectors or scores of the prompts, in one batch, before anything normalises them."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    raw = PoolingParams(use_activation=False)
    outputs = llm.encode(inputs, raw, pooling_task=TASKS[head], use_tqdm=False)
    return [output.outputs.data for output in outputs]


def furthest(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference, of pooled results."""
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def differences(found: LogProbs, expected: torch.Tensor) -> list[float]:
    """All differences; ``expected`` is [at least as many tokens, vocabulary]."""
    return [
        abs(value - expected[place, token].item())
        for place, position in enumerate(found)
        for token, value in position.items()
    ]


def difference(found: LogProbs, expected: torch.Tensor) -> float:
    """The largest difference."""
    return max(differences(found, expected))


def mean_difference(found: LogProbs, expected: torch.Tensor) -> float:
    return statistics.fmean(differences(found, expected))


def worst(llm: LLM, reference: Reference, prompts: Sequence[Sequence[int]]) -> float:
    pairs = zip(prompt_log_probs(llm, prompts), prompts, strict=True)
    return max(difference(found, reference(prompt)) for found, prompt in pairs)


def random_prompts(*lengths: int) -> list[list[int]]:
    return [tiny.token_ids(1, length, seed=length)[0].tolist() for length in lengths]


def trained_prompts(*lengths: int) -> list[list[int]]:
    """Prompts of the task that tiny-bloom was trained on, at 256 tokens."""
    return [
        evaluation_prompt(np.random.default_rng(length), tokens=length).input_ids.tolist()
        for length in lengths
    ]


def converted_tiny(
    folder: Path, family: str, scaling: str, head: tiny.Head | None = None, **changes: Any
) -> Path:
    """A converted tiny checkpoint; an encoder's input limit is the longest text that an engine here reads."""
    encoder = family in tiny.ENCODERS
    changes = changes if encoder else {"use_cache": True, **changes}
    source = (tiny.FACTORIES | tiny.ENCODERS)[family](folder / "source", 4, head=head, **changes)
    limit = LONGEST if encoder else None
    scaled(source, folder / "out", scaling, 4, max_length=limit)
    return folder / "out"


def widened(folder: Path, times: int = 4) -> Path:
    """tiny-bloom with every channel copied so many times, and the same logits: heads of 32, not of 8.

    A copy of the hidden state changes no norm. A matrix that reads copies is divided by their number; queries
    are divided by its root, as the softmax scale is.
    """
    folder.mkdir(parents=True)
    config = json.loads((TINY_BLOOM / "config.json").read_text(encoding="utf-8"))
    heads = config["n_head"]

    def copied(tensor: torch.Tensor, axis: int, groups: int = 1) -> torch.Tensor:
        """The channels of an axis, copied within each of the groups."""
        grouped = tensor.unflatten(axis, (groups, -1))
        return torch.cat([grouped] * times, dim=axis + 1).flatten(axis, axis + 1)

    tensors = {}
    for name, tensor in load_file(TINY_BLOOM / "model.safetensors").items():
        fused = "query_key_value" in name
        if tensor.dim() == 2:
            tensor = copied(tensor, 1, heads if name.endswith("dense.weight") else 1)
            if "word_embeddings" not in name:
                tensor = copied(tensor / times, 0, 3 * heads if fused else 1)
        else:
            tensor = copied(tensor, 0, 3 * heads if fused else 1)
        if fused:
            tensor.unflatten(0, (heads, 3, -1))[:, 0] /= math.sqrt(times)
        if "ln_f" in name:
            tensor = tensor / times  # the head is the embeddings, which are copied but not divided
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["hidden_size"] *= times
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((TINY_BLOOM / file).read_bytes())
    return folder
