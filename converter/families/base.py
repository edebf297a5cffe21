"""What a family declares, and how its config is read. One small file per family holds one ``Family``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from converter.errors import SourceError, UnsupportedModel
from converter.slopes import Slopes

Config = Mapping[str, Any]

HEADS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}
"""transformers' auto class -> how the classes of every family's modeling file end."""

LARGEST_COUNT = 1 << 24
"""No size in a config is larger; one that is would only exhaust the memory."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model that matter to attention; counts, not bytes."""

    num_heads: int
    head_dim: int
    num_layers: int
    num_kv_heads: int


@dataclass(frozen=True)
class Family:
    """One architecture: how to recognise it, what to read from its config, what to write.

    The modeling code of a family is in ``templates/``, in ``configuration_ntk_<name>.py`` and
    ``modeling_ntk_<name>.py``; its classes are called ``Ntk<Camel>Config``, ``Ntk<Camel>Model``
    and so on for each head.
    """

    name: str
    """Short name, as in the template's file names: ``bloom``."""
    title: str
    """Name for people: ``BLOOM``."""
    camel: str
    """Name as it stands in class names: ``Bloom``."""
    model_types: tuple[str, ...]
    """Values of ``model_type`` in a source's config that belong to this family."""
    class_prefixes: tuple[str, ...]
    """Prefixes of the source's class names in ``architectures``: ``("Bloom",)``."""
    check: Callable[[Config], None]
    """Raises ``UnsupportedModel``, with the reason, for a config this family cannot honour."""
    geometry: Callable[[Config], Geometry]
    """Reads the sizes; raises ``SourceError`` for a missing or impossible one."""
    stock_slopes: Callable[[Config], Slopes]
    """The slopes the checkpoint was trained with."""
    train_lengths: Mapping[str, int]
    """Hub id -> trained length in tokens, of checkpoints known for certain."""
    length_hint: str | None = None
    """Config key that often, but not reliably, holds the trained length."""
    length_doubt: str = ""
    """Why the hint is not trusted, for the message that asks for the real number."""
    normalise: Callable[[Config], dict[str, Any]] = dict
    """Keys in the spelling that the template reads (old configs spell some differently)."""
    raise_length: Callable[[dict[str, Any], int], None] | None = None
    """Raises the config's own length limit to the given number of tokens, where it has one."""
    layers_prefix: str = "transformer.h"
    """Where the layers' tensors are, the base model's prefix included."""
    embeddings: str = "word_embeddings.weight"
    """The token embeddings' tensor, below the base model's prefix."""
    tokenizer_class: str = "PreTrainedTokenizerFast"
    """What transformers chose for the source's model_type if the tokenizer's own config names none."""
    bias_scale: Callable[[int], float] = lambda head_dim: 1.0
    """Head size -> the factor on slope times distance (Falcon divides it by sqrt(head size))."""
    stock_unfit: Callable[[Config], str | None] = lambda config: None
    """Why transformers' own class computes this checkpoint wrongly, or None if it is right."""
    examples: tuple[str, ...] = field(default=())
    """Hub ids for the documentation's table."""

    @property
    def model_type(self) -> str:
        """The ``model_type`` of a converted repository."""
        return f"ntk_{self.name}"

    @property
    def templates(self) -> tuple[str, ...]:
        """The files that are copied into a converted repository."""
        return (
            f"configuration_ntk_{self.name}.py",
            f"modeling_ntk_{self.name}.py",
            "ntk_decoder.py",
            "ntk_alibi.py",
        )

    @property
    def auto_map(self) -> dict[str, str]:
        """The ``auto_map`` of a converted repository: auto class -> module.class."""
        modeling = {auto: f"modeling_ntk_{self.name}.Ntk{self.camel}{end}" for auto, end in HEADS.items()}
        return {"AutoConfig": f"configuration_ntk_{self.name}.Ntk{self.camel}Config", **modeling}

    def architectures(self, config: Config) -> list[str]:
        """The converted repository's class names for those of the source; causal LM if it has none.

        Raises:
            UnsupportedModel: a class that the family's modeling file does not have.
        """
        named = config.get("architectures")
        if not named:
            return [f"Ntk{self.camel}ForCausalLM"]
        if not isinstance(named, list):
            raise SourceError(f"config.json: architectures is {named!r}, not a list of class names")
        ends = {f"{prefix}{end}": end for prefix in self.class_prefixes for end in HEADS.values()}
        for name in named:
            if name not in ends:
                raise UnsupportedModel(
                    f"architectures names {name!r}; of {self.title} only the classes "
                    f"{', '.join(self.class_prefixes[0] + end for end in HEADS.values())} can be converted"
                )
        return [f"Ntk{self.camel}{ends[name]}" for name in named]


def count(config: Config, *names: str, default: int | None = None) -> int:
    """A positive integer of the config, under any of its spellings.

    Raises:
        SourceError: missing without a default, not a positive integer of a sane size, or spelled
            twice with different values.
    """
    found = {name: config[name] for name in names if config.get(name) is not None}
    if not found:
        if default is None:
            raise SourceError(f"config.json has no {' or '.join(names)}; the checkpoint is incomplete")
        return default
    for name, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_COUNT:
            raise SourceError(
                f"config.json: {name} is {value!r}, expected an integer of 1 to {LARGEST_COUNT}"
            )
    if len(set(found.values())) > 1:
        spelled = " and ".join(f"{name} {value}" for name, value in found.items())
        raise SourceError(f"config.json contradicts itself: {spelled}; remove the wrong one")
    return int(next(iter(found.values())))


def head_dim(hidden_size: int, num_heads: int) -> int:
    """``hidden_size / num_heads``.

    Raises:
        SourceError: the heads do not divide the hidden size.
    """
    if hidden_size % num_heads:
        raise SourceError(f"config.json: {num_heads} heads do not divide the hidden size {hidden_size}")
    return hidden_size // num_heads


def respelled(config: Config, spellings: Mapping[str, str]) -> dict[str, Any]:
    """The config with old spellings (keys of ``spellings``) replaced by the current ones, in place."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        current = spellings.get(key, key)
        if key == current or config.get(current) is None:
            result[current] = value
    return result
