"""From a converted repository to a graph over its weights; neither torch nor a weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from converter.errors import SourceError
from converter.exports.onnx.choices import QUANTISED
from converter.exports.onnx.describe import Description
from converter.exports.onnx.families import network_class
from converter.exports.onnx.graph import COMPUTE, Graph
from converter.exports.onnx.weights import DTYPES, Weights
from converter.result.converted import ConvertedRepository
from converter.scaling.scaling import first_layers


def dtype_of(repository: ConvertedRepository) -> str:
    """The dtype of most weights, as in ``COMPUTE``; raises ``SourceError`` if no graph computes in it."""
    names = {dtype: name for name, dtype in COMPUTE.items()}
    stored = repository.checkpoint.dtypes[0]
    if stored not in DTYPES:
        raise SourceError(f"the weights are {stored}; graphs are built over {', '.join(DTYPES)}")
    return names[DTYPES[stored]]


def build_graph(
    repository: ConvertedRepository,
    made: Description,
    *,
    part: tuple[int, int] | None = None,
    calibrated: Mapping[str, Path] | None = None,
) -> Graph:
    """The graph of a repository's model, or of its first layers and tokens (``part``).

    ``calibrated``: stored name of a weight -> file with its numbers. Raises ``SourceError`` for a tensor that
    is missing or does not fit the config, ``UnsupportedModel`` for an option that graphs do not support.
    """
    config, geometry, scaling = repository.config, repository.geometry, repository.scaling
    family, quantised = repository.family, made.dtype in QUANTISED
    vocabulary = None
    if part is not None:
        layers, tokens = part
        vocabulary = int(config["vocab_size"])
        config = {**config, "vocab_size": tokens}
        geometry, scaling = replace(geometry, num_layers=layers), first_layers(scaling, layers)
    weights = Weights(
        repository.folder,
        repository.checkpoint,
        f"{family.base_prefix}.",
        follow_links=made.standalone,
        vocabulary=vocabulary,
    )
    graph = Graph(COMPUTE[made.computes_in])
    parts: dict[str, Any] = {
        "fused": made.profile == "ort",
        "config": config,
        "family": family,
        "geometry": geometry,
        "convert_weights": made.standalone and not quantised,
        "weights": weights,
    }
    if quantised:
        from converter.exports.onnx.quantise import Quantiser

        parts["quantiser"] = Quantiser(graph, made.dtype, fused=parts["fused"], calibrated=calibrated)
    network = network_class(family)(graph, **parts)
    if repository.decoder:
        network.build(scaling, repository.head, last_logits=made.last_logits, pooling=made.pools)
    else:
        network.build(scaling, repository.head, made.pools)
    return graph
