"""Every way in which the converter refuses, fails or stops.

ConverterError              one line for the user: what is wrong and what to do
├── UsageError              the options contradict each other            (exit 2)
├── SourceError             the checkpoint cannot be found or read       (exit 1)
│   └── Unfinished          it changed meanwhile, or a process was killed: another attempt may do
├── UnsupportedModel        not a model that this scaling can be baked into
├── AlreadyConverted        the source is itself a converted repository
├── OutputError             the output folder cannot be used
├── PushError               the repository on the Hub cannot be written to
├── VerificationError       the converted repository failed its checks
├── ValidationError         an ONNX graph failed its checks
├── ProviderError           onnxruntime cannot run where it was asked to
└── MissingPackage          an optional package is not installed
"""


class ConverterError(Exception):
    """Base of all errors that are shown to the user as one line."""

    exit_code = 1


class UsageError(ConverterError):
    """Options that exclude each other, or a value outside its range."""

    exit_code = 2


class SourceError(ConverterError):
    """The source is missing, unreadable, truncated or inconsistent."""


class Unfinished(SourceError):
    """Reading the source did not come to its end, for a reason that may be gone the next time."""


class UnsupportedModel(ConverterError):
    """The source is readable but its attention is not one this tool can scale."""


class AlreadyConverted(ConverterError):
    """The source was written by this tool."""


class OutputError(ConverterError):
    """The output folder exists, cannot be written, or does not fit on the disk."""


class PushError(ConverterError):
    """The repository on the Hub holds something else, or the Hub does not take what is sent."""


class VerificationError(ConverterError):
    """The converted repository does not do what it must."""


class ValidationError(ConverterError):
    """An ONNX graph does not compute what the model computes, or does not belong to it."""


class ProviderError(ConverterError):
    """An execution provider of onnxruntime that is not there, or that fell back to another."""


class MissingPackage(ConverterError):
    """A package of an optional extra is not installed."""
