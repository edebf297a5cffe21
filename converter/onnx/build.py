"""From a converted repository to a graph over its weights; neither torch nor a weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from converter.config import Config
from converter.model.alibi import AlibiModel
from converter.onnx.describe import Description
from converter.onnx.graph import COMPUTE, Graph
from converter.onnx.options import QUANTISED
from converter.onnx.weights import Weights
from converter.scaling.scaling import first_layers


def build_graph(
    repository: AlibiModel,
    made: Description,
    *,
    part: tuple[int, int] | None = None,
    calibrated: Mapping[str, Path] | None = None,
    widened: bool = False,
) -> Graph:
    """The graph of a repository's model, or of its first layers and tokens (``part``).

    ``calibrated``: stored name of a weight -> file with its numbers. ``widened``: see ``Graph``. Raises
    ``SourceError`` for a tensor that is missing or does not fit the config, ``UnsupportedModel`` for an
    option that graphs do not support.
    """
    config: Config = repository.result_config
    geometry, scaling = repository.geometry, repository.scaling
    quantised, fused = made.dtype in QUANTISED, made.profile == "ort"
    vocabulary = None
    if part is not None:
        layers, tokens = part
        vocabulary = int(config["vocab_size"])
        config = {**config, "vocab_size": tokens}
        geometry, scaling = replace(geometry, num_layers=layers), first_layers(scaling, layers)
    graph, quantiser = Graph(COMPUTE[made.computes_in], widened=widened), None
    if quantised:
        from converter.onnx.quantise import Quantiser

        quantiser = Quantiser(graph, made.dtype, fused=fused, calibrated=calibrated)
    family = repository.family
    module = import_module(f"converter.onnx.families.{family.name}")
    network = getattr(module, family.camel)(
        graph,
        fused=fused,
        config=config,
        family=family,
        geometry=geometry,
        weights=Weights(repository, follow_links=made.standalone, vocabulary=vocabulary),
        convert_weights=made.standalone and not quantised,
        last_logits=made.last_logits,
        quantiser=quantiser,
    )
    network.build(scaling, repository.head, made.pooling)
    return graph
