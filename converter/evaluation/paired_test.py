"""Whether fitted slopes are better than the baseline: a paired test on what took no part in the fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.errors import NoGain
from converter.evaluation.evaluated_model import EvaluatedModel
from converter.evaluation.results import FEWEST, SIGNIFICANT, WORTH, WORTH_RATIO, Verdict
from converter.evaluation.split import ONE_IN_TEST, Split, most_test_items
from converter.evaluation.statistics import items_to_show, larger_gain_to_show, permutation_p, t_interval
from converter.evaluation.trainable import row_losses
from converter.scaling.scaling import Scaling

ITEMS = {"text": "windows", "prompts": "prompts"}
"""What is tested, by measure."""
SMALL = -math.log(WORTH_RATIO)
"""The smallest gain that is worth a fit: of the loss in nats, and of an answer's probability."""


@dataclass(frozen=True)
class PairedTest:
    """The fitted slopes against the baseline, on windows or prompts that took no part in the fit."""

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
    gain: float
    """A gain that more items would show: of the probability of prompts' answers, or of a text's loss in nats.
    It is the one that is worth it, ``WORTH`` or ``SMALL``, halved while these items would have shown it."""
    needed_for_gain: int
    """Items that would show ``gain``."""
    seen: float
    """The gain that was seen, as ``gain``; negative for a loss. Few items may show a large one by chance."""
    needed: int
    """Items that would show the gain that was seen, or one of ``SMALL`` if that was less."""
    harms: bool
    """Whether they are worse by more than chance, or not a number."""


def parts_within(splits: Sequence[Split], *, static: bool) -> list[tuple[Split, Any]]:
    """What tests for harm within the trained length, and whose it is.

    Position-dynamic slopes change nothing there, so only static ones are tested.
    """
    if not static:
        return []
    found = [(split, split.test_within) for split in splits]
    return [(split, items) for split, items in found if len(items)]


def run_paired_tests(
    evaluated: EvaluatedModel, splits: Sequence[Split], scaling: Scaling
) -> tuple[list[PairedTest], list[PairedTest]]:
    """Runs the test parts under the baseline and the fitted slopes, as the converted model would.

    Returns the tests of gain, one for each split, and those of harm within the trained length.
    """
    parts: list[tuple[Split, Any]] = [(split, split.test_beyond) for split in splits]
    parts += parts_within(splits, static=scaling.static)
    batches = [split.batches(items) for split, items in parts]
    before = _losses(evaluated, evaluated.baseline, batches)
    after = _losses(evaluated, scaling, batches)
    found = []
    for place, (split, _) in enumerate(parts):
        length = max(batch.ids.shape[1] for batch in batches[place])
        found.append(paired_test(split.name, length, before[place], after[place]))
    return found[: len(splits)], found[len(splits) :]


def _losses(evaluated: EvaluatedModel, scaling: Scaling, parts: Sequence[Any]) -> list[tuple[float, ...]]:
    """The mean loss of each row of each part's batches."""
    model = evaluated.scaled(scaling)
    return [row_losses(model, batches) for batches in parts]


def paired_test(measure: str, length: int, before: Sequence[float], after: Sequence[float]) -> PairedTest:
    """Tests the mean losses of the same items, float64 in nats per token; see ``PairedTest``."""
    mean_before, mean_after = float(np.mean(before)), float(np.mean(after))
    falls = np.subtract(before, after)
    gains = falls
    if measure == "prompts":
        gains = np.exp(np.negative(after)) - np.exp(np.negative(before))
    gain = float(np.mean(gains))
    finite = bool(np.isfinite(gains).all())
    p = permutation_p(gains) if finite else 1.0  # a change that is not a number needs no test

    harms = not mean_after < math.inf or (p < SIGNIFICANT and gain < 0)
    none_worth_it = len(gains) >= FEWEST and (t_interval(gains)[1] < SMALL or not gains.any())
    verdict: Verdict
    if p < SIGNIFICANT and gain > 0 and mean_after < mean_before:
        verdict = "helps"
    elif harms or none_worth_it:
        verdict = "does not help"
    else:
        verdict = "cannot tell"

    spread = float(np.std(gains)) if math.isfinite(gain) else 0.0
    worth, for_worth = larger_gain_to_show(spread, WORTH if measure == "prompts" else SMALL, len(gains))
    needed = items_to_show(spread, max(SMALL, gain))  # of a gain that is not a number, the first
    if verdict == "cannot tell":
        needed = max(needed, len(gains) + 1)
    return PairedTest(
        measure=measure,
        length=length,
        items=len(gains),
        before=mean_before,
        after=mean_after,
        better=int((falls > 0).sum()),
        p=p,
        verdict=verdict,
        gain=worth,
        needed_for_gain=for_worth,
        seen=gain,
        needed=needed,
        harms=harms,
    )


def check_gain(gain_tests: Sequence[PairedTest], harm_tests: Sequence[PairedTest], how: str) -> None:
    """Raises ``NoGain`` unless a test of gain shows one, and no test shows harm.

    ``how`` says how the fit ended.
    """
    tests = [*gain_tests, *harm_tests]
    harms = any(test.harms for test in tests)
    helps = any(test.verdict == "helps" for test in gain_tests)
    if helps and not harms:
        return
    said = "; ".join(map(_in_words, tests))
    undecided = [test for test in gain_tests if test.verdict == "cannot tell"]
    if harms or not undecided:
        raise NoGain(
            f"no fitted slopes are better than the model's own on what was kept back ({said}), so nothing "
            f"was written ({how}); give other text or prompts, or a formula (tune)",
            "does not help",
        )
    nearest = min(undecided, key=lambda test: test.needed / test.items)
    most = most_test_items(nearest.length)
    if nearest.needed > most:
        more = f"at most {most} judge: give other ones, more steps, or a formula (tune)"
    else:
        more = f"give about {ONE_IN_TEST * nearest.needed}: one in {ONE_IN_TEST} judges"
    raise NoGain(
        f"cannot tell whether the fitted slopes are better on what was kept back ({said}), so nothing was "
        f"written ({how}); {_sizes(nearest)}; {more}",
        "cannot tell",
    )


def _sizes(test: PairedTest) -> str:
    """How many items would show a gain that is worth it, and the one that was seen, if that is no chance."""
    items = ITEMS[test.measure]
    said = f"{test.needed_for_gain} {items} would most likely show a gain of {_in_unit(test, test.gain)}"
    if test.seen > SMALL:
        return f"{said}, and {test.needed} the {_in_unit(test, test.seen)} that were seen"
    return f"{said}, and {test.needed} one of {_in_unit(test, SMALL)}"


def _in_unit(test: PairedTest, gain: float) -> str:
    if test.measure == "prompts":
        return f"{100 * gain:.3g} points of the answers' probability"
    return f"{100 * -math.expm1(-gain):.3g} % of perplexity"


def _in_words(test: PairedTest) -> str:
    said = (
        f"{test.measure} at {test.length} tokens: loss {test.before:.4f} before, {test.after:.4f} fitted, "
        f"{test.better} of {test.items} better, p = {test.p:.2g}"
    )
    if test.measure == "prompts":
        said += " of the answers' probability"
    return said
