"""Bakes linear and NTK-aware scaling into Hugging Face checkpoints that use ALiBi or rotary positions.

    >>> from converter import convert, inspect
    >>> result = convert("bigscience/bloom-1b7", "bloom-ntk", scale=2)

Modules are imported when they are first used, so ``inspect`` and ``--help`` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from converter._version import __version__

if TYPE_CHECKING:
    from converter.catalogue import supported
    from converter.conversion import ConversionResult, convert
    from converter.errors import (
        ConverterError,
        MissingPackage,
        NoGain,
        OutputError,
        ProviderError,
        PushError,
        ServerError,
        SourceError,
        UnsupportedModel,
        UsageError,
        ValidationError,
        VerificationError,
    )
    from converter.evaluation.evaluate import evaluate
    from converter.evaluation.fit import Fit, fit
    from converter.evaluation.results import Results
    from converter.evaluation.tasks import Retrieval, Task, make_task
    from converter.evaluation.tune import Tuning, tune
    from converter.inspection import Inspection, inspect
    from converter.model.open import SourceOptions
    from converter.onnx.export import ExportResult, export
    from converter.onnx.options import OnnxOptions
    from converter.pictures.plotting import plot
    from converter.publish.push import PushResult, push
    from converter.scaling.request import ScalingOptions
    from converter.validation import Validation, validate

__all__ = [
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
    "Retrieval",
    "ScalingOptions",
    "ServerError",
    "SourceError",
    "SourceOptions",
    "Task",
    "Tuning",
    "UnsupportedModel",
    "UsageError",
    "Validation",
    "ValidationError",
    "VerificationError",
    "__version__",
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
    "catalogue": ("supported",),
    "conversion": ("ConversionResult", "convert"),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.fit": ("Fit", "fit"),
    "evaluation.results": ("Results",),
    "evaluation.tasks": ("Retrieval", "Task", "make_task"),
    "evaluation.tune": ("Tuning", "tune"),
    "inspection": ("Inspection", "inspect"),
    "model.open": ("SourceOptions",),
    "onnx.export": ("ExportResult", "export"),
    "onnx.options": ("OnnxOptions",),
    "pictures.plotting": ("plot",),
    "publish.push": ("PushResult", "push"),
    "scaling.request": ("ScalingOptions",),
    "validation": ("Validation", "validate"),
}
"""Module -> what is taken from it; the errors are those in ``converter.errors``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "errors")
    return getattr(import_module(f"converter.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
