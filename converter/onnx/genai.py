"""genai_config.json: what onnxruntime-genai reads beside a graph.

What onnxruntime-genai 0.18 makes of it was found out by running it. It needs ``type``,
``context_length``, ``vocab_size`` and an end token within the vocabulary; the cache's sizes and dtype it
takes from the graph.

It pads the rows of a batch on the right and masks nothing but trailing padding tokens, so the mask of a
shorter row gets a hole between prompt and new tokens. The graph counts positions in the mask, and gives
the last logits of the last real token, so it is right about that. Padding on the left is not masked.
"""

from __future__ import annotations

from typing import Any

from converter.families.base import LARGEST_COUNT, count
from converter.jsonfile import read_object
from converter.onnx.build import Repository
from converter.repository import PROVENANCE

DYNAMIC_REACH = 8
"""A dynamic scaling has no longest length; genai gets this many times the trained one."""
DEFAULT_LENGTH = 2048
"""Tokens: trained length of most ALiBi checkpoints, where nothing says otherwise."""


def genai_config(repository: Repository, *, file_name: str, head_size: int) -> dict[str, Any]:
    """The content of genai_config.json for a graph that computes attention with GroupQueryAttention.

    Args:
        repository: a converted repository.
        file_name: the graph's, in the same folder.
        head_size: channels of a cached key or value, as the graph declares them.
    """
    geometry = repository.geometry
    vocabulary = count(repository.config, "vocab_size")
    longest = context_length(repository)
    return {
        "model": {
            "type": "decoder",
            **_special_tokens(repository, vocabulary),
            "context_length": longest,
            "vocab_size": vocabulary,
            "decoder": {
                "filename": file_name,
                "head_size": head_size,
                "hidden_size": geometry.num_heads * geometry.head_dim,
                "num_attention_heads": geometry.num_heads,
                "num_hidden_layers": geometry.num_layers,
                "num_key_value_heads": geometry.num_kv_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        # One buffer of max_length tokens for past and present; a caller who needs less memory sets less.
        "search": {"do_sample": False, "max_length": longest, "past_present_share_buffer": True},
    }


def context_length(repository: Repository) -> int:
    """The longest row, in tokens, that genai shall accept; the model itself has no limit.

    The trained length times the factor, or times ``DYNAMIC_REACH``. An unknown trained length is read
    from the config's own limit, though that is often not what a model was trained at: here it only
    bounds a buffer.
    """
    config, family, scaling = repository.config, repository.family, repository.scaling
    factor = float(DYNAMIC_REACH) if scaling.dynamic else scaling.factor or 1.0
    provenance = config.get(PROVENANCE)
    recorded = provenance.get("train_length") if isinstance(provenance, dict) else None
    trained = scaling.train_length or recorded
    if not isinstance(trained, int):
        limit = family.length_hint or "max_position_embeddings"
        trained = count(config, limit, default=DEFAULT_LENGTH)
        if family.raise_length is not None and config.get(limit) is not None:
            factor = 1.0  # converting has already raised this limit
    return min(round(trained * factor), LARGEST_COUNT)


def _special_tokens(repository: Repository, vocabulary: int) -> dict[str, Any]:
    """Their ids, from generation_config.json or else config.json.

    genai cannot run without an end token or with one outside the vocabulary. Without any it takes the
    padding token, and without that token 0; this says so in the file. It reads no ``null``.
    """
    path = repository.folder / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}

    def ids(name: str) -> list[int]:
        for settings in (generation, repository.config):
            value = settings.get(f"{name}_token_id")
            listed = value if isinstance(value, list) else [value]
            known = [token for token in listed if type(token) is int and 0 <= token < vocabulary]
            if known:
                return known
        return []

    start, end, padding = ids("bos")[:1], ids("eos"), ids("pad")[:1]
    end = end or padding or [0]
    result = {"eos_token_id": end, "pad_token_id": (padding or end)[0]}
    return result | {"bos_token_id": start[0]} if start else result
