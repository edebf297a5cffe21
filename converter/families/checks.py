"""The checks of a source, including those that apply to every family."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from converter.config import Config, count, is_number
from converter.errors import SourceError, UnsupportedModel
from converter.families import Family, recognise
from converter.rotary import settings
from converter.rotary.settings import Rotary
from converter.source.checkpoint import BIN, BIN_INDEX, SAFETENSORS, SAFETENSORS_INDEX, quantised
from converter.source.keys import ADAPTER, MERGE
from converter.source.source import QUANTISED_BY, Source
from converter.source.values import FLOATS
from converter.source.weight_files import stored_dtypes

QUANTISED_KEYS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("quantization_config", "compression_config"), (None,)),
    **dict.fromkeys(("quantization_bit", "bigdl_transformers_low_bit"), (None, 0, "")),
}
"""Keys of quantised checkpoints -> values of others: of transformers, which looks whether the first is there,
of compressed-tensors, and of tools that have their own."""
NORMS = ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "norm_eps")
"""What is added to a variance, so that its root is a number."""
UNMERGED = re.compile(r"\.(base_layer|lora_[A-Z]\w*|modules_to_save)\.")
"""Finds the tensors of a model with an adapter of PEFT."""
VALUE_HEAD = "v_head."
"""Begins the names of the tensors that TRL adds to a model."""
MOST_LABELS = 1 << 17
"""The largest number of labels of a classifier; transformers makes a name for each of them."""


def check_source(config: Config) -> Family | Rotary:
    """The positions of a source that can be converted: its ALiBi family, or how they rotate.

    Raises ``UnsupportedModel`` for others and quantised ones, ``SourceError`` for an impossible size.
    """
    if settings.recognises(config):
        check_plain(config)
        return settings.read_rotary(config)
    return check_family(recognise(config), config)


def check_family(family: Family, config: Config) -> Family:
    """The checks of a source of this family, which is returned."""
    check_plain(config)
    if config.get("alibi_scaling") is not None and not family.own_scaling:
        raise UnsupportedModel(
            f"config.json has alibi_scaling {config['alibi_scaling']!r}, which {family.title} does not read; "
            "if the model was trained without it, remove it; otherwise this model cannot be converted"
        )
    family.check_supported(config)
    family.architectures(config)
    family.geometry(config)
    count(config, "vocab_size", default=1)
    return family


def check_plain(config: Config) -> None:
    """The checks of any checkpoint, converted or not."""
    for key, others in QUANTISED_KEYS.items():
        if config.get(key) not in others:
            raise quantised(f"{key} is set")
    for key in NORMS:
        value = config.get(key)
        if value is not None and not (is_number(value) and 0 < value < 1):
            raise SourceError(f"config.json: {key} is {value!r}, expected a small positive number")
    labels = count(config, "num_labels", default=1)
    if labels > MOST_LABELS:
        raise SourceError(f"config.json: num_labels is {labels}, more than any model has ({MOST_LABELS})")
    named = config.get("id2label") or {}
    if not isinstance(named, dict) or not all(number.isdecimal() for number in named):
        raise SourceError("config.json: id2label does not give numbers names; correct or remove it there")


def without_quantisation(source: Source, config: Config) -> tuple[dict[str, Any], list[str]]:
    """A config without what says that weights are quantised, if they are not; and those keys and files.

    A merge of QLoRA leaves it behind. Raises ``UnsupportedModel`` unless every tensor is known to be floating
    point. Whether names and shapes are the model's, verification finds.
    """
    keys = [key for key, others in QUANTISED_KEYS.items() if config.get(key) not in others]
    files = [name for name in QUANTISED_BY if name in source.files]
    # transformers 4.57 only looks whether such a key is there.
    result = {key: value for key, value in config.items() if key not in QUANTISED_KEYS}
    if not keys and not files:
        return result, []
    what = quantisation_sign([*keys, *files])
    dtypes = stored_dtypes(source)
    if dtypes is None:
        named = " and ".join([*keys, *files])
        raise UnsupportedModel(
            f"{quantised(what).message}; if a merge left it, remove {named}, or convert a local copy in "
            "safetensors"
        )
    if not dtypes <= FLOATS.keys():
        raise quantised(what)
    return result, [*keys, *files]


def quantisation_sign(names: Sequence[str]) -> str:
    """What says that weights are quantised, for ``quantised``: the first of keys and files."""
    return f"it has {names[0]}" if names[0] in QUANTISED_BY else f"{names[0]} is set"


def check_wrapper(names: Iterable[str], embeddings: str, backbone: str) -> None:
    """Raises ``SourceError`` if a program's wrapper was saved: no library finds tensors by its names.

    ``embeddings`` is the name of the model's token embeddings without its ``backbone``. Raises it too for an
    adapter that was not merged, and for a value head.
    """
    for name in names:
        if UNMERGED.search(name):
            raise SourceError(
                f"the tensor {name!r} belongs to an adapter that was not merged into the model; merge it and "
                f"save that: {MERGE}"
            )
        if name.startswith(VALUE_HEAD):
            raise SourceError(
                f"the tensor {name!r} belongs to a value head, beside the model; save the model alone: "
                "model.pretrained_model.save_pretrained(DIR)"
            )
        wrapper = f".{name}".removesuffix(f".{embeddings}").removesuffix(f".{backbone}")[1:]
        if name.endswith(f".{embeddings}") and wrapper:
            inner = MERGE if wrapper.startswith("base_model") else f"model.{wrapper}.save_pretrained(DIR)"
            raise SourceError(
                f"{wrapper}. stands before the tensors' names, such as {name!r}: a wrapper was saved, not "
                f"the model in it; save that ({inner}), or remove {wrapper}. from the names"
            )


def check_one_save(source: Source) -> None:
    """Raises ``SourceError`` for two sets of weights in what was saved: an older save may have left one."""
    found = [name for name in (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX) if name in source.files]
    if len(found) > 1:
        raise SourceError(
            f"{source.name} has {' and '.join(found)}; remove the weights of the older save, since it is not "
            "known which are meant"
        )


def check_merged(place: object, names: Container[str]) -> None:
    """Raises ``SourceError`` for a converted repository with an adapter, which some programs would apply."""
    if ADAPTER in names:
        raise SourceError(
            f"{place} holds an adapter ({ADAPTER}); merge it into its model and save that: {MERGE}"
        )
