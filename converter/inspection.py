"""Describes a checkpoint; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import UsageError
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.model.open import ModelOptions, open_with_request
from converter.rotary.settings import Change
from converter.scaling.request import KnownBase
from converter.scaling.scaling import Scaling, averaged, rows
from converter.source.checkpoint import ITEM_BYTES, weights_entry
from converter.source.weight_files import weight_files

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class SlopeTable:
    """One slope per head, in the order of the heads; for rotary positions, one frequency per channel pair."""

    stock: tuple[float, ...]
    """As trained."""
    scaled: tuple[float, ...] | None
    """After scaling; None without scaling, and for a concave penalty, which has no slope."""
    factor: float | None
    """The scale factor a of ``scaled``; of a concave penalty, tokens / trained length."""
    at_length: int | None
    """Number of tokens at which a dynamic scaling has this factor; None for a static one."""
    layers: int = 1
    """If the layers' slopes differ: how many layers ``scaled`` is the geometric mean of."""
    spans: tuple[float | None, ...] | None = None
    """The distance in tokens at which each head's bias reaches -5 nats after scaling; None where it does not
    within ``at_length`` tokens. None altogether without scaling, and for rotary positions."""


EMPTY = SlopeTable((), None, None, None)
CACHED = 1000
"""Tokens for which the size of the cache is given."""


@dataclass(frozen=True)
class Needs:
    """What a conversion of the model takes, in bytes; None where it is not known."""

    weights: Mapping[str, int]
    """Of the loaded weights, by dtype; empty where the number of parameters is not known."""
    cache: int | None
    """Of the keys and values of 1,000 tokens in 16 bits; None for an encoder."""
    length: int | None
    """Tokens of the prompt whose ``scores`` are given: the target length, else twice the trained length."""
    scores: int | None
    """Of one layer's scores of such a prompt in 16 bits, if no fused kernel computes the attention: at least
    one copy of them is in memory. With a fused kernel, there are none."""
    download: int
    """On disk, in the Hub's cache; 0 for a local folder."""
    result: int
    """On disk, of the result's weights in their own dtype; none of it with ``--hard-link``."""


@dataclass(frozen=True)
class Inspection:
    source: str
    commit: str | None
    family: str
    model_type: str
    converted: bool
    original: str | None
    """Hub id or folder's name of what a converted repository was made from."""
    num_heads: int
    head_dim: int
    num_kv_heads: int
    num_layers: int
    parameters: int | None
    """Number of stored elements; None if the files must be loaded to count them (``.bin``)."""
    dtype: str | None
    """As stored in the files (safetensors' name), or else as given in the config."""
    files: Mapping[str, int | None]
    """Weight files and their sizes in bytes; None where the size is not known."""
    train_length: int | None
    train_length_origin: str
    base: KnownBase | None
    """The known checkpoint of the same family that the card names as its base, and its trained length. Only
    where the trained length is not known or doubtful; it is not taken for it."""
    input_limit: int | None
    """Of an encoder with a scaling: the tokens after which programs cut a text."""
    overrides: Mapping[str, Any]
    alibi_scaling: dict[str, Any] | None
    """The scaling in the config, or the one that ``convert`` would write there."""
    by_default: bool
    """Whether that is the scaling of a conversion without options."""
    slopes: SlopeTable
    """The slopes of an ALiBi model; empty for a rotary one."""
    frequencies: SlopeTable
    """The frequencies of a rotary model, in radians per token; empty for an ALiBi one."""
    rotary: Change | None
    """How the scaling changes rotary positions; None for an ALiBi model."""
    recommended: dict[str, Any] | None
    """The default scaling of a decoder, as in config.json, if a target length without a method was given: it
    is better than that one factor for all lengths. None for other options and models."""
    bias_scale: float | None
    """Nats per token for a slope of 1: a head's bias is -slope * bias_scale * distance. None for a rotary
    model."""
    needs: Needs

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {"set" if name == "overrides" else name: value for name, value in values.items()}


def inspect(model: str | Path, **options: Unpack[ModelOptions]) -> Inspection:
    """Describes a checkpoint, original or converted, and its slopes under a scaling.

    From the Hub, only the config and the index of the weights are downloaded; and the card, where the config
    does not tell the trained length.

    Args:
        model: a local folder, or a Hub id.
        options: the scaling and the source, see ``ScalingOptions`` and ``SourceOptions``. If none of scale,
            target_length, dynamic and slopes is given, a checkpoint with a scaling shows its own, and another
            one that of a conversion without options, if it needs none. For a dynamic scaling, the scaled
            slopes are those at twice the trained length.

    Raises:
        UsageError: options that contradict each other.
        SourceError: the checkpoint is missing, unreadable or damaged.
        UnsupportedModel: it is neither an ALiBi model of a supported family nor a rotary model that can
            be scaled.
    """
    opened, request = open_with_request(model, **options)
    scaling = opened.resolve(request) if request.asked else opened.scaling
    by_default = not (request.asked or opened.converted) and not scaling.scaled
    if by_default:
        try:
            scaling = opened.resolve(request)
        except UsageError:  # a conversion needs a trained length, or the strength of a rotary model
            by_default = False
    found = _slopes(opened, scaling)
    rotary = opened.positions == "rotary"
    recommended = opened.recommended(request)
    weights = _weights(opened)
    return Inspection(
        source=opened.name,
        commit=opened.source.commit,
        family=opened.kind,
        model_type=opened.config_json.get("model_type") or "not given",  # as in DNABERT-2
        converted=opened.converted,
        original=None if opened.provenance is None else opened.provenance.source,
        **asdict(opened.geometry),
        **weights,
        train_length=opened.trained.tokens,
        train_length_origin=opened.trained.origin,
        base=opened.trained.base,
        input_limit=None if opened.decoder else opened.input_limit(scaling),
        overrides=opened.overrides,
        alibi_scaling=None if rotary else scaling.to_json(),
        by_default=by_default,
        slopes=EMPTY if rotary else found,
        frequencies=found if rotary else EMPTY,
        rotary=opened.change(scaling),
        recommended=None if recommended is None else recommended.to_json(),
        bias_scale=opened.bias_scale if isinstance(opened, AlibiModel) else None,
        needs=_needs(opened, scaling, options.get("target_length"), weights),
    )


def _needs(model: Model, scaling: Scaling, target: int | None, weights: Mapping[str, Any]) -> Needs:
    count, shape, trained = weights["parameters"], model.geometry, model.trained.tokens
    channels = shape.head_dim
    if isinstance(model, AlibiModel):
        channels += scaling.folded_channels
    if target is None and trained is not None:
        target = 2 * trained if scaling.dynamic or not scaling.scaled else int(scaling.factor * trained)
    half = ITEM_BYTES["F16"]
    size = sum(each or 0 for each in weights["files"].values())
    return Needs(
        weights={} if count is None else {name: count * ITEM_BYTES[name] for name in ("F32", "F16")},
        cache=2 * shape.num_layers * shape.num_kv_heads * channels * half * CACHED if model.decoder else None,
        length=target,
        scores=None if target is None else shape.num_heads * target**2 * half,
        download=0 if model.source.local else size,
        result=size,
    )


def _weights(model: Model) -> dict[str, Any]:
    """The files, number of parameters and dtype of an ``Inspection``."""
    source, config = model.source, model.source_config
    # Offline, the cache may hold only the config, which is enough for a description.
    unknown = source.offline and weights_entry(source.files) is None
    files = {} if unknown else weight_files(source)
    declared = config.get("dtype", config.get("torch_dtype"))
    dtype = declared if isinstance(declared, str) else None
    if source.local and files:
        checkpoint = model.checkpoint
        dtype = next(iter(checkpoint.dtypes), dtype)
        return {"files": checkpoint.files, "parameters": checkpoint.parameters, "dtype": dtype}
    counts = source.parameters or {}
    dtype = max(counts, key=lambda name: counts[name]) if counts else dtype
    return {"files": files, "parameters": sum(counts.values()) or None, "dtype": dtype}


def _slopes(model: Model, scaling: Scaling) -> SlopeTable:
    stock = model.stock(model.tensor_settings)
    if not scaling.scaled:
        return SlopeTable(stock, None, None, None)
    length = 2 * scaling.train_length if scaling.dynamic else None
    shown = averaged(scaling)
    scaled = None if scaling.power is not None else model.scaled(stock, shown, length or 0)
    spans = None
    if isinstance(model, AlibiModel):
        spans = tuple(penalty.span for penalty in model.penalties(stock, shown, length or 0))
    return SlopeTable(stock, scaled, scaling.factor_at(length or 0), length, rows(scaling), spans)
