"""The scalings that a model can compute (none, static, dynamic), and ``alibi_scaling`` in its config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast, get_args

from converter.config import is_count, is_number
from converter.errors import SourceError
from converter.scaling.slopes import Ramp, Slopes, scaled_slopes

Method = Literal["ntk", "by-parts", "linear", "ntk-published", "none"]
Basis = Literal["length", "position"]
"""What a dynamic factor grows with: the number of tokens in the sequence, or the position of each query."""

METHODS: tuple[Method, ...] = get_args(Method)
"""The formula of each is in ``slopes.exponents``, and once more in ``templates/ntk_alibi.py``."""
BASES: tuple[Basis, ...] = get_args(Basis)


@dataclass(frozen=True)
class Unscaled:
    """The slopes or frequencies as trained."""

    method: ClassVar[Method] = "none"
    ramp: ClassVar[Ramp | None] = None

    def factor_at(self, tokens: int) -> float:  # noqa: ARG002 -- the same signature as the other kinds
        """The scale factor a: 1."""
        return 1.0

    def slopes(self, stock: Slopes, tokens: int = 0) -> Slopes:  # noqa: ARG002
        """The stock slopes."""
        return stock

    def to_json(self) -> None:
        """The value of ``alibi_scaling``."""

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True)
class Static:
    """The same factor at every length."""

    method: Method
    factor: float
    """Scale factor a >= 1, no unit."""
    ramp: Ramp | None = None
    """Of ``by-parts``; None for other methods."""

    def factor_at(self, tokens: int) -> float:  # noqa: ARG002
        """The scale factor a, whatever the length."""
        return self.factor

    def slopes(self, stock: Slopes, tokens: int = 0) -> Slopes:  # noqa: ARG002
        """The scaled slopes."""
        return scaled_slopes(stock, self.method, self.factor, self.ramp)

    def to_json(self) -> dict[str, Any]:
        """The value of ``alibi_scaling``, in the convention of BTLM and JAIS."""
        return {"type": self.method, "factor": self.factor, **_ramp_json(self.ramp)}

    def __str__(self) -> str:
        return f"{self.method}, factor {self.factor:g}{_ramp_text(self.ramp)}"


@dataclass(frozen=True)
class Dynamic:
    """A factor that grows with the tokens: a = max(1, rate * tokens / train_length)."""

    method: Method
    dynamic: Basis
    rate: float
    """a0 > 0, no unit."""
    train_length: int
    """Trained length in tokens."""
    ramp: Ramp | None = None
    """Of ``by-parts``; None for other methods."""

    def factor_at(self, tokens: int) -> float:
        """The scale factor a for a sequence of ``tokens`` tokens, or a query at position ``tokens - 1``."""
        return max(1.0, self.rate * tokens / self.train_length)

    def slopes(self, stock: Slopes, tokens: int = 0) -> Slopes:
        """The slopes for a sequence of ``tokens`` tokens."""
        return scaled_slopes(stock, self.method, self.factor_at(tokens), self.ramp)

    def to_json(self) -> dict[str, Any]:
        """The value of ``alibi_scaling``, in the convention of BTLM and JAIS, extended."""
        return {
            "type": self.method,
            "train_seq_len": self.train_length,
            "dynamic": self.dynamic,
            "rate": self.rate,
            **_ramp_json(self.ramp),
        }

    def __str__(self) -> str:
        rate = f"rate {self.rate:g} from {self.train_length} tokens"
        return f"{self.method}, {self.dynamic}-dynamic, {rate}{_ramp_text(self.ramp)}"


Scaling = Unscaled | Static | Dynamic
UNSCALED = Unscaled()


def _ramp_json(ramp: Ramp | None) -> dict[str, Any]:
    return {} if ramp is None else {"ramp": list(ramp)}


def _ramp_text(ramp: Ramp | None) -> str:
    return "" if ramp is None else f", ramp {ramp[0]:g} to {ramp[1]:g} tokens"


def stretched(scaling: Scaling, ratio: float) -> Scaling:
    """The scaling of slopes that are ``ratio`` times as flat, for the same exponents."""
    if isinstance(scaling, Unscaled) or scaling.ramp is None:
        return scaling
    start, end = scaling.ramp
    return replace(scaling, ramp=(start * ratio, end * ratio))


def read_scaling(value: object) -> Scaling:
    """Reads ``alibi_scaling``; ``dynamic`` defaults to length and ``rate`` to 1, as in BTLM.

    Raises:
        SourceError: the value is not a scaling.
    """
    if value is None:
        return UNSCALED
    problem = SourceError(f"config.json: alibi_scaling is {value!r}, which is not a scaling this tool knows")
    if not isinstance(value, Mapping) or value.get("type") not in METHODS or value["type"] == "none":
        raise problem
    method = cast(Method, value["type"])
    factor, length, rate = value.get("factor"), value.get("train_seq_len"), value.get("rate", 1.0)
    try:
        ramp = _read_ramp(value.get("ramp"))
    except ValueError:
        raise problem from None
    if (ramp is not None) != (method == "by-parts"):
        raise problem
    if factor is not None:
        if length is not None or not is_number(factor) or factor < 1:
            raise problem
        return Static(method, float(factor), ramp)
    dynamic = value.get("dynamic", "length")
    if dynamic not in BASES or not is_count(length) or not is_number(rate) or rate <= 0:
        raise problem
    return Dynamic(method, dynamic, float(rate), length, ramp)


def _read_ramp(value: object) -> Ramp | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(map(is_number, value))):
        raise ValueError(f"{value!r} is not a ramp")
    start, end = map(float, value)
    if not (0 < start < end and math.log(start) < math.log(end)):
        raise ValueError(f"{value!r} is not a ramp")
    return start, end
