"""The exceptions of the converter: each is one line for the user, what is wrong and what to do.

A message names parameters with ``option``, since the same one is `target_length` in Python and
--target-length on the command line: ``UsageError(f"{option.scale} 0.5 is out of range")``.
"""

import re
import textwrap
from collections.abc import Callable


class _Option:
    """``option.scale``, or ``option["scale"]``, stands for the parameter ``scale`` in the text of a message.

    ``option.onnx_dtype`` is the field ``dtype`` of ``OnnxOptions``, and ``option.no_verify`` means that
    ``verify`` is False.
    """

    def __getattr__(self, name: str) -> str:
        return f"{MARK}{name}{MARK}"

    __getitem__ = __getattr__


MARK = "\ue000"
"""Stands before and after a parameter in a message. It is a character for private use, so no text has it."""
option = _Option()


def python_name(parameter: str) -> str:
    """A parameter as users of the Python functions know it, in backquotes."""
    if parameter.startswith("onnx_"):
        return f"`OnnxOptions.{parameter.removeprefix('onnx_')}`"
    if parameter.startswith("no_"):
        return f"`{parameter.removeprefix('no_')}=False`"
    return f"`{parameter}`"


class ConverterError(Exception):
    """Base of all errors that are shown to the user as one line."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        """With marked parameters; to be part of another error's message."""
        self.name_of: Callable[[str], str] = python_name
        """How ``str`` names a parameter; the command line sets its own."""

    def __str__(self) -> str:
        return re.sub(f"{MARK}(.*?){MARK}", lambda found: self.name_of(found[1]), self.message)


class UsageError(ConverterError):
    """Options that contradict each other, or a value outside its range; its exit code is 2, all others' 1."""

    exit_code = 2


class SourceError(ConverterError):
    """The source is missing, unreadable, truncated or inconsistent."""


class UnsupportedModel(ConverterError):
    """The source can be read, but this tool cannot scale its positions."""


class Undecided(UnsupportedModel):
    """The config leaves something open that changes what the model computes; the user can say it."""


class OutputError(ConverterError):
    """The output folder exists, cannot be written, or does not fit on the disk."""


class PushError(ConverterError):
    """The repository on the Hub has other content, or the Hub rejects the push."""


class VerificationError(ConverterError):
    """The converted repository failed a check."""


class NoGain(ConverterError):
    """Fitted slopes are not better on what was kept back; ``verdict`` is "does not help" or "cannot tell"."""

    def __init__(self, message: str, verdict: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class ValidationError(ConverterError):
    """An ONNX graph computes something other than the model, or belongs to another model."""


class ProviderError(ConverterError):
    """An execution provider of onnxruntime is missing, or fell back to another one."""


class ServerError(ConverterError):
    """A server of models is gone, or rejects what ``eval`` asks."""


class MissingPackage(ConverterError):
    """A package of an optional extra is not installed."""


NO_MEMORY = (
    "allocate memory",
    "failed to map segment",
    "bad_alloc",
    "bad allocation",
    "error return without exception set",
)
"""What libraries say if memory runs out: torch, the dynamic loader, C++, extensions that do not check."""


TOO_MANY_FILES = "Too many open files"


def out_of_memory(error: Exception) -> bool:
    """Whether an error means that the memory, or a limit on it, is used up."""
    said = str(error)
    found = any(words in said for words in NO_MEMORY) and "not permitted" not in said  # a disk without exec
    return found or isinstance(error, MemoryError)


def reason(error: Exception) -> str:
    """An error of a library in one line; transformers' can list all models."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder=' ...')}"
