"""What the command line says about results, for people."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from converter.rotary.settings import Change
from converter.scaling import Scaling

if TYPE_CHECKING:
    from converter.catalogue import Entry
    from converter.evaluation.tune import AgainstNone, Choice, Tuning
    from converter.inspection import Inspection
    from converter.onnx.export import ExportResult
    from converter.onnx.validation import GraphCheck, ValidationReport
    from converter.pipeline import ConversionResult
    from converter.publish.push import PushResult

MOST_NAMES = 20
"""Files that one line names."""
FAILS = 0.1
"""Score below which a model is said not to be able to do a task."""
WAYS = {
    "copied": "copied",
    "shared": "sharing the source's bytes until one of them changes (reflink)",
    "hard-linked": "hard-linked: the source's own, so that to change one is to change both",
    "linked": "links to the source's",
    "not shared": "copied, since the disk cannot share their bytes (--hard-link may link them)",
    "not linked": "copied, since they cannot be linked to the source's (another disk, or not allowed)",
    "converted": "written anew",
    "kept": "kept from the interrupted run",
}
"""How weight files came to be -> what is said of it."""


def plan(result: ConversionResult) -> str:
    """A dry run: the table of files and the changes to config.json."""
    lines = [*_rotary(result.rotary), f"{result.path} would hold", ""]
    width = max(map(len, result.files))
    for name, size in result.files.items():
        lines.append(f"  {name:{width}}  {'' if size is None else bytes_text(size):>10}".rstrip())
    lines += ["", "config.json", ""]
    for key, (before, after) in result.config_changes.items():
        lines += [f"- {key}: {json.dumps(before)}"] if before is not None else []
        lines += [f"+ {key}: {json.dumps(after)}"] if after is not None else []
    lines += ["", *_notes(result)] if result.notes else []
    return "\n".join(lines)


def summary(result: ConversionResult, *, verbose: bool) -> str:
    """A finished conversion."""
    total = sum(size or 0 for size in result.files.values())
    lines = [
        f"{result.source} converted to {result.model_type}: {result.scaling}",
        *_rotary(result.rotary),
        f"{_files(len(result.files))}, {bytes_text(total)}, in {result.seconds:.1f} s",
    ]
    lines += [
        f"weights: {', '.join(f'{_files(count)} {WAYS[how]}' for how, count in result.weights.items())}"
    ]
    if verbose:
        lines += [f"  {name}  {bytes_text(size or 0)}" for name, size in result.files.items()]
    lines += [f"checked {check.name}: {'skipped, ' * check.skipped}{check.detail}" for check in result.checks]
    lines += ["not verified (--no-verify)"] * (not result.checks)
    lines += _notes(result)
    how = "load it with trust_remote_code=True, by an Auto class; a class called by name may run unscaled"
    return "\n".join([*lines, "load it as its source; only config.json differs" if result.rotary else how])


def _notes(result: ConversionResult) -> list[str]:
    return [f"note: {note}" for note in result.notes]


def _rotary(change: Change | None) -> list[str]:
    return [] if change is None else [f"rotary positions, not ALiBi: {change}"]


def families(entries: Sequence[Entry]) -> str:
    """What can be converted."""
    lines = []
    for entry in entries:
        recognised = entry.recognised_by.replace("`", "")
        lines += [f"{entry.title}  ({entry.positions}, {entry.kind})", *_wrapped("model_type", recognised)]
        lines += _wrapped("models", ", ".join(entry.examples)) if entry.examples else []
        lines += _wrapped("heads", ", ".join(entry.heads)) if entry.heads else []
        known = ", ".join(f"{name} {length}" for name, length in entry.train_lengths.items())
        lines += _wrapped("trained at", known) if known else []
        lines += ["  no ONNX graph"] if not entry.onnx else []
        lines.append("")
    return "\n".join(lines[:-1])


def _wrapped(name: str, text: str) -> list[str]:
    """A field, in lines that fit a terminal."""
    start = f"  {name}: "
    width = shutil.get_terminal_size().columns
    return textwrap.wrap(
        text, max(width, 40), initial_indent=start, subsequent_indent="    ", break_on_hyphens=False
    )


def tuning(found: Tuning) -> str:
    """What ``tune`` found: the search, the curve, and what each choice gains and costs."""
    has_loss = any(each.losses for each in found.candidates)
    has_score = any(each.scores for each in found.candidates)
    head = ["scaling", *["retrieval, %"] * has_score, *["perplexity"] * has_loss, "prompts, windows"]
    rows = []
    for each in found.candidates:
        score = [f"{100 * each.accuracy:.1f}"] if each.accuracy is not None else []
        loss = [f"{math.exp(min(each.loss, 700)):.3g}"] if each.loss is not None else []
        asked = f"{len(each.scores)}, {len(each.losses)}{', dropped' * each.dropped}"
        rows.append([str(each.scaling), *score, *loss, asked])
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [f"{found.model}, trained at {found.train_length} tokens, to reach {found.target_length}", ""]
    lines += [f"The search, at {found.target_length} tokens:", ""]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    lines += [
        "",
        "None and the choices, measured again on other prompts and windows:",
        "",
        found.curve.report(),
    ]
    lines += ["", *(_choice(choice) for choice in found.choices), *_doubt(found)]
    lines += [f"in {found.seconds:.0f} s"]
    if found.command is None:
        harm = any(choice.gains for choice in found.choices)
        why = "What helps by one measure harms by the other" if harm else "No scaling measurably helps here"
        advice = f"{why}: leave the model as it is."
        return "\n".join([*lines, "", advice, "More --minutes tell smaller differences from chance."])
    return "\n".join([*lines, "", "This bakes it in:", "", f"    {found.command}"])


def _doubt(found: Tuning) -> list[str]:
    """What to say where the model fails at the tasks even where it needs no scaling."""
    asked = [
        each for each in found.curve.measurements if each.scaling == "none" and each.task != "perplexity"
    ]
    short = min((each.length for each in asked), default=0)
    scores = [score for each in asked if each.length == short for score in each.scores]
    share = sum(scores) / len(scores) if scores else 1.0
    if share >= FAILS:
        return []
    return [
        f"Unscaled, it has {100 * share:.0f} % right even at {short} tokens, so retrieval says little about "
        "this model; give --prompts that it can answer."
    ]


def _choice(choice: Choice) -> str:
    """One sentence: what a choice gains and costs at the target, and at short range."""
    if choice.scaling.method == "none":
        return f"By {choice.measure}: none is best."
    verdict = "better than none" if choice.gains else "not measurably better than none"
    if choice.loses:
        other = "retrieval" if choice.measure == "perplexity" else "perplexity"
        verdict += f", and worse by {other}"
    text = f"By {choice.measure}: {choice.scaling}, {verdict}; at the target: {_versus(choice.at_target)}"
    short = _versus(choice.at_short)
    return f"{text}; at {choice.short} tokens: {short}." if short else f"{text}."


def _versus(found: AgainstNone) -> str:
    """Both measures' differences to none, with their intervals; empty if neither was measured."""
    parts = []
    if (scores := found.retrieval) is not None:
        points = [100 * value for value in (scores.difference, scores.low, scores.high)]
        interval = f"{points[1]:+.1f} to {points[2]:+.1f}"
        parts.append(f"retrieval {points[0]:+.1f} points ({interval}, p = {scores.p:.2g})")
    if (losses := found.perplexity) is not None:
        interval = f"{losses.low:.3f} to {losses.high:.3f}"
        parts.append(f"perplexity x {losses.difference:.3f} ({interval}, p = {losses.p:.2g})")
    return ", ".join(parts)


def exported(result: ExportResult) -> str:
    """A finished export."""
    lines = [f"{name}  {bytes_text(size)}" for name, size in result.files.items()]
    lines += [validation(result.report) if result.report else "not validated (--no-validate)"]
    return "\n".join([*lines, f"in {result.seconds:.1f} s"])


def pushed(result: PushResult, *, verbose: bool) -> str:
    """A finished push."""
    where = result.repo + (f" (branch {result.branch})" if result.branch != "main" else "")
    total = f"{_files(len(result.files))}, {bytes_text(sum(result.files.values()))}"
    if result.pull_request is not None:
        lines = [f"pull request {result.pull_request} for {where}: {total}"]
    elif result.changed or result.deleted:
        lines = [f"pushed to {where} as commit {result.commit}: {total}"]
    elif result.new_branch:
        lines = [f"created {where}, which begins with all of it, at commit {result.commit} ({total})"]
    else:
        lines = [f"nothing to push: {where} holds all of it at commit {result.commit} ({total})"]
    if result.changed and len(result.changed) < len(result.files):
        lines.append(f"changed: {_names(result.changed)}")
    if verbose:
        lines += [f"  {_names([name])}  {bytes_text(size)}" for name, size in result.files.items()]
    lines += [f"deleted: {_names(result.deleted)}"] if result.deleted else []
    if result.kept:
        lines.append(
            f"kept as it is on the Hub: {_names(result.kept)}, written by hand (or give --overwrite)"
        )
    lines += [f"not pushed: {_names(result.left)}"] if result.left else []
    return "\n".join(lines + [f"checked {check.name}: {check.detail}" for check in result.checks])


def _names(names: Sequence[str]) -> str:
    """Names of files that anybody may have given, as a terminal can show them, and no more than a few."""
    shown = [
        "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name) for name in names
    ]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(shown[:MOST_NAMES]) + more


def validation(report: ValidationReport) -> str:
    """What was checked of each graph, and where it ran."""
    lines = []
    for graph in report.graphs:
        lines.append(f"{graph.file}: {graph.profile}, {graph.dtype}; run: {graph.extent}")
        lines += [_check(check) for check in graph.structure]
        for place in graph.providers:
            note = f", {place.note}" if place.note else ""
            lines.append(f"  on {place.provider}: ran on {', '.join(place.ran) or 'nothing'}{note}")
            lines += [f"  {_check(check)}" for check in place.checks]
    return "\n".join(lines)


def _check(check: GraphCheck) -> str:
    return f"  {'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}"


def inspection(found: Inspection) -> str:
    """What ``inspect`` found."""
    groups = "" if found.num_kv_heads == found.num_heads else f" ({found.num_kv_heads} for keys and values)"
    sizes = [size for size in found.files.values() if size is not None]
    weights = f"{_files(len(found.files))}, {bytes_text(sum(sizes))}" if found.files else "none found"
    count = "not known without loading" if found.parameters is None else f"{found.parameters:,}"
    length = "" if found.train_length is None else f"{found.train_length} tokens, "
    rows = {
        "source": found.source + (f" at {found.commit}" if found.commit else ""),
        "family": f"{found.family} (model_type {found.model_type})",
        "heads": f"{found.num_heads} of size {found.head_dim}{groups}",
        "layers": str(found.num_layers),
        "parameters": count + (f" ({found.dtype})" if found.dtype else ""),
        "weights": weights,
        "trained length": length + found.train_length_origin,
        "converted": "yes" if found.converted else "no",
        "scaling": str(Scaling.from_json(found.rotary.scaling if found.rotary else found.alibi_scaling)),
    }
    if found.rotary:
        rows["rotary"] = f"{found.rotary.channels} channels a head, {found.rotary}"
    lines = [f"{name:16}{value}" for name, value in rows.items()]
    slopes, row = (found.frequencies, "pair") if found.rotary else (found.slopes, "head")
    if slopes.scaled is None:
        lines += ["", f"{row}       stock"]
        lines += [f"{head:4}  {stock:10.8f}" for head, stock in enumerate(slopes.stock)]
    else:
        at = f" at {slopes.at_length} tokens" if slopes.at_length else ""
        lines += ["", f"{row}       stock      scaled  divided by (factor {slopes.factor:g}{at})"]
        for head, (stock, scaled) in enumerate(zip(slopes.stock, slopes.scaled, strict=True)):
            lines.append(f"{head:4}  {stock:10.8f}  {scaled:10.8f}  {stock / scaled:.4f}")
    return "\n".join(lines)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def bytes_text(size: int) -> str:
    """A size as people read it: 3.4 GB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
