"""What graphs there are (profiles, dtypes, tasks), and what every session of theirs is given."""

from __future__ import annotations

from typing import Literal, get_args

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
