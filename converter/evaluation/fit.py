"""Fits slopes to the user's own text and prompts, and judges them by a part that took no part in the fit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from converter import interrupts
from converter.bytesize import bytes_text
from converter.errors import NoGain, UsageError
from converter.evaluation.candidates import ladder
from converter.evaluation.exam import LONGEST
from converter.evaluation.hardware import Hardware, choose, explained, free_memory
from converter.evaluation.perplexity import pieces, read_windows
from converter.evaluation.results import SIGNIFICANT, finite
from converter.evaluation.settings import run_settings
from converter.evaluation.subject import CAUSAL, MASKED, Subject, open_subject
from converter.evaluation.tasks.base import Item, Task
from converter.fitting.descent import Descent, Look, descend
from converter.fitting.samples import Answered, Prompts, Samples, Windows
from converter.fitting.trainable import Batch, TrainableAlibi, memory, row_losses
from converter.progress import Advance
from converter.progress import steps as step_bar
from converter.scaling.scaling import FITTED, LARGEST_FACTOR, UNSCALED, Basis, Dynamic, Scaling, Static

STEPS, MINUTES = 200, 10.0
TOKENS_PER_STEP = 8192
MOST_TOKENS = 1 << 22
"""Of text that is read; more would not be looked at in the steps there are."""
STOP, JUDGE = 2, 6
"""Fewest windows or prompts to stop by, and to judge by: six that all get better are the fewest that are more
than chance."""
STOP_TOKENS, JUDGE_TOKENS = 1 << 15, 1 << 17
"""Most tokens of either, beyond the fewest windows or prompts."""
LEARN = 8
"""Fewest windows or prompts to learn from."""


@dataclass(frozen=True)
class Verdict:
    """The fitted slopes against the stock ones, on windows or prompts that took no part in the fit."""

    measure: str
    """"text" or "prompts"."""
    length: int
    """Tokens of a window, or of the longest prompt."""
    items: int
    """Windows or prompts."""
    before: float
    """Mean loss in nats per predicted token with the stock slopes."""
    after: float
    """The same with the fitted slopes."""
    better: int
    """Items with less loss."""
    p: float
    """Of the two-sided signed-rank test (Wilcoxon 1945) of the items' losses. It weighs by how much they
    changed, so prompts that stay right hardly count."""

    @property
    def gains(self) -> bool:
        """Whether the fitted slopes are better by more than chance."""
        return self.after < self.before and self.p < SIGNIFICANT

    @property
    def loses(self) -> bool:
        """Whether they are worse by more than chance, or not a number."""
        return not self.after < math.inf or (self.after > self.before and self.p < SIGNIFICANT)


@dataclass(frozen=True)
class Fit:
    """Fitted slopes, which are better than the stock ones."""

    model: str
    train_length: int
    target_length: int
    scaling: Static | Dynamic
    verdicts: Sequence[Verdict]
    """At the target length; for a static scaling and text, also at the trained length."""
    looks: Sequence[Look]
    """The losses by which the descent stopped."""
    steps: int
    interrupted: bool
    """Whether the user stopped the fit; the best slopes until then are in ``scaling``."""
    settings: Mapping[str, Any]
    seconds: float

    @property
    def slopes(self) -> dict[str, Any]:
        """The content of a file for ``--slopes``, with the record of the fit."""
        record = {
            "model": self.model,
            "target_length": self.target_length,
            "steps": self.steps,
            "judged": [asdict(each) for each in self.verdicts],
            **self.settings,
        }
        return {**self.scaling.to_json(), "fitted": {key: finite(value) for key, value in record.items()}}

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        return {
            **self.slopes,
            "train_length": self.train_length,
            "looks": [{"step": each.step, "losses": finite(each.losses)} for each in self.looks],
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
        }


def fit(
    model: str | Path,
    target_length: int,
    *,
    text: Sequence[str | Path] = (),
    prompts: Sequence[Task] = (),
    static: bool = False,
    dynamic: Basis | None = None,
    shared: bool = False,
    steps: int = STEPS,
    minutes: float = MINUTES,
    train_length: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = False,
    say: Callable[[str], object] = str,
) -> Fit:
    """Fits one exponent per layer and head, with all weights frozen.

    ``convert(model, out, slopes=fit(...).slopes)`` writes the model.

    Args:
        model: a local folder or a Hub id, not converted.
        target_length: length to reach in tokens, above the trained length.
        text: UTF-8 files to learn from: the next token or, in encoders, masked ones.
        prompts: tasks whose answers to learn, such as ``make_task("prompts", file)``.
        static: fit the same slopes for every length; the default for encoders.
        dynamic: ``position``, the default for decoders: the slopes of the first tokens, up to the trained
            length, stay as they are.
        shared: fit one exponent per head, for all layers.
        steps: most steps.
        minutes: most time for the steps, approximately.
        dtype: ``fp32`` or ``bf16``; by default bf16 on CUDA and fp32 on a CPU.
        say: called with a line about what is fitted and the memory that it takes, before it starts.
        train_length, overrides, seed, device, batch_size, revision, token, cache_dir, progress: as for
            ``evaluate``. On a CPU, the same seed gives the same slopes.

    Raises:
        NoGain: nothing that was fitted is better than the stock slopes.
        UsageError: neither text nor prompts, or too little of them; the target is not above the trained
            length; a form or model that cannot be fitted; not enough memory.
        SourceError, UnsupportedModel, VerificationError: see ``evaluate``.
        KeyboardInterrupt: Ctrl-C before there was anything better.
    """
    _check_options(text, prompts, static, dynamic, steps, minutes, target_length)
    files = [Path(path) for path in text]
    settings = run_settings(seed, files)
    hardware = _hardware(device, dtype, batch_size)
    with open_subject(
        model,
        hardware,
        train_length=train_length,
        overrides=overrides,
        revision=revision,
        token=token,
        cache_dir=Path(cache_dir) if cache_dir else None,
        progress=progress,
        architectures=(CAUSAL, MASKED),
    ) as subject:
        started = time.monotonic()
        trained = _check(subject, target_length, prompts)
        form = starting_form(subject, trained, target_length, static=static, dynamic=dynamic, shared=shared)
        samples = _samples(subject, files, prompts, form, trained, target_length, seed)
        with explained():
            say(_announcement(subject, form, samples, target_length))
            with step_bar("fitting", steps, show=progress) as advance:
                found = learn(subject, samples, form, steps, minutes * 60, seed, advance)
            if found.interrupted:
                _use_what_is_there(found)
            verdicts = _judge(subject, samples, found.best.scaling, trained)
    _check_gain(verdicts)
    return Fit(
        model=subject.name,
        train_length=trained,
        target_length=target_length,
        scaling=found.best.scaling,
        verdicts=verdicts,
        looks=found.looks,
        steps=found.steps,
        interrupted=found.interrupted,
        settings=settings,
        seconds=time.monotonic() - started,
    )


def starting_form(
    subject: Subject, trained: int, target: int, *, static: bool, dynamic: Basis | None, shared: bool
) -> Static | Dynamic:
    """The form to fit, with the stock slopes: all exponents are 0.

    Raises:
        UsageError: the model cannot compute it, or its factor would be too large.
    """
    geometry = subject.recipe.geometry
    rows = ((0.0,) * geometry.num_heads,) * (1 if shared else geometry.num_layers)
    form: Static | Dynamic
    if static or (dynamic is None and not subject.recipe.decoder):
        if target / trained > LARGEST_FACTOR:
            raise UsageError(f"`target_length` {target} is more than {LARGEST_FACTOR:g} times {trained}")
        form = Static(FITTED, target / trained, exponents=rows)
    else:
        form = Dynamic(FITTED, "position", 1.0, trained, exponents=rows)
    subject.recipe.check_scaling(form)
    return form


def learn(
    subject: Subject,
    samples: Sequence[Samples],
    form: Static | Dynamic,
    steps: int,
    seconds: float,
    seed: int,
    advance: Advance,
) -> Descent:
    """Fits the slopes of a subject; see ``descend``."""
    model = subject.scaled(UNSCALED)
    alibi = TrainableAlibi(subject.stock, form, model.device)
    return descend(model, alibi, samples, steps=steps, seconds=seconds, seed=seed, advance=advance)


def fitted_candidate(
    subject: Subject,
    items: Sequence[Item],
    windows: NDArray[np.int64],
    trained: int,
    target: int,
    *,
    seconds: float,
    seed: int,
    advance: Advance = int,
) -> Scaling | None:
    """Slopes fitted to prompts and windows, not judged yet; None if they gained nothing where they stopped.

    Raises:
        UsageError: there are too few prompts and windows.
    """
    form = starting_form(subject, trained, target, static=False, dynamic=None, shared=False)
    cases = answered(subject.tokenizer, items, trained, target)
    found: list[Samples] = []
    if len(windows) >= LEARN + STOP:
        found.append(_windows(subject, windows, form, trained, 0, max(STOP, len(windows) // 8)))
    if len(cases) >= LEARN + STOP:
        shuffled = np.random.default_rng(seed).permutation(len(cases))
        cases = [cases[index] for index in shuffled]
        found.append(_prompts(subject, cases, 0, max(STOP, len(cases) // 8)))
    if not found:
        raise UsageError(
            f"fitting needs {LEARN + STOP} prompts or windows beside those to choose and to measure by, and "
            f"{max(len(cases), len(windows))} are left; give more"
        )
    descent = learn(subject, found, form, STEPS, seconds, seed, advance)
    if descent.interrupted:
        raise KeyboardInterrupt
    return None if descent.best is descent.looks[0] else descent.best.scaling


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


def _windows(
    subject: Subject,
    windows: NDArray[np.int64],
    form: Static | Dynamic,
    trained: int,
    judge: int,
    stop: int,
) -> Windows:
    """Windows [windows, target]: the first to judge by, then those to stop by, the others to learn from."""
    # With a position-dynamic form, no slope changes up to the trained length.
    lengths = ladder(trained, windows.shape[1])[0 if isinstance(form, Static) else 1 :]
    parts = windows[judge + stop :], windows[judge : judge + stop], windows[:judge]
    return Windows(*parts, lengths, rows_of(subject.hardware), _mask(subject))


def _prompts(subject: Subject, cases: Sequence[Answered], judge: int, stop: int) -> Prompts:
    """Prompts in the same order of parts."""
    parts = cases[judge + stop :], cases[judge : judge + stop], cases[:judge]
    return Prompts(*parts, rows_of(subject.hardware))


def _check_options(
    text: Sequence[Any],
    prompts: Sequence[Task],
    static: bool,
    dynamic: Basis | None,
    steps: int,
    minutes: float,
    target: int,
) -> None:
    if not text and not prompts:
        raise UsageError("fitting needs something to learn from; give `text`, `prompts` or both")
    if static and dynamic is not None:
        raise UsageError("`static` and `dynamic` cannot be combined; drop one of them")
    if dynamic == "length":
        raise UsageError(
            "`dynamic` length is not fitted: there, a token's slopes depend on the tokens after it; give "
            "`dynamic` position or `static`"
        )
    if steps < 1:
        raise UsageError(f"`steps` {steps} is out of range; give at least 1")
    if not 0 < minutes < math.inf:
        raise UsageError(f"`minutes` {minutes} is out of range; give a finite number above 0")
    if target > LONGEST:
        raise UsageError(f"`target_length` {target} is out of range; give at most {LONGEST}")


def _hardware(device: str | None, dtype: str | None, batch_size: int | None) -> Hardware:
    if dtype == "fp16":
        raise UsageError("`dtype` fp16 cannot hold the gradients of long texts; give bf16 or fp32")
    chosen = choose(device, dtype, batch_size)
    if dtype is None and chosen.device.type == "cuda":
        return choose("cuda", "bf16", batch_size)  # many checkpoints are stored in fp16
    return chosen


def _check(subject: Subject, target: int, prompts: Sequence[Task]) -> int:
    """The trained length; raises ``UsageError`` unless the model can be fitted to the target."""
    if subject.patched is None:
        raise UsageError(f"{subject.name} has rotary positions, which have no slopes to fit; see tune")
    if prompts and not subject.recipe.decoder:
        raise UsageError(f"{subject.name} is an encoder and gives no answers; drop `prompts`, give `text`")
    return subject.stretched_to(target)


def _samples(
    subject: Subject,
    files: Sequence[Path],
    prompts: Sequence[Task],
    form: Static | Dynamic,
    trained: int,
    target: int,
    seed: int,
) -> list[Samples]:
    """What to learn from, and the parts that are kept back; which they are, the seed decides."""
    rng = np.random.default_rng(seed)
    found: list[Samples] = []
    if files:
        count = max(LEARN + STOP + JUDGE, MOST_TOKENS // target)
        windows = read_windows(subject.tokenizer, files, target, count)
        judge, stop = _kept(len(windows), target, f"`text` has {len(windows)} windows of {target} tokens")
        windows = windows[rng.permutation(len(windows))]
        found.append(_windows(subject, windows, form, trained, judge, stop))
    if prompts:
        lengths, count = ladder(trained, target), MOST_TOKENS // target
        drawn = [task.items(subject.tokenizer, lengths, count, seed) for task in prompts]
        items = [item for by_length in drawn for each in by_length.values() for item in each]
        shortest = 0 if isinstance(form, Static) else trained
        cases = answered(subject.tokenizer, items, shortest, target)
        cases = [cases[index] for index in rng.permutation(len(cases))]
        what = f"`prompts` has {len(cases)} prompts with {shortest + 1} to {target} tokens"
        judge, stop = _kept(len(cases), target, what)
        found.append(_prompts(subject, cases, judge, stop))
    return found


def _kept(count: int, length: int, what: str) -> tuple[int, int]:
    """How many items to judge by, and to stop by."""
    judge = max(JUDGE, min(count // 8, JUDGE_TOKENS // length))
    stop = max(STOP, min(count // 8, STOP_TOKENS // length))
    if count < LEARN + judge + stop:
        raise UsageError(
            f"{what}, and fitting needs {LEARN + judge + stop}: to learn from, to stop by and to judge by; "
            "give more, or another `target_length`"
        )
    return judge, stop


def _mask(subject: Subject) -> int | None:
    if subject.recipe.decoder:
        return None
    mask = subject.tokenizer.mask_token_id
    if mask is None:
        raise UsageError(f"the tokenizer of {subject.name} has no token that masks others")
    return int(mask)


def _announcement(subject: Subject, form: Static | Dynamic, samples: Sequence[Samples], target: int) -> str:
    """What is fitted and the memory that it takes; raises ``UsageError`` if there is not enough."""
    model = subject.scaled(UNSCALED)
    assert form.exponents is not None
    needed = memory(model, rows_of(subject.hardware)(target), target)
    free = free_memory(model.device)
    if needed > free:
        raise UsageError(
            f"a step at {target} tokens takes about {bytes_text(needed)} of memory beside the weights, and "
            f"{bytes_text(free)} are free; give a shorter `target_length`, `dtype` bf16 or another `device`"
        )
    numbers = len(form.exponents) * len(form.exponents[0])
    learned = ", ".join(f"{each.predicted} tokens of {each.name}" for each in samples)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return (
        f"fitting {numbers} numbers to {learned}; memory: about {bytes_text(weights)} for the weights and "
        f"{bytes_text(needed)} for a step"
    )


def _use_what_is_there(found: Descent) -> None:
    if found.best is found.looks[0]:
        raise interrupts.Interrupted("no slopes were better than the stock ones yet, so nothing was written")
    interrupts.forget()


def _judge(subject: Subject, samples: Sequence[Samples], scaling: Scaling, trained: int) -> list[Verdict]:
    """Runs both slopes as the converted model would, on what took no part in the fit."""
    parts = [(each, each.judging) for each in samples]
    if isinstance(scaling, Static):
        parts += [(each, pieces(each.judging, trained)) for each in samples if isinstance(each, Windows)]
    batches = [each.kept(items) for each, items in parts]
    before, after = (
        [row_losses(subject.scaled(wanted), each) for each in batches] for wanted in (UNSCALED, scaling)
    )
    kept = zip(parts, batches, before, after, strict=True)
    return [_verdict(each.name, found, stock, fitted) for (each, _), found, stock, fitted in kept]


def _verdict(name: str, batches: Sequence[Batch], before: Sequence[float], after: Sequence[float]) -> Verdict:
    changes = np.subtract(after, before)
    return Verdict(
        measure=name,
        length=max(batch.ids.shape[1] for batch in batches),
        items=len(changes),
        before=float(np.mean(before)),
        after=float(np.mean(after)),
        better=int((changes < 0).sum()),
        p=float(stats.wilcoxon(changes).pvalue) if changes.any() else 1.0,
    )


def _check_gain(verdicts: Sequence[Verdict]) -> None:
    if any(each.gains for each in verdicts) and not any(each.loses for each in verdicts):
        return
    said = "; ".join(
        f"{each.measure} at {each.length} tokens: loss {each.before:.4f} with the stock slopes, "
        f"{each.after:.4f} fitted, {each.better} of {each.items} better, p = {each.p:.2g}"
        for each in verdicts
    )
    raise NoGain(
        f"no fitted slopes are better than the stock ones on what was kept back ({said}), so nothing was "
        "written; give more text or prompts, or a formula (tune)"
    )
