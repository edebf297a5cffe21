"""Exports: the forms in which other engines run a converted repository.

base.py     what an export is
staging.py  writes an export into its repository, all of it or nothing
onnx/       ONNX graphs

A new kind of export is a folder here and an entry in ``EXPORTS``.
"""

from __future__ import annotations

from converter.exports.base import ExportKind
from converter.exports.onnx.kind import OnnxKind

EXPORTS: tuple[ExportKind, ...] = (OnnxKind(),)
"""Every kind of export. The first is what ``ntk-convert export`` writes if no other is asked for."""


def reports() -> list[str]:
    """Names of the reports that exports write; see ``ExportKind.reports``."""
    return [name for kind in EXPORTS for name in kind.reports]


def not_copied() -> list[str]:
    """Names of a source's files that a conversion does not copy; see ``ExportKind.not_copied``."""
    return [name for kind in EXPORTS for name in kind.not_copied]
