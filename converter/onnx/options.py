"""What graph to write: the options of the command line and of the Python API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from converter.errors import UsageError

Profile = Literal["ort", "portable"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
DTYPES = ("native", "fp32", "fp16", "bf16", "int8", "int4")
QUANTISED: dict[str, Literal[4, 8]] = {"int8": 8, "int4": 4}
"""dtype -> bits of the layers' weights."""


@dataclass(frozen=True)
class OnnxOptions:
    """What graph to write.

    Raises:
        UsageError: options that contradict each other.
    """

    profile: Profile = "ort"
    """``ort``: onnxruntime's fused attention; ``portable``: standard ONNX operators only."""
    dtype: str = "native"
    """``native`` (the weights' own), ``fp32``, ``fp16``, ``bf16``, ``int8`` or ``int4``."""
    standalone: bool = False
    """A copy of the weights beside the graph, in ``onnx/``; quantised graphs always have one."""
    last_logits: bool = False
    """Logits of each row's last token only."""
    provider: str | None = None
    """Where to validate: ``cpu``, ``cuda``, or None for the CPU and, where there is one, CUDA."""
    validate: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--onnx-profile", self.profile, ("ort", "portable")),
            ("--onnx-dtype", self.dtype, DTYPES),
            ("--provider", self.provider, (None, "cpu", "cuda")),
        ):
            if value not in known:
                choices = ", ".join(str(choice) for choice in known if choice)
                raise UsageError(f"{name} {value!r} is unknown; choose one of {choices}")

    @property
    def copies_weights(self) -> bool:
        """Whether the graph gets weights of its own."""
        return self.standalone or self.dtype in QUANTISED

    @property
    def words(self) -> list[str]:
        """As they stand on a command line."""
        words = ["--onnx"]
        words += ["--onnx-profile", self.profile] if self.profile != "ort" else []
        words += ["--onnx-dtype", self.dtype] if self.dtype != "native" else []
        words += ["--onnx-standalone"] if self.standalone else []
        return words + (["--last-logits"] if self.last_logits else [])
