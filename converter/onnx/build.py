"""From a converted repository to a graph over its weights; neither torch nor a weight is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from converter import families
from converter.checkpoint import Checkpoint, read_checkpoint
from converter.errors import SourceError, UnsupportedModel
from converter.jsonfile import read_object
from converter.onnx.attention import MakeAttention
from converter.onnx.attention_ort import OrtAttention
from converter.onnx.attention_portable import PortableAttention
from converter.onnx.families import DECODERS, ENCODERS
from converter.onnx.graph import Graph
from converter.onnx.options import Profile
from converter.onnx.weights import DTYPES, Weights
from converter.repository import check_code
from converter.scaling import Scaling

FORMS: dict[Profile, MakeAttention] = {"ort": OrtAttention, "portable": PortableAttention}
COMPUTE = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
"""Names of the dtypes that a graph can compute in."""


@dataclass(frozen=True)
class Repository:
    """A converted repository: what its graphs are built from."""

    folder: Path
    config: dict[str, Any]
    family: families.Family
    checkpoint: Checkpoint

    @property
    def scaling(self) -> Scaling:
        return Scaling.from_json(self.config.get("alibi_scaling"))

    @property
    def geometry(self) -> families.Geometry:
        return self.family.geometry(self.config)

    @property
    def dtype(self) -> str:
        """The dtype of most weights, as in ``COMPUTE``."""
        names = {dtype: name for name, dtype in COMPUTE.items()}
        stored = self.checkpoint.dtypes[0]
        if stored not in DTYPES:
            raise SourceError(f"the weights are {stored}; graphs are built over {', '.join(DTYPES)}")
        return names[DTYPES[stored]]

    @property
    def decoder(self) -> bool:
        """Whether it is causal and its graph has a cache."""
        return self.family.kind == "decoder"

    @property
    def has_logits(self) -> bool:
        """Whether it computes a number for each token of the vocabulary."""
        named: list[str] = self.config["architectures"]
        return named == [self.family.language_model]

    @property
    def head(self) -> str:
        """How its class ends: ``ForCausalLM``, ``Model``, ..."""
        name: str = self.config["architectures"][0]
        return name.removeprefix(f"Ntk{self.family.camel}")


def open_repository(folder: Path) -> Repository:
    """Reads a converted repository's config and the headers of its weights.

    Raises:
        SourceError: no converted repository, a damaged one, or code that is not this version's.
        UnsupportedModel: a class or family that has no graph.
    """
    if not folder.is_dir():
        raise SourceError(f"{folder} is no folder; name a repository that ntk-convert wrote")
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} has no config.json; name a repository that ntk-convert wrote")
    config = read_object(folder / "config.json")
    family = families.recognise(config)
    if not families.converted(config):
        raise SourceError(
            f"{folder} is not converted (model_type {config['model_type']!r}); convert it first: "
            "ntk-convert MODEL --scale A --out DIR --onnx"
        )
    check_has_graph(config, family)
    check_code(folder, config, family.templates)
    checkpoint = read_checkpoint(folder)
    if checkpoint.format != "safetensors":
        raise SourceError(
            f"the weights of {folder} are no safetensors files, and graphs are built over those"
        )
    return Repository(folder, config, family, checkpoint)


def check_has_graph(config: families.Config, family: families.Family) -> None:
    """Raises ``UnsupportedModel`` for the config of a converted repository that no graph can be built of."""
    named = config.get("architectures") or []
    if family.kind == "decoder" and named != [family.language_model]:
        raise UnsupportedModel(
            f"architectures is {json.dumps(named)}; of decoders, only causal language models have a graph"
        )
    if len(named) != 1:
        raise UnsupportedModel(f"architectures is {json.dumps(named)}; a graph is built of one class")


def build_graph(
    repository: Repository,
    *,
    profile: Profile,
    dtype: str,
    last_logits: bool,
    follow_links: bool = False,
    convert_weights: bool = False,
) -> Graph:
    """The graph of a repository's causal language model, or of an encoder with whatever head it has.

    Args:
        repository: what to build it from.
        profile: ``ort`` or ``portable``.
        dtype: what it computes in, a name of ``COMPUTE``.
        last_logits: logits of each row's last token only; of a decoder.
        follow_links: name the files of weights that links lead to, for a graph that will copy them.
        convert_weights: whether weights of another dtype are converted when the graph is saved with a
            copy of them, or else by casts in the graph.

    Raises:
        SourceError: a tensor that is missing or does not fit the config.
        UnsupportedModel: an option of the config that has no graph.
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
    name = repository.family.name
    if repository.decoder:
        decoder = DECODERS[name](graph, **parts)
        decoder.build(FORMS[profile], repository.scaling, last_logits=last_logits)
    else:
        ENCODERS[name](graph, **parts).build(repository.scaling, repository.head)
    return graph
