"""What the command line prints about results, for people to read."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from converter.formatting import bytes_text
from converter.model.overrides import set_values
from converter.rotary.settings import Change
from converter.scaling.scaling import Scaling, number_text, read_scaling

if TYPE_CHECKING:
    from converter.catalogue import Entry
    from converter.conversion import ConversionResult
    from converter.evaluation.fit import Fit
    from converter.evaluation.results import Comparison
    from converter.evaluation.tune import Choice, Tuning
    from converter.families.family import Trained
    from converter.inspection import Inspection, SlopeTable
    from converter.publish.push import PushPreview, PushResult

MOST_NAMES = 20
"""Most file names that one line lists."""
WAYS = {
    "copied": "copied",
    "shared": "sharing disk space with the source until one of the two changes (reflink), "
    "so whether a weight is NaN or infinite was not checked",
    "hard-linked": "hard-linked to the source (editing one file edits both), so whether a "
    "weight is NaN or infinite was not checked",
    "linked": "linked to the source",
    "not shared": "copied, because the file system cannot share disk space (--hard-link may link them)",
    "not linked": "copied, because they cannot be linked to the source (another disk, or not permitted)",
    "converted": "rewritten",
}
"""How weight files were written -> its description."""


def plan(result: ConversionResult) -> str:
    """The result of a dry run: the table of files and the changes to config.json."""
    lines = [*_rotary(result.rotary), f"{result.path} would contain", ""]
    width = max(map(len, result.files))
    for name, size in result.files.items():
        lines.append(f"  {name:{width}}  {'' if size is None else bytes_text(size):>10}".rstrip())
    lines += ["", "config.json", ""]
    for key, (before, after) in result.config_changes.items():
        lines += [f"- {key}: {json.dumps(before)}"] if before is not None else []
        lines += [f"+ {key}: {json.dumps(after)}"] if after is not None else []
    more = _remarks(result)
    lines += ["", *more] if more else []
    return "\n".join(lines)


def one_factor(recommended: Scaling, *, converted: bool) -> str:
    """The note on a target length without a method, for a decoder that gets ``recommended`` by default.

    A converted repository keeps its scaling without any option, so there the default has to be asked for.
    """
    remedy = "leave out --target-length"
    if converted:
        remedy = f"give --dynamic {recommended.dynamic} in place of --target-length"
    return (
        f"note: --target-length gives one factor for all lengths, method ntk; recommended: {remedy}, for the "
        f"default: {recommended.method} by {recommended.dynamic}, at every length"
    )


def summary(result: ConversionResult, *, verbose: bool) -> str:
    total = sum(size or 0 for size in result.files.values())
    lines = [
        f"{result.source} converted to {result.model_type}: {result.scaling}",
        *_rotary(result.rotary),
        f"{_files(len(result.files))}, {bytes_text(total)}, in {result.seconds:.1f} s",
        f"weights: {', '.join(f'{_files(count)} {WAYS[how]}' for how, count in result.weights.items())}",
        *_sizes(result, verbose=verbose),
    ]
    lines += _checked(result) or ["not verified (--no-verify)"]
    lines += _remarks(result)
    how = "load it with an Auto class and trust_remote_code=True; other classes may run it unscaled"
    return "\n".join([*lines, "load it like the source; only config.json differs" if result.rotary else how])


def _remarks(result: ConversionResult) -> list[str]:
    limit = f"texts are cut after {result.input_limit} tokens; --max-length N changes that"
    return [*(f"note: {note}" for note in result.notes), *[limit] * (result.input_limit is not None)]


def _checked(result: ConversionResult | PushResult) -> list[str]:
    return [f"checked {check.name}: {'skipped, ' * check.skipped}{check.detail}" for check in result.checks]


def _sizes(result: ConversionResult | PushResult, *, verbose: bool) -> list[str]:
    """The files and their sizes, for ``--verbose``."""
    files = result.files.items() if verbose else ()
    return [f"  {_names([name])}  {bytes_text(size or 0)}" for name, size in files]


def _rotary(change: Change | None) -> list[str]:
    return [] if change is None else [f"rotary positions, not ALiBi: {change}"]


def families(entries: Sequence[Entry], *, checkpoints: bool) -> str:
    """The list of models that can be converted; with ``checkpoints``, also of the known checkpoints."""
    lines = []
    for entry in entries:
        recognised = entry.recognised_by.replace("`", "")
        lines += [f"{entry.title}  ({entry.positions}, {entry.kind})", *_wrapped("model_type", recognised)]
        lines += _wrapped("models", ", ".join(entry.examples)) if entry.examples else []
        lines += _wrapped("heads", ", ".join(entry.heads)) if entry.heads else []
        lines += ["  no ONNX graph"] if not entry.onnx else []
        if checkpoints:
            lines += [line for group in entry.checkpoints for line in _trained(group)]
        elif entry.checkpoints:
            count = sum(len(group.ids) for group in entry.checkpoints)
            lines += _wrapped("known checkpoints", f"{count}, listed by: ntk-convert families {entry.name}")
        lines.append("")
    return "\n".join(lines[:-1])


def _trained(group: Trained) -> list[str]:
    """Checkpoints with one trained length, and who states it."""
    length = "trained length not known" if group.tokens is None else f"trained at {group.tokens} tokens"
    return [*_wrapped(length, group.source), *_filled(", ".join(group.ids), "    ")]


def _wrapped(name: str, text: str) -> list[str]:
    """A field, wrapped to the width of the terminal."""
    return _filled(text, f"  {name}: ")


def _filled(text: str, start: str) -> list[str]:
    width = shutil.get_terminal_size().columns
    return textwrap.wrap(
        text, max(width, 40), initial_indent=start, subsequent_indent="    ", break_on_hyphens=False
    )


def tuning(found: Tuning) -> str:
    """What ``tune`` found: the half that chose, the half that judged, and the verdict."""
    from converter.evaluation.results import legend

    labels = (found.candidates if found.choices else found.curve).labels()
    judged = {row: label for row, label in labels.items() if row in found.curve.labels()}
    lines = [f"{found.model}, trained at {found.train_length} tokens, to reach {found.target_length}", ""]
    if found.choices:
        what = f"One half of the prompts and windows chooses, at {found.target_length} tokens:"
        lines += [what, "", found.candidates.report(labels), "", "The other half judges the best:", ""]
    lines += [found.curve.report(labels), "", *filter(None, [legend(judged)]), ""]
    named = {choice.measure: labels[found.model, str(choice.scaling)] for choice in found.choices}
    lines += [_choice(choice, named[choice.measure]) for choice in found.choices]
    lines += [f"Time: {found.seconds:.0f} s", ""]
    verdict = f"Verdict: {found.verdict}. "
    if not found.choices:
        verdict += "Give prompts of your own, of a kind that the model can answer."
        return "\n".join([*lines, verdict])
    decisive = next(each for each in found.choices if each.verdict == found.verdict)
    than = "with the scaling that it was tuned with" if found.baseline.scaled else "without scaling"
    verdict += _reason(decisive, named[decisive.measure], than)
    if found.command is not None:
        return "\n".join([*lines, f"{verdict}. To convert the model this way:", "", f"    {found.command}"])
    if found.verdict == "cannot tell":
        more = "Give more prompts, queries or text, or a higher --items; half of them judge"
        verdict += f", which is too little to tell. {more}."
    else:
        verdict += ": leave the model as it is."
    return "\n".join([*lines, verdict])


def _reason(choice: Choice, name: str, than: str) -> str:
    """Why a scaling of this name is advised or not, in a sentence without its full stop."""
    from converter.evaluation.results import PERPLEXITY

    judged, read = choice.judgement, choice.measure == PERPLEXITY
    what, done = ("windows", "predicted") if read else ("prompts", "answered")
    found = judged.comparison
    said = (
        f"Of {judged.items} {what} that took no part in the choice, {found.better} are {done} better with "
        f"{name} than {than}, and {found.worse} worse"
    )
    if choice.other is None:
        return said
    state = "better too" if choice.other.gains else "worse" if choice.other.loses else "not measurably worse"
    return f"{said}; {'retrieval' if read else PERPLEXITY} is {state}"


def fitted(found: Fit) -> str:
    """What ``fit`` gained, on what was kept back."""
    from converter.evaluation.fit import ENDS
    from converter.evaluation.paired_test import ITEMS

    lines = [f"fitted in {found.steps} steps, {found.seconds:.0f} s; {ENDS[found.ended]}"]
    for each in found.judged:
        lines.append(
            f"kept back, {each.measure} at {each.length} tokens: loss {each.before:.4f} -> {each.after:.4f}; "
            f"{each.better} of {each.items} {ITEMS[each.measure]} better, p = {each.p:.2g}"
        )
    return "\n".join(lines)


def _choice(choice: Choice, name: str) -> str:
    """What a choice shows, and what its scaling gains and costs at the target and at short range."""
    from converter.evaluation.results import PERPLEXITY

    judged = choice.judgement
    masked = choice.measure == PERPLEXITY
    items, unit = ("windows", " %") if masked else ("prompts", " points")
    if judged.verdict == "cannot tell":
        said = (
            f"cannot tell with {judged.items} {items}: {judged.needed} would show a gain of "
            f"{100 * judged.gain:.3g}{unit}"
        )
        if judged.needed_for_seen is not None:
            said += f", and {judged.needed_for_seen} the {100 * judged.seen:.3g}{unit} that were seen"
    elif choice.verdict != judged.verdict:
        said = f"helps, but harms {'retrieval' if masked else PERPLEXITY}"
    else:
        said = judged.verdict
    other = "retrieval" if masked else PERPLEXITY
    lines = [f"By {choice.measure}: {name}: {said}."]
    lines += [f"  at the target: {_versus(choice.measure, judged.comparison)}"]
    lines += [f"  at the target: {_versus(other, choice.other)}"] if choice.other is not None else []
    lines += [f"  at {choice.short} tokens: {_versus(*each)}" for each in choice.at_short.items()]
    return "\n".join(lines)


def _versus(measure: str, found: Comparison) -> str:
    """The difference from the baseline with its interval (95 %), the items that differ, and p."""
    from converter.evaluation.results import difference_text

    value, interval = difference_text(measure, found)
    counts = f"{found.better} better, {found.worse} worse, p = {found.p:.2g}"
    return f"{measure} {value} ({interval.removeprefix('x ')}); {counts}"


def pushed(result: PushResult, *, verbose: bool) -> str:
    where = result.repo + (f" (branch {result.branch})" if result.branch != "main" else "")
    total = f"{_files(len(result.files))}, {bytes_text(sum(result.files.values()))}"
    if result.pull_request is not None:
        lines = [f"pull request {result.pull_request} for {where}: {total}"]
    elif result.changed or result.deleted:
        lines = [f"pushed to {where} as commit {result.commit}: {total}"]
    else:
        lines = [f"nothing to push: {where} already has all files at commit {result.commit} ({total})"]
    if result.changed and len(result.changed) < len(result.files):
        lines.append(f"changed: {_names(result.changed)}")
    lines += _sizes(result, verbose=verbose)
    lines += [f"deleted: {_names(result.deleted)}"] if result.deleted else []
    if result.kept:
        lines.append(f"kept as on the Hub: {_names(result.kept)}, written by hand (--overwrite replaces it)")
    if result.stale:
        lines.append(
            f"left on the Hub: {_names(result.stale)}, graphs of the older model; export, and push again"
        )
    lines += [f"not pushed: {_names(result.left)}"] if result.left else []
    return "\n".join([*lines, *_checked(result)])


def push_preview(found: PushPreview) -> str:
    """What a push would send, and what it would leave out."""
    where = found.repo + (f" (branch {found.branch})" if found.branch != "main" else "")
    total = f"{_files(len(found.files))}, {bytes_text(sum(found.files.values()))}"
    lines = [f"{where} would get {total}", ""]
    width = max(map(len, found.files))
    lines += [f"  {name:{width}}  {bytes_text(size):>10}" for name, size in found.files.items()]
    lines += ["", f"not sent: {_names(found.left)}" if found.left else "nothing in the folder is left out"]
    if found.changes is None:
        return "\n".join([*lines, not_asked(found.repo)])
    changes = found.changes
    there = [name for name in found.files if name not in changes.changed and name not in changes.kept]
    lines += [f"on the Hub already: {_names(there)}"] if there else []
    lines += [f"would be deleted there: {_names(changes.deleted)}"] if changes.deleted else []
    lines += [f"would stay as it is there: {_names(changes.kept)}, written by hand"] if changes.kept else []
    lines += [f"would be of the older model: {_names(changes.stale)}"] if changes.stale else []
    return "\n".join(lines)


def not_asked(repo_id: str) -> str:
    return f"the Hub was not asked what {repo_id} holds, because there is no token"


def _names(names: Sequence[str]) -> str:
    """The first names of a list of files."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def inspection(found: Inspection) -> str:
    rows = {
        "source": found.source,
        "family": f"{found.family} (model_type {found.model_type})",
        "heads": f"{found.num_heads} of size {found.head_dim}",
        "layers": str(found.num_layers),
        "parameters": "not known without loading",
        "weights": "none found",
        **_needs(found),
        "trained length": _trained_length(found),
    }
    if found.commit:
        rows["source"] += f" at {found.commit}"
    if found.num_kv_heads != found.num_heads:
        rows["heads"] += f" ({found.num_kv_heads} for keys and values)"
    if found.parameters is not None:
        rows["parameters"] = f"{found.parameters:,}"
    if found.dtype:
        rows["parameters"] += f" ({found.dtype})"
    if found.files:
        total = sum(size or 0 for size in found.files.values())
        rows["weights"] = f"{_files(len(found.files))}, {bytes_text(total)}"
    if found.input_limit:
        rows["input limit"] = f"{found.input_limit} tokens"
    if found.overrides:
        rows["set"] = " ".join(set_values(found.overrides))
    rows["converted"] = "no"
    if found.converted:
        rows["converted"] = f"yes, from {found.original or 'an unknown source'}"
    scaling = read_scaling(found.rotary.scaling if found.rotary else found.alibi_scaling)
    rows["scaling"] = str(scaling)
    if found.by_default:
        rows["scaling"] = f"none; a conversion gives it by default: {scaling}"
    if found.rotary:
        rows["rotary"] = f"{found.rotary.channels} channels a head, {found.rotary}"
    lines = [f"{name:16}{value}" for name, value in rows.items()]
    if found.rotary:
        return "\n".join([*lines, "", *_positions("pair", found.frequencies)])
    return "\n".join([*lines, "", *_positions("head", found.slopes)])


def _trained_length(found: Inspection) -> str:
    text = found.train_length_origin
    if found.train_length is not None:
        text = f"{found.train_length} tokens, {text}"
    if found.base is not None:
        text += f"; {found.base}: --train-length {found.base.tokens}"
    return text


def _positions(row: str, table: SlopeTable) -> list[str]:
    """A line for each slope or frequency; ``row`` is what has one."""
    if table.scaled is None and table.spans is not None:
        return _concave_spans(table, table.spans)
    if table.scaled is None or table.factor is None:
        return [f"{row:11}stock", *(f"{n:4}  {stock:10.8f}" for n, stock in enumerate(table.stock))]
    where = f"factor {number_text(table.factor)}"
    if table.at_length:
        where += f" at {table.at_length} tokens"
    if table.layers > 1:
        where += f"; mean of {table.layers} layers"
    lines = [f"{row:11}stock      scaled  divided by ({where})"]
    for n, (stock, scaled) in enumerate(zip(table.stock, table.scaled, strict=True)):
        lines.append(f"{n:4}  {stock:10.8f}  {scaled:10.8f}  {stock / scaled:.4f}")
    return lines


def _concave_spans(table: SlopeTable, spans: Sequence[float | None]) -> list[str]:
    """A line for each head, with the distance at which its concave penalty reaches 5 nats."""
    lines = [f"head       stock slope  5 nats at distance (among {table.at_length} tokens)"]
    for n, (stock, span) in enumerate(zip(table.stock, spans, strict=True)):
        reached = "never" if span is None else f"{span:.1f}"
        lines.append(f"{n:4}  {stock:16.8f}  {reached}")
    return lines


def _needs(found: Inspection) -> dict[str, str]:
    needs, rows = found.needs, {}
    if needs.weights:
        rows["memory"] = ", ".join(
            f"{bytes_text(size)} of weights in {bits} bits"
            for size, bits in zip(needs.weights.values(), (32, 16), strict=True)
        )
    if needs.cache is not None:
        rows["cache"] = f"{bytes_text(needs.cache)} for 1,000 tokens in 16 bits"
    if needs.scores is not None:
        rows["scores"] = (
            f"{bytes_text(needs.scores)} and more for a prompt of {needs.length} tokens in 16 bits; "
            "none with a fused kernel"
        )
    if needs.result:
        download = f"{bytes_text(needs.download)} for the download, " * bool(needs.download)
        rows["disk"] = f"{download}{bytes_text(needs.result)} for the result (none with --hard-link)"
    return rows


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
