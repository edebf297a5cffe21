"""Everything that needs a GPU, in one run of at most 9 minutes on an H100; ``make gpu``.

    python benchmarks/on_gpu.py
    python benchmarks/on_gpu.py --device cpu                # a trial, in a few minutes
    python benchmarks/on_gpu.py --part attention --part graphs --minutes 5

Each part runs in a process of its own, gets a share of the time, and writes its result file again and again
as it goes. So a part that crashes or hangs loses nothing of the others, and little of its own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click
import measuring
import report
import torch
from gpu.part import Settings, shared

PARTS = {
    "right": 80,
    "tests": 70,
    "choices": 50,
    "encoders": 90,
    "halves": 30,
    "decoding": 70,
    "attention": 90,
    "graphs": 95,
}
"""Part, a module in ``gpu/`` -> its share of the time, in order of worth, because a run may be cut off at any
time. What a part leaves is divided among those after it."""
PACKAGES = ("accelerate", "flash-attn", "kernels", "onnxruntime", "onnxruntime-gpu", "triton", "vllm")
SPARE, LATE = 25.0, 4.0
"""Seconds that are not divided, for starting and ending; seconds after its time at which a part is ended."""
TRIAL = "A trial on the CPU with tiny sizes: it shows that the parts run, and nothing about a GPU."


def run_part(name: str, settings: Settings) -> None:
    """Runs one part and exits with 1 if something failed; for a process of its own."""
    os.setsid()  # so that it can be ended with its own processes
    part = importlib.import_module(f"gpu.{name}")
    torch._dynamo.config.recompile_limit = 64  # flex_attention has many dtypes and shapes
    document = report.Document(f"gpu-{name}", f"GPU: {part.TITLE}", settings.results, PACKAGES)
    if settings.trial:  # compiling would take longer than all else together
        document.head.insert(1, TRIAL)
        torch.compiler.set_stance("force_eager")
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    try:
        part.run(settings, document)
    except Exception as error:
        document.fail("the whole part", error)
        document.end()
        raise
    document.end()
    sys.exit(1 if document.failed else 0)


def ended(process: multiprocessing.process.BaseProcess, seconds: float) -> str | None:
    """Waits for a part, and ends it when it is late; returns what went wrong, or None."""
    try:
        process.join(max(0.0, seconds))
        if process.is_alive():
            return "was ended, because its time was over"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()  # it may not have become a group yet
        process.join()
    code = process.exitcode or 0
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return "failed; its result says what" if code else None


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--part", "parts", type=click.Choice(list(PARTS)), multiple=True, help="Only this one.")
@click.option("--minutes", default=9.0, show_default=True, help="The whole run ends within this time.")
@click.option(
    "--results", type=click.Path(path_type=Path), help="Folder to write to.  [results/; a trial: none]"
)
def main(device: str, parts: tuple[str, ...], minutes: float, results: Path | None) -> None:
    started, parts = time.monotonic(), parts or tuple(PARTS)
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("torch finds no CUDA device; for a trial without one: make gpu DEVICE=cpu")
    if results is None and device == "cuda":
        results = report.RESULTS
    until = started + 60 * minutes - SPARE
    wrong: dict[str, str] = {}
    os.environ.setdefault("KINETO_LOG_LEVEL", "4")  # torch's profiler reports each start and stop
    with measuring.workplace(1 if device == "cpu" else os.cpu_count() or 1) as temporary:
        base = Settings(device, temporary, results, until)
        context = multiprocessing.get_context("spawn")
        for name, part_until in shared(parts, until, [PARTS[name] for name in parts]):
            begun = time.monotonic()
            report.say(f"--- {name}: at most {part_until - begun:.0f} s")
            own = temporary / name
            own.mkdir()
            settings = replace(base, folder=own, until=part_until)
            process = context.Process(target=run_part, args=(name, settings), name=name)
            process.start()
            problem = ended(process, part_until + LATE - time.monotonic())
            shutil.rmtree(own, ignore_errors=True)
            report.say(f"--- {name}: {time.monotonic() - begun:.0f} s")
            if problem:
                wrong[name] = problem
    report.say(f"{time.monotonic() - started:.0f} s in all")
    for name, problem in wrong.items():
        report.say(f"{name} {problem}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
