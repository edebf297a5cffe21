"""The evaluation, from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from converter.errors import UsageError
from converter.evaluation.exam import Exam, default_lengths
from converter.evaluation.hardware import choose, explained
from converter.evaluation.results import Measurement, Results
from converter.evaluation.settings import run_settings
from converter.evaluation.statistics import compare
from converter.evaluation.subject import open_subject, release
from converter.evaluation.tasks.base import Task
from converter.evaluation.trials import trials
from converter.progress import token_bar
from converter.scaling import Dynamic, Method


def evaluate(
    models: Sequence[str | Path],
    *,
    tasks: Sequence[Task] = (),
    text: Sequence[str | Path] = (),
    methods: Sequence[Method] = (),
    scales: Sequence[float] = (),
    dynamics: Sequence[Dynamic] = (),
    rates: Sequence[float] = (),
    lengths: Sequence[int] = (),
    items: int = 50,
    seed: int = 0,
    train_length: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = False,
) -> Results:
    """Measures perplexity and retrieval of models, by length and under one or several scalings.

    Every scaling of a model gets the same prompts and the same windows of the text, so that differences are
    those of pairs. A source is converted on the way, into a temporary folder, and verified.

    Args:
        models: local folders or Hub ids, stock or converted.
        tasks: from ``converter.evaluation.tasks.make_task``.
        text: UTF-8 files, for perplexity; without any, it is not measured.
        methods: scalings to try on each model, with every one of ``scales`` (static factors) and
            ``dynamics`` (with every one of ``rates``); without methods, each model as it stands.
        lengths: tokens of prompts and windows; by default 1, 2 and 4 times the trained length.
        items: prompts of each length, and windows of the longest, at most.
        seed: the same seed gives the same prompts.
        train_length: trained length in tokens, of models for which it is not known.
        device: ``cpu`` or ``cuda``; CUDA where there is one.
        dtype: ``fp32``, ``fp16`` or ``bf16``; as stored on CUDA, float32 on a CPU whose memory has room.
        batch_size: rows at once, at most.
        revision, token, cache_dir: as for ``convert``.
        progress: draw progress bars on stderr.

    Raises:
        UsageError: options that contradict each other, or a length that fits no prompt.
        SourceError: a checkpoint or a task's file is missing, unreadable or damaged.
        UnsupportedModel: a checkpoint that cannot be scaled, or is no causal language model.
        VerificationError: the converted code and the weights do not go together.
    """
    started = time.monotonic()
    if not models:
        raise UsageError("there is no model to measure; give a folder or a Hub id")
    if not tasks and not text:
        raise UsageError("there is nothing to measure; give --tasks, or --text FILE for perplexity")
    if items < 1:
        raise UsageError(f"--items {items} is out of range; give at least 1")
    requests = trials(methods, scales, dynamics, rates, train_length)
    hardware = choose(device, dtype, batch_size)
    files = [Path(path) for path in text]
    settings = run_settings(seed, files, items=items)
    measured: list[tuple[Measurement, Hashable]] = []
    described: dict[str, Mapping[str, Any]] = {}
    for model in models:
        with open_subject(
            model,
            hardware,
            train_length=train_length,
            revision=revision,
            token=token,
            cache_dir=Path(cache_dir) if cache_dir else None,
            progress=progress,
        ) as subject:
            name = _unique(subject.name, described)
            scalings = [subject.resolve(request) for request in requests] or [subject.own_scaling]
            wanted = default_lengths(name, subject.trained.tokens, lengths)
            exam = Exam.prepare(subject.tokenizer, tasks, files, wanted, items, seed)
            with token_bar(name, exam.tokens * len(scalings), show=progress) as advance:
                for scaling in scalings:
                    with explained():
                        model_now = subject.scaled(scaling)
                        found = exam.measure(
                            model_now, subject.tokenizer, subject.hardware, name, str(scaling), advance
                        )
                    measured += [(each, exam.fingerprint(each.task, each.length)) for each in found]
            described[name] = subject.describe()
        release(hardware.device)
    return Results(_compared(measured), described, settings, time.monotonic() - started)


def _compared(measured: Sequence[tuple[Measurement, Hashable]]) -> list[Measurement]:
    """Each beside the first model and scaling of the run, where they were asked the same."""
    first: dict[tuple[str, int], tuple[Measurement, Hashable]] = {}
    result = []
    for each, fingerprint in measured:
        baseline, asked = first.setdefault((each.task, each.length), (each, fingerprint))
        if baseline is not each and asked == fingerprint:
            each = replace(each, comparison=compare(each.metric, each.scores, baseline.scores))
        result.append(each)
    return result


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """A name for results: folders may be called alike."""
    number = 1
    unique = name
    while unique in taken:
        number += 1
        unique = f"{name} ({number})"
    return unique
