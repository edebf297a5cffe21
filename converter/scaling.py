"""From what the user asks for to the ``alibi_scaling`` of a config, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from converter.errors import SourceError, UsageError
from converter.slopes import Slopes, scaled_slopes

Method = Literal["ntk", "linear", "ntk-published", "none"]
Dynamic = Literal["length", "position"]

METHODS: tuple[Method, ...] = ("ntk", "linear", "ntk-published", "none")
DYNAMICS: tuple[Dynamic, ...] = ("length", "position")
DEFAULT_METHOD: Method = "ntk"


@dataclass(frozen=True)
class Scaling:
    """A scaling that a model can compute: no scaling, static or dynamic.

    ``factor`` is set for a static one; ``dynamic``, ``rate`` and ``train_length`` for a dynamic one.
    """

    method: Method
    factor: float | None = None
    """Scale factor a >= 1, no unit."""
    dynamic: Dynamic | None = None
    rate: float | None = None
    """a0 > 0 in a = max(1, a0 * tokens / train_length), no unit."""
    train_length: int | None = None
    """Trained length in tokens."""

    def factor_at(self, tokens: int) -> float:
        """The scale factor a that a row of so many tokens gets."""
        if self.method == "none":
            return 1.0
        if self.factor is not None:
            return self.factor
        assert self.rate is not None
        assert self.train_length is not None
        return max(1.0, self.rate * tokens / self.train_length)

    def slopes(self, stock: Slopes, tokens: int = 0) -> Slopes:
        """The stock slopes as a row of so many tokens sees them."""
        return scaled_slopes(stock, self.method, self.factor_at(tokens))

    def to_json(self) -> dict[str, Any] | None:
        """The value of ``alibi_scaling``, in the convention of BTLM and JAIS, extended."""
        if self.method == "none":
            return None
        if self.factor is not None:
            return {"type": self.method, "factor": self.factor}
        return {
            "type": self.method,
            "train_seq_len": self.train_length,
            "dynamic": self.dynamic,
            "rate": self.rate,
        }

    @classmethod
    def from_json(cls, value: object) -> Scaling:
        """Reads ``alibi_scaling``; a missing ``dynamic`` and ``rate`` mean length and 1, as in BTLM.

        Raises:
            SourceError: not a scaling.
        """
        if value is None:
            return cls("none")
        problem = SourceError(f"config.json: alibi_scaling is {value!r}, which is no scaling this tool knows")
        if not isinstance(value, Mapping) or value.get("type") not in METHODS[:-1]:
            raise problem
        method = cast(Method, value["type"])
        factor, length, rate = value.get("factor"), value.get("train_seq_len"), value.get("rate", 1.0)
        if factor is not None:
            if length is not None or not _number(factor) or factor < 1:
                raise problem
            return cls(method, factor=float(factor))
        dynamic = value.get("dynamic", "length")
        whole = isinstance(length, int) and not isinstance(length, bool) and length > 0
        if dynamic not in DYNAMICS or not whole or not _number(rate) or rate <= 0:
            raise problem
        return cls(method, dynamic=dynamic, rate=float(rate), train_length=length)

    def __str__(self) -> str:
        if self.method == "none":
            return "none"
        if self.factor is not None:
            return f"{self.method}, factor {self.factor:g}"
        return f"{self.method}, {self.dynamic}-dynamic, rate {self.rate:g} from {self.train_length} tokens"


@dataclass(frozen=True)
class Request:
    """The scaling options of the command line and of the Python API, checked against each other.

    Raises:
        UsageError: see ``__post_init__``; names the option and what to give instead.
    """

    method: Method = "ntk"
    scale: float | None = None
    target_length: int | None = None
    dynamic: Dynamic | None = None
    rate: float | None = None
    train_length: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"--method {self.method!r} is unknown; choose one of {', '.join(METHODS)}")
        if self.dynamic is not None and self.dynamic not in DYNAMICS:
            raise UsageError(f"--dynamic {self.dynamic!r} is unknown; choose length or position")
        given = [name for name, value in self._factors.items() if value is not None]
        if self.method == "none":
            if given or self.rate is not None:
                raise UsageError(
                    f"--method none scales nothing and takes no {(given or ['--rate'])[0]}; drop one of them"
                )
        elif len(given) > 1:
            raise UsageError(f"{' and '.join(given)} exclude each other; give one of them")
        elif not given and not self.by_default:
            raise UsageError(
                f"--method {self.method} needs a strength: give --scale, --target-length or --dynamic"
            )
        if self.rate is not None and self.dynamic is None and not self.by_default:
            raise UsageError(
                "--rate belongs to --dynamic length or --dynamic position; give one or drop --rate"
            )
        if self.scale is not None and (not _number(self.scale) or self.scale < 1):
            raise UsageError(f"--scale {self.scale} is out of range; give a finite number of at least 1")
        if self.rate is not None and (not _number(self.rate) or self.rate <= 0):
            raise UsageError(
                f"--rate {self.rate} is out of range; give a finite number above 0, usually 1 to 2"
            )
        for name, length in (("--target-length", self.target_length), ("--train-length", self.train_length)):
            if length is not None and (not isinstance(length, int) or not 1 <= length <= 1 << 31):
                raise UsageError(f"{name} {length} is out of range; give a number of tokens, at least 1")

    @property
    def _factors(self) -> dict[str, object]:
        return {"--scale": self.scale, "--target-length": self.target_length, "--dynamic": self.dynamic}

    @property
    def by_default(self) -> bool:
        """Whether the strength is left to this tool: ntk, dynamic. See ``resolve``."""
        return self.method == DEFAULT_METHOD and not any(
            value is not None for value in self._factors.values()
        )

    @property
    def length_user(self) -> str | None:
        """The option that needs to know the trained length, if any."""
        if self.by_default:
            return "--dynamic, the default,"
        if self.dynamic is not None:
            return "--dynamic"
        return None if self.target_length is None else "--target-length"

    def resolve(self, train_length: int | None, default: Dynamic | None = None) -> Scaling:
        """The scaling asked for, of a model trained at ``train_length`` tokens.

        Without a strength it is dynamic: up to the trained length such a model is the stock one, and beyond
        it the measured models retrieved as well as with any other scaling (examples/evidence/README.md).
        By position in a decoder, whose cached keys fit no other; by length in an encoder, whose first
        tokens look as far ahead as its last look back.

        Args:
            train_length: None if it is not known, which only a request without ``length_user`` allows.
            default: what it is dynamic by without a strength.

        Raises:
            UsageError: the target length is below the trained length.
        """
        if self.method == "none":
            return Scaling("none")
        if self.scale is not None:
            return Scaling(self.method, factor=float(self.scale))
        assert train_length is not None
        if self.target_length is not None:
            if self.target_length < train_length:
                raise UsageError(
                    f"--target-length {self.target_length} is below the trained length {train_length}; "
                    "nothing needs scaling up to there"
                )
            return Scaling(self.method, factor=self.target_length / train_length)
        rate = 1.0 if self.rate is None else float(self.rate)
        dynamic = self.dynamic or default
        assert dynamic is not None
        return Scaling(self.method, dynamic=dynamic, rate=rate, train_length=train_length)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
