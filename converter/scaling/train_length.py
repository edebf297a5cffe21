"""The length of the sequences that a checkpoint was trained on."""

from __future__ import annotations

from dataclasses import dataclass

from converter.config import Config, read_provenance


@dataclass(frozen=True)
class TrainLength:
    """The trained length and where that number comes from."""

    tokens: int | None
    """None if it is not known."""
    origin: str
    """Where the number comes from, or why it is not known."""


def recorded_length(config: Config, given: int | None) -> TrainLength | None:
    """The trained length that the user gave or that a converted repository records; None if there is neither.

    Raises:
        SourceError: the record is damaged.
    """
    if given is not None:
        return TrainLength(given, "as given")
    provenance = read_provenance(config)
    if provenance is not None and provenance.train_length is not None:
        return TrainLength(provenance.train_length, "recorded when it was converted")
    return None
