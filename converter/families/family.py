"""``Family``: what a family declares about its configs, classes and tensors. Each has a module here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from converter.config import Config, Geometry, count, head_dim, is_number, with_current_keys
from converter.errors import SourceError, Undecided, UnsupportedModel, option
from converter.scaling.slopes import Slopes
from converter.scaling.slopes import stock_slopes as press_slopes
from converter.source.checkpoint import Tensor

Kind = Literal["decoder", "encoder"]

LANGUAGE_MODEL: dict[Kind, str] = {"decoder": "ForCausalLM", "encoder": "ForMaskedLM"}
"""The suffix of the class of a model with a language modeling head."""
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
"""transformers' auto class -> the suffix of its class in a family's modeling file."""
TASKS = {
    "Model": "feature-extraction",
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}
"""Such a suffix -> the name of its task on the Hub and in optimum."""


@dataclass(frozen=True)
class Trained:
    """Checkpoints that were trained at one length, which one source states.

    A checkpoint's trained length is the longest of all the stages of its training. So a model that was
    fine-tuned on shorter texts keeps the length of the model that it was made from.
    """

    tokens: int | None
    """The trained length; None if no source was found that states it."""
    source: str
    """Who states it, in a few words; where it was looked for if ``tokens`` is None."""
    ids: tuple[str, ...]


def _no_settings(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    del config, tensors
    return {}


@dataclass(frozen=True)
class Family:
    """One architecture: how to recognise it, what to read from its config, what to write.

    The modeling code of a family is in ``templates/configuration_ntk_<name>.py`` and
    ``templates/modeling_ntk_<name>.py``. Its classes are called ``Ntk<Camel>Config``,
    ``Ntk<Camel>Model`` and so on for each head.
    """

    name: str
    """Short name, used in the names of the templates: ``bloom``."""
    title: str
    """Name for people: ``BLOOM``."""
    model_types: tuple[str, ...]
    """Values of ``model_type`` in a source's config that belong to this family."""
    class_prefixes: tuple[str, ...]
    """Prefixes of the source's class names in ``architectures``: ``("Bloom",)``."""
    checkpoints: tuple[Trained, ...]
    sizes: tuple[str, str, str] = ("num_attention_heads", "hidden_size", "num_hidden_layers")
    """The config's keys of the number of heads, the hidden size and the number of layers."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys -> those that the template reads."""
    check_supported: Callable[[Config], None] = lambda config: None
    """Raises ``UnsupportedModel``, with the reason, for a config whose options cannot be honoured."""
    kv_heads: Callable[[Config, int], int] = lambda config, heads: heads
    """The number of key and value heads; takes the config and the number of heads."""
    trained_slopes: Callable[[Config, int], Slopes] = lambda config, heads: press_slopes(heads)
    """The slopes the checkpoint was trained with; takes the config and the number of heads."""
    kind: Kind = "decoder"
    """Decoders are causal and have a cache; encoders see both sides, and their bias is symmetric."""
    claims: Callable[[Config], bool] | None = None
    """Recognises a config whose ``model_type`` is not enough, because it is missing or shared."""
    sign: str = ""
    """What ``claims`` looks for, in words for people; empty if ``model_types`` is enough."""
    class_aliases: Mapping[str, str] = field(default_factory=dict)
    """Irregular class names in ``architectures`` -> the suffix of the converted class: ``ForCausalLM``."""
    sized: Mapping[tuple[Any, ...], str] = field(default_factory=dict)
    """Vocabulary and ``sizes`` that no checkpoint trained at another length has -> a Hub id with them."""
    length_hint: str | None = None
    """Config key that often, but not reliably, holds the trained length."""
    length_doubt: str = "is a limit that is often raised without training"
    """Why the hint is not trusted, for the message that asks for the real number."""
    limited: bool = True
    """Whether the hint is a limit that has to be raised: tools that read it truncate or refuse beyond it."""
    rewrite: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Takes a config with current keys; returns it with what the template does not read in the same way."""
    settings_from_tensors: Callable[[Config, Mapping[str, Tensor]], dict[str, Any]] = _no_settings
    """Takes a source's or a result's config and the stored tensors by name; returns the keys that the config
    lacks or has wrong and that the tensors' names and shapes reveal."""
    base_prefix: str = "transformer"
    """The backbone's attribute in a model with a head, which its tensors' names start with."""
    layers: str = "h"
    """Name of the list of layers, without the backbone's prefix."""
    embeddings: str = "word_embeddings.weight"
    """Name of the token embeddings' tensor, without the backbone's prefix."""
    head: str = "lm_head.weight"
    """Name of the weight of the language modeling head, which may be tied to the embeddings."""
    stored_slopes: str | None = None
    """Name of the tensor that stores the slopes, without the backbone's prefix; None if there is none. Its
    values replace those of the formula; a conversion writes them into config.json as ``SLOPES``."""
    own_scaling: bool = False
    """Whether the source's code reads ``alibi_scaling`` from its config, as BTLM's does. The trained length
    is then its ``train_seq_len``, if there is one."""
    ignored_tensors: tuple[str, ...] = ()
    """Patterns of stored tensors that no computation uses, such as the buffer of a causal mask."""
    tokenizer_class: str = "PreTrainedTokenizerFast"
    """The class that transformers chooses for the source's model_type if the tokenizer's config has none."""
    bias_scale: Callable[[int], float] = lambda head_dim: 1.0
    """Head size -> the factor on slope times distance (Falcon divides it by sqrt(head size))."""
    stock: bool = True
    """Whether transformers has its own classes for this family, called ``<camel>Model`` and so on."""
    stock_unfit: Callable[[Config], str | None] = lambda config: None
    """Why transformers' own class computes this checkpoint wrongly; None if it is right."""
    doubt: Callable[[Config], str | None] = lambda config: None
    """What the config leaves unclear and users of the result should know; None if all is clear."""
    restored: Mapping[str, Any] = field(default_factory=dict)
    """Keys that ``check_supported`` reads, and the template does not -> the value in all converted models."""
    examples: tuple[str, ...] = field(default=())
    """Hub ids for the documentation's table."""

    @property
    def camel(self) -> str:
        """Name in class names: ``MosaicGpt``."""
        return "".join(word.title() for word in self.name.split("_"))

    @property
    def train_lengths(self) -> Mapping[str, int]:
        """Hub id -> trained length in tokens, of the known checkpoints whose length is known."""
        return {
            name: group.tokens for group in self.checkpoints for name in group.ids if group.tokens is not None
        }

    def geometry(self, config: Config) -> Geometry:
        """Reads the sizes; ``SourceError`` for one that is missing or impossible."""
        heads, width, layers = (
            count(config, key, *(other for other, name in self.spellings.items() if name == key))
            for key in self.sizes
        )
        return Geometry(heads, head_dim(width, heads), layers, self.kv_heads(config, heads))

    def stock_slopes(self, config: Config) -> Slopes:
        return self.trained_slopes(config, self.geometry(config).num_heads)

    def template_config(self, source: Config) -> dict[str, Any]:
        """A source's config with the keys and values that the template reads."""
        return self.rewrite(with_current_keys(source, self.spellings))

    def set_length(self, config: dict[str, Any], length: int) -> None:
        """Gives the config's own length limit this number of tokens; that of a decoder is only raised."""
        if self.limited and self.length_hint is not None:
            own = count(config, self.length_hint, default=1) if self.kind == "decoder" else 1
            config[self.length_hint] = max(own, length)

    @property
    def model_type(self) -> str:
        """The ``model_type`` of a converted repository."""
        return f"ntk_{self.name}"

    @property
    def templates(self) -> tuple[str, ...]:
        """The files that are copied into a converted repository."""
        parts = {
            "decoder": ("ntk_attention.py", "ntk_plan.py", "ntk_concave.py", "ntk_modes.py", "ntk_cache.py"),
            "encoder": (
                "ntk_encoder_heads.py",
                "ntk_symmetric.py",
                "ntk_symmetric_sdpa.py",
                "ntk_texts.py",
                "ntk_tiles.py",
            ),
        }
        return (
            f"configuration_ntk_{self.name}.py",
            f"modeling_ntk_{self.name}.py",
            f"ntk_{self.kind}.py",
            "ntk_config.py",
            "ntk_heads.py",
            *parts[self.kind],
            "ntk_alibi.py",
        )

    @property
    def heads(self) -> Mapping[str, str]:
        return HEADS[self.kind]

    @property
    def auto_map(self) -> dict[str, str]:
        """The ``auto_map`` of a converted repository: auto class -> module.class."""
        config = f"configuration_ntk_{self.name}.Ntk{self.camel}Config"
        modeling = f"modeling_ntk_{self.name}.Ntk{self.camel}"
        return {"AutoConfig": config, **{auto: modeling + end for auto, end in self.heads.items()}}

    @property
    def classes(self) -> Mapping[str, str]:
        """The classes of a converted repository -> a source's class of the same kind."""
        ends = self.heads.values()
        return {f"Ntk{self.camel}{end}": f"{self.class_prefixes[0]}{end}" for end in ends}

    @property
    def language_model(self) -> str:
        """The class of the converted model with a language modeling head."""
        return f"Ntk{self.camel}{LANGUAGE_MODEL[self.kind]}"

    def architectures(self, config: Config) -> list[str]:
        """The converted classes for those that the source's config names; by default the language model.

        Raises ``SourceError``, ``UnsupportedModel`` or, for two classes, ``Undecided``.
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
                    f"architectures names {name!r}; the {self.title} classes that can be converted are "
                    f"{', '.join(known)}"
                )
        converted = list(dict.fromkeys(f"Ntk{self.camel}{ends[name]}" for name in named))
        if len(converted) > 1:
            raise Undecided(
                f"config.json: architectures names {' and '.join(dict.fromkeys(named))}, and the weights are "
                f"those of one class; give that one, e.g. {option.overrides} "
                f"'architectures={json.dumps(named[:1])}'"
            )
        return converted

    def recognises(self, config: Config) -> bool:
        """Whether the config belongs to a source of this family, or to a repository converted from one."""
        model_type = config.get("model_type")
        if model_type == self.model_type:
            return True
        return model_type in self.model_types if self.claims is None else self.claims(config)

    def tensor_names(self, below: str) -> tuple[str, str]:
        """The names under which a tensor of the backbone may be stored: with its prefix and without."""
        return f"{self.base_prefix}.{below}", below

    def find(self, tensors: Mapping[str, Tensor], below: str) -> Tensor | None:
        """The stored tensor of the backbone; None if it is missing."""
        prefixed, plain = self.tensor_names(below)
        return tensors.get(prefixed) or tensors.get(plain)

    def below(self, name: str) -> str:
        """A tensor's name without the backbone's prefix."""
        return name.removeprefix(f"{self.base_prefix}.")


def check_options(config: Config, known: Mapping[str, tuple[Any, ...]], what: str, where: str = "") -> None:
    """Raises ``UnsupportedModel`` for an option with a value that the template would not honour.

    ``known`` is option -> its good values; None stands for a missing or null key, which means the default.
    ``what`` is the kind of model, for people, and ``where`` the name of an object in the config and a dot.
    """
    for key, good in known.items():
        value = config.get(key)
        if value not in good:
            fit = " or ".join(repr(option) for option in good if option is not None) or "no such key"
            raise UnsupportedModel(f"{where}{key} is {value!r}; only {what} with {fit} can be converted")


IGNORED_TENSORS = r"(^|\.)(masked_bias|(\w+_)?mask)$"
"""Causal-mask buffers that old checkpoints of any family store and no version of a model reads."""

SLOPES = "alibi_slopes"
"""Key of a converted config that holds the slopes stored in the checkpoint."""


def stored_slopes(config: Config, num_heads: int) -> Slopes | None:
    """The slopes that a conversion wrote into the config; None if there are none."""
    value = config.get(SLOPES)
    if value is None:
        return None
    numbers = isinstance(value, list) and all(is_number(slope) and slope > 0 for slope in value)
    if not numbers or len(value) != num_heads:
        raise SourceError(f"config.json: {SLOPES} is not a list of {num_heads} positive numbers")
    return tuple(float(slope) for slope in value)
