"""What a model says of its scaling in the card of a converted repository."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from converter.config import Config
from converter.families import Family
from converter.families.family import TASKS
from converter.scaling.scaling import Method, Scaling, number_text

NEEDS_TRUST = "Loading needs `trust_remote_code=True` and fails without it. "
CODE_NOTE = """

The code is that of ntk-convert, under the Apache License 2.0. The head of `{module}` says what each
file does, what it imports, and what it opens."""
METHODS: Mapping[Method, str] = {
    "ntk": "The head that sees the nearest keys stays as trained, and the one that sees the farthest sees "
    "farther by the factor; the others lie between.",
    "ntk-published": "The first head stays as trained, and the others see farther, by the formula of the "
    "original code.",
    "by-parts": "Heads that see up to {start} tokens stay as trained, and those that see {end} or more see "
    "farther by the factor.",
    "linear": "Every head sees farther by the factor.",
    "concave": "Up to the trained length nothing changes. Beyond, near keys cost what they cost in training, "
    "and far ones less.",
    "fitted": "How much farther each head sees was fitted.",
}
"""What a scaling does to the heads, for a reader who does not know it."""
DYNAMIC = {
    "length": "The factor is 1 up to the trained length, and then grows with the text.",
    "position": "The factor is 1 up to the trained length, and then grows with the place of the token that "
    "looks back.",
}
"""What the factor of a dynamic scaling grows with."""
STOCK_NOTES = """\
**Do not load this repository
with the stock class** (`{stock_class}.from_pretrained(...)`): transformers then only warns about the
model type and returns an **unscaled** model."""
OWN_NOTES = """\
The code comes with this repository;
it neither needs nor uses the code that the source came with."""

FLOAT16_NOTE = """

In float16 it reads texts of up to {tokens} tokens, and refuses longer ones. bfloat16 and float32 have no such
limit."""


@dataclass(frozen=True)
class CardText:
    position_kind: str
    """For the title: "ALiBi" or "rotary"."""
    scaled_positions: str
    """What was scaled and how; continues "This is SOURCE with its": "ALiBi slopes scaled for ..."."""
    explanation: str
    """What the scaling does, in sentences; empty for an unscaled model, and for rotary ones."""
    differences: str
    """What differs from the source; continues "only": "`config.json` differs"."""
    loading_notes: str
    """Notes on loading and use."""
    auto_class: str
    """The auto class of transformers that loads the result."""
    task: str | None
    """What the Hub calls its task, such as ``text-generation``; None for a class without one."""
    tags: tuple[str, ...]
    has_code: bool
    """Whether loading the result runs code of the repository."""


def alibi_card_text(family: Family, scaling: Scaling, config: Config) -> CardText:
    """The texts for scaled ALiBi slopes; ``config`` is the result's."""
    stock_class = config["architectures"][0].removeprefix("Ntk")
    what = "ALiBi slopes" if scaling.power is None else "ALiBi penalty"
    how = f"scaled for longer contexts: {scaling}" if scaling.scaled else "not scaled at all"
    notes = NEEDS_TRUST + (STOCK_NOTES.format(stock_class=stock_class) if family.stock else OWN_NOTES)
    notes += CODE_NOTE.format(module=f"modeling_{family.model_type}.py")
    if scaling.float16_length is not None:
        notes += FLOAT16_NOTE.format(tokens=scaling.float16_length)
    return CardText(
        position_kind="ALiBi",
        scaled_positions=f"{what} {how}",
        explanation=explain(scaling),
        differences="the attention's code and `config.json` differ",
        loading_notes=notes,
        auto_class=auto_class(config),
        task=task(config),
        tags=("alibi", "ntk-alibi", "custom_code"),
        has_code=True,
    )


def explain(scaling: Scaling) -> str:
    """What a scaling does, in one or two sentences; empty without one."""
    if not scaling.scaled:
        return ""
    text = METHODS[scaling.method]
    if scaling.ramp is not None:
        start, end = scaling.ramp
        text = text.format(start=number_text(start), end=number_text(end))
    if scaling.dynamic and scaling.power is None:
        text += f" {DYNAMIC[scaling.dynamic]}"
    return text


def task(config: Config) -> str | None:
    """The Hub's name for the task of the config's architecture; None if it is not known."""
    return TASKS.get(auto_class(config).removeprefix("AutoModel") or "Model")


def auto_class(config: Config) -> str:
    """The auto class of transformers for the config's architecture."""
    named = config.get("architectures") or [""]
    found = re.search(r"(For[A-Z]\w+|LMHeadModel)$", str(named[0]))
    end = "" if found is None else "ForCausalLM" if found[0] == "LMHeadModel" else found[0]
    return f"AutoModel{end}"
