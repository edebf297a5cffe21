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
    from converter.catalogue import supported as supported
    from converter.conversion import ConversionResult as ConversionResult
    from converter.conversion import ConvertOptions as ConvertOptions
    from converter.conversion import convert as convert
    from converter.errors import *  # noqa: F403 -- as _MODULES lists them
    from converter.evaluation.evaluate import evaluate as evaluate
    from converter.evaluation.fit import Fit as Fit
    from converter.evaluation.fit import fit as fit
    from converter.evaluation.results import Results as Results
    from converter.evaluation.tasks import Retrieval as Retrieval
    from converter.evaluation.tasks import Task as Task
    from converter.evaluation.tasks import make_task as make_task
    from converter.evaluation.tune import Tuning as Tuning
    from converter.evaluation.tune import tune as tune
    from converter.inspection import Inspection as Inspection
    from converter.inspection import inspect as inspect
    from converter.model.open import SourceOptions as SourceOptions
    from converter.onnx.export import ExportResult as ExportResult
    from converter.onnx.export import export as export
    from converter.onnx.options import OnnxOptions as OnnxOptions
    from converter.pictures.plotting import plot as plot
    from converter.publish.push import PushResult as PushResult
    from converter.publish.push import push as push
    from converter.scaling.request import ScalingOptions as ScalingOptions
    from converter.validation import Validation as Validation
    from converter.validation import validate as validate

_MODULES = {
    "catalogue": ("supported",),
    "conversion": ("ConversionResult", "ConvertOptions", "convert"),
    "errors": (
        "ConverterError",
        "MissingPackage",
        "NoGain",
        "OutputError",
        "ProviderError",
        "PushError",
        "ServerError",
        "SourceError",
        "UnsupportedModel",
        "UsageError",
        "ValidationError",
        "VerificationError",
    ),
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
"""Module -> the public names that are taken from it."""

__all__ = ["__version__", *sorted(name for names in _MODULES.values() for name in names)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"converter.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
