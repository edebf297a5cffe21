"""How a graph was made, as its file records it. No weight is read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from converter.onnx.graph import COMPUTE
from converter.onnx.options import PROFILES, QUANTISED, Profile, computes_in
from converter.source.sentence_transformers import Pooling

METADATA = "ntk_convert"
"""Property of a graph's file that records, as JSON, how the graph was made."""

FUSED = (
    "ort: operators of onnxruntime. Its quantize_dynamic, and other engines, take the profile portable: "
    "ntk-convert export DIR --onnx-profile portable"
)
"""What its file says of such a graph to whoever opens it with something else."""
RAGGED = "a row's new token may stand right behind the row's own tokens"
"""What such a graph's property ``rows`` says, by which servers know it; older graphs have none."""


@dataclass(frozen=True)
class Description:
    """How a graph was made; all that its repository does not say."""

    profile: Profile
    dtype: str
    last_logits: bool
    standalone: bool
    alibi_scaling: Any
    """As config.json has it."""
    task: str | None = None
    """What it computes; None for what the model's class does."""
    calibrated: bool = False
    """Whether its weights were rounded by what the layers compute on a text."""
    pooling: Pooling | None = None
    """How it makes one vector of each text; None if it does not."""

    @property
    def computes_in(self) -> str:
        """The dtype of its activations."""
        return computes_in(self.dtype)

    @property
    def metadata(self) -> dict[str, str]:
        properties = {METADATA: json.dumps(asdict(self))}
        if self.profile == "ort":
            properties |= {"profile": FUSED, "rows": RAGGED}
        return properties


def read_graph(path: Path) -> tuple[ir.Model, Description] | None:
    """Reads a graph's file; None if this tool did not make it, or it is damaged or lacks its own weights."""
    try:
        model = ir.load(path)
        stored = json.loads(model.metadata_props[METADATA])
        if stored.get("pooling"):
            stored["pooling"] = Pooling(tuple(stored["pooling"]["modes"]), stored["pooling"]["normalised"])
        made = Description(**stored)
        whole = not made.standalone or all(map(_complete, model.graph.initializers.values()))
    except Exception:  # protobuf, JSON, missing keys and files raise different errors
        return None
    known = made.profile in PROFILES and made.dtype in (*COMPUTE, *QUANTISED)
    return (model, made) if known and whole else None


def _complete(initialiser: ir.Value) -> bool:
    """Whether the file beside a graph is long enough for a weight that is read from it."""
    tensor = initialiser.const_value
    if not isinstance(tensor, ir.ExternalTensor):
        return True
    return Path(tensor.path).stat().st_size >= (tensor.offset or 0) + (tensor.length or 0)
