"""Keys that transformers or sentence-transformers read, and that a conversion does not honour.

Such a key would make the result something else than what these libraries make of the source. Each has a row
in ``KEYS``: it is refused, or left out with a note where the result is the same without it. ``python -m
tests.keys`` prints what the installed libraries read and no row names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from converter.errors import SourceError, UnsupportedModel
from converter.source.checkpoint import weights_entry
from converter.source.library_files import SENTENCE_CONFIGS, SENTENCES_CONFIG
from converter.source.remote_code import ARGUMENTS
from converter.source.source import CONFIG, PLAIN, Source
from converter.source.tokenizer import TOKENIZER_CONFIG

TOKENIZER = "tokenizer.json"
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MERGE = "model.merge_and_unload().save_pretrained(DIR)"
HARMLESS = (
    *("dtype", "torch_dtype", "attn_implementation", "use_cache", "padding_side", "use_fast"),
    *("low_cpu_mem_usage", "use_safetensors", *ARGUMENTS),
)
"""Arguments with which sentence-transformers may load a model: they choose how it is computed. Of these,
``ARGUMENTS`` are removed."""

Kind = Literal["any", "alibi", "alibi decoder", "vectors"]
"""What a row is for: any model, one whose code is ours, such a decoder, or a graph of text embeddings."""


def one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


NULL, FALSE = one_of(None), one_of(None, False)


def only(*names: str) -> Callable[[Any], bool]:
    """Whether a value is missing, or an object with no other keys than these."""
    return lambda value: value is None or (isinstance(value, dict) and {*value} <= {*names})


def same_config(source: Source, names: Any) -> bool:
    """Whether all configs that ``configuration_files`` names say what config.json says."""

    def content(name: str) -> dict[str, Any]:
        return {key: value for key, value in source.object(name).items() if key != "configuration_files"}

    return _listed(source, names) and all(content(name) == content(CONFIG) for name in names or ())


def same_tokenizer(source: Source, names: Any) -> bool:
    """Whether all tokenizers that ``fast_tokenizer_files`` names are copies of tokenizer.json."""
    if not _listed(source, names) or (names and TOKENIZER not in source.files):
        return False
    return all(source.read(name) == source.read(TOKENIZER) for name in names or ())


def always(*_: Any) -> bool:
    return True


def _listed(source: Source, names: Any) -> bool:
    """Whether this is a list of files of the source, or null."""
    return names is None or (
        isinstance(names, list)
        and all(isinstance(name, str) and PLAIN.fullmatch(name) and name in source.files for name in names)
    )


@dataclass(frozen=True)
class Key:
    """A key and its verdict: refused, unless one of the conditions holds."""

    effect: str
    """What it does, for the message that refuses it or says that it was left out."""
    remedy: str = "remove the key if the model was trained without it"
    fine: Callable[[Any], bool] = NULL
    """Values that change nothing; they stay."""
    unneeded: Callable[[Source, Any], bool] = lambda source, value: False
    """Values without which the result is the same; the key is left out, with a note."""
    kind: Kind = "any"


def _arguments(effect: str) -> Key:
    remedy = f"leave only {', '.join(name for name in HARMLESS if name not in ARGUMENTS)} there"
    return Key(f"with which sentence-transformers {effect}", remedy, fine=only(*HARMLESS))


def _own_plan(what: str) -> Key:
    return Key(f"the new code has its own {what}", unneeded=always, kind="alibi")


WINDOW = Key("which gives generate a cache with a window, and attention has none", kind="alibi")
PART = Key("so transformers reads settings from there, and not from config.json itself", kind="alibi")
STATES = "and here the backbone's last hidden states are pooled"
LAST = {"method": "forward", "method_output_name": "last_hidden_state"}
INSTEAD = "remove it there, and do it in your own program"
SENTENCE_KEYS: Mapping[str, Key] = {
    **dict.fromkeys(("config_kwargs", "config_args"), _arguments("changes the config")),
    **dict.fromkeys(("model_kwargs", "model_args"), _arguments("loads the weights in another way")),
    **dict.fromkeys(("processor_kwargs", "tokenizer_args"), _arguments("changes the tokenizer")),
    "processing_kwargs": Key("with which sentence-transformers changes the ids", INSTEAD, fine=only()),
    "do_lower_case": Key(
        "which lower-cases texts before the tokenizer, not done here", INSTEAD, FALSE, kind="vectors"
    ),
    "transformer_task": Key(STATES, INSTEAD, one_of(None, "feature-extraction"), kind="vectors"),
    "modality_config": Key(STATES, INSTEAD, one_of(None, {"text": LAST}), kind="vectors"),
    "module_output_name": Key(STATES, INSTEAD, one_of(None, "token_embeddings"), kind="vectors"),
    **dict.fromkeys(
        ("query_length", "document_length", "query_expansion"),
        Key("which makes sentence-transformers cut or pad texts by their task", INSTEAD),
    ),
}
KEYS: Mapping[str, Mapping[str, Key]] = {
    CONFIG: {
        "configuration_files": Key(
            "so transformers reads another config than config.json",
            "keep the right one as config.json, and remove the key",
            fine=lambda value: False,
            unneeded=same_config,
        ),
        "transformers_weights": Key(
            "so transformers loads other weights than those that are converted",
            "give the right file the usual name, model.safetensors or model.safetensors.index.json, and "
            "remove the key",
            unneeded=lambda source, name: bool(name == weights_entry(source.files)),
        ),
        "is_causal": Key(
            "so attention reads in both directions",
            "an encoder that was made from a decoder cannot be converted",
            one_of(None, True),
            kind="alibi decoder",
        ),
        **dict.fromkeys(("sliding_window", "layer_types", "attention_chunk_size"), WINDOW),
        **dict.fromkeys(("text_config", "text_encoder", "decoder", "generator"), PART),
        "is_encoder_decoder": Key("and this is one part only", fine=FALSE, kind="alibi"),
        "sub_configs": replace(PART, fine=one_of(None, {})),
        "kv_sharing_modes": Key("and the new code keeps the keys of every layer", kind="alibi"),
        "fusion_config": Key("which makes transformers replace layers", kind="alibi"),
        "pruned_heads": Key("and the new code has all heads", fine=one_of(None, {}), kind="alibi"),
        "base_model_tp_plan": _own_plan("plan for tensor parallelism"),
        "base_model_pp_plan": _own_plan("plan for pipeline parallelism"),
        "base_model_fsdp_plan": _own_plan("plan for FSDP"),
        "distributed_config": _own_plan("plans, and a training's do not belong to a model"),
    },
    TOKENIZER_CONFIG: {
        "fast_tokenizer_files": Key(
            f"so transformers reads another tokenizer than {TOKENIZER}",
            f"keep the right one as {TOKENIZER}, and remove the key",
            fine=lambda value: False,
            unneeded=same_tokenizer,
        ),
        **dict.fromkeys(
            ("tokenizer_file", "vocab_file", "merges_file"),
            Key("the repository's own file is read, and not one on another machine", unneeded=always),
        ),
        "init_inputs": Key("which the tokenizer's class gets before its files", fine=one_of(None, [])),
    },
    **dict.fromkeys(SENTENCE_CONFIGS, SENTENCE_KEYS),
    SENTENCES_CONFIG: {
        "truncate_dim": Key("and here vectors are not cut", INSTEAD, kind="vectors"),
        "default_prompt_name": Key("a prompt that is not put before texts here", INSTEAD, kind="vectors"),
    },
}
"""File -> key -> verdict. Keys without a row are honoured, or no library reads them."""


def refuse_or_drop_keys(
    source: Source, contents: Mapping[str, Any], kinds: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Applies the verdicts of ``KEYS`` to JSON files; ``contents`` is what they hold, by name.

    Raises ``UnsupportedModel`` for a key that is refused. Returns the new content of each file from which a
    key is dropped, and a note on each. ``kinds`` are those of ``Key.kind`` that apply.
    """
    files: dict[str, Any] = {}
    notes = []
    for name, rows in KEYS.items():
        content = contents.get(name)
        for key, row in rows.items():
            if not isinstance(content, dict) or key not in content:
                continue
            value = content[key]
            if row.kind not in kinds or row.fine(value):
                continue
            if not row.unneeded(source, value):
                raise UnsupportedModel(f"{name}: {key} is {repr(value)[:80]}, {row.effect}; {row.remedy}")
            files.setdefault(name, dict(content)).pop(key)
            why = row.effect if row.unneeded is always else "it names nothing else than what is converted"
            notes.append(f"{key} of {name} was left out: {why}")
    return files, notes


def check_vectors(source: Source) -> None:
    """Raises ``UnsupportedModel`` if sentence-transformers makes other vectors than modules.json says."""
    names = (*SENTENCE_CONFIGS, SENTENCES_CONFIG)
    refuse_or_drop_keys(source, {name: source.object(name) for name in names}, ["vectors"])


def check_adapter(source: Source) -> None:
    """Raises ``SourceError`` for an adapter beside full weights, which transformers applies with peft.

    An adapter's config without its weights is what a merge left behind.
    """
    if ADAPTER in source.files and any(name in source.files for name in ADAPTER_WEIGHTS):
        raise SourceError(
            f"{source.name} has an adapter beside its weights ({ADAPTER}), which transformers applies where "
            f"peft is installed; merge it and save that: {MERGE} (if it is merged, remove its files)"
        )
