"""The pooling that a graph computes for ``--pooled``."""

from __future__ import annotations

from pathlib import Path

from converter.errors import UnsupportedModel
from converter.source.base import CONFIG, Source
from converter.source.pooling import Pooling, read_pooling
from converter.source.sentence_transformers import MODULES, nested_files

INSTEAD = "export without --pooled and pool the hidden states as the model's card says"


def graph_pooling(folder: Path) -> Pooling:
    """How the graph of a repository makes one vector of a text.

    Raises:
        UnsupportedModel: the repository has no files for that, or they ask for what is not computed.
        SourceError: one of the files is damaged.
    """
    try:
        found = read_pooling(folder)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"--pooled: {error}; {INSTEAD}") from error
    if found is None:
        raise UnsupportedModel(
            f"--pooled needs {MODULES} and 1_Pooling/{CONFIG} of sentence-transformers, which say how to "
            f"pool, and the repository has no {MODULES}; {INSTEAD}"
        )
    return found


def check_source(source: Source) -> None:
    """Checks that the repository which a source will become says how to pool; fetches the files for that.

    Raises:
        UnsupportedModel, SourceError: see ``graph_pooling``.
    """
    source.fetch(name for name in nested_files(source).files if name.endswith(f"/{CONFIG}"))
    graph_pooling(source.folder)
