"""Every way in which the converter refuses, fails or stops.

ConverterError              one line for the user: what is wrong and what to do
├── UsageError              the options contradict each other            (exit 2)
├── SourceError             the checkpoint cannot be found or read       (exit 1)
├── UnsupportedModel        not a model that this scaling can be baked into
├── AlreadyConverted        the source is itself a converted repository
├── OutputError             the output folder cannot be used
└── VerificationError       the converted repository failed its checks
"""


class ConverterError(Exception):
    """Base of all errors that are shown to the user as one line."""

    exit_code = 1


class UsageError(ConverterError):
    """Options that exclude each other, or a value outside its range."""

    exit_code = 2


class SourceError(ConverterError):
    """The source is missing, unreadable, truncated or inconsistent."""


class UnsupportedModel(ConverterError):
    """The source is readable but its attention is not one this tool can scale."""


class AlreadyConverted(ConverterError):
    """The source was written by this tool."""


class OutputError(ConverterError):
    """The output folder exists, cannot be written, or does not fit on the disk."""


class VerificationError(ConverterError):
    """The converted repository does not do what it must."""
