"""Fits slopes to the user's own text and prompts, and tests them on a part that took no part in the fit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from converter import interrupts
from converter.errors import UsageError, option
from converter.evaluation.checks import trained_length_below
from converter.evaluation.evaluate import run_settings
from converter.evaluation.evaluated_model import EvaluatedModel, open_evaluated_model
from converter.evaluation.losses import pieces
from converter.evaluation.optimizer import End, EvaluationPoint, optimise
from converter.evaluation.paired_test import (
    ITEMS,
    PairedTest,
    check_gain,
    parts_within,
    run_paired_tests,
)
from converter.evaluation.results import WORSE_THAN_GUESSING, finite
from converter.evaluation.runner import AUTO, Hardware, choose, free_memory
from converter.evaluation.split import Split, TextSplit, rows_per_step, train_validation_test
from converter.evaluation.statistics import power_text
from converter.evaluation.tasks import AnyTask, Task
from converter.evaluation.trainable import TrainableAlibi, memory, row_losses
from converter.formatting import bytes_text
from converter.model.model import Model
from converter.paths import listed
from converter.progress import steps as step_bar
from converter.scaling.scaling import FITTED, LARGEST_FACTOR, UNSCALED, Basis, Scaling

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.model.open import SourceOptions

STEPS, MINUTES = 200, 10.0
ENDS: dict[End, str] = {
    "converged": "more steps gained nothing",
    "steps": "all steps were made",
    "time": "the time was up",
    "not a number": "a gradient was not a number",
    "interrupted": "interrupted",
}


@dataclass(frozen=True)
class Fit:
    """Fitted slopes, which are better than the stock ones."""

    model: str
    train_length: int
    target_length: int
    scaling: Scaling
    judged: Sequence[PairedTest]
    """Up to the target length; then, for a static scaling, within the trained length, where it may harm."""
    looks: Sequence[EvaluationPoint]
    """The validation losses, by which it stopped."""
    steps: int
    ended: End
    """Why there were no more steps; the best slopes until then are in ``scaling``."""
    settings: Mapping[str, Any]
    seconds: float

    @property
    def slopes(self) -> dict[str, Any]:
        """The content of a file for ``--slopes``, with the record of the fit."""
        record = {
            "model": self.model,
            "target_length": self.target_length,
            "steps": self.steps,
            "judged": [asdict(each) for each in self.judged],
            **self.settings,
        }
        fitted = {key: finite(value) for key, value in record.items()}
        return {**(self.scaling.to_json() or {}), "fitted": fitted}

    def to_json(self) -> dict[str, Any]:
        return {
            **self.slopes,
            "train_length": self.train_length,
            "looks": [{"step": each.step, "losses": finite(each.losses)} for each in self.looks],
            "ended": self.ended,
            "seconds": round(self.seconds, 1),
        }


def fit(
    model: str | Path,
    target_length: int,
    *,
    text: str | Path | Sequence[str | Path] = (),
    prompts: Sequence[AnyTask] = (),
    static: bool = False,
    dynamic: Basis | None = None,
    shared: bool = False,
    temperatures: bool = False,
    steps: int = STEPS,
    minutes: float = MINUTES,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    progress: bool = False,
    say: Callable[[str], object] = str,
    **source: Unpack[SourceOptions],
) -> Fit:
    """Fits one exponent per layer and head, with all weights frozen.

    ``convert(model, out, slopes=fit(...).slopes)`` writes the model.

    Args:
        model: a local folder or a Hub id.
        target_length: length to reach in tokens, above the trained length.
        text: UTF-8 files to learn from: the next token or, in encoders, masked ones.
        prompts: tasks whose answers to learn, such as ``make_task("prompts", file)``.
        static: fit the same slopes for every length; the default for encoders.
        dynamic: ``position``, the default for decoders: the slopes of the first tokens, up to the trained
            length, stay as they are.
        shared: fit one exponent per head, for all layers.
        temperatures: fit as many temperatures too, powers of the factor that multiply the queries.
        steps: most steps.
        minutes: most time for the steps, approximately.
        dtype: ``fp32`` or ``bf16``; by default bf16 on CUDA and fp32 on a CPU.
        say: called before the fit starts, with a line about what is fitted and the memory that it takes, and
            one about what judges, and what gain it can show.
        seed, device, batch_size, progress: as for ``evaluate``. On a CPU, a seed gives the same slopes.
        source: see ``SourceOptions``.

    Raises:
        NoGain: nothing that was fitted is better than the stock slopes.
        UsageError: neither text nor prompts, too little of them, or text that the model does not understand;
            the target is not above the trained length; a form or model that cannot be fitted; not enough
            memory.
        SourceError, UnsupportedModel, VerificationError: see ``evaluate``.
        KeyboardInterrupt: Ctrl-C before there was anything better.
    """
    if not text and not prompts:
        raise UsageError(
            f"fitting needs something to learn from; give {option.text}, {option.prompts} or both"
        )
    asked = [task for task in prompts if isinstance(task, Task)]
    if len(asked) < len(prompts):
        raise UsageError(
            f"{option.prompts} takes tasks whose answers are text, such as make_task('prompts', file); drop "
            "others"
        )
    _check_form(static, dynamic)
    if steps < 1:
        raise UsageError(f"{option.steps} {steps} is out of range; give at least 1")
    if not 0 < minutes < math.inf:
        raise UsageError(f"{option.minutes} {minutes} is out of range; give a finite number above 0")
    files = [Path(path) for path in listed(text)]
    settings = run_settings(seed, files)
    hardware = _hardware(device, dtype, batch_size)

    def check(opened: Model) -> None:
        _check_model(opened, prompts)
        trained_length_below(opened, target_length)

    with open_evaluated_model(model, hardware, check=check, progress=progress, **source) as evaluated:
        started = time.monotonic()
        trained = trained_length_below(evaluated.model, target_length)
        if dynamic is None and not evaluated.model.decoder:
            static = True
        stretched = target_length if static else None
        form = _starting_form(evaluated, trained, stretched, shared, temperatures)
        splits = train_validation_test(
            evaluated, files, asked, trained, target_length, seed, say, static=static
        )
        _check_text(evaluated, splits)
        say(_announcement(evaluated, form, splits, target_length))
        say(_power(splits, static=static))

        with step_bar("fitting", steps, show=progress) as advance:
            bare = evaluated.scaled(UNSCALED)
            alibi = TrainableAlibi(evaluated.stock, form, bare.device)
            found = optimise(
                bare, alibi, splits, steps=steps, seconds=minutes * 60, seed=seed, advance=advance
            )
        if found.ended == "interrupted":
            if found.best is found.points[0]:
                raise interrupts.Interrupted(
                    "no slopes were better than the model's own yet, so nothing was written"
                )
            interrupts.forget()
        gain_tests, harm_tests = run_paired_tests(evaluated, splits, found.best.scaling)
    check_gain(gain_tests, harm_tests, f"{found.steps} steps; {ENDS[found.ended]}")
    return Fit(
        model=evaluated.model.name,
        train_length=trained,
        target_length=target_length,
        scaling=found.best.scaling,
        judged=[*gain_tests, *harm_tests],
        looks=found.points,
        steps=found.steps,
        ended=found.ended,
        settings=settings,
        seconds=time.monotonic() - started,
    )


def _check_form(static: bool, dynamic: Basis | None) -> None:
    """Refuses forms that contradict each other, or that are not fitted."""
    if static and dynamic is not None:
        raise UsageError(f"{option.static} and {option.dynamic} cannot be combined; drop one of them")
    if dynamic == "length":
        raise UsageError(
            f"{option.dynamic} length is not fitted: there, a token's slopes depend on the tokens after it; "
            f"give {option.dynamic} position or {option.static}"
        )


def _check_model(model: Model, prompts: Sequence[AnyTask]) -> None:
    """Refuses a model without slopes, and prompts for one that gives no answers."""
    if model.positions == "rotary":
        raise UsageError(f"{model.name} has rotary positions, which have no slopes to fit; see tune")
    if prompts and not model.decoder:
        raise UsageError(
            f"{model.name} is an encoder and gives no answers; drop {option.prompts}, give {option.text}"
        )


def _starting_form(
    evaluated: EvaluatedModel, trained: int, target: int | None, shared: bool, temperatures: bool
) -> Scaling:
    """The form to fit, static if there is a target; it starts as the stock model, with 0 everywhere."""
    geometry = evaluated.model.geometry
    layers = 1 if shared else geometry.num_layers
    zeros = ((0.0,) * geometry.num_heads,) * layers
    form = Scaling(FITTED, exponents=zeros, temperatures=zeros if temperatures else None)
    if target is None:
        form = replace(form, dynamic="position", train_length=trained)
    elif target / trained > LARGEST_FACTOR:
        raise UsageError(f"{option.target_length} {target} is more than {LARGEST_FACTOR:g} times {trained}")
    else:
        form = replace(form, factor=target / trained)
    evaluated.model.check_scaling(form)
    return form


def _hardware(device: str | None, dtype: str | None, batch_size: int | None) -> Hardware:
    if dtype == "fp16":
        raise UsageError(f"{option.dtype} fp16 cannot hold the gradients of long texts; give bf16 or fp32")
    if device == AUTO:
        raise UsageError(
            f"{option.device} auto is for eval and tune, and a fit needs one device; give cpu or cuda"
        )
    chosen = choose(device, dtype, batch_size)
    if dtype is None and chosen.device.type == "cuda":
        return choose("cuda", "bf16", batch_size)  # many checkpoints are stored in fp16
    return chosen


def _check_text(evaluated: EvaluatedModel, splits: Sequence[Split]) -> None:
    """Raises ``UsageError`` for a text that the model reads worse than guessing, within the trained length.

    Slopes would be fitted to whatever confuses it least.
    """
    model = evaluated.scaled(evaluated.baseline)
    guessing = math.log(model.config.vocab_size)
    for split in splits:
        if not isinstance(split, TextSplit):
            continue
        rows = pieces(split.validation, split.trained)
        loss = float(np.mean(row_losses(model, split.batches(rows))))
        if not loss <= guessing + WORSE_THAN_GUESSING:  # so that a NaN is refused, too
            raise UsageError(
                f"{evaluated.model.name} does not understand {option.text}: its loss is {loss:.1f} nats a "
                f"token at {split.trained} tokens, and guessing would give {guessing:.1f}; give text of the "
                "kind that it was trained on"
            )


def _announcement(evaluated: EvaluatedModel, form: Scaling, splits: Sequence[Split], target: int) -> str:
    """What is fitted and the memory that it takes; raises ``UsageError`` if there is not enough."""
    model = evaluated.scaled(UNSCALED)
    rows = rows_per_step(evaluated.hardware)
    needed = memory(model, rows(target), target)
    free = free_memory(model.device)
    if needed > free:
        raise UsageError(
            f"a step at {target} tokens takes about {bytes_text(needed)} of memory beside the weights, and "
            f"{bytes_text(free)} are free; give a shorter {option.target_length}, {option.dtype} bf16 or "
            f"another {option.device}"
        )
    assert form.exponents is not None
    numbers = len(form.exponents) * len(form.exponents[0])
    if form.temperatures is not None:
        numbers *= 2
    learned = ", ".join(f"{split.training_tokens} tokens of {split.name}" for split in splits)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return (
        f"fitting {numbers} numbers to {learned}; memory: about {bytes_text(weights)} for the weights and "
        f"{bytes_text(needed)} for a step"
    )


def _power(splits: Sequence[Split], *, static: bool) -> str:
    """What the test parts hold, and what gain they can show."""
    shown = [power_text(len(split.test_beyond), ITEMS[split.name]) for split in splits]
    said = f"kept back to judge by: {', '.join(shown)}"
    harm = sum(len(items) for _, items in parts_within(splits, static=static))
    if harm:
        said += f"; {harm} within the trained length, which can show harm"
    return said
