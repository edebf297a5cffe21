"""From a converted repository to a graph over its weights; neither torch nor a weight is loaded."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from converter.errors import SourceError
from converter.exports.onnx.attention import MakeAttention
from converter.exports.onnx.attention_ort import OrtAttention
from converter.exports.onnx.attention_portable import PortableAttention
from converter.exports.onnx.choices import Profile
from converter.exports.onnx.families import network_class
from converter.exports.onnx.graph import Graph
from converter.exports.onnx.weights import DTYPES, Weights
from converter.result.converted import ConvertedRepository
from converter.source.pooling import Pooling

FORMS: dict[Profile, MakeAttention] = {"ort": OrtAttention, "portable": PortableAttention}
COMPUTE = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
"""Names of the dtypes that a graph can compute in."""


def dtype_of(repository: ConvertedRepository) -> str:
    """The dtype of most weights, as in ``COMPUTE``.

    Raises:
        SourceError: a dtype that no graph computes in.
    """
    names = {dtype: name for name, dtype in COMPUTE.items()}
    stored = repository.checkpoint.dtypes[0]
    if stored not in DTYPES:
        raise SourceError(f"the weights are {stored}; graphs are built over {', '.join(DTYPES)}")
    return names[DTYPES[stored]]


def build_graph(
    repository: ConvertedRepository,
    *,
    profile: Profile,
    dtype: str,
    last_logits: bool,
    pooling: Pooling | None = None,
    follow_links: bool = False,
    convert_weights: bool = False,
) -> Graph:
    """The graph of a repository's model, with whatever head it has.

    Args:
        repository: what to build it from; ``check_repository`` accepts it.
        profile: ``ort`` or ``portable``.
        dtype: what the graph computes in, a name of ``COMPUTE``.
        last_logits: a decoder computes the logits of each row's last token only.
        pooling: how a trunk's hidden states also become one vector of each text; None for no such vector.
        follow_links: name the weight files that links lead to, for a graph that will copy them.
        convert_weights: convert weights of another dtype when the graph is saved with a copy of them; by
            default the graph casts them.

    Raises:
        SourceError: a tensor is missing or does not fit the config.
        UnsupportedModel: the config has an option that graphs do not support.
    """
    graph = Graph(COMPUTE[dtype])
    parts: dict[str, Any] = {
        "fused": profile == "ort",
        "config": repository.config,
        "family": repository.family,
        "geometry": repository.geometry,
        "convert_weights": convert_weights,
        "weights": Weights(
            repository.folder,
            repository.checkpoint,
            f"{repository.family.base_prefix}.",
            follow_links=follow_links,
        ),
    }
    network = network_class(repository.family)(graph, **parts)
    if repository.decoder:
        network.build(
            FORMS[profile], repository.scaling, repository.head, last_logits=last_logits, pooling=pooling
        )
    else:
        network.build(repository.scaling, repository.head, pooling)
    return graph
