"""The checks of an ALiBi repository, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from converter.errors import ConverterError, VerificationError
from converter.result.converted import ConvertedRepository
from converter.verification.check import Check, Context
from converter.verification.patched import Patched

CHECKS = ("tensors", "slopes", "paths", "stock", "own_code")
"""Modules beside this one, in the order in which they run. To add a check, write a module with a ``NAME``
and a ``check(patched, context)``, and list it here."""


def verify(repository: ConvertedRepository, context: Context) -> list[Check]:
    """Runs all checks; see ``converter.verification.verify``."""
    try:
        with one_thread(), Patched.load(repository) as patched:
            found: list[Check | None] = [module.check(patched, context) for module in modules()]
    except ConverterError:
        raise
    except Exception as error:  # building a model from a bad config value can raise anything
        reason = str(error).partition("\n")[0]
        raise VerificationError(
            f"the model does not run with this config.json ({type(error).__name__}: {reason}); "
            "correct the value there"
        ) from error
    return [check for check in found if check is not None]


def modules() -> list[Any]:
    """The modules that ``CHECKS`` names, in its order."""
    return [import_module(f"converter.verification.{name}") for name in CHECKS]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: on a busy machine, more of them make such small models much slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
