"""How long the sequences were that a checkpoint was trained on, and what a scaling makes of that."""

from __future__ import annotations

from dataclasses import dataclass

from converter.errors import UsageError
from converter.families import Config, Family
from converter.repository import PROVENANCE
from converter.scaling import Dynamic, Request, Scaling
from converter.source import Source


@dataclass(frozen=True)
class TrainLength:
    """The trained length and where that number comes from."""

    tokens: int | None
    """None if it is not known."""
    origin: str
    """Where from, or why it is not known."""


def trained_length(family: Family, config: Config, source: Source, given: int | None) -> TrainLength:
    """The trained length: as given, as a converted repository records it, of a known checkpoint, or stated.

    A config's own length key is not taken for it; but a copy that only says what it was made from
    (``_name_or_path``) counts as that checkpoint unless this key contradicts.
    """
    told = recorded_length(config, given)
    if told is not None:
        return told
    if source.repo_id is not None and source.repo_id in family.train_lengths:
        return TrainLength(family.train_lengths[source.repo_id], f"known checkpoint {source.repo_id}")
    stated = family.config_length(config)
    if stated is not None:
        return TrainLength(stated, "config.json's alibi_scaling")
    hint = config.get(family.length_hint) if family.length_hint else None
    says = ""
    if hint is not None:
        says = f"; config.json has {family.length_hint} {hint!r}, but that key {family.length_doubt}"
    origin = config.get("_name_or_path")
    if isinstance(origin, str) and origin in family.train_lengths:
        known = family.train_lengths[origin]
        if hint in (None, known):
            return TrainLength(known, f"config's _name_or_path is the known checkpoint {origin}")
        return TrainLength(None, f"not known: made from {origin}, which was trained at {known}{says}")
    return TrainLength(None, f"not known{says}")


def recorded_length(config: Config, given: int | None) -> TrainLength | None:
    """The trained length as given, or as a converted repository records it."""
    if given is not None:
        return TrainLength(given, "--train-length")
    provenance = config.get(PROVENANCE)
    recorded = provenance.get("train_length") if isinstance(provenance, dict) else None
    if isinstance(recorded, int) and not isinstance(recorded, bool) and recorded > 0:
        return TrainLength(recorded, "recorded when it was converted")
    return None


def resolve(request: Request, trained: TrainLength, source: Source, default: Dynamic | None) -> Scaling:
    """The scaling that ``request`` means for this checkpoint.

    Raises:
        UsageError: it needs the trained length, which is not known; a target below it; or no strength and no
            ``default``, which is ``Recipe.default_dynamic``.
    """
    if request.by_default and default is None:
        raise UsageError(
            "a rotary model has no default strength: give --scale, --target-length or --dynamic length"
        )
    if request.length_user is not None and trained.tokens is None:
        raise UsageError(
            f"{request.length_user} needs the trained length of {source.name}, which is {trained.origin}; "
            "add --train-length N"
        )
    return request.resolve(trained.tokens, default)
