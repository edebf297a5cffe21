"""What a head's ALiBi takes from the score of a key, by the distance of that key; in float64.

``templates/ntk_concave.py`` repeats the formula of the concave penalty, because a converted repository must
not depend on this package. Verification measures the penalties of the converted model against those here.
"""

from __future__ import annotations

from dataclasses import dataclass

from converter.scaling.slopes import NATS, Slopes


@dataclass(frozen=True)
class Penalty:
    """``line * d + curve * (1 - (1 - d / tokens) ** power)`` nats for a key at distance d.

    A head with a slope has no curve.
    """

    line: float
    """Nats per token of distance."""
    curve: float = 0.0
    """Nats."""
    tokens: int = 1
    """Those that the query sees, itself among them; only a curve depends on them."""
    power: int = 1

    def at(self, distance: float) -> float:
        """The penalty in nats of a key at this distance, from 0 to ``tokens`` where there is a curve."""
        return self.line * distance + self.curve * (1 - (1 - distance / self.tokens) ** self.power)

    @property
    def span(self) -> float | None:
        """The distance in tokens at which the penalty reaches ``NATS``.

        None if that of a curve does not reach it at any token that the query sees.
        """
        if not self.curve:
            return NATS / self.line
        near, far = 0.0, float(self.tokens - 1)
        if self.at(far) < NATS:
            return None
        while far - near > 1e-9 * far:  # the penalty rises with the distance
            middle = (near + far) / 2
            if self.at(middle) < NATS:
                near = middle
            else:
                far = middle
        return far


def lines(slopes: Slopes) -> tuple[Penalty, ...]:
    """The penalties of slopes in nats per token."""
    return tuple(Penalty(slope) for slope in slopes)


def concave(slopes: Slopes, tokens: int, train_length: int, power: int) -> tuple[Penalty, ...]:
    """The concave penalty of each slope, for a query that sees ``tokens`` tokens.

    Up to the trained length L it is ``slope * d``, as trained. Beyond, it starts with the same slope, and
    costs the farthest key what the end of the trained length costs it in training, up to ``power * L``
    tokens; from there on, that grows with the tokens.

    Near distances are kept and far ones compressed as in Self-Extend (arXiv 2401.01325). The power is this
    project's: it makes the penalty a product of a number of the query and one of the key.
    """
    if tokens <= train_length:
        return lines(slopes)
    end = max(train_length, tokens / power)
    found = []
    for slope in slopes:
        curve = slope * (tokens - end) / (power - 1)
        line = max(0.0, slope - power * curve / tokens)
        found.append(Penalty(line, curve, tokens, power))
    return tuple(found)
