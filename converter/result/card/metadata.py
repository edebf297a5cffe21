"""The front matter of a result's card: what is kept of an older card's, and what is known of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from converter.families.family import TASKS
from converter.result.card.facts import Facts
from converter.source.card import read_front_matter
from converter.source.hub import is_repo_id

KEPT = (
    *("license", "license_name", "license_link", "language", "datasets", "metrics", "thumbnail"),
    *("pipeline_tag", "library_name", "base_model", "tags"),
)
"""Keys of a source's front matter that are kept: each a text or a list of texts."""
NOT_KEPT = {"model_type", "new_version"}
"""Keys that do not hold for a result, even if it has weights of its own."""
FALSE_TAGS = {
    # Files of other libraries, which are not copied.
    *("tf", "tensorflow", "jax", "flax", "keras", "tflite", "coreml", "onnx", "openvino", "gguf", "ggml"),
    *("mlx", "rust", "transformers.js"),
    # Servers that know the source's model type, logs of its training, and its results.
    *("text-generation-inference", "text-embeddings-inference", "endpoints_compatible"),
    *("tensorboard", "mteb", "model-index"),
    # Rotary models need no code; the tags of ALiBi models have it.
    "custom_code",
}
"""Tags of the source that do not hold for the converted model."""
LOCAL_PATH = re.compile(r"(?:^|[:\s])(?:file:|~?/[\w.]|\\\\\w|[A-Za-z]:[\\/]\w)")
"""Finds a path on the disk of the machine that wrote a card, which may be private."""
SENTENCE_TRANSFORMERS, SENTENCE_SIMILARITY = "sentence-transformers", "sentence-similarity"
"""Names of the library and of its task on the Hub."""


def write_front_matter(metadata: Mapping[str, Any]) -> str:
    import yaml

    return f"---\n{yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)}---\n"


def describe_metadata(facts: Facts) -> dict[str, Any]:
    """The metadata of a result: what still holds of the older card's, and what is known of this model."""
    older = read_front_matter(facts.origin.older.text)
    older = {**facts.origin.older.inherited, **older}
    known = {key: _texts(older.get(key)) for key in KEPT}
    computed = _computed_metadata(facts, known)
    kept: dict[str, Any] = {}
    if facts.may_have_own_weights:
        kept = {key: value for key, value in older.items() if key not in NOT_KEPT and not _is_local(value)}
    kept |= known
    for key in computed:
        kept.pop(key, None)  # the computed keys stand last
    return {key: value for key, value in {**kept, **computed}.items() if value is not None}


def _computed_metadata(facts: Facts, known: Mapping[str, str | list[str] | None]) -> dict[str, Any]:
    """The keys that depend on the result; ``known`` is what the older card says under the keys ``KEPT``."""
    is_sentence_encoder = facts.sentence_encoder
    if facts.sentence_encoder is None:
        is_sentence_encoder = facts.makes_embeddings and known["library_name"] == SENTENCE_TRANSFORMERS
    task, library = facts.card_text.task, "transformers"
    if is_sentence_encoder:
        task, library = SENTENCE_SIMILARITY, SENTENCE_TRANSFORMERS
    parent, relation = _parent(facts, known["base_model"]), None
    if facts.weights == "other" and parent is not None:
        relation = "finetune"
    return {
        "pipeline_tag": _pipeline_tag(facts, known["pipeline_tag"], task),
        "base_model": parent,
        "base_model_relation": relation,
        "library_name": library,
        "tags": _tags(facts, known["tags"]),
    }


def _texts(value: object) -> str | list[str] | None:
    """A text or a list of texts without local paths; None if there are none, or other values among them."""
    entries: list[Any] = value if isinstance(value, list) else [value]
    # YAML reads the language code "no" (Norwegian) as False.
    entries = ["no" if entry is False else entry for entry in entries]
    if not all(isinstance(entry, str) and entry for entry in entries):
        return None
    texts = [entry for entry in entries if not _is_local(entry)]
    if not texts:
        return None
    return texts if isinstance(value, list) else texts[0]


def _is_local(value: object) -> bool:
    """Whether it is a local path, or a list or an object with one in it."""
    if isinstance(value, dict):
        return any(_is_local(each) for each in value.values())
    if isinstance(value, list):
        return any(_is_local(each) for each in value)
    return isinstance(value, str) and LOCAL_PATH.search(value) is not None


def _parent(facts: Facts, stated: str | list[str] | None) -> str | list[str] | None:
    """The Hub ids for ``base_model``, of which the older card stated some."""
    names = [stated] if isinstance(stated, str) else stated or []
    if not all(is_repo_id(name) for name in names):
        stated = None  # names of folders
    if facts.may_have_own_weights:
        # The card of a tuned model may name a closer parent than the original.
        return stated or facts.origin.base_model
    return facts.origin.base_model or stated


def _pipeline_tag(facts: Facts, stated: str | list[str] | None, task: str | None) -> str | list[str] | None:
    """The Hub's name of the task: what the older card stated, if that still holds, or ``task``."""
    # Weights of its own may come with another head than the card was written for.
    may_be_outdated = facts.may_have_own_weights and stated in (SENTENCE_SIMILARITY, *TASKS.values())
    if stated is None or may_be_outdated:
        return task
    return stated


def _tags(facts: Facts, stated: str | list[str] | None) -> list[str]:
    """The older card's tags that still hold, and the result's own."""
    tags = [stated] if isinstance(stated, str) else stated or []
    # The Hub makes tags such as "base_model:adapter:ID" itself, and peft writes them for an adapter.
    kept = [tag for tag in tags if tag.lower() not in FALSE_TAGS and not tag.startswith("base_model:")]
    return list(dict.fromkeys([*kept, *facts.card_text.tags]))
