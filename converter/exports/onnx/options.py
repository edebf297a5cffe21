"""The options of an ONNX graph, of the command line and of the Python API. They are the ``Export``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from converter.config import Config
from converter.exports.onnx.choices import GraphOptions

if TYPE_CHECKING:
    from converter.exports.onnx.export import ExportResult
    from converter.recipes import Recipe
    from converter.result.converted import ConvertedRepository
    from converter.source.base import Source
    from converter.source.checkpoint import Checkpoint


class OnnxOptions(GraphOptions):
    """What graph to write; see ``GraphOptions`` for the options. Methods import onnx only when called."""

    name: ClassVar[str] = "onnx"

    def check_installed(self) -> None:
        """See ``Export.check_installed``: looks for onnx, onnx-ir, onnxruntime and its provider."""
        from converter.exports.onnx.requirements import check_installed

        check_installed(self)

    def check(self, recipe: Recipe, config: Config, source: Source) -> None:
        """See ``Export.check``: accepts ALiBi models that have the task and, for ``--pooled``, the files."""
        from converter.exports.onnx.pooling import check_source
        from converter.exports.onnx.requirements import check_recipe

        check_recipe(recipe, config, self)
        if self.pooled:
            check_source(source)

    def planned_files(self, recipe: Recipe, config: Config, elements: Mapping[str, int]) -> list[str]:
        """See ``Export.planned_files``."""
        from converter.exports.onnx.files import planned_files

        return planned_files(self, recipe, config, elements)

    def bytes_needed(self, checkpoint: Checkpoint, dtype: str | None) -> int:
        """See ``Export.bytes_needed``: counts the graph's own copy of the weights."""
        from converter.exports.onnx.files import graph_bytes

        return graph_bytes(self, checkpoint, dtype)

    def write(self, repository: ConvertedRepository, *, progress: bool = False) -> ExportResult:
        """See ``Export.write`` and ``converter.export``."""
        from converter.exports.onnx.export import write

        return write(repository, self, progress=progress)
