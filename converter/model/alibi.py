"""``AlibiModel``: its slopes are scaled by modeling code that is copied into the result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.config import LONGEST, Config, Geometry, is_count
from converter.errors import SourceError, UnsupportedModel, UsageError, option
from converter.families import SLOPES, Family
from converter.families.checks import check_wrapper
from converter.families.family import IGNORED_TENSORS
from converter.model import alibi_config
from converter.model.card_text import CardText, alibi_card_text
from converter.model.model import Model
from converter.scaling.penalty import Penalty
from converter.scaling.request import BY_PARTS, NTK, RAMP, Defaults, KnownBase, TrainLength
from converter.scaling.scaling import CONCAVE, DYNAMIC_REACH, Scaling, rows, stretched
from converter.scaling.slopes import NATS, SEEN, Slopes, longest_row, span_of
from converter.source.card import read_card, read_front_matter
from converter.source.checkpoint import Checkpoint
from converter.source.sentence_transformers import INPUT_LIMITS, stated_limit
from converter.source.tokenizer import Tokenizer
from converter.source.values import FLOATS, blocks, same_values

ROTARY_TENSOR = re.compile(r"(^|[._])(rotary|rope|inv_freq)")
LEARNED_TENSOR = re.compile(r"(^|\.)(wpe|position_embeddings|embed_positions)\.weight$")


@dataclass(frozen=True, kw_only=True)
class AlibiModel(Model):
    """A checkpoint with ALiBi; members without a word are explained in ``Model``."""

    family: Family

    positions = "alibi"

    def __post_init__(self) -> None:
        if (problem := self._misfit(self.scaling)) is not None:
            raise SourceError(f"config.json: alibi_scaling has {problem}")

    @property
    def kind(self) -> str:
        return self.family.name

    @property
    def model_type(self) -> str:
        return self.family.model_type

    @property
    def templates(self) -> tuple[str, ...]:
        return self.family.templates

    @property
    def decoder(self) -> bool:
        return self.family.kind == "decoder"

    @property
    def geometry(self) -> Geometry:
        return self.family.geometry(self.source_config)

    @property
    def defaults(self) -> Defaults:
        """Of decoders and of encoders, see examples/evidence/README.md and encoders.md."""
        return Defaults("position", BY_PARTS, RAMP) if self.decoder else Defaults("length", NTK, RAMP)

    # Its class, as a result has it.

    @property
    def architecture(self) -> str:
        """The name of the class, such as ``NtkBloomForCausalLM``."""
        return self.family.architectures(self.source_config)[0]

    @property
    def head(self) -> str:
        """The end of that name: ``ForCausalLM``, ``Model``, ..."""
        return self.architecture.removeprefix(f"Ntk{self.family.camel}")

    @property
    def has_logits(self) -> bool:
        """Whether it computes logits, a number for each token of the vocabulary."""
        return self.architecture == self.family.language_model

    @property
    def has_cache(self) -> bool:
        """Whether its class generates, and so has a cache in a graph."""
        return self.decoder and self.has_logits

    @property
    def linear_layers(self) -> list[str]:
        """Names of the linear layers in its blocks, which are what peft calls ``target_modules``."""
        weight = re.compile(rf"{re.escape(self.family.layers)}\.\d+\.(?:.+\.)?(\w+)\.weight")
        found = {
            weight.fullmatch(self.family.below(name))
            for name, tensor in self.checkpoint.tensors.items()
            if len(tensor.shape) == 2
        }
        return sorted({match[1] for match in found if match})

    # Scaling.

    def _trained(self) -> TrainLength:
        """Of a known checkpoint, or in the vendor's ``alibi_scaling``.

        The config's usual length key is not trusted. A copy that names a known checkpoint as its origin
        (``_name_or_path``) counts as that checkpoint, with a note if its length key has another value.
        """
        family, config, source = self.family, self.source_config, self.source
        # The one in the root of its repository. In a subfolder, there may be another one.
        if source.repo_id == source.name and source.repo_id in family.train_lengths:
            return TrainLength(family.train_lengths[source.repo_id], f"known checkpoint {source.repo_id}")
        own = config.get("alibi_scaling") if family.own_scaling else None
        stated = own.get("train_seq_len") if isinstance(own, dict) else None
        if is_count(stated):
            return TrainLength(stated, "config.json's alibi_scaling")
        hint = config.get(family.length_hint) if family.length_hint else None
        says = ""
        if hint is not None:
            says = f"; config.json has {family.length_hint} {hint!r}, but that key {family.length_doubt}"
        origin = config.get("_name_or_path")
        if isinstance(origin, str) and origin in family.train_lengths:
            known = family.train_lengths[origin]
            note = (
                f"{known} tokens are taken for the trained length, as of {origin}, which _name_or_path names"
            )
            found = f"config's _name_or_path is the known checkpoint {origin}"
            if hint in (None, known):
                return TrainLength(known, found)
            base = self._known_base()
            if base is not None:
                says += f"; {base}: --train-length {base.tokens}"
            return TrainLength(known, found, f"{note}{says}", base)
        alike = family.sized.get((config.get("vocab_size"), *(config.get(key) for key in family.sizes)))
        if alike is not None:
            says += f"; it has the sizes of {alike}, which was trained at {family.train_lengths[alike]}"
        return TrainLength(None, f"not known{says}", base=self._known_base())

    def _known_base(self) -> KnownBase | None:
        """The one known checkpoint of this family that the card names as ``base_model``; None for others.

        transformers 5 saves no ``_name_or_path``, and a Trainer's card has this key in its place.
        """
        try:
            card = read_card(self.source)
        except SourceError:  # a conversion says what is wrong with it
            return None
        named = read_front_matter(card).get("base_model")
        if isinstance(named, list) and len(named) == 1:
            [named] = named
        lengths = self.family.train_lengths
        if not isinstance(named, str) or named not in lengths:
            return None
        return KnownBase(named, lengths[named])

    def check_scaling(self, scaling: Scaling) -> None:
        if (problem := self._misfit(scaling)) is not None:
            raise UsageError(f"the slopes are not this model's: they have {problem}")
        if scaling.method == CONCAVE:
            if not self.decoder:
                raise UsageError(
                    f"{option.method} {CONCAVE} is for decoders: an encoder has keys on both sides, "
                    f"where no fused attention computes it; leave out {option.method}"
                )
            return
        self._check_strength(scaling)
        if scaling.ramp is None:
            return
        stock = self.stock({})
        spans = [NATS / (slope * self.bias_scale) for slope in stock]
        if max(spans) <= scaling.ramp[0]:
            raise UsageError(
                f"{option.method} {scaling.method} would scale no head: the longest span is {max(spans):.0f} "
                f"tokens, and the ramp starts at {scaling.ramp[0]:g}; give a {option.ramp} that starts lower"
            )

    def _check_strength(self, scaling: Scaling) -> None:
        """Refuses a factor that makes a slope flatter than what verification can measure.

        For a dynamic scaling this is its factor at the trained length, or 2, where slopes are measured. A
        slope that is as flat in the stock model is no reason.
        """
        if not scaling.scaled:
            return
        static, layers, stock = scaling.static, rows(scaling), self.stock({})
        strength = scaling.factor if scaling.static else max(2.0, scaling.rate)
        form = Scaling(scaling.method, strength, scaling.ramp, scaling.exponents)
        flattest = SEEN / span_of(longest_row(self.family.kind, layers)) / self.bias_scale
        largest = min(
            (
                # A slope is m * a ** -t.
                (slope / flattest) ** (math.log(strength) / math.log(slope / scaled))
                for layer in range(layers)
                for slope, scaled in zip(stock, self.scaled(stock, form, 0, layer), strict=True)
                if scaled < flattest <= slope
            ),
            default=strength,
        )
        if largest < strength and not static and largest < 2:
            raise UsageError(
                "a dynamic scaling makes slopes of this model too flat to be measured and verified; give a "
                f"{option.scale} of at most {largest:.3g}"
            )
        if largest < strength:
            raise UsageError(
                f"a {'factor' if static else 'rate'} of {strength:g} makes slopes of this model too flat to "
                f"be measured and verified; give at most {math.floor(largest)}"
            )

    def _misfit(self, scaling: Scaling) -> str | None:
        """How fitted exponents contradict the model's sizes; None if they do not."""
        fitted = scaling.exponents
        if fitted is None:
            return None
        heads, layers = self.geometry.num_heads, self.geometry.num_layers
        if len(fitted[0]) != heads:
            return f"exponents for {len(fitted[0])} heads, and the model has {heads}"
        if len(fitted) not in (1, layers):
            return f"exponents for {len(fitted)} layers, and the model has {layers}"
        return None

    def input_limit(self, scaling: Scaling) -> int | None:
        """See ``Model``.

        A static scaling reaches the trained length, or else the config's own limit, times the factor. A
        dynamic one has no end; an encoder's is ``DYNAMIC_REACH``, since texts are cut without a warning. The
        limit of an encoder is never below the source's: the config's own, and what its files state. A
        converted encoder that keeps its scaling keeps the limit in its config.
        """
        key = self.family.length_hint or ""
        keeps_scaling = self.converted and scaling == self.scaling
        if keeps_scaling and scaling.scaled and not self.decoder:
            return _tokens_under(key, self.result_config)
        own = _tokens_under(key, self.source_config)
        reach = self._reach(scaling, own)
        if reach is None:
            return None
        if not self.decoder:
            stated = stated_limit(self.contents(INPUT_LIMITS))
            reach = max(reach, own or 0, stated or 0)
        return min(reach, LONGEST)

    def _reach(self, scaling: Scaling, own_limit: int | None) -> int | None:
        """The tokens that a scaling is meant for; None if that is not known, or without an end.

        ``own_limit`` is the limit in the source's config.
        """
        if scaling.dynamic and not self.decoder:
            return DYNAMIC_REACH * scaling.train_length
        if not scaling.static:
            return None
        if self.provenance is not None and self.provenance.limits is None:
            own_limit = None  # the source's was not recorded, and this one has been multiplied already
        trained = self.trained.tokens or own_limit
        return None if trained is None else round(trained * scaling.factor)

    def make_result_config(self, scaling: Scaling, tokenizer: Tokenizer, limit: int | None) -> dict[str, Any]:
        return alibi_config.result_config(
            self.family, self.source_config, scaling, self.origin, tokenizer, limit
        )

    def read_tensor_settings(self, folder: Path, checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
        if not checkpoint.tensors:  # .bin files show their tensors only once they are converted
            return {}
        check_wrapper(checkpoint.tensors, self.family.embeddings, self.family.base_prefix)
        check_positions(checkpoint.tensors)
        slopes = read_slopes(folder, checkpoint, self.family, self.geometry.num_heads)
        found = self.family.settings_from_tensors(config, checkpoint.tensors)
        if found.get("tie_word_embeddings", self._ties):
            found |= self._untied(folder, checkpoint)
        found |= named_labels({**config, **found})
        return found if slopes is None else {**found, SLOPES: list(slopes)}

    def _untied(self, folder: Path, checkpoint: Checkpoint) -> dict[str, bool]:
        """Unties a stored head that differs from the embeddings, as transformers 5 does as it loads them.

        4.57 ties them by the config and loses the head. So does the code of the families that transformers
        has no class for, which runs there only: they are refused, since their users may mean either.
        """
        family = self.family
        head, table = (family.find(checkpoint.tensors, name) for name in (family.head, family.embeddings))
        if head is None or table is None or same_values(folder, head, table):
            return {}
        if not family.stock and not self.converted:
            untied = family.template_config({**self.source_config, "tie_word_embeddings": False})
            always = untied["tie_word_embeddings"]  # MosaicGPT's code has no head at all
            remedy = "" if always else f", or give {option.overrides} tie_word_embeddings=false to use it"
            raise SourceError(
                f"the tensor {head.name!r} differs from the embeddings, which the source's code uses in its "
                f"place; remove it from the weights{remedy}"
            )
        return {"tie_word_embeddings": False}

    @property
    def ignored_tensors(self) -> re.Pattern[str]:
        return re.compile("|".join((IGNORED_TENSORS, *self.family.ignored_tensors)))

    @property
    def exact_tensors(self) -> tuple[str, ...]:
        # The converted model reads its slopes from this tensor, so they must stay exact.
        stored = self.family.stored_slopes
        return () if stored is None else tuple(self.family.tensor_names(stored))

    @property
    def tied_tensors(self) -> tuple[str, ...]:
        return (self.family.head,) if self._ties else ()

    @property
    def _ties(self) -> bool:
        # Without the key, the templates' config classes use true, as those of transformers do.
        return bool(self.family.template_config(self.source_config).get("tie_word_embeddings", True))

    def stock(self, tensor_settings: Config) -> Slopes:
        return self.family.stock_slopes({**self.source_config, **tensor_settings})

    def scaled(self, stock: Slopes, scaling: Scaling, tokens: int, layer: int = 0) -> Slopes:
        return stretched(scaling, self.bias_scale).slopes(stock, tokens, layer)

    def penalties(self, stock: Slopes, scaling: Scaling, tokens: int, layer: int = 0) -> tuple[Penalty, ...]:
        """What each head takes from the score of a key, in nats, in a sequence of ``tokens`` tokens."""
        nats = tuple(slope * self.bias_scale for slope in stock)
        return scaling.penalties(nats, tokens, layer)

    @property
    def bias_scale(self) -> float:
        """Nats per token for a slope of 1: a head's bias is -slope * bias_scale * distance."""
        return self.family.bias_scale(self.geometry.head_dim)

    @property
    def notes(self) -> Sequence[str]:
        doubt = self.family.doubt(self.source_config)
        notes = [] if doubt is None else [doubt]
        own = self.source_config.get("alibi_scaling") if self.family.own_scaling else None
        if own is not None:
            notes.append(
                f"the source's own alibi_scaling {json.dumps(own)} is replaced, not multiplied: the slopes "
                "stored in the checkpoint are scaled anew"
            )
        return notes

    @property
    def card_text(self) -> CardText:
        return alibi_card_text(self.family, self.scaling, self.result_config)


def _tokens_under(key: str, config: Config) -> int | None:
    """The number of tokens that a config has under a key; None if it has no valid one."""
    value = config.get(key)
    return value if is_count(value, LONGEST) else None


def named_labels(config: Config) -> dict[str, Any]:
    """The labels that a classifier's config lacks, as transformers names them; other programs read them."""
    if not any(name.endswith("Classification") for name in config.get("architectures") or ()):
        return {}
    stated = config.get("id2label") or {}
    count = config.get("num_labels") or len(stated) or 2
    labels = {str(each): f"LABEL_{each}" for each in range(count)}
    if stated.keys() == labels.keys():
        labels = {each: str(stated[each]) for each in labels}
    return {"id2label": labels, "label2id": {label: int(each) for each, label in labels.items()}}


def check_positions(names: Iterable[str]) -> None:
    """Refuses weights that were trained with positions other than ALiBi, whatever their config says."""
    for name in names:
        kind = "rotary" if ROTARY_TENSOR.search(name) else "learned" if LEARNED_TENSOR.search(name) else None
        if kind is not None:
            raise UnsupportedModel(
                f"the weights have a tensor {name!r}, so this model has {kind} positions, not the ALiBi that "
                "its config.json claims; there are no slopes to scale"
            )


def read_slopes(folder: Path, checkpoint: Checkpoint, family: Family, num_heads: int) -> Slopes | None:
    """The ``num_heads`` slopes that the checkpoint stores, in the order of the heads; None without any."""
    if family.stored_slopes is None:
        return None
    tensor = family.find(checkpoint.tensors, family.stored_slopes)
    if tensor is None:
        return None
    # The number is checked before they are read, since the tensor may have any size.
    whole = math.prod(tensor.shape) == num_heads and tensor.dtype in FLOATS
    slopes = tuple(float(value) for block in blocks(folder, tensor) for value in block) if whole else ()
    if not slopes or not all(0 < slope < math.inf for slope in slopes):
        raise SourceError(
            f"the tensor {tensor.name!r} ({tensor.dtype}) does not hold {num_heads} positive slopes"
        )
    return slopes
