"""The scaling options that a user gives, how they are checked, and the scaling that they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from converter.config import LONGEST, is_number
from converter.errors import UsageError, option
from converter.scaling.scaling import (
    BASES,
    CONCAVE,
    LIMITS,
    METHODS,
    POWER,
    UNSCALED,
    Basis,
    Method,
    Scaling,
    number_text,
    typed,
)

NTK: Method = "ntk"
BY_PARTS: Method = "by-parts"
Parts = tuple[float, float]
"""A ramp in parts of the trained length."""
RAMP: Parts = (1 / 8, 1 / 2)
"""The ramp of ALiBi models if none is given: the one that held best where it was measured
(examples/evidence/README.md)."""
NARROWEST = 1.001
"""The smallest ratio of a ramp's ends; rounding must not make them equal."""
SLOPES_FILE = "slopes.json"
"""The name of a file of fitted slopes in a converted repository, and where none is known."""
RECORD = "fitted"
"""Its key for notes on how the slopes were found; they are not part of the scaling."""


@dataclass(frozen=True)
class KnownBase:
    """The known checkpoint that a card names as the model's base. Its length is suggested, never taken."""

    name: str
    """Hub id."""
    tokens: int
    """Its trained length."""

    def __str__(self) -> str:
        return f"its base {self.name} was trained at {self.tokens}"


@dataclass(frozen=True)
class TrainLength:
    """The trained length and where that number comes from."""

    tokens: int | None
    """None if it is not known."""
    origin: str
    """Where the number comes from, or why it is not known."""
    note: str | None = None
    """What in the config speaks against it."""
    base: KnownBase | None = None
    """Where the length is not known, or something speaks against it: what the card says."""

    @property
    def remedy(self) -> str:
        """What to give where it is not known, for an error."""
        if self.base is None:
            return f"add {option.train_length} N"
        return f"{self.base}: {option.train_length} {self.base.tokens}"


@dataclass(frozen=True)
class Defaults:
    """What scales a model where the user leaves it open."""

    dynamic: Basis | None
    """What the factor grows with if no strength is given; None if one is required."""
    method: Method
    """Of a dynamic scaling. A static one is ``ntk``, which needs no trained length."""
    ramp: Parts
    """Of ``by-parts``."""


@dataclass(frozen=True)
class GivenSlopes:
    """The fitted slopes of ``--slopes``."""

    name: str
    """Of the file, without its folder."""
    scaling: Scaling
    record: Any = field(default=None, compare=False)
    """Notes on how they were found, as JSON."""

    def to_json(self) -> dict[str, Any]:
        """The content of a file of fitted slopes."""
        return {**(self.scaling.to_json() or {}), **({} if self.record is None else {RECORD: self.record})}


class ScalingOptions(TypedDict, total=False):
    """One scaling, as the Python functions take it.

    Give at most one of scale, target_length and dynamic. Without any of them, decoders get by-parts by
    position, and encoders ntk by length.
    """

    scale: float | None
    """Scale factor a >= 1 of a static scaling."""
    target_length: int | None
    """Length to reach in tokens; a = target_length / trained length."""
    method: Method | None
    """``ntk``; ``by-parts``; ``concave``, by position only; ``linear``; ``ntk-published``, the formula of the
    original code; or ``none``, the unscaled model with the new attention code. By default ``ntk``, but
    ``by-parts`` for a dynamic scaling of a decoder."""
    dynamic: Basis | None
    """a = max(1, rate * tokens / trained length), where tokens is the length of the sequence (``length``) or
    the position of each query (``position``)."""
    rate: float | None
    """Rate of a dynamic scaling, above 0 and usually 1 to 2; 1 by default."""
    ramp: Parts | None
    """Start and end of the ramp of ``by-parts``, which it makes the default, in parts of the trained length;
    by default 1/8 and 1/2, or for rotary models 1/32 and 1."""
    slopes: str | Path | Mapping[str, Any] | None
    """A JSON file of fitted slopes, or its content, instead of the six options above."""


@dataclass(frozen=True)
class Request:
    """The scaling options of the command line and of the Python API, checked against each other.

    ``UsageError`` names an invalid option or combination, and what to give instead.
    """

    method: Method | None = None
    """None for the model's default, see ``Defaults``."""
    scale: float | None = None
    target_length: int | None = None
    dynamic: Basis | None = None
    rate: float | None = None
    train_length: int | None = None
    ramp: Parts | None = None
    """Of ``by-parts``; None for the model's default."""
    slopes: GivenSlopes | None = None
    """Fitted slopes, instead of a method and its strength."""

    def __post_init__(self) -> None:
        if self.method is None and self.slopes is None and self.ramp is not None:
            object.__setattr__(self, "method", BY_PARTS)  # no other method has a ramp
        if self.slopes is not None:
            self._check_slopes(self.slopes)
        self._check_choices()
        self._check_strength()
        self._check_ranges()

    def _check_slopes(self, slopes: GivenSlopes) -> None:
        self._check_alone()
        if not slopes.name.isprintable():
            raise UsageError(
                f"{option.slopes} {slopes.name!r} has characters that cannot be printed; rename the file"
            )

    def _check_choices(self) -> None:
        if self.method not in (None, *METHODS):
            raise UsageError(
                f"{option.method} {self.method!r} is unknown; choose one of {', '.join(METHODS)}"
            )
        if self.dynamic is not None and self.dynamic not in BASES:
            raise UsageError(f"{option.dynamic} {self.dynamic!r} is unknown; choose length or position")

    def _check_strength(self) -> None:
        """At most one strength, for a method that takes one; a rate only for a dynamic one."""
        given = [name for name, value in self._strengths.items() if value is not None]
        if self.method == CONCAVE:
            self._check_concave(given)
            return
        if self.method == "none":
            if self.rate is not None:
                given.append(option.rate)
            if given:
                raise UsageError(f"{option.method} none cannot be combined with {given[0]}; drop one of them")
            return
        if given == [option.target_length, option.dynamic]:
            raise UsageError(
                f"{option.dynamic} grows with every text, so a dynamic scaling needs no target; drop "
                f"{option.target_length}"
            )
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} cannot be combined; give one of them")
        if not given and not self.strength_open and self.slopes is None:
            raise UsageError(
                f"{option.method} {self.method} needs a strength: give {option.scale}, "
                f"{option.target_length} or {option.dynamic}"
            )
        if self.rate is not None and self.dynamic is None and not self.strength_open:
            raise UsageError(
                f"{option.rate} needs {option.dynamic} length or {option.dynamic} position; give one of them "
                f"or drop {option.rate}"
            )

    def _check_concave(self, given: Sequence[str]) -> None:
        """Nothing but the position that the method has anyway."""
        refused = [name for name in given if name != option.dynamic or self.dynamic != "position"]
        if self.rate is not None:
            refused.append(option.rate)
        if refused:
            raise UsageError(
                f"{option.method} {CONCAVE} cannot be combined with {refused[0]}: its strength follows from "
                f"each query's position and the trained length; drop {refused[0]}"
            )

    def _check_ranges(self) -> None:
        for name, key in (
            ("scale", "factor"),
            ("rate", "rate"),
            ("target_length", "train_seq_len"),
            ("train_length", "train_seq_len"),
        ):
            value, (fits, expected) = getattr(self, name), LIMITS[key]
            if value is not None and not fits(value):
                raise UsageError(f"{option[name]} {typed(value)} is out of range; give {expected}")
        if self.ramp is not None:
            self._check_ramp(self.ramp)

    def _check_alone(self) -> None:
        others = {
            option.method: self.method is not None,
            **{name: value is not None for name, value in self._strengths.items()},
            option.rate: self.rate is not None,
            option.ramp: self.ramp is not None,
        }
        for name in (name for name, given in others.items() if given):
            raise UsageError(f"{option.slopes} cannot be combined with {name}; drop one of them")

    def _check_ramp(self, ramp: Parts) -> None:
        if self.method != BY_PARTS:
            raise UsageError(
                f"{option.ramp} needs {option.method} {BY_PARTS}; give that method or drop {option.ramp}"
            )
        numbers = isinstance(ramp, Sequence) and len(ramp) == 2 and all(map(is_number, ramp))
        if not numbers or not 1 / LONGEST <= ramp[0] <= ramp[1] / NARROWEST or ramp[1] > LONGEST:
            shown = " ".join(map(typed, ramp)) if numbers else repr(ramp)
            raise UsageError(
                f"{option.ramp} {shown} is not a ramp; give two parts of the trained length, "
                f"from {1 / LONGEST:.2g} to {LONGEST:.2g} and the smaller first"
            )

    @property
    def _strengths(self) -> dict[str, object]:
        """The parameters that state a strength, as messages name them."""
        return {
            option.scale: self.scale,
            option.target_length: self.target_length,
            option.dynamic: self.dynamic,
        }

    @property
    def strength_open(self) -> bool:
        """Whether the user left the strength to this tool, which then scales dynamically; see ``resolve``."""
        strengths = (self.slopes, *self._strengths.values())
        return self.method in (None, NTK, BY_PARTS, CONCAVE) and not any(
            value is not None for value in strengths
        )

    @property
    def asked(self) -> bool:
        """Whether the user gave any option other than a trained length."""
        return not self.strength_open or self.method is not None or self.rate is not None

    @property
    def options(self) -> dict[str, Any]:
        """The options for ``argv``, without a method that a static scaling has by default."""
        return {
            "method": None if self.method == NTK and self._static else self.method,
            "scale": None if self.scale is None else number_text(self.scale),
            "target_length": self.target_length,
            "dynamic": self.dynamic,
            "rate": None if self.rate is None else number_text(self.rate),
            "train_length": self.train_length,
            "slopes": None if self.slopes is None else self.slopes.name,
            "ramp": None if self.ramp is None else tuple(map(number_text, self.ramp)),
        }

    @property
    def _static(self) -> bool:
        return self.scale is not None or self.target_length is not None

    def resolve(self, trained: TrainLength, name: str, defaults: Defaults) -> Scaling:
        """The scaling of one model that these options ask for.

        Without a strength the scaling is dynamic: up to the trained length, the model then computes what the
        stock model does (see examples/evidence/README.md). In a decoder the factor grows by position, because
        only then do cached keys stay right while the text grows. In an encoder it grows by length, because
        the first tokens look as far ahead as the last ones look back. Raises ``UsageError`` for what this
        model cannot have.
        """
        if self.slopes is not None:
            return self._given(self.slopes, trained)
        if self.method == "none":
            return UNSCALED
        method = self.method or (NTK if self._static else defaults.method)
        if method == CONCAVE:
            length = self._needed(trained, name, f"{option.method} {CONCAVE}")
            return Scaling(CONCAVE, dynamic="position", train_length=length, power=POWER)
        ramp = None
        if method == BY_PARTS:
            what = self._what if self.method is None else f"{option.method} {method}"
            length = self._needed(trained, name, what)
            start, end = self.ramp or defaults.ramp
            ramp = (start * length, end * length)
        if self.scale is not None:
            return Scaling(method, float(self.scale), ramp)
        if self.target_length is not None:
            length = self._needed(trained, name, option.target_length)
            if self.target_length <= length:
                raise UsageError(
                    f"{option.target_length} {self.target_length} is not above the trained length {length}; "
                    "no scaling is needed up to there, so give a longer one"
                )
            return Scaling(method, self.target_length / length, ramp)
        basis = self.dynamic or defaults.dynamic
        if basis is None:
            raise UsageError(
                f"a rotary model has no default strength: give {option.scale}, {option.target_length} or "
                f"{option.dynamic} length"
            )
        rate = 1.0 if self.rate is None else float(self.rate)
        length = self._needed(trained, name, self._what)
        return Scaling(method, ramp=ramp, dynamic=basis, rate=rate, train_length=length)

    def _given(self, slopes: GivenSlopes, trained: TrainLength) -> Scaling:
        scaling = slopes.scaling
        if scaling.dynamic and trained.tokens not in (None, scaling.train_length):
            raise UsageError(
                f"{slopes.name} grows from {scaling.train_length} tokens, but the trained length is "
                f"{trained.tokens}; take slopes that were made for this model, or give {option.train_length}"
            )
        return scaling

    @property
    def _what(self) -> str:
        """What makes a scaling dynamic, for a message."""
        return option.dynamic if self.dynamic else "the default scaling"

    def _needed(self, trained: TrainLength, name: str, what: str) -> int:
        """The trained length, which ``what`` needs."""
        if trained.tokens is None:
            raise UsageError(
                f"{what} needs the trained length of {name}, which is {trained.origin}; {trained.remedy}"
            )
        return trained.tokens


def request_for(scaling: Scaling, trained: int | None, *, told: bool = True) -> Request:
    """The request that resolves to ``scaling``, the one of a model with the trained length ``trained``.

    ``told`` says whether the request names that length, since the checkpoint does not tell it.
    """
    length = trained if told else None
    if not scaling.scaled:
        return Request("none", train_length=length)
    if scaling.exponents is not None:
        return Request(train_length=length, slopes=GivenSlopes(SLOPES_FILE, scaling))
    if scaling.method == CONCAVE:
        return Request(CONCAVE, train_length=length)
    ramp = None
    if scaling.ramp is not None and trained is not None:
        ramp = (scaling.ramp[0] / trained, scaling.ramp[1] / trained)
    if scaling.static:
        return Request(scaling.method, scale=scaling.factor, train_length=length, ramp=ramp)
    return Request(scaling.method, dynamic=scaling.dynamic, rate=scaling.rate, train_length=length, ramp=ramp)
