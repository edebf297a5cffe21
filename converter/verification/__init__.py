"""Checks a converted repository by running the code that it holds.

    alone.py      the lock of all that cannot run in two threads
    imported.py   imports that code and reads the repository's tensors
    tensors.py    every tensor the model expects is stored, and nothing else
    penalties.py  the penalties, measured from attention weights, are the requested ones
    paths.py      the fused, chunked and decoding paths agree with plain attention
    truncated.py  writes truncated folders: the first layers, and the rows of some tokens
    loaded.py     loaded as users do, the result has the checkpoint's values and agrees with the stock model
    rotary.py     the checks of a rotary repository, which holds no code

The cost does not grow with the model: no check holds the weights of more than a few layers.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

from converter.config import Config
from converter.errors import ConverterError, OutputError, UsageError, VerificationError, reason
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.model.rotary import RotaryModel
from converter.progress import Bar, steps
from converter.verification.alone import ALONE
from converter.verification.check import Check, not_ours

__all__ = ["Check", "verify"]

CHECKS = 4
"""Of a model with ALiBi."""


def verify(
    model: Model,
    source_config: Config | None = None,
    source: Path | None = None,
    *,
    passed: list[Check] | None = None,
    progress: bool = False,
) -> list[Check]:
    """Checks a converted repository, complete except for its card; returns the checks, in order.

    ``source_config`` is the source's config as read, for the stock model, by default ``model``'s; ``source``
    is its folder, for its tokenizer, None if it is not at hand. ``passed`` gets each check that passes.
    Raises ``VerificationError`` for the first check that fails, or a model that cannot be built or run.
    """
    passed = [] if passed is None else passed
    check_python()
    try:
        # The bar comes first, because loading torch and transformers takes seconds.
        with (
            steps("verifying", CHECKS, show=progress) as bar,
            unlogged(),
            one_thread(),
            same_random_state(),
        ):
            if isinstance(model, AlibiModel):
                config = model.source_config if source_config is None else source_config
                return _verify_alibi(model, config, source, passed, bar)
            assert isinstance(model, RotaryModel)
            from converter.verification import rotary

            rotary.verify(model, passed)
            bar(CHECKS)
            return passed
    except ConverterError:
        raise
    except Exception as error:  # building a model from a bad config value can raise anything
        if not_ours(error):
            raise
        raise VerificationError(
            f"the model does not run with this config.json ({reason(error)}); correct the value there, or "
            f"install another version of transformers than {version('transformers')}"
        ) from error


def check_python() -> None:
    """Raises ``ConverterError`` for what keeps any model from being run, whatever its config says."""
    if sys.flags.optimize > 1:
        raise UsageError(
            "Python runs without docstrings (-OO or PYTHONOPTIMIZE), which transformers reads; run it without"
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise OutputError(
            "there is no folder for temporary files; set TMPDIR to one that can be written"
        ) from error


def _verify_alibi(
    model: AlibiModel, source_config: Config, source: Path | None, passed: list[Check], bar: Bar
) -> list[Check]:
    from converter.verification import loaded, paths, penalties, tensors
    from converter.verification.imported import ImportedRepository

    with ImportedRepository.load(model) as imported:
        for check in (
            tensors.check_tensors,
            penalties.check_penalties,
            paths.check_paths,
            partial(loaded.check_loading, source_config=source_config, source=source),
        ):
            passed.append(check(imported))
            bar.rename(f"verified {passed[-1].name}")
            bar(1)
    return passed


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: on a busy machine, more of them make such small models much slower."""
    import torch

    with ALONE:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def same_random_state() -> Iterator[None]:
    """Leaves torch's random state as it is: a model that is built draws from it."""
    import torch

    with ALONE, torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def unlogged() -> Iterator[None]:
    """Hides what transformers tells, such as the whole of a config with a wrong value; it is also raised.

    Its bars and warnings would name temporary folders.
    """
    from transformers.utils import logging as told

    with ALONE:
        level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
        told.set_verbosity(logging.CRITICAL)
        told.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            told.set_verbosity(level)
            if bars:
                told.enable_progress_bar()
