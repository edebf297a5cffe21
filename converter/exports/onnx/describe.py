"""How a graph was made, as its file records it. No weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from converter.errors import ValidationError
from converter.exports.onnx.build import COMPUTE
from converter.exports.onnx.choices import PROFILES, QUANTISED
from converter.exports.onnx.graph import METADATA


class Description(NamedTuple):
    """How a graph was made."""

    profile: str
    dtype: str
    last_logits: bool
    standalone: bool
    alibi_scaling: Any
    head_size: int
    """Channels of a cached key or value; 0 for an encoder, which has no cache."""
    task: str | None = None
    """What it computes; None for what the model's class does."""
    calibrated: bool = False
    """Whether its weights were rounded by what the layers compute on a text."""
    pooling: Any = None
    """How it makes one vector of each text, as ``Pooling.to_json``; None if it does not."""

    @property
    def computes_in(self) -> str:
        """The dtype of its activations; quantised graphs compute in float32."""
        return self.dtype if self.dtype in COMPUTE else "fp32"


def describe(path: Path) -> Description | None:
    """Reads a graph's description; None if this tool did not make it or it is not an ONNX file."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
        properties = {entry.key: entry.value for entry in model.metadata_props}
        past = [value for value in model.graph.input if value.name == "past_key_values.0.key"]
        head_size = past[0].type.tensor_type.shape.dim[3].dim_value if past else 0
        found = Description(**json.loads(properties[METADATA]), head_size=head_size)
    except Exception:  # protobuf, JSON and missing keys raise different errors
        return None
    return found if found.profile in PROFILES and found.dtype in (*COMPUTE, *QUANTISED) else None


def has_weights(path: Path) -> bool:
    """Whether the files beside a graph are long enough for the weights that it reads from them."""
    import onnx

    try:
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            where = {entry.key: entry.value for entry in tensor.external_data}
            end = int(where.get("offset", 0)) + int(where.get("length", 0))
            if where and (path.parent / where["location"]).stat().st_size < end:
                return False
    except Exception:  # no such file, and what describe names
        return False
    return True


def description(path: Path, name: str) -> Description:
    """Reads a graph's description.

    Raises:
        ValidationError: this tool did not write the file, or it is damaged.
    """
    made = describe(path)
    if made is None:
        raise ValidationError(f"{name} was not written by ntk-convert, or is damaged")
    return made
