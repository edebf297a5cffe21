"""What a family declares, and how its config is read. One small file per family holds one ``Family``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from converter.errors import SourceError, UnsupportedModel
from converter.slopes import Slopes

Config = Mapping[str, Any]
Kind = Literal["decoder", "encoder"]

LANGUAGE_MODEL: dict[Kind, str] = {"decoder": "ForCausalLM", "encoder": "ForMaskedLM"}
"""How the class of a model with a language modeling head ends."""
HEAD_TENSOR: dict[Kind, str] = {"decoder": "lm_head.weight", "encoder": "cls.predictions.decoder.weight"}
"""What that head's weight is called."""
HEADS: dict[Kind, dict[str, str]] = {
    kind: {
        "AutoModel": "Model",
        f"AutoModel{head}": head,
        "AutoModelForSequenceClassification": "ForSequenceClassification",
        "AutoModelForTokenClassification": "ForTokenClassification",
        "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    }
    for kind, head in LANGUAGE_MODEL.items()
}
"""transformers' auto class -> how the classes of a family's modeling file end."""

LARGEST_COUNT = 1 << 24
"""No size in a config is larger; one that is would only exhaust the memory."""
LARGEST = {"heads": 4096, "layers": 8192, "channels a head": 8192}
"""What is counted out, one by one, has closer bounds: many times those of any model."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model that matter to attention; counts, not bytes.

    Raises:
        SourceError: more than any model has.
    """

    num_heads: int
    head_dim: int
    num_layers: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        sizes = (max(self.num_heads, self.num_kv_heads), self.num_layers, self.head_dim)
        for (what, largest), size in zip(LARGEST.items(), sizes, strict=True):
            if size > largest:
                raise SourceError(f"config.json means {size} {what}, more than any model has ({largest})")


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
    kind: Kind = "decoder"
    """Decoders are causal and have a cache; encoders see both sides, and their bias is symmetric."""
    claims: Callable[[Config], bool] | None = None
    """Recognises a config whose ``model_type`` does not decide, because it is missing or shared."""
    sign: str = ""
    """What a claim looks for, for people; empty where ``model_types`` says it."""
    class_aliases: Mapping[str, str] = field(default_factory=dict)
    """Class names in ``architectures`` that have another form -> how ours ends: ``ForCausalLM``."""
    length_hint: str | None = None
    """Config key that often, but not reliably, holds the trained length."""
    length_doubt: str = ""
    """Why the hint is not trusted, for the message that asks for the real number."""
    config_length: Callable[[Config], int | None] = lambda config: None
    """The trained length that a config states outright, if it does."""
    normalise: Callable[[Config], dict[str, Any]] = dict
    """Keys in the spelling that the template reads (old configs spell some differently)."""
    fit: Callable[[Config, Collection[str]], dict[str, Any]] = lambda config, names: {}
    """From the normalised config of a conversion and the names of the stored tensors: keys that the
    config lacks or has wrong and the tensors tell."""
    raise_length: Callable[[dict[str, Any], int], None] | None = None
    """Raises the config's own length limit to the given number of tokens, where it has one."""
    base_prefix: str = "transformer"
    """Where the trunk is in a model with a head: its attribute, and the start of its tensors' names."""
    layers: str = "h"
    """Where the layers' tensors are, below the trunk's prefix."""
    embeddings: str = "word_embeddings.weight"
    """The token embeddings' tensor, below the trunk's prefix."""
    stored_slopes: str | None = None
    """The tensor that holds the slopes of the checkpoint, below the trunk's prefix. It beats the formula:
    a conversion writes its values into config.json as ``SLOPES``."""
    own_scaling: bool = False
    """Whether the source's own code reads ``alibi_scaling`` from its config, as BTLM's does."""
    unread: tuple[str, ...] = ()
    """Patterns of stored tensors that nothing computes with, such as the buffer of a causal mask."""
    tokenizer_class: str = "PreTrainedTokenizerFast"
    """What transformers chose for the source's model_type if the tokenizer's own config names none."""
    bias_scale: Callable[[int], float] = lambda head_dim: 1.0
    """Head size -> the factor on slope times distance (Falcon divides it by sqrt(head size))."""
    stock: bool = True
    """Whether transformers has classes of its own for this family, called ``<camel>Model`` and so on."""
    stock_unfit: Callable[[Config], str | None] = lambda config: None
    """Why transformers' own class computes this checkpoint wrongly, or None if it is right."""
    doubt: Callable[[Config], str | None] = lambda config: None
    """What the config of a checkpoint that is converted leaves open, for its users to know."""
    examples: tuple[str, ...] = field(default=())
    """Hub ids for the documentation's table."""

    @property
    def model_type(self) -> str:
        """The ``model_type`` of a converted repository."""
        return f"ntk_{self.name}"

    @property
    def templates(self) -> tuple[str, ...]:
        """The files that are copied into a converted repository."""
        symmetric = ("ntk_symmetric.py",) if self.kind == "encoder" else ()
        return (
            f"configuration_ntk_{self.name}.py",
            f"modeling_ntk_{self.name}.py",
            f"ntk_{self.kind}.py",
            "ntk_heads.py",
            *symmetric,
            "ntk_alibi.py",
        )

    @property
    def heads(self) -> Mapping[str, str]:
        """Of ``HEADS``, those of its kind."""
        return HEADS[self.kind]

    @property
    def auto_map(self) -> dict[str, str]:
        """The ``auto_map`` of a converted repository: auto class -> module.class."""
        modeling = {
            auto: f"modeling_ntk_{self.name}.Ntk{self.camel}{end}" for auto, end in self.heads.items()
        }
        return {"AutoConfig": f"configuration_ntk_{self.name}.Ntk{self.camel}Config", **modeling}

    @property
    def language_model(self) -> str:
        """The class of a converted repository with a language modeling head."""
        return f"Ntk{self.camel}{LANGUAGE_MODEL[self.kind]}"

    @property
    def head(self) -> str:
        """The tensor of its language modeling head, which may be one with the embeddings."""
        return HEAD_TENSOR[self.kind]

    def architectures(self, config: Config) -> list[str]:
        """The converted repository's class names for those of the source; a language model if it has none.

        Raises:
            UnsupportedModel: a class that the family's modeling file does not have.
        """
        named = config.get("architectures")
        if not named:
            return [self.language_model]
        if not isinstance(named, list):
            raise SourceError(f"config.json: architectures is {named!r}, not a list of class names")
        regular = {f"{prefix}{end}": end for prefix in self.class_prefixes for end in self.heads.values()}
        ends = regular | dict(self.class_aliases)
        for name in named:
            if not isinstance(name, str) or name not in ends:
                known = [self.class_prefixes[0] + end for end in self.heads.values()] + [*self.class_aliases]
                raise UnsupportedModel(
                    f"architectures names {name!r}; of {self.title} only the classes "
                    f"{', '.join(known)} can be converted"
                )
        return [f"Ntk{self.camel}{ends[name]}" for name in named]

    def recognises(self, config: Config) -> bool:
        """Whether this is the config of such a source or of its converted repository."""
        model_type = config.get("model_type")
        if model_type == self.model_type:
            return True
        return model_type in self.model_types if self.claims is None else self.claims(config)

    def tensor_names(self, below: str) -> tuple[str, str]:
        """The names under which a tensor of the trunk may be stored: with its prefix and without."""
        return f"{self.base_prefix}.{below}", below

    def below(self, name: str) -> str:
        """A tensor's name without the trunk's prefix."""
        return name.removeprefix(f"{self.base_prefix}.")


SLOPES = "alibi_slopes"
"""Key of a converted config with the slopes that the checkpoint stores."""


def stored_slopes(config: Config, num_heads: int) -> Slopes | None:
    """The slopes that a conversion wrote into the config, if it did.

    Raises:
        SourceError: not one positive number a head.
    """
    value = config.get(SLOPES)
    if value is None:
        return None
    numbers = isinstance(value, list) and all(
        isinstance(slope, (int, float)) and not isinstance(slope, bool) and 0 < slope < math.inf
        for slope in value
    )
    if not numbers or len(value) != num_heads:
        raise SourceError(f"config.json: {SLOPES} are not {num_heads} positive numbers")
    return tuple(float(slope) for slope in value)


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
