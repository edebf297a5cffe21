"""What slopes are fitted to, and what is kept back of it to judge them by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converter.errors import NoGain, UsageError
from converter.evaluation.losses import pieces
from converter.evaluation.results import FEWEST, SIGNIFICANT, WORSE_THAN_GUESSING, WORTH_RATIO, Verdict
from converter.evaluation.runner import Hardware
from converter.evaluation.samples import Answered, Prompts, Samples, Windows
from converter.evaluation.scalings import ladder
from converter.evaluation.statistics import items_to_show, permutation_p, t_interval
from converter.evaluation.subject import Subject
from converter.evaluation.tasks.task import Item, Task
from converter.evaluation.trainable import Batch, row_losses
from converter.scaling.scaling import Scaling
from converter.texts import read_windows

TOKENS_PER_STEP = 8192
MOST_TOKENS = 1 << 22
"""Of text that is read; more would not be looked at in the steps there are."""
LEARN, STOP, JUDGE = 8, 2, FEWEST
"""Fewest windows or prompts to learn from, to stop by, and to judge by."""
PARTS = 3
"""One window or prompt of so many judges: a fit needs few of them, and a test many."""
ENOUGH = 48
"""Windows or prompts that judge even if they take more than ``JUDGE_TOKENS``."""
STOP_TOKENS, JUDGE_TOKENS = 1 << 15, 1 << 17
"""Most tokens to stop by, beyond the fewest items; and to judge by, beyond ``ENOUGH`` items."""
ITEMS = {"text": "windows", "prompts": "prompts"}
"""What judges, by measure."""
SMALL = -math.log(WORTH_RATIO)
"""The gain that is worth a fit: of the loss in nats, and of an answer's probability."""


@dataclass(frozen=True)
class Judged:
    """The fitted slopes against the stock ones, on windows or prompts that took no part in the fit."""

    measure: str
    """"text" or "prompts"."""
    length: int
    """Tokens of a window, or of the longest prompt."""
    items: int
    """Windows or prompts."""
    before: float
    """Mean loss in nats per predicted token with the stock slopes, or those that the model was tuned with."""
    after: float
    """The same with the fitted slopes."""
    better: int
    """Items with less loss."""
    p: float
    """Of the two-sided permutation test (Fisher 1935) of the mean change: the items' changes keep their
    sizes, and get random signs. So prompts that stay right hardly count, however many there are. In text, the
    loss is tested; in prompts the probability exp(-loss) of an answer's tokens, so that one prompt that stays
    wrong cannot outweigh all others."""
    verdict: Verdict
    needed: int
    """Items that would show the gain that was seen, or one of ``SMALL`` if none was."""
    harms: bool
    """Whether they are worse by more than chance, or not a number."""


def samples_of(
    subject: Subject,
    files: Sequence[Path],
    prompts: Sequence[Task],
    form: Scaling,
    trained: int,
    target: int,
    seed: int,
    say: Callable[[str], object] = str,
) -> list[Samples]:
    """What to learn from, and the parts that are kept back; which they are, the seed decides.

    ``say``: see ``read_windows``.
    """
    rng = np.random.default_rng(seed)
    found: list[Samples] = []
    if files:
        count = max(LEARN + STOP + JUDGE, MOST_TOKENS // target)
        windows = read_windows(subject.tokenizer, files, target, count, say)
        judge, stop = _kept(len(windows), target, f"`text` has {len(windows)} windows of {target} tokens")
        windows = windows[rng.permutation(len(windows))]
        parts = windows[judge + stop :], windows[judge : judge + stop], windows[:judge]
        # With a position-dynamic form, no slope changes up to the trained length.
        lengths = ladder(trained, target)[0 if form.static else 1 :]
        found.append(Windows(*parts, lengths, rows_of(subject.hardware), subject.mask))
    if prompts:
        lengths, count = ladder(trained, target), MOST_TOKENS // target
        drawn = [task.items(subject.tokenizer, lengths, count, seed) for task in prompts]
        items = [item for by_length in drawn for each in by_length.values() for item in each]
        shortest = 0 if form.static else trained
        cases = answered(subject.tokenizer, items, shortest, target)
        cases = [cases[index] for index in rng.permutation(len(cases))]
        far, near = _split(cases, trained)
        what = f"`prompts` has {len(far)} prompts with {trained + 1} to {target} tokens"
        (judge, stop), more = _kept(len(far), target, what), _shares(len(near), target)
        found.append(
            Prompts(
                learned=far[judge + stop :] + near[sum(more) :],
                stopping=far[judge : judge + stop] + near[more[0] : sum(more)],
                judging=far[:judge] + near[: more[0]],
                rows=rows_of(subject.hardware),
            )
        )
    return found


def answered(tokenizer: Any, items: Sequence[Item], shortest: int, longest: int) -> list[Answered]:
    """Prompts with their first right answers, if both take more than ``shortest`` and at most ``longest``.

    The answer is what the model should go on with: after a space, unless the prompt ends with white space.
    """
    found = []
    for item in items:
        blank = tokenizer.decode(item.ids[-1:])[-1:].isspace()
        before = "\n" if blank else "a"
        start = tokenizer(before, add_special_tokens=False)["input_ids"]
        whole = tokenizer(f"{before}{'' if blank else ' '}{item.answers[0]}", add_special_tokens=False)
        answer = whole["input_ids"][len(start) :]
        if answer and shortest < len(item.ids) + len(answer) <= longest:
            found.append(Answered((*item.ids, *answer), len(item.ids)))
    return found


def rows_of(hardware: Hardware) -> Callable[[int], int]:
    """How many rows of so many tokens a step runs at once."""
    return lambda length: min(hardware.rows(length), max(1, TOKENS_PER_STEP // length))


def _split(cases: Sequence[Answered], trained: int) -> tuple[list[Answered], list[Answered]]:
    """Those beyond the trained length, and those within it."""
    far = [case for case in cases if len(case.ids) > trained]
    return far, [case for case in cases if len(case.ids) <= trained]


def _most(length: int) -> int:
    """Most items that judge."""
    return max(ENOUGH, JUDGE_TOKENS // length)


def _shares(count: int, length: int) -> tuple[int, int]:
    """How many of so many items judge, and how many stop."""
    return min(count // PARTS, _most(length)), min(count // 8, STOP_TOKENS // length)


def _kept(count: int, length: int, what: str) -> tuple[int, int]:
    """As ``_shares``, but at least the fewest that there must be; raises ``UsageError`` if there are not."""
    judge, stop = map(max, (JUDGE, STOP), _shares(count, length))
    if count < LEARN + judge + stop:
        raise UsageError(
            f"{what}, and fitting needs {LEARN + judge + stop}: to learn from, to stop by and to judge by; "
            "give more, or another `target_length`"
        )
    return judge, stop


def judging(samples: Sequence[Samples], trained: int, *, static: bool) -> list[tuple[Samples, Any]]:
    """The items that judge, and whose they are. Those within the trained length, which judge harm, come last.

    Position-dynamic slopes change nothing there, so only static ones have any.
    """
    far: list[tuple[Samples, Any]] = []
    near: list[tuple[Samples, Any]] = []
    for each in samples:
        if isinstance(each, Prompts):
            beyond, within = _split(each.judging, trained)
            far.append((each, beyond))
            near += [(each, within)] if within else []
        else:
            far.append((each, each.judging))
            near += [(each, pieces(each.judging, trained))] if static else []
    return far + near


def check_text(subject: Subject, samples: Sequence[Samples], trained: int) -> None:
    """Raises ``UsageError`` for a text that the model reads worse than guessing, within the trained length.

    Slopes would be fitted to whatever confuses it least.
    """
    model = subject.scaled(subject.baseline)
    guessing = math.log(model.config.vocab_size)
    for each in samples:
        if isinstance(each, Windows):
            loss = float(np.mean(row_losses(model, each.kept(pieces(each.stopping, trained)))))
            if loss > guessing + WORSE_THAN_GUESSING:
                raise UsageError(
                    f"{subject.model.name} does not understand `text`: its loss is {loss:.1f} nats a token "
                    f"at {trained} tokens, and guessing would give {guessing:.1f}; give text of the kind "
                    "that it was trained on"
                )


def judge(subject: Subject, samples: Sequence[Samples], scaling: Scaling, trained: int) -> list[Judged]:
    """Runs both slopes as the converted model would, on what took no part in the fit."""
    parts = judging(samples, trained, static=scaling.static)
    batches = [each.kept(items) for each, items in parts]
    before, after = (
        [row_losses(subject.scaled(wanted), each) for each in batches]
        for wanted in (subject.baseline, scaling)
    )
    kept = zip(parts, batches, before, after, strict=True)
    return [judged(each.name, found, stock, fitted) for (each, _), found, stock, fitted in kept]


def judged(name: str, batches: Sequence[Batch], before: Sequence[float], after: Sequence[float]) -> Judged:
    stock, fitted = float(np.mean(before)), float(np.mean(after))
    falls = np.subtract(before, after)
    gains = np.exp(np.negative(after)) - np.exp(np.negative(before)) if name == "prompts" else falls
    # Where a change is not a number, no test is needed.
    mean, p = float(np.mean(gains)), permutation_p(gains) if np.isfinite(gains).all() else 1.0
    harms = not fitted < math.inf or (p < SIGNIFICANT and mean < 0)
    small = len(gains) >= FEWEST and (t_interval(gains)[1] < SMALL or not gains.any())
    verdict: Verdict = "does not help" if harms or small else "cannot tell"
    if p < SIGNIFICANT and mean > 0 and fitted < stock:
        verdict = "helps"
    spread = float(np.std(gains)) if math.isfinite(mean) else 0.0
    needed = items_to_show(spread, max(SMALL, mean))  # of a mean that is not a number, the first
    return Judged(
        measure=name,
        length=max(batch.ids.shape[1] for batch in batches),
        items=len(gains),
        before=stock,
        after=fitted,
        better=int((falls > 0).sum()),
        p=p,
        verdict=verdict,
        needed=max(needed, len(gains) + 1) if verdict == "cannot tell" else needed,
        harms=harms,
    )


def check_gain(found: Sequence[Judged], how: str) -> None:
    """Raises ``NoGain`` unless the slopes help by one measure and harm by none; ``how`` says how it ended."""
    harms = any(each.harms for each in found)
    if any(each.verdict == "helps" for each in found) and not harms:
        return
    said = "; ".join(
        f"{each.measure} at {each.length} tokens: loss {each.before:.4f} before, "
        f"{each.after:.4f} fitted, {each.better} of {each.items} better, p = {each.p:.2g}"
        + (" of the answers' probability" if each.measure == "prompts" else "")
        for each in found
    )
    undecided = [each for each in found if each.verdict == "cannot tell"]
    if harms or not undecided:
        raise NoGain(
            f"no fitted slopes are better than the model's own on what was kept back ({said}), so nothing "
            f"was written ({how}); give other text or prompts, or a formula (tune)",
            "does not help",
        )
    each = min(undecided, key=lambda each: each.needed / each.items)
    more = f"give about {PARTS * each.needed}: one in {PARTS} judges"
    if each.needed > _most(each.length):
        more = f"but at most {_most(each.length)} judge: give other ones, more steps, or a formula (tune)"
    raise NoGain(
        f"cannot tell whether the fitted slopes are better on what was kept back ({said}), so nothing was "
        f"written ({how}); {each.needed} {ITEMS[each.measure]} would most likely show it, {more}",
        "cannot tell",
    )
