"""The evaluation: every model under every scaling, on the same prompts and text."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import UsageError, option
from converter.evaluation.benchmark import Benchmark, default_lengths
from converter.evaluation.checks import check_kinds
from converter.evaluation.comparison import Scores, measurement
from converter.evaluation.evaluated_model import EvaluatedModel, open_evaluated_model
from converter.evaluation.results import Measurement, Results
from converter.evaluation.runner import choose
from converter.evaluation.scalings import grid
from converter.evaluation.server import Served, open_served
from converter.evaluation.tasks import AnyTask, make_tasks
from converter.model.model import Model
from converter.paths import listed
from converter.progress import token_bar
from converter.scaling.request import Parts
from converter.scaling.scaling import Basis, Method, short_names
from converter.weights.files import sha256

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.model.open import SourceOptions

PACKAGES = ("torch", "transformers")


def evaluate(
    models: str | Path | Sequence[str | Path],
    *,
    tasks: Sequence[AnyTask | str] = (),
    text: str | Path | Sequence[str | Path] = (),
    methods: Sequence[Method] = (),
    scales: Sequence[float] = (),
    dynamic: Sequence[Basis] = (),
    rates: Sequence[float] = (),
    ramps: Sequence[Parts] = (),
    lengths: Sequence[int] = (),
    items: int = 50,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    server: str | None = None,
    model_name: str | None = None,
    concurrency: int | None = None,
    progress: bool = False,
    say: Callable[[str], object] = str,
    **source: Unpack[SourceOptions],
) -> Results:
    """Measures perplexity and retrieval of models, by length and under one or several scalings.

    Every scaling of a model gets the same prompts and the same windows of text, so differences are paired.
    A model that is not converted yet is converted into a temporary folder and verified.

    Args:
        models: one or several local folders or Hub ids, stock or converted.
        tasks: what to ask: names of tasks without a file, such as ``passkey``, and results of ``make_task``.
        text: UTF-8 files for perplexity (in encoders, of masked tokens). Without ``tasks`` and ``text``, the
            tasks without a file that the model's tokenizer can read are measured.
        methods: scaling methods to try on each model, each with all ``scales`` (static factors) and all
            ``dynamic`` (each with all ``rates``). Without methods, each model is measured as it is.
        ramps: ramps of ``by-parts`` to try, each in parts of the trained length; by default the model's own.
        lengths: tokens of prompts and windows; by default 1, 2 and 4 times the trained length. Tasks with
            ``own_lengths``, such as ``prompts``, ignore them.
        items: most prompts of each length, and most windows of the longest length.
        seed: the same seed gives the same prompts.
        device: ``cpu``, ``cuda``, or ``auto``, which spreads the layers over all GPUs, the CPU and the disk;
            by default CUDA if there is a CUDA device.
        dtype: ``fp32``, ``fp16`` or ``bf16``; by default as stored on CUDA, and float32 on a CPU if it fits
            into memory.
        batch_size: most rows at once.
        server: measures the model on the OpenAI-compatible server at this URL; of ``models``, which must be
            one, only config and tokenizer are read. Its own scaling is measured, and where the weights are
            here and fit, also whether the server computes it.
        model_name: its name on the server; by default the path that was given, or the only one there is.
        concurrency: requests at once to the server; 4 by default.
        progress: draw progress bars on stderr.
        say: called with a line about what is sent to the server, what is checked first, and windows that come
            from few files.
        source: see ``SourceOptions``.

    Raises:
        UsageError: options contradict each other, or a length is too short for a prompt.
        SourceError: a checkpoint or a task's file is missing, unreadable or damaged.
        UnsupportedModel: a checkpoint cannot be scaled, or is neither a causal language model nor
            an encoder that embeds texts or predicts masked tokens.
        VerificationError: the converted code and the weights do not fit together, or the server computes the
            model without its scaling.
        ServerError: the server is gone, or rejects what it is asked.
        MissingPackage: there is a ``server``, and OpenAI's client is not installed.
    """
    started = time.monotonic()
    if not models:
        raise UsageError("there is no model to measure; give a folder or a Hub id")
    if items < 1:
        raise UsageError(f"{option.items} {items} is out of range; give at least 1")
    requests = grid(methods, scales, dynamic, rates, source.get("train_length"), ramps)
    asked = make_tasks(tasks)
    _check_server(
        server,
        listed(models),
        here={"methods": methods, "device": device, "dtype": dtype, "batch_size": batch_size},
        there={"model_name": model_name, "concurrency": concurrency},
    )
    files = [Path(path) for path in listed(text)]
    settings = run_settings(seed, files, items=items)
    needs_lengths = not asked or bool(files or lengths) or not all(task.own_lengths for task in asked)

    def check(opened: Model) -> None:
        check_kinds(opened, asked, files)
        for request in requests:
            opened.resolve(request)
        if needs_lengths:
            default_lengths(opened.name, opened.trained.tokens, lengths)

    measurements: list[Measurement] = []
    baselines: Scores = {}
    described: dict[str, Mapping[str, Any]] = {}
    for model in listed(models):
        opened: AbstractContextManager[EvaluatedModel | Served]
        if server is None:
            hardware = choose(device, dtype, batch_size)
            opened = open_evaluated_model(model, hardware, check=check, progress=progress, **source)
        else:
            opened = open_served(model, server, model_name, concurrency, say=say, **source)
        with opened as evaluated:
            name = _unique(evaluated.model.name, described)
            scalings = [evaluated.model.resolve(request) for request in requests]
            if not scalings:
                scalings = [evaluated.model.scaling]

            own_lengths: Sequence[int] = ()
            if needs_lengths:
                own_lengths = default_lengths(name, evaluated.model.trained.tokens, lengths)
            tell = str if described else say  # all models read the same files
            benchmark = Benchmark.prepare(evaluated, asked, files, own_lengths, items, seed, tell)
            if isinstance(evaluated, Served):
                evaluated.check_room(benchmark.most_tokens_at_once)
                evaluated.check_scaling(benchmark.sample, model, say, source)
            else:
                evaluated.check_float16(scalings, benchmark.most_tokens_at_once)

            titles = short_names(map(str, scalings))
            with token_bar(name, benchmark.tokens * len(scalings), show=progress) as bar:
                for number, scaling in enumerate(scalings):
                    bar.rename(name if len(scalings) == 1 else titles[str(scaling)])
                    # A static scaling changes short lengths too, so a failure there may be its own.
                    stop = number == 0 and not scaling.static
                    found = benchmark.measure(evaluated, scaling, bar, stop_at_failure=stop)
                    if number == 0:
                        benchmark = benchmark.only(found)
                    measurements += _compared(name, str(scaling), found, baselines)
                bar.rename(name)
            described[name] = evaluated.describe(scalings[-1])  # the one that is loaded
    return Results(measurements, described, settings, time.monotonic() - started)


def _compared(model: str, scaling: str, found: Scores, baselines: Scores) -> list[Measurement]:
    """The scores, compared with the first ones of their task and length, which ``baselines`` gathers."""
    measurements = []
    for (task, length), scores in found.items():
        baseline = baselines.setdefault((task, length), scores)
        measurements.append(measurement(model, scaling, task, length, scores, baseline))
    return measurements


def _check_server(
    server: str | None, models: Sequence[Any], here: Mapping[str, Any], there: Mapping[str, Any]
) -> None:
    """Refuses options of a run ``here`` with a server, and those of a server, ``there``, without one."""
    if server is None:
        for name, value in there.items():
            if value is not None:
                raise UsageError(f"{option[name]} is for {option.server} URL; drop it or add that")
        return
    for name, value in here.items():
        if value:
            raise UsageError(
                f"{option[name]} is for a model that runs here, and the server has its own; drop it"
            )
    if len(models) > 1:
        raise UsageError(
            f"{option.server} measures one model, and there are {len(models)}; measure each by itself"
        )


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """A unique name for the results, since folders may have the same name."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name} ({number})"
    return found


def run_settings(seed: int, text: Iterable[Path], **others: Any) -> dict[str, Any]:
    """``Results.settings``: the seed, the command's own settings, the texts' SHA-256, versions.

    Raises ``UsageError`` for a text that is not a regular file, such as a pipe.
    """
    digests: dict[str, str] = {}
    for path in text:
        if not path.is_file():
            raise UsageError(
                f"{option.text} {path} is not a plain file; give one, because the text is read twice"
            )
        name = str(path) if path.name in digests else path.name
        digests[name] = sha256(path)
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = version(package)
    return {"seed": seed, **others, "text": digests, "versions": versions}
