"""The scalings that a model can compute (none, static, dynamic), and ``alibi_scaling`` in its config."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from converter.config import LONGEST, is_count, is_number
from converter.errors import SourceError
from converter.scaling.penalty import Penalty, concave, lines
from converter.scaling.slopes import Exponents, Ramp, Slopes, exponents, with_exponents

Method = Literal["ntk", "by-parts", "concave", "linear", "ntk-published", "none", "fitted"]
CONCAVE: Method = "concave"
"""The method that scales no slope: its formula is in ``penalty.concave``."""
FITTED: Method = "fitted"
"""The method without a formula: its exponents are in the scaling itself."""
Basis = Literal["length", "position"]
"""What a dynamic factor grows with: the number of tokens in the sequence, or the position of each query."""

METHODS: tuple[Method, ...] = tuple(method for method in get_args(Method) if method != FITTED)
"""The formula of each but ``concave`` is in ``slopes.exponents``, and once more in
``templates/ntk_alibi.py``."""
POWER = 8
"""Of a concave penalty: the better one of two that were measured (examples/evidence/README.md). A config has
it, so that another default would change no repository."""
LARGEST_BITS = 30
"""The logarithm to base 2 of the largest number of a key that float16 holds for a concave penalty; see
``templates/ntk_concave.py``."""
BASES: tuple[Basis, ...] = get_args(Basis)
EXPONENTS = (-1.0, 4.0)
"""The least and the largest exponent of a fitted scaling; below 0, a head gets steeper."""
TEMPERATURES = (-1.0, 1.0)
"""The least and the largest temperature; below 0, a head looks less closely at the content of the keys."""
LARGEST_FACTOR, LARGEST_RATE = 65536.0, 16.0
"""Of a fitted scaling. With ``EXPONENTS``, they keep all slopes within float32."""


FOLDED_CHANNELS = 8
"""Channels that a converted decoder appends to each head for slopes; see ``templates/ntk_alibi.py``."""
CONCAVE_CHANNELS = 16
"""The same for a concave penalty; see ``templates/ntk_concave.py``."""


def number_text(value: float) -> str:
    """The shortest text that reads back to the same number, without a trailing ``.0``."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value).removesuffix(".0")


def typed(value: object) -> str:
    """An option's value for messages; whoever types 2 need not find 2.0 there."""
    return str(value).removesuffix(".0")


@dataclass(frozen=True)
class Scaling:
    """What a model computes: its slopes or frequencies as trained, or scaled.

    The scale factor a is the same at every length (static), or it grows with the tokens (dynamic):
    a = max(1, rate * tokens / train_length). ``read_scaling`` and ``Request`` check what users give.
    """

    method: Method = "none"
    factor: float = 1.0
    """Of a static scaling: the scale factor a >= 1, no unit."""
    ramp: Ramp | None = None
    """Of ``by-parts``; None for other methods."""
    exponents: Exponents | None = None
    """Of ``fitted``; None for other methods."""
    temperatures: Exponents | None = None
    """Of ``fitted``, in as many rows as the exponents; None if it has none."""
    power: int | None = None
    """Of ``concave``; None for other methods."""
    dynamic: Basis | None = None
    """What the factor of a dynamic scaling grows with; None for other scalings."""
    rate: float = 1.0
    """Of a dynamic scaling: a0 > 0, no unit."""
    train_length: int = 0
    """Of a dynamic scaling: the trained length in tokens."""

    @property
    def scaled(self) -> bool:
        """Whether it changes anything."""
        return self.method != "none"

    @property
    def static(self) -> bool:
        """Whether it has the same factor at every length."""
        return self.scaled and not self.dynamic

    def factor_at(self, tokens: int) -> float:
        """The scale factor a for a sequence of ``tokens`` tokens, or a query at position ``tokens - 1``."""
        return max(1.0, self.rate * tokens / self.train_length) if self.dynamic else self.factor

    @property
    def folded_channels(self) -> int:
        """The channels that a converted decoder appends to each head."""
        return FOLDED_CHANNELS if self.power is None else CONCAVE_CHANNELS

    @property
    def float16_length(self) -> int | None:
        """The most tokens for which float16 holds a concave penalty; None for other scalings."""
        if self.power is None:
            return None
        return int(self.train_length * 2 ** (LARGEST_BITS / self.power))

    @property
    def reach(self) -> float:
        """The multiple of the trained length that is given where a program needs a longest length.

        A dynamic scaling has no longest length, so this is a choice: of a concave penalty, the multiple up to
        which the farthest key costs no more than in training.
        """
        if self.power is not None:
            return float(self.power)
        return float(DYNAMIC_REACH) if self.dynamic else self.factor

    def slopes(self, stock: Slopes, tokens: int = 0, layer: int = 0) -> Slopes:
        """The slopes of a layer for a sequence of ``tokens`` tokens; ``ValueError`` for a concave penalty."""
        return with_exponents(stock, exponents_of(self, stock, layer), self.factor_at(tokens))

    def penalties(self, stock: Slopes, tokens: int = 0, layer: int = 0) -> tuple[Penalty, ...]:
        """What each head of a layer takes from the score of a key, for a sequence of ``tokens`` tokens."""
        if self.power is not None:
            return concave(stock, tokens, self.train_length, self.power)
        return lines(self.slopes(stock, tokens, layer))

    def to_json(self) -> dict[str, Any] | None:
        """The value of ``alibi_scaling``, in the convention of BTLM and JAIS, extended; None if unscaled."""
        if not self.scaled:
            return None
        found: dict[str, Any] = {"type": self.method}
        if self.power is not None:
            found |= {"train_seq_len": self.train_length, "dynamic": self.dynamic, "power": self.power}
        elif self.dynamic:
            found |= {"train_seq_len": self.train_length, "dynamic": self.dynamic, "rate": self.rate}
        else:
            found["factor"] = self.factor
        if self.ramp is not None:
            found["ramp"] = list(self.ramp)
        for name, table in (("exponents", self.exponents), ("temperatures", self.temperatures)):
            if table is not None:
                found[name] = [list(row) for row in table]
        return found

    def __str__(self) -> str:
        parts: list[str] = [self.method]
        if self.power is not None:
            parts += [f"{self.dynamic}-dynamic", f"power {self.power} from {self.train_length} tokens"]
        elif self.dynamic:
            rate = f"rate {number_text(self.rate)} from {self.train_length} tokens"
            parts += [f"{self.dynamic}-dynamic", rate]
        elif self.scaled:
            parts.append(f"factor {number_text(self.factor)}")
        if self.ramp is not None:
            parts.append(f"ramp {' to '.join(map(number_text, self.ramp))} tokens")
        if self.exponents is not None:
            layers = len(self.exponents)
            parts.append(f"{len(self.exponents[0])} heads")
            parts.append("all layers alike" if layers == 1 else f"{layers} layers")
        if self.temperatures is not None:
            parts.append("with temperatures")
        return ", ".join(parts)


UNSCALED = Scaling()
DYNAMIC_REACH = 8
"""The ``reach`` of a dynamic scaling."""
LONGEST_SHOWN = 200
"""Characters of a value in a message."""


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The full name (``str``) of each scaling -> one for tables and legends, such as "by-parts by position".

    Short names are distinct. They leave out rate 1, and ramps and lengths that all names of a form share.
    """
    forms: dict[str, list[list[str]]] = {}
    parts = {}
    for name in names:
        spread = re.sub(r"(, rate 1)? from (\d+ tokens)", r", from \2", name)
        method, *more = spread.split(", ")
        strength = more.pop(0) if more else ""
        basis = strength.removesuffix("-dynamic")
        form = f"{method} by {basis}" if basis in BASES else f"{method}, {strength}".removesuffix(", ")
        parts[name] = form, more
        forms.setdefault(form, []).append(more)
    short = {}
    for name, (form, more) in parts.items():
        told = [part for part in more if "rate" in part or not all(part in others for others in forms[form])]
        short[name] = ", ".join([form, *told])
    return short if len({*short.values()}) == len(short) else {name: name for name in short}


def exponents_of(scaling: Scaling, stock: Slopes, layer: int = 0) -> tuple[float, ...]:
    """The exponent t of each head of a layer: that of the formula, or the fitted one."""
    if scaling.exponents is not None:
        return scaling.exponents[layer if len(scaling.exponents) > 1 else 0]
    return exponents(scaling.method, stock, scaling.ramp)


def temperatures_of(scaling: Scaling, layer: int = 0) -> tuple[float, ...] | None:
    """The fitted temperature u of each head of a layer; None without temperatures.

    That the content needs a factor which grows with the length is from InfoScale (arXiv 2501.08570) and YaRN
    (arXiv 2309.00071), which have one for all heads.
    """
    if scaling.temperatures is None:
        return None
    return scaling.temperatures[layer if len(scaling.temperatures) > 1 else 0]


def query_factors(scaling: Scaling, heads: int, tokens: int = 0, layer: int = 0) -> tuple[float, ...]:
    """``a ** u`` of each of the ``heads`` of a layer, which multiplies its queries; 1 without temperatures.

    ``tokens`` are those in the sequence, or the query's position + 1.
    """
    temperatures = temperatures_of(scaling, layer)
    if temperatures is None:
        return (1.0,) * heads
    factor = scaling.factor_at(tokens)
    return tuple(factor**u for u in temperatures)


def rows(scaling: Scaling) -> int:
    """In how many rows of slopes, one per layer, the layers differ; 1 if all are the same."""
    return 1 if scaling.exponents is None else len(scaling.exponents)


def averaged(scaling: Scaling) -> Scaling:
    """The same for all layers: each slope, and factor on queries, is the geometric mean of the layers'."""
    return _each(
        scaling, lambda table: (tuple(sum(heads) / len(table) for heads in zip(*table, strict=True)),)
    )


def first_layers(scaling: Scaling, layers: int) -> Scaling:
    """The scaling of a model's first ``layers`` layers."""
    return _each(scaling, lambda table: table[:layers])


def _each(scaling: Scaling, change: Callable[[Exponents], Exponents]) -> Scaling:
    """The scaling with its exponents and temperatures changed, if it has any."""
    if scaling.exponents is None:
        return scaling
    temperatures = None if scaling.temperatures is None else change(scaling.temperatures)
    return replace(scaling, exponents=change(scaling.exponents), temperatures=temperatures)


def stretched(scaling: Scaling, ratio: float) -> Scaling:
    """The scaling of slopes that are ``ratio`` times as flat, for the same exponents."""
    if scaling.ramp is None:
        return scaling
    start, end = scaling.ramp
    return replace(scaling, ramp=(start * ratio, end * ratio))


LIMITS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "factor": (lambda value: is_number(value) and 1 <= value <= LONGEST, f"a number from 1 to {LONGEST}"),
    "train_seq_len": (lambda value: is_count(value, LONGEST), f"a number of tokens, from 1 to {LONGEST}"),
    "dynamic": (lambda value: value in BASES, " or ".join(BASES)),
    "rate": (
        lambda value: is_number(value) and 0 < value <= LONGEST,
        f"a number above 0, at most {LONGEST}, and usually 1 to 2",
    ),
    "power": (lambda value: is_number(value) and value == POWER, str(POWER)),
}
"""Key of ``alibi_scaling`` -> whether a value can be one, and what is expected."""
METHOD_KEYS: Mapping[Method, tuple[str, ...]] = {
    "by-parts": ("ramp",),
    FITTED: ("exponents", "temperatures"),
    CONCAVE: ("power",),
}
"""Method -> the keys of ``alibi_scaling`` that it has and others do not."""
MAY_BE_NULL = ("factor", "train_seq_len", "ramp")
"""Keys of ``alibi_scaling`` that count as missing if they are null."""


def read_scaling(value: object, where: str = "config.json: alibi_scaling") -> Scaling:
    """Reads ``alibi_scaling``, which messages call ``where``, or raises ``SourceError``.

    ``dynamic`` defaults to length and ``rate`` to 1, as in BTLM. The templates refuse a key that they do not
    know, and so does this: it may change the slopes, and a newer version may have written it.
    """
    if value is None:
        return UNSCALED
    if not isinstance(value, Mapping):
        raise _no_scaling(value, where)
    method = value.get("type")
    # Without scaling, the whole value is null.
    if method == "none" or method not in (*METHODS, FITTED):
        raise _no_scaling(value, where)
    given = {key: each for key, each in value.items() if each is not None or key not in MAY_BE_NULL}
    if method == CONCAVE:
        return _read_concave(given, where)

    static = "factor" in given
    if static == ("train_seq_len" in given):
        raise SourceError(f"{where} needs a factor or train_seq_len, and not both")
    strength = ("factor",) if static else ("train_seq_len", "dynamic", "rate")
    _check_keys(given, {"type", *strength, *METHOD_KEYS.get(method, ())}, where)
    for key in strength:
        fits, expected = LIMITS[key]
        if key in given and not fits(given[key]):
            raise SourceError(f"{where} has {key} {given[key]!r:.{LONGEST_SHOWN}}, expected {expected}")

    if static:
        scaling = Scaling(method, factor=float(given["factor"]))
    else:
        scaling = Scaling(
            method,
            dynamic=given.get("dynamic", "length"),
            rate=float(given.get("rate", 1.0)),
            train_length=given["train_seq_len"],
        )
    if method == "by-parts":
        ramp = _read_ramp(given.get("ramp"))
        if ramp is None:
            raise SourceError(f"{where} needs a ramp: two numbers of tokens, the smaller first")
        return replace(scaling, ramp=ramp)
    if method == FITTED:
        exponents, temperatures = _read_fitted(given, where)
        _check_fitted_strength(scaling, where)
        return replace(scaling, exponents=exponents, temperatures=temperatures)
    return scaling


def _read_concave(given: Mapping[Any, Any], where: str) -> Scaling:
    _check_keys(given, {"type", "train_seq_len", "dynamic", *METHOD_KEYS[CONCAVE]}, where)
    for key in ("train_seq_len", "power"):
        fits, expected = LIMITS[key]
        if not fits(given.get(key)):
            raise SourceError(f"{where} has {key} {given.get(key)!r:.{LONGEST_SHOWN}}, expected {expected}")
    if given.get("dynamic") != "position":
        raise SourceError(
            f"{where} has dynamic {given.get('dynamic')!r:.{LONGEST_SHOWN}}; a concave penalty needs position"
        )
    return Scaling(
        CONCAVE, dynamic="position", train_length=given["train_seq_len"], power=int(given["power"])
    )


def _no_scaling(value: object, where: str) -> SourceError:
    shown = repr(value)
    if len(shown) > LONGEST_SHOWN:
        shown = f"{shown[:LONGEST_SHOWN]}..."
    return SourceError(f"{where} is {shown}, which is not a scaling this tool knows")


def _check_keys(given: Mapping[Any, object], known: set[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise SourceError(
                f"{where} has the key {str(key)[:LONGEST_SHOWN]!r}, which this version does not know for "
                "this scaling; if a newer ntk-convert wrote it, install that, else remove the key"
            )


def _check_fitted_strength(scaling: Scaling, where: str) -> None:
    """Raises ``SourceError`` for a strength with which slopes would leave float32."""
    if scaling.static and not 1 < scaling.factor <= LARGEST_FACTOR:
        raise SourceError(
            f"{where} has factor {scaling.factor:g}; a fitted scaling needs one above 1, and at most "
            f"{LARGEST_FACTOR:g}"
        )
    if scaling.rate > LARGEST_RATE:
        raise SourceError(
            f"{where} has rate {scaling.rate:g}; that of a fitted scaling is at most {LARGEST_RATE:g}"
        )


def _read_fitted(value: Mapping[str, object], where: str) -> tuple[Exponents, Exponents | None]:
    fitted = _read_table(value.get("exponents"), where, "exponent", EXPONENTS)
    temperatures = None
    if "temperatures" in value:
        temperatures = _read_table(value["temperatures"], where, "temperature", TEMPERATURES)
        if [len(row) for row in temperatures] != [len(row) for row in fitted]:
            raise SourceError(f"{where} has temperatures of another shape than its exponents; give as many")
    if not any(any(row) for row in (*fitted, *(temperatures or ()))):
        raise SourceError(f"{where} has no exponent other than 0, so it would scale no head")
    return fitted, temperatures


def _read_table(value: object, where: str, name: str, bounds: tuple[float, float]) -> Exponents:
    least, largest = bounds
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        raise SourceError(f"{where} needs {name}s: one list for all layers in a list, or one per layer")
    if len({len(row) for row in value}) > 1:
        raise SourceError(f"{where} has {name}s of different numbers of heads; give one per head and layer")
    for layer, row in enumerate(value):
        for head, number in enumerate(row):
            if not is_number(number) or not least <= number <= largest:
                raise SourceError(
                    f"{where} has the {name} {repr(number)[:LONGEST_SHOWN]} for head {head} of layer "
                    f"{layer}; give numbers from {least:g} to {largest:g}"
                )
    return tuple(tuple(map(float, row)) for row in value)


def _read_ramp(value: object) -> Ramp | None:
    """Two spans in tokens; None if it is not a ramp."""
    if not (isinstance(value, list) and len(value) == 2 and all(map(is_number, value))):
        return None
    start, end = map(float, value)
    return (start, end) if 0 < start < end and math.log(start) < math.log(end) else None
