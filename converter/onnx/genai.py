"""genai_config.json, which onnxruntime-genai reads beside a graph.

Found by running onnxruntime-genai 0.18: it needs ``type``, ``context_length`` and ``vocab_size``; an end
token, if there is one, has to be within the vocabulary. It takes the sizes and the dtype of the cache from
the graph. It hands each text among ``session_options`` to onnxruntime as an entry of the session's
configuration.

It pads the rows of a batch on the right and masks only trailing padding tokens, so the mask of a shorter row
gets a hole between prompt and new tokens. The graph counts positions in the mask and takes the logits of the
last real token, so the results are right. Padding on the left is not masked. Its ``Engine`` puts a row's new
token right behind the row's own tokens; see ``Tokens``.
"""

from __future__ import annotations

from typing import Any

from converter.config import LARGEST_COUNT, count, is_integer
from converter.errors import SourceError
from converter.model.alibi import AlibiModel
from converter.onnx.attention_ort import head_size
from converter.onnx.options import ENTRIES
from converter.source.source import Source
from converter.source.tokenizer import TOKENIZER_CONFIG

NEVER_ENDS = (
    "no end token is known, so onnxruntime-genai goes on to `max_length`; add `eos_token_id` to "
    "`genai_config.json`"
)
DEFAULT_LENGTH = 2048
"""Tokens: the trained length of most ALiBi checkpoints, used if the config has no limit."""


def genai_config(repository: AlibiModel, *, file_name: str) -> dict[str, Any]:
    """The content of genai_config.json for ``file_name``, a graph with GroupQueryAttention."""
    geometry = repository.geometry
    vocabulary = count(repository.result_config, "vocab_size")
    longest = context_length(repository)
    return {
        "model": {
            "type": "decoder",
            **_special_tokens(repository, vocabulary),
            "context_length": longest,
            "vocab_size": vocabulary,
            "decoder": {
                "session_options": dict(ENTRIES),
                "filename": file_name,
                "head_size": head_size(geometry, repository.scaling),
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
        # Past and present share a buffer of max_length tokens; callers set a smaller length to save memory.
        "search": {"do_sample": False, "max_length": longest, "past_present_share_buffer": True},
    }


def context_length(repository: AlibiModel) -> int:
    """The longest row, in tokens, that genai accepts; the model itself has no limit.

    This is the trained length times ``Scaling.reach``. If the trained length is not known, the limit in the
    config takes its place. That limit is often not the trained length, but here it only bounds a buffer.
    """
    config, family, factor = repository.result_config, repository.family, repository.scaling.reach
    trained = repository.trained.tokens
    if trained is None:
        limit = family.length_hint or "max_position_embeddings"
        trained = count(config, limit, default=DEFAULT_LENGTH)
        if family.limited and config.get(limit) is not None:
            factor = 1.0  # the conversion has raised this limit already
    return min(round(trained * factor), LARGEST_COUNT)


def _special_tokens(repository: AlibiModel, vocabulary: int) -> dict[str, Any]:
    """The ids of special tokens: of generation_config.json, else config.json, else the tokenizer.

    genai needs ids within the vocabulary and reads no ``null``: what is not known is left out, and the end
    token pads where there is no other.
    """
    source = repository.source
    generation = source.object("generation_config.json")

    def ids(name: str) -> list[int]:
        key = f"{name}_token_id"
        # The tokenizer's files may be large, so they are read only if they are needed.
        for settings in (generation, repository.result_config, None):
            value = (tokenizer_ids(source) if settings is None else settings).get(key)
            listed = value if isinstance(value, list) else [value]
            known = [token for token in listed if is_integer(token) and 0 <= token < vocabulary]
            if known:
                return known
        return []

    start, end, padding = ids("bos"), ids("eos"), ids("pad") or ids("eos")
    found = {"eos_token_id": end, "pad_token_id": padding[:1], "bos_token_id": start[:1]}
    return {name: known if name.startswith("eos") else known[0] for name, known in found.items() if known}


def tokenizer_ids(source: Source) -> dict[str, Any]:
    """The ids of the tokens that the tokenizer's files name as special, by their keys in config.json."""
    try:
        settings = {**source.object("special_tokens_map.json"), **source.object(TOKENIZER_CONFIG)}
        listed = source.object("tokenizer.json").get("added_tokens") or []
        decoder = (settings.get("added_tokens_decoder") or {}).items()
        known = {token["content"]: int(key) for key, token in decoder}
        known |= {token["content"]: token["id"] for token in listed}
        names = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "pad")}
        texts = {name: text["content"] if isinstance(text, dict) else text for name, text in names.items()}
        return {f"{name}_token_id": known.get(text) for name, text in texts.items()}
    except (SourceError, AttributeError, KeyError, TypeError, ValueError):
        return {}  # a tokenizer that does not load
