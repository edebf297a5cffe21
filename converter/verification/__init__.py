"""Checks of a converted repository, by running the code that it holds.

    patched.py   imports that code and reads the repository's tensors
    tensors.py   every tensor the model expects is stored, and nothing else
    slopes.py    the slopes, measured from attention weights, are the ones asked for
    paths.py     the fused, chunked and decoding paths agree with plain attention
    slice.py     the first layers and some tokens, to be run with the real weights
    stock.py     they agree with the stock model
    own_code.py  they agree with the source's own code, only where that may be run

The cost does not grow with the model: no check holds more than a few layers' weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from converter.errors import ConverterError, VerificationError
from converter.families.base import Config, Family
from converter.own_code import OwnCode
from converter.verification.check import Check

if TYPE_CHECKING:
    from converter.verification.patched import Patched

__all__ = ["Check", "verify"]


def verify(
    repository: Path, family: Family, source_config: Config, own_code: OwnCode | None = None
) -> list[Check]:
    """Checks a converted repository.

    Args:
        repository: the folder, complete but for its card.
        family: the family it belongs to.
        source_config: the source's config as read, for the stock model.
        own_code: the source's own code, to be run and compared with too; None not to run any of it.

    Returns:
        What was checked, in order; a check that could not apply is marked as skipped and says why.

    Raises:
        VerificationError: the first check that failed, or a model that cannot be built or run at all.
    """
    from converter.verification.patched import Patched

    try:
        with one_thread(), Patched.load(repository, family) as patched:
            return run(patched, family, source_config, own_code)
    except ConverterError:
        raise
    except Exception as error:  # a value that the model cannot be built from can raise anything
        reason = str(error).partition("\n")[0]
        raise VerificationError(
            f"the model does not run with this config.json ({type(error).__name__}: {reason}); "
            "correct the value there"
        ) from error


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other make such small models much slower."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(patched: Patched, family: Family, source_config: Config, own_code: OwnCode | None) -> list[Check]:
    """All checks, in order."""
    from converter.verification import paths, slopes, stock, tensors

    checks = [
        tensors.check(patched, family),
        slopes.check(patched, family),
        paths.check(patched, family),
        stock.check(patched, family, source_config),
    ]
    if own_code is not None:
        from converter.verification import own_code as own

        checks.append(own.check(patched, family, source_config, own_code))
    return checks
