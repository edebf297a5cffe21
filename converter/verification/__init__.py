"""Checks a converted repository by running the code that it holds.

    patched.py  imports that code and reads the repository's tensors
    tensors.py  every tensor the model expects is stored, and nothing else
    slopes.py   the slopes, measured from attention weights, are the requested ones
    paths.py    the fused, chunked and decoding paths agree with plain attention
    slice.py    builds a slice: the first layers with real weights, and some tokens
    stock.py    the slice agrees with the stock model
    rotary.py   the checks of a rotary repository, which holds no code

The cost does not grow with the model: no check holds the weights of more than a few layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from converter.config import Config
from converter.errors import ConverterError, VerificationError, out_of_memory
from converter.progress import Bar, steps
from converter.recipes import RotaryRecipe
from converter.result.converted import ConvertedRepository
from converter.verification.check import Check

__all__ = ["Check", "verify"]

CHECKS = 4
"""Of a model with ALiBi."""


def verify(
    repository: ConvertedRepository, source_config: Config | None = None, *, progress: bool = False
) -> list[Check]:
    """Checks a converted repository.

    Args:
        repository: complete except for its card.
        source_config: the source's config as read, for the stock model; the repository's own by default.
        progress: draw a progress bar on stderr.

    Returns:
        The checks, in order. A check that does not apply is marked as skipped and says why.

    Raises:
        VerificationError: a check failed (the first one is named), or the model cannot be built or run.
    """
    try:
        # The bar comes first, because loading torch and transformers takes seconds.
        with steps("verifying", CHECKS, show=progress) as bar, unlogged(), one_thread():
            if isinstance(repository.recipe, RotaryRecipe):
                from converter.verification import rotary

                checks = rotary.verify(repository, repository.recipe)
                bar(CHECKS)
                return checks
            config = repository.config if source_config is None else source_config
            return _verify_alibi(repository, config, bar)
    except ConverterError:
        raise
    except Exception as error:  # building a model from a bad config value can raise anything
        if out_of_memory(error) or getattr(error, "errno", None):
            raise  # no fault of the config
        reason = " ".join(str(error).split())
        raise VerificationError(
            f"the model does not run with this config.json ({type(error).__name__}: {reason}); "
            "correct the value there"
        ) from error


def _verify_alibi(repository: ConvertedRepository, source_config: Config, bar: Bar) -> list[Check]:
    from converter.verification import paths, slopes, stock, tensors
    from converter.verification.patched import Patched

    found = []
    with Patched.load(repository) as patched:
        for check in (
            tensors.check,
            slopes.check,
            paths.check,
            partial(stock.check, source_config=source_config),
        ):
            found.append(check(patched))
            bar.rename(f"verified {found[-1].name}")
            bar(1)
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: on a busy machine, more of them make such small models much slower."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def unlogged() -> Iterator[None]:
    """Hides what transformers logs, such as the whole of a config with a wrong value; it is also raised."""
    from transformers.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        set_verbosity(level)
