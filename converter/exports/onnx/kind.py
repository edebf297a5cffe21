"""ONNX graphs as a kind of export."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from converter.exports.onnx.files import GENAI, REPORT
from converter.exports.onnx.options import OnnxOptions

if TYPE_CHECKING:
    from converter.exports.base import Option
    from converter.result.converted import ConvertedRepository
    from converter.verification import Check


class OnnxKind:
    """See ``ExportKind``."""

    name = OnnxOptions.name
    help = "Export a validated ONNX graph."
    default = OnnxOptions()
    reports = (REPORT,)
    not_copied = (GENAI, REPORT)

    def options(self) -> Sequence[Option]:
        """See ``ExportKind.options``."""
        from converter.exports.onnx.command_line import OPTIONS

        return OPTIONS

    def take(self, arguments: dict[str, Any], *, validate: bool = True) -> OnnxOptions:
        """See ``ExportKind.take``."""
        from converter.exports.onnx.command_line import take

        return take(arguments, validate=validate)

    def check_again(
        self, repository: ConvertedRepository, listed: Collection[str], *, progress: bool = False
    ) -> Sequence[Check]:
        """See ``ExportKind.check_again``: runs the graphs against the torch model."""
        from converter.exports.onnx.validate import check_again

        return check_again(repository, listed, progress=progress)
