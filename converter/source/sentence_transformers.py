"""What a checkpoint has for sentence-transformers, and other files in its subfolders.

``modules.json`` lists the parts of a sentence encoder in order, each with the folder of its settings, such as
``1_Pooling`` (github.com/UKPLab/sentence-transformers, SentenceTransformer.save, modules/pooling.py and
modules/normalize.py). ``additional_chat_templates/*.jinja`` are named chat templates of transformers.

The input limit is the number of tokens after which programs cut a text: that of sentence-transformers, if it
has a file for it, and the tokenizer's (transformers, fastembed) are two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from converter.config import LONGEST, Config, is_count
from converter.errors import SourceError, UnsupportedModel, UsageError, option
from converter.source.library_files import SENTENCE_CONFIGS, SENTENCES_CONFIG
from converter.source.remote_code import NOT_COPIED
from converter.source.source import CONFIG, PLAIN, Source, plain_text
from converter.source.tokenizer import TOKENIZER_CONFIG

MODULES = "modules.json"
TEMPLATES = "additional_chat_templates"
UNREADABLE = f"{MODULES} is not a list of modules that sentence-transformers can read"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
NO_FILES = ("sentence_transformers.models.Normalize",)
"""Types of modules that old releases saved without a file; git and the Hub have no empty folders."""
OTHER_INPUTS = (
    "Asym",
    "BoW",
    "CLIPModel",
    "Router",
    "SparseStaticEmbedding",
    "StaticEmbedding",
    "WordEmbeddings",
)
"""Classes that read texts in the place of a Transformer, or choose one of several."""
LIBRARY = "sentence_transformers."
"""Prefix of the types of modules that are part of sentence-transformers."""
SENTENCES, TOKENS = "sentence_embedding", "token_embeddings"
"""What sentence-transformers calls the vector of a text, and those of its tokens."""
OLD_MODULES = {
    re.compile(r"sentence_transformers\.(?:base|sentence_transformer)\.modules\.\w+\.(\w+)"): (
        r"sentence_transformers.models.\1"
    ),
    re.compile(r"sentence_transformers\.sparse_encoder\.modules\.\w+\.(\w+)"): (
        r"sentence_transformers.sparse_encoder.models.\1"
    ),
}
"""Type of a module as sentence-transformers 6 saves it -> the name by which all versions find it."""
NEW_KEYS: Mapping[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_input_name": SENTENCES,
    "module_output_name": SENTENCES,
}
"""Key of a module that sentence-transformers 6 saves and older versions reject -> its default."""
NEW_DIMENSION, DIMENSION = "embedding_dimension", "word_embedding_dimension"
"""The width of a pooling's input: in sentence-transformers 6, and in all versions."""
CROSS_ENCODER = "CrossEncoder"
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older key of 1_Pooling/config.json -> mode, in the order in which several vectors are joined."""
MODES = tuple(FLAGS.values())
INPUT_LIMITS = {**dict.fromkeys(SENTENCE_CONFIGS, "max_seq_length"), TOKENIZER_CONFIG: "model_max_length"}
"""File -> key of its input limit: of sentence-transformers for an encoder, and of the tokenizer."""


@dataclass(frozen=True)
class Nested:
    """Files in a source's subfolders."""

    files: dict[str, int | None]
    """Files to copy, as ``folder/name``, and their sizes in bytes."""
    notes: Sequence[str]
    """What the result lacks, one sentence each."""
    sentence_encoder: bool | None
    """Whether sentence-transformers loads the result by its ``modules.json``; None if there is none."""
    modules: Sequence[tuple[str, str]] = ()
    """The type of each module of a sentence encoder, and its folder: empty for the root."""


def nested_files(source: Source) -> Nested:
    """Finds the files to copy; from the Hub, ``modules.json`` is downloaded for this."""
    files = {name: size for name, size in source.inside(TEMPLATES).items() if name.endswith(".jinja")}
    if MODULES not in source.files:
        return Nested(files, [], None)
    try:
        modules = _modules(source)
    except SourceError:
        return Nested(files, [UNREADABLE], sentence_encoder=False)
    if not modules:
        return Nested(files, [], None)

    _check_first(modules[0][0])
    notes = []
    for kind, folder in modules:
        if kind == NOT_COPIED or not kind.startswith(LIBRARY):
            notes.append(
                f"{MODULES} names {plain_text(kind)}, code of the source that is not copied, so "
                "sentence-transformers cannot load this repository"
            )
        if folder:  # else it is the transformer itself, whose files are in the root
            copied, left = _module_files(source, kind, folder)
            files |= copied
            if left:
                notes.append(f"not copied for sentence-transformers: {', '.join(left)}")
    return Nested(files, notes, sentence_encoder=not notes, modules=modules)


def _module_files(source: Source, kind: str, folder: str) -> tuple[dict[str, int | None], list[str]]:
    """The files of a module to copy, with their sizes in bytes, and what is left out of its folder.

    Raises ``UnsupportedModel`` for a folder that holds a model of its own.
    """
    found = source.inside(folder)
    if not found:
        if kind in NO_FILES:
            return {}, []
        return {}, [f"{folder} ({MODULES} names it)"]
    if kind.startswith(LIBRARY) and kind.endswith("Transformer") and f"{folder}/{CONFIG}" in found:
        raise UnsupportedModel(
            f"{MODULES} places the model in {folder}, so sentence-transformers loads that one; if it is "
            f"right, give {option.subfolder} {folder}, else set its path there to an empty text"
        )
    names = [name for name in (f"{folder}/{CONFIG}", f"{folder}/{WEIGHTS}") if name in found]
    left = found.keys() - set(names)
    if f"{folder}/{WEIGHTS}" in found:
        left -= {f"{folder}/{PICKLED}"}  # the same weights
    return {name: found[name] for name in names}, sorted(left)


def _check_first(kind: str) -> None:
    """Raises ``UnsupportedModel`` for a first module that takes the place of a Transformer."""
    if kind.startswith(LIBRARY) and kind.rpartition(".")[2] in OTHER_INPUTS:
        raise UnsupportedModel(
            f"{MODULES} begins with {plain_text(kind)}, so sentence-transformers reads texts with it, not "
            f"with the model beside it; give {option.subfolder} the folder of a Transformer, or remove "
            f"{MODULES}"
        )


def _modules(source: Source) -> list[tuple[str, str]]:
    """The type of each module, and its folder: empty for the root; raises ``SourceError``."""
    found = []
    value = source.json(MODULES)
    for module in value if isinstance(value, list) else [None]:
        match module:
            case {"type": str(kind), "path": str(part)} if not part or PLAIN.fullmatch(part):
                found.append((kind, part))
            case _:
                raise SourceError(UNREADABLE)
    return found


def for_old_versions(
    contents: Mapping[str, Any], modules: Sequence[tuple[str, str]]
) -> tuple[dict[str, Any], list[str]]:
    """Gives the files that sentence-transformers 6 saved the names and keys that older versions know.

    ``contents`` are those of JSON files, by name, and ``modules`` as in ``Nested``. Version 6 reads the old
    names too. Returns the new content of each file that changes, and a note for what only version 6 loads.
    """
    files: dict[str, Any] = {}
    newer: list[str] = []
    if modules:
        stated = [dict(module) for module in contents.get(MODULES, ())]
        known = [{**module, "type": _old_type(module["type"])} for module in stated]
        if known != stated:
            files[MODULES] = known
    for kind, folder in modules:
        for name in [f"{folder}/{CONFIG}"] if folder else SENTENCE_CONFIGS:
            content = contents.get(name)
            if not isinstance(content, dict) or not kind.startswith(LIBRARY):
                continue
            old = _old_settings(content, transformer=not folder)
            if old != content:
                files[name] = old
            newer += [f"{key} of {name}" for key in NEW_KEYS if key in old]
            newer += [f"pooling_mode of {name}"] if isinstance(old.get("pooling_mode"), list) else []
    settings = contents.get(SENTENCES_CONFIG)
    if isinstance(settings, dict) and settings.get("model_type") == CROSS_ENCODER:
        newer = []  # an older CrossEncoder does not read these files
    needs = f"loading it with sentence-transformers needs version 6: {', '.join(newer)}"
    return files, [needs] if newer else []


def old_activation(contents: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The keys of config.json in which older versions look for the activation of a CrossEncoder.

    Version 6 saves it in ``SENTENCES_CONFIG``, and without it a score has another scale. Version 4 reads the
    first key and version 3 the second. Empty if ``config`` has one, or if this is no CrossEncoder.
    """
    settings = contents.get(SENTENCES_CONFIG)
    if not isinstance(settings, dict) or settings.get("model_type") != CROSS_ENCODER:
        return {}
    activation = settings.get("activation_fn")
    first, second = "sentence_transformers", "sbert_ce_default_activation_function"
    if not isinstance(activation, str) or config.get(first) or config.get(second):
        return {}
    return {first: {"activation_fn": activation}, second: activation}


def _old_type(kind: str) -> str:
    for pattern, old in OLD_MODULES.items():
        if pattern.fullmatch(kind):
            return pattern.sub(old, kind)
    return kind


def _old_settings(settings: Mapping[str, Any], *, transformer: bool) -> dict[str, Any]:
    """A module's settings without the keys of version 6 that have their defaults."""
    defaults = {**NEW_KEYS, **({"module_output_name": TOKENS} if transformer else {})}
    result = {key: value for key, value in settings.items() if key not in defaults or value != defaults[key]}
    if NEW_DIMENSION in result:
        width = result.pop(NEW_DIMENSION)
        result.setdefault(DIMENSION, width)
    modes = result.get("pooling_mode")
    # Older versions join several in the order of their flags.
    if isinstance(modes, list) and modes == [mode for mode in MODES if mode in modes]:
        del result["pooling_mode"]
        result |= {flag: mode in modes for flag, mode in FLAGS.items()}
    return result


def module_folders(source: Source) -> list[str]:
    """The folders of a sentence encoder's modules; empty if it has none, or its list cannot be read."""
    if MODULES not in source.files:
        return []
    try:
        return [folder for _, folder in _modules(source) if folder]
    except SourceError:
        return []


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a text become one vector, over its real tokens."""

    modes: tuple[str, ...]
    """Of ``MODES``; the vectors of several are joined."""
    normalised: bool
    """Whether the vector is scaled to unit length."""

    def __str__(self) -> str:
        return " and ".join(self.modes) + (", scaled to unit length" if self.normalised else "")


def read_pooling(source: Source, mode: str | None = None) -> Pooling | None:
    """How sentence-transformers would pool a repository's hidden states; None without ``modules.json``.

    ``mode`` is the user's, for a repository that does not say it. Raises ``UnsupportedModel`` for a way that
    is not computed here, ``SourceError`` for a damaged file, and ``UsageError`` for a mode that it says too.
    """
    if MODULES not in source.files:
        return None
    modules = _modules(source)
    kinds = [kind.rpartition(".")[2] if kind.startswith(LIBRARY) else kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(
            f"{MODULES} lists {', '.join(map(plain_text, kinds)) or 'nothing'}; what can be computed is "
            "Transformer, Pooling and Normalize, in this order"
        )
    _, settings, *normalising = [source.object(f"{part}/{CONFIG}") if part else {} for _, part in modules]
    if any(each.get("module_input_name", SENTENCES) != SENTENCES for each in normalising):
        raise UnsupportedModel(f"Normalize of {MODULES} does not scale the vector of the text")
    if not settings:
        if mode is None:
            raise UnsupportedModel(f"{modules[1][1]}/{CONFIG} is missing, which says how to pool")
        return Pooling((mode,), normalised=bool(normalising))
    if settings.get("include_prompt", True) is not True:
        raise UnsupportedModel("the pooling leaves out a prompt, whose length is not known here")
    found = Pooling(_modes(settings), normalised=bool(normalising))
    if mode is not None:
        raise UsageError(
            f"{option.pooling} {mode}: {MODULES} says how to pool already ({found}); leave it out"
        )
    return found


def _modes(settings: dict[str, Any]) -> tuple[str, ...]:
    """The modes that a pooling's settings name; the mean if they name none, as in sentence-transformers."""
    named = settings.get("pooling_mode")
    if named is None:
        named = [mode for flag, mode in FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = named if isinstance(named, list) else [named]
    for mode in modes:
        if mode not in MODES:
            raise UnsupportedModel(f"the pooling mode {plain_text(mode)} is not one of {', '.join(MODES)}")
    return tuple(modes)


def stated_limit(contents: Mapping[str, Any]) -> int | None:
    """The input limit that the JSON files of a source state, by name; sentence-transformers' comes first."""
    for name, key in INPUT_LIMITS.items():
        content = contents.get(name)
        limit = content.get(key) if isinstance(content, dict) else None
        if is_count(limit, LONGEST - 1):  # larger ones, such as 1e30, stand for none
            return limit
    return None


def set_limits(
    contents: Mapping[str, Any], limit: int | None, *, decoder: bool
) -> tuple[dict[str, Any], str | None]:
    """Gives an encoder's files the input limit; the tokenizer of a decoder, if its own is lower.

    ``contents`` are those of JSON files, by name. Returns the new content of each that changes, and a note,
    or None.
    """
    files: dict[str, Any] = {}
    changed = []
    for name in (TOKENIZER_CONFIG,) if decoder else INPUT_LIMITS:
        content, key = contents.get(name), INPUT_LIMITS[name]
        before = content.get(key) if isinstance(content, dict) else limit
        if limit is None or before == limit:  # a JSON file that is not an object stays as it is
            continue
        own = before if is_count(before, LONGEST - 1) else None
        if not decoder or (own is not None and own < limit):
            files[name] = {**contents[name], key: limit}
            changed.append(f"{key} in {name} was {own or 'not set'}")
    return files, f"the input limit is {limit} tokens: {' and '.join(changed)}" if changed else None
