"""Runs graphs on the stand-in, and stores where onnxruntime put their operators.

It is a program for environments with onnxruntime-gpu and NumPy alone, so it imports nothing else.
STAND_IN_LOG names the file in which the stand-in notes what is launched and copied.

python place.py FOUND.json GRAPH...
"""

from __future__ import annotations

import collections
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

Found = dict[str, Any]
TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}
CASES = {
    "prompt": (1, 300, 0, 0),
    "batch": (2, 48, 0, 0),
    "decoding": (2, 1, 20, 0),
    "chunk": (1, 24, 20, 0),
    "shared buffer": (1, 1, 20, 64),
}
"""Name -> rows, new tokens, cached tokens and tokens of a buffer for past and present; 0: there is none."""


def bound(session: onnxruntime.InferenceSession, rows: int, new: int, past: int, buffer: int) -> Any:
    """Inputs on the host, as programs have them; caches and outputs on the device."""
    binding = session.io_binding()
    ids, mask = np.ones((rows, new), np.int64), np.ones((rows, past + new), np.int64)
    caches = {}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            shape = [rows, value.shape[1], buffer or past, value.shape[3]]
            cache = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, TYPES[value.type], "cuda")
            binding.bind_ortvalue_input(value.name, cache)
            caches[value.name.replace("past_key_values.", "present.")] = cache
        else:
            given = {"attention_mask": mask, "token_type_ids": 0 * ids}.get(value.name, ids)
            binding.bind_cpu_input(value.name, given)
    for value in session.get_outputs():
        if buffer and value.name in caches:
            binding.bind_ortvalue_output(value.name, caches[value.name])
        else:
            binding.bind_output(value.name, "cuda")
    return binding


def runs(profile: Path) -> Iterator[Found]:
    """Of each run: bytes of the largest output of each operator on the CPU, and copies between devices."""
    host: dict[str, int] = collections.defaultdict(int)
    copies = 0
    for event in json.loads(profile.read_text(encoding="utf-8", errors="replace")):
        if event["name"] == "model_run":
            yield {"host": dict(host), "copies": copies}
            host.clear()
            copies = 0
        operator, details = event.get("args", {}).get("op_name"), event.get("args", {})
        if event["name"].endswith("_kernel_time") and details["provider"] == "CPUExecutionProvider":
            host[operator] = max(host[operator], int(details["output_size"]))
        copies += event["name"].endswith("_kernel_time") and operator.startswith("Memcpy")


def place(path: str) -> dict[str, Found] | str:
    """Case -> what is found, or an error; one error for all if the graph does not load."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(tempfile.gettempdir()) / "place")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    try:
        session = onnxruntime.InferenceSession(path, options, providers=providers)
    except Exception as error:
        return str(error)
    if session.get_providers() != providers:
        return "the CUDA provider did not load"
    session.disable_fallback()
    caches = any(value.name.startswith("past_key_values.") for value in session.get_inputs())
    fused = '"profile": "ort"' in session.get_modelmeta().custom_metadata_map["ntk_convert"]
    log = Path(os.environ["STAND_IN_LOG"])
    found: dict[str, Found] = {}
    for name, (rows, new, past, buffer) in CASES.items():
        if (past and not caches) or (buffer and not fused):
            continue
        log.write_text("")
        try:
            session.run_with_iobinding(bound(session, rows, new, past, buffer))
            found[name] = {"error": None}
        except Exception as error:
            found[name] = {"error": str(error)}
        found[name]["log"] = log.read_text().splitlines()
    profile = Path(session.end_profiling())
    for one, more in zip(found.values(), runs(profile), strict=False):
        one |= more
    profile.unlink()
    return found


def main(target: str, graphs: Sequence[str]) -> None:
    placed = {path: place(path) for path in graphs}
    Path(target).write_text(json.dumps(placed), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
