"""What can be converted, as the code itself declares it: for ``ntk-convert families`` and the README."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from converter.families import FAMILIES
from converter.rotary.models import MODELS


@dataclass(frozen=True)
class Entry:
    """One supported family."""

    name: str
    title: str
    """Name for people."""
    positions: Literal["alibi", "rotary"]
    kind: Literal["decoder", "encoder"]
    recognised_by: str
    """What in a source's config.json tells it."""
    heads: tuple[str, ...]
    """How the classes end that a source may have; empty where transformers' own classes are kept."""
    examples: tuple[str, ...]
    """Hub ids."""
    train_lengths: dict[str, int]
    """Hub id -> trained length in tokens, of the checkpoints known for certain."""
    onnx: bool
    """Whether a graph can be exported."""

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return asdict(self)


def supported() -> list[Entry]:
    """Every family that can be converted: ALiBi decoders, ALiBi encoders, rotary models."""
    alibi = [
        Entry(
            name=family.name,
            title=family.title,
            positions="alibi",
            kind=family.kind,
            recognised_by=family.sign or ", ".join(f"`{name}`" for name in family.model_types),
            heads=tuple(family.heads.values()),
            examples=family.examples,
            train_lengths=dict(family.train_lengths),
            onnx=True,
        )
        for family in sorted(FAMILIES, key=lambda family: family.kind)
    ]
    rotary = Entry(
        name="rotary",
        title="Rotary models",
        positions="rotary",
        kind="decoder",
        recognised_by=", ".join(f"`{name}`" for name in MODELS),
        heads=(),
        examples=(),
        train_lengths={},
        onnx=False,
    )
    return [*alibi, rotary]


COLUMNS = ("family", "models", "`model_type` of the source", "attention", "trained length known of")


def markdown() -> str:
    """The README's table."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for entry in supported():
        rotary = entry.positions == "rotary"
        known = len(entry.train_lengths)
        rows.append(
            (
                entry.title,
                ", ".join(entry.examples) or "any of these types",
                entry.recognised_by,
                "causal, by config.json alone" if rotary else ATTENTION[entry.kind],
                "all (`max_position_embeddings`)" if rotary else f"{known} checkpoint{'s' * (known != 1)}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


ATTENTION = {"decoder": "causal", "encoder": "bidirectional"}
