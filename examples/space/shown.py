"""What the page says and draws: HTML and SVG, in the colours of style.css."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

from converter import ConversionResult, ExportResult, Inspection
from converter.scaling.penalty import Penalty
from converter.scaling.scaling import UNSCALED, Scaling, read_scaling

STATIC, POSITION, LENGTH = "one factor for all", "by position", "by length"
"""What the factor of a scaling grows with."""
WIDE, HIGH = 460.0, 230.0
"""Of a picture, in its own units; the page scales it."""
LEFT, RIGHT, TOP, BOTTOM = 46.0, 450.0, 24.0, 196.0
"""Where its axes lie."""
POINTS = 200
"""Of a curve in a picture."""
NUMBERS = 10
"""Of heads or pairs that a picture has room for."""
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""From one number to the next."""
DEEPEST = 12.0
"""Nats of bias that are drawn; a key below that has no weight left."""


def facts(found: Inspection, kind: str) -> str:
    """The model in a few numbers."""
    size = sum(size or 0 for size in found.files.values())
    shown = {
        "model": _at_commit(found.source, found.commit),
        "family": f"{found.family}, {kind}",
        "parameters": _in_units(found.parameters).replace("G", "B") if found.parameters else "not counted",
        "weights": f"{_in_units(size)}B",
        "trained length": f"{found.train_length:,} tokens" if found.train_length else "not known",
        "heads": str(found.num_heads),
        "layers": str(found.num_layers),
    }
    cells = "".join(f"<div><span>{name}</span><b>{escape(text)}</b></div>" for name, text in shown.items())
    facts = f'<div class="facts">{cells}</div>'
    if found.train_length:
        return facts
    return f"{facts}<p>{escape(_asked(found))}</p>"


def _asked(found: Inspection) -> str:
    """What to do where the trained length is not known."""
    asked = f"The trained length is {found.train_length_origin}. Say it below, and look again."
    if found.base is not None:
        return f"{asked} The model's card says: {found.base}. If that is its base, say {found.base.tokens}."
    return f"{asked} For a fine-tuned model, it is the length that its base was trained at."


def _in_units(number: float) -> str:
    """A number with three digits and a unit, such as "1.72 G"."""
    power = min(3, (len(str(int(number))) - 1) // 3)
    return f"{number / 1000**power:.3g} {('', 'k', 'M', 'G')[power]}"


def reason(trained: int, growth: str, factor: float) -> str:
    """Why this scaling, in a sentence."""
    until = f"to {factor:g} at {factor * trained:,.0f} tokens"
    if growth == STATIC:
        return (
            f"**One factor, {factor:g}, for inputs of any length:** simple, but short inputs change a little."
        )
    if growth == POSITION:
        kept = f"the first {trained:,} tokens of any input are computed exactly as before."
        return f"**The factor grows with the position, {until}:** {kept}"
    kept = f"inputs of up to {trained:,} tokens are computed exactly as before."
    return f"**The factor grows with the length of the input, {until}:** {kept}"


def concave_reason(trained: int) -> str:
    """Why a concave penalty, in a sentence."""
    kept = f"the first {trained:,} tokens of any input are computed exactly as before."
    return f"**Near keys count as in the training, far ones as if they were nearer:** {kept}"


def slider_effect(growth: str) -> str:
    """What the slider of the longest input does to the result."""
    if growth == STATIC:
        return "The result's factor is this length, divided by the trained one."
    return "Changes only the pictures: the result's factor grows with the input."


def summary(result: ConversionResult, exported: ExportResult | None) -> str:
    """What was converted, with which scaling, what was written, and which checks it passed."""
    files = {**result.files, **(exported.files if exported else {})}
    size = _in_units(sum(size or 0 for size in files.values()))
    rows = [(("skipped" if each.skipped else "passed"), each.name, each.detail) for each in result.checks]
    rows += [("note", "note", note) for note in result.notes]
    lines = "".join(
        f'<li class="{kind}"><b>{escape(name)}</b> {escape(text)}</li>' for kind, name, text in rows
    )
    written = f"{len(files)} files, {size}B{', with an ONNX graph' if exported else ''}"
    how = "Load it with an Auto class and <code>trust_remote_code=True</code>." * (result.rotary is None)
    model = _at_commit(result.source, result.commit)
    return (
        f"<p><b>Converted and checked</b> in {result.seconds:.1f} s: {escape(model)}, "
        f"{_scaling(result.scaling)}. {written}. {how}</p><ul>{lines}</ul>"
    )


def _at_commit(source: str, commit: str | None) -> str:
    """A model's name, with the start of its commit if it is from the Hub."""
    if commit is None:
        return source
    return f"{source} at {commit[:8]}"


def _scaling(scaling: Scaling) -> str:
    """A scaling in a few words."""
    if scaling.dynamic:
        trained = f"{scaling.train_length:,} tokens"
        return f"{scaling.method} by {scaling.dynamic}, for a trained length of {trained}"
    return f"{scaling.method}, one factor of {scaling.factor:g}"


def pictures(found: Inspection, longest: float, head: int) -> str:
    """The span of every head, and the bias of one, before and after; of a rotary model, its wavelengths."""
    trained, scale = found.train_length or 1, found.bias_scale
    if scale is None:
        before, after = found.frequencies.stock, found.frequencies.scaled or found.frequencies.stock
        old, new = [[2 * math.pi / each for each in values] for values in (before, after)]
        drawn = {
            "Tokens in which each pair of channels turns once": _spans(old, new, trained, longest, "pair")
        }
    else:
        nats = tuple(slope * scale for slope in found.slopes.stock)
        stock = UNSCALED.penalties(nats)
        scaled = read_scaling(found.alibi_scaling).penalties(nats, int(longest))
        seen, sees = ([penalty.span for penalty in penalties] for penalties in (stock, scaled))
        head = min(head, len(nats) - 1)
        drawn = {
            "How far each head sees, in tokens": _spans(seen, sees, trained, longest, "head"),
            f"Bias of head {head} by distance, in nats": _bias(stock[head], scaled[head], trained, longest),
        }
    key = '<p class="key"><i class="old"></i>as trained <i class="new"></i>scaled, at the longest input</p>'
    return key + "".join(
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {WIDE} {HIGH}" role="img" '
        f'aria-label="{name}">{body}</svg></figure>'
        for name, body in drawn.items()
    )


def _spans(
    before: Sequence[float | None], after: Sequence[float | None], trained: int, longest: float, each: str
) -> str:
    """A mark for each head before and after, on a logarithmic axis of tokens; None has no mark.

    ``each`` is what has a mark, in one word; the marks are numbered from 0, at most ``NUMBERS`` of them.
    """
    ends = [math.log2(value) for value in (*before, *after, trained, longest) if value is not None]
    low, high = math.floor(min(ends)), math.ceil(max(ends))

    def up(tokens: float) -> float:
        return TOP + (BOTTOM - TOP) * (high - math.log2(tokens)) / (high - low)

    ticks = [2.0**power for power in range(low, high + 1, math.ceil((high - low) / 6))]
    drawn = [_text(LEFT - 6, up(tokens) + 4, f"{tokens:,.5g}", "end") for tokens in ticks]
    for name, tokens, below in (("trained", trained, 17), ("longest input", longest, -5)):
        drawn.append(_line("mark", LEFT, up(tokens), RIGHT, up(tokens)))
        drawn.append(_text(LEFT + 4, up(tokens) + below, f"{name}: {tokens:,.0f}", "start"))
    drawn.append(_text(LEFT - 6, BOTTOM + 24, each, "end"))
    between = next(step for step in STEPS if len(before) <= NUMBERS * step)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        x = LEFT + (RIGHT - LEFT) * (index + 0.5) / len(before)
        if index % between == 0:
            drawn.append(_text(x, BOTTOM + 24, str(index), "middle"))
        if old is not None and new is not None:
            drawn.append(_line("move", x, up(old), x, up(new)))
        if new is not None:
            drawn.append(f'<circle class="new" cx="{x:.1f}" cy="{up(new):.1f}" r="4"/>')
        if old is not None:
            drawn.append(f'<circle class="old" cx="{x:.1f}" cy="{up(old):.1f}" r="2.5"/>')
    return "".join(drawn)


def _bias(before: Penalty, after: Penalty, trained: int, longest: float) -> str:
    """The bias of a head by distance, down to ``DEEPEST``."""

    def across(tokens: float) -> float:
        return LEFT + (RIGHT - LEFT) * tokens / longest

    def up(nats: float) -> float:
        return TOP + (BOTTOM - TOP) * nats / DEEPEST

    drawn = [_text(LEFT - 6, up(nats) + 4, f"{-nats:g}" if nats else "0", "end") for nats in (0, 4, 8, 12)]
    for name, tokens, anchor in (("trained", trained, "middle"), ("longest input", longest, "end")):
        drawn.append(_line("mark", across(tokens), TOP, across(tokens), BOTTOM))
        drawn.append(_text(max(across(tokens), 90), BOTTOM + 24, f"{name}: {tokens:,.0f}", anchor))
    for kind, penalty in (("old", before), ("new", after)):
        distances = [longest * point / POINTS for point in range(POINTS + 1)]
        if not penalty.curve:
            distances = [0.0, min(longest, DEEPEST / penalty.line)]
        seen = [(distance, penalty.at(distance)) for distance in distances]
        points = [(across(distance), up(nats)) for distance, nats in seen if nats <= DEEPEST * (1 + 1e-9)]
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            drawn.append(_line(kind, x1, y1, x2, y2))
    return "".join(drawn)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
