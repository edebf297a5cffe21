"""Bakes linear and NTK-aware scaling into Hugging Face checkpoints with ALiBi, or rotary positions.

    >>> from converter import convert, inspect
    >>> result = convert("bigscience/bloom-1b7", "bloom-ntk", scale=2)

Nothing is imported before it is used: ``inspect`` and ``--help`` answer without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from converter.catalogue import supported
    from converter.errors import (
        AlreadyConverted,
        ConverterError,
        MissingPackage,
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
    from converter.evaluation.results import Results
    from converter.evaluation.tasks import make_task
    from converter.evaluation.tune import Tuning, tune
    from converter.inspection import Inspection, inspect
    from converter.onnx.export import ExportResult, export
    from converter.onnx.options import OnnxOptions
    from converter.onnx.validate import validate
    from converter.pictures.plotting import plot
    from converter.pipeline import ConversionResult, convert
    from converter.publish.push import PushResult, push

__all__ = [
    "AlreadyConverted",
    "ConversionResult",
    "ConverterError",
    "ExportResult",
    "Inspection",
    "MissingPackage",
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
    "convert",
    "evaluate",
    "export",
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
    "evaluate": "converter.evaluation.evaluate",
    "Results": "converter.evaluation.results",
    "make_task": "converter.evaluation.tasks",
    "tune": "converter.evaluation.tune",
    "Tuning": "converter.evaluation.tune",
    "plot": "converter.pictures.plotting",
    "inspect": "converter.inspection",
    "Inspection": "converter.inspection",
    "export": "converter.onnx.export",
    "ExportResult": "converter.onnx.export",
    "OnnxOptions": "converter.onnx.options",
    "push": "converter.publish.push",
    "PushResult": "converter.publish.push",
    "supported": "converter.catalogue",
    "validate": "converter.onnx.validate",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES.get(name, "converter.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
