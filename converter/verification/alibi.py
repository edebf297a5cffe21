"""The checks of an ALiBi repository, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from converter.config import Config
from converter.errors import ConverterError, VerificationError
from converter.result.converted import ConvertedRepository
from converter.verification import paths, slopes, stock, tensors
from converter.verification.check import Check
from converter.verification.patched import Patched


def verify(repository: ConvertedRepository, source_config: Config) -> list[Check]:
    """Runs all checks; see ``converter.verification.verify``."""
    try:
        with one_thread(), Patched.load(repository) as patched:
            return [
                tensors.check(patched),
                slopes.check(patched),
                paths.check(patched),
                stock.check(patched, source_config),
            ]
    except ConverterError:
        raise
    except Exception as error:  # building a model from a bad config value can raise anything
        reason = str(error).partition("\n")[0]
        raise VerificationError(
            f"the model does not run with this config.json ({type(error).__name__}: {reason}); "
            "correct the value there"
        ) from error


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: on a busy machine, more of them make such small models much slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
