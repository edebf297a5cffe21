"""Bakes linear and NTK-aware scaling into Hugging Face checkpoints that use ALiBi or rotary positions.

    >>> from converter import convert, inspect
    >>> result = convert("bigscience/bloom-1b7", "bloom-ntk", scale=2)

Modules are imported when they are first used, so ``inspect`` and ``--help`` do not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converter._version import __version__

if TYPE_CHECKING:
    from converter.adoption import AdoptionResult, adopt
    from converter.catalogue import supported
    from converter.errors import (
        AlreadyConverted,
        ConverterError,
        MissingPackage,
        NoGain,
        OutputError,
        ProviderError,
        PushError,
        SourceError,
        UnsupportedModel,
        UsageError,
        ValidationError,
        VerificationError,
    )
    from converter.evaluation.evaluate import evaluate
    from converter.evaluation.fit import Fit, fit
    from converter.evaluation.results import Results
    from converter.evaluation.tasks import make_task
    from converter.evaluation.tune import Tuning, tune
    from converter.exports.onnx.export import ExportResult, export
    from converter.exports.onnx.options import OnnxOptions
    from converter.exports.onnx.validate import validate
    from converter.inspection import Inspection, inspect
    from converter.pictures.plotting import plot
    from converter.pipeline import ConversionResult, convert
    from converter.publish.push import PushResult, push

__all__ = [
    "AdoptionResult",
    "AlreadyConverted",
    "ConversionResult",
    "ConverterError",
    "ExportResult",
    "Fit",
    "Inspection",
    "MissingPackage",
    "NoGain",
    "OnnxOptions",
    "OutputError",
    "ProviderError",
    "PushError",
    "PushResult",
    "Results",
    "SourceError",
    "Tuning",
    "UnsupportedModel",
    "UsageError",
    "ValidationError",
    "VerificationError",
    "__version__",
    "adopt",
    "convert",
    "evaluate",
    "export",
    "fit",
    "inspect",
    "make_task",
    "plot",
    "push",
    "supported",
    "tune",
    "validate",
]

_MODULES = {
    "convert": "converter.pipeline",
    "ConversionResult": "converter.pipeline",
    "adopt": "converter.adoption",
    "AdoptionResult": "converter.adoption",
    "evaluate": "converter.evaluation.evaluate",
    "Results": "converter.evaluation.results",
    "fit": "converter.evaluation.fit",
    "Fit": "converter.evaluation.fit",
    "make_task": "converter.evaluation.tasks",
    "tune": "converter.evaluation.tune",
    "Tuning": "converter.evaluation.tune",
    "plot": "converter.pictures.plotting",
    "inspect": "converter.inspection",
    "Inspection": "converter.inspection",
    "export": "converter.exports.onnx.export",
    "ExportResult": "converter.exports.onnx.export",
    "OnnxOptions": "converter.exports.onnx.options",
    "push": "converter.publish.push",
    "PushResult": "converter.publish.push",
    "supported": "converter.catalogue",
    "validate": "converter.exports.onnx.validate",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES.get(name, "converter.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
