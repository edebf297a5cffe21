"""What graphs there are: profiles, dtypes and tasks."""

from __future__ import annotations

from typing import Literal, get_args

from converter.families.base import TASKS as TASK_OF

Profile = Literal["ort", "portable"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Name on the command line -> onnxruntime's name."""
DTYPES = ("native", "fp32", "fp16", "bf16", "int8", "int4", "w8a8")
TASKS = tuple(TASK_OF.values())
TRUNK = TASK_OF["Model"]
"""The task of a model without a head."""
QUANTISED: dict[str, Literal[4, 8]] = {"int8": 8, "int4": 4, "w8a8": 8}
"""dtype -> bits of the layers' weights."""
INTEGER = "w8a8"
"""The dtype whose products are of integers: activations have 8 bits too."""
