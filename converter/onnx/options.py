"""What graphs there are (profiles, dtypes, tasks), the options of one, and what every session is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from converter.errors import UsageError, option
from converter.families.family import TASKS as TASK_OF

Profile = Literal["ort", "portable"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Name on the command line -> onnxruntime's name."""
DTYPES = ("native", "fp32", "fp16", "bf16", "int8", "int4", "int8-fp16", "int4-fp16", "w8a8")
TASKS = tuple(TASK_OF.values())
BACKBONE = TASK_OF["Model"]
"""The task of a model without a head."""
QUANTISED: dict[str, Literal[4, 8]] = {"int8": 8, "int4": 4, "int8-fp16": 8, "int4-fp16": 4, "w8a8": 8}
"""dtype -> bits of the layers' weights."""
INTEGER = "w8a8"
"""The dtype whose products are of integers: activations have 8 bits too."""
POOLINGS = ("mean", "cls")
"""How a model without files for sentence-transformers can be pooled."""
ENTRIES = {"session.set_denormal_as_zero": "1"}
"""Entries of the configuration of every onnxruntime session, name -> value.

ALiBi gives far keys probabilities so small that float32 can only store them as denormal numbers (below
1.2e-38). Some processors compute many times slower with these, and none needs them: beside a row's other
probabilities they vanish. This makes onnxruntime's CPU provider take them for zero."""


def computes_in(dtype: str) -> str:
    """The dtype of a graph's activations: quantised graphs have float32, or what their dtype ends in."""
    last = dtype.rpartition("-")[2]
    return last if last in ("fp16", "bf16") else "fp32"


@dataclass(frozen=True)
class OnnxOptions:
    """What graph to write; ``UsageError`` for options that contradict each other."""

    profile: Profile = "ort"
    """``ort``: onnxruntime's fused attention; ``portable``: standard ONNX operators, and MatMulNBits for
    quantised weights."""
    dtype: str = "native"
    """``native`` (the weights' own), ``fp32``, ``fp16``, ``bf16``, ``int8``, ``int4``, ``int8-fp16``,
    ``int4-fp16`` or ``w8a8``. Quantised graphs compute in float32, or in float16 with ``-fp16``, for GPUs."""
    task: str | None = None
    """What the graph computes, such as ``feature-extraction``; by default what the model's class does. A
    model with a head has a graph of its backbone as well, and a model without that head has none of it."""
    pooled: bool = False
    """Compute one vector of each text as well, as the repository's files for sentence-transformers say."""
    pooling: str | None = None
    """``mean`` or ``cls``: how to compute it, for a repository without these files."""
    standalone: bool = False
    """Copy the weights into ``onnx/``, into the graph's file or beside it; quantised graphs always do."""
    last_logits: bool = False
    """Compute the logits of each row's last token only."""
    calibrate: tuple[Path, ...] = ()
    """Text files: int4 weights are rounded so that the layers compute almost the same on this text."""
    provider: str | None = None
    """Where to validate: ``cpu``, ``cuda``, or None for the CPU and, if there is one, CUDA."""
    validate: bool = True
    """Run the graph before it is put in place."""

    def __post_init__(self) -> None:
        for name, value, known in (
            (option.onnx_profile, self.profile, PROFILES),
            (option.onnx_dtype, self.dtype, DTYPES),
            (option.onnx_task, self.task, (None, *TASKS)),
            (option.pooling, self.pooling, (None, *POOLINGS)),
            (option.provider, self.provider, (None, *PROVIDERS)),
        ):
            if value not in known:
                choices = ", ".join(str(choice) for choice in known if choice)
                raise UsageError(f"{name} {value!r} is unknown; choose one of {choices}")
        if self.calibrate and QUANTISED.get(self.dtype) != 4:
            raise UsageError(f"{option.calibrate} is for int4 weights; give {option.onnx_dtype} int4 with it")
        if self.pooling and not self.pooled:
            raise UsageError(
                f"{option.pooling} says how to compute the vectors of {option.pooled}; add it, or drop "
                f"{option.pooling}"
            )
        if self.pooled and self.task not in (None, BACKBONE):
            raise UsageError(
                f"{option.pooled} is for graphs of hidden states; give {option.onnx_task} {BACKBONE} with it"
            )

    @property
    def computes(self) -> str | None:
        """The task that was asked for; pooling needs the hidden states of the backbone."""
        return BACKBONE if self.pooled else self.task

    @property
    def copies_weights(self) -> bool:
        return self.standalone or self.dtype in QUANTISED

    @property
    def options(self) -> dict[str, Any]:
        """The options for ``argv``, without those that have their default."""
        return {
            "onnx_profile": None if self.profile == "ort" else self.profile,
            "onnx_dtype": None if self.dtype == "native" else self.dtype,
            "onnx_task": self.task,
            "pooled": self.pooled,
            "pooling": self.pooling,
            "onnx_standalone": self.standalone,
            "last_logits": self.last_logits,
            "provider": self.provider,
            "calibrate": list(self.calibrate),
        }
