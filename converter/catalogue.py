"""What can be converted, as the code itself declares it: for ``ntk-convert families`` and the docs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from converter.errors import UsageError
from converter.families import FAMILIES
from converter.families.family import Trained
from converter.rotary.models import MODELS


@dataclass(frozen=True)
class Entry:
    """One supported family."""

    name: str
    title: str
    positions: Literal["alibi", "rotary"]
    kind: Literal["decoder", "encoder"]
    recognised_by: str
    """What in a source's config.json tells it."""
    heads: tuple[str, ...]
    """How the classes end that a source may have; empty where transformers' own classes are kept."""
    examples: tuple[str, ...]
    train_lengths: dict[str, int]
    """Hub id -> trained length in tokens, of the known checkpoints whose length is known."""
    checkpoints: tuple[Trained, ...]
    """All known checkpoints, with the source of each trained length."""
    onnx: bool
    """Whether a graph can be exported."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def supported(name: str = "") -> list[Entry]:
    """Every family that can be converted: ALiBi decoders, ALiBi encoders, rotary models.

    Args:
        name: only the families with this text in their name or this ``model_type``, and the known checkpoints
            with this text in their Hub id; upper and lower case are the same.

    Raises:
        UsageError: there are none.
    """
    found = [part for entry in _families() if (part := _named(entry, name.lower())) is not None]
    if not found:
        raise UsageError(
            f"no family or known checkpoint is called {name!r}: ntk-convert families lists the families, "
            "ntk-convert inspect MODEL describes any model"
        )
    return found


def _named(entry: Entry, name: str) -> Entry | None:
    """The entry, or its known checkpoints with that name; None if it has none."""
    if name in entry.name or f"`{name}`" in entry.recognised_by.lower():
        return entry
    groups = [
        replace(group, ids=tuple(each for each in group.ids if name in each.lower()))
        for group in entry.checkpoints
    ]
    kept = tuple(group for group in groups if group.ids)
    ids = {each for group in kept for each in group.ids}
    lengths = {each: length for each, length in entry.train_lengths.items() if each in ids}
    return replace(entry, checkpoints=kept, train_lengths=lengths) if kept else None


def _families() -> list[Entry]:
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
            checkpoints=family.checkpoints,
            onnx=True,
        )
        for family in sorted(FAMILIES, key=lambda family: family.kind)
    ]
    types = ", ".join(f"`{name}`" for name in MODELS)
    return [*alibi, Entry("rotary", "Rotary models", "rotary", "decoder", types, (), (), {}, (), onnx=False)]


COLUMNS = ("family", "models", "`model_type` of the source", "attention", "trained length known of")


def markdown(name: str = "") -> str:
    """The README's table; ``name`` is that of ``supported``."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for entry in supported(name):
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
