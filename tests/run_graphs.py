"""Runs graphs with whatever onnxruntime is installed, and stores what they compute.

It is also a program for environments with onnxruntime and NumPy alone, so it imports nothing else:

python run_graphs.py INPUTS.npz OUTPUTS.npz GRAPH...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

Array = NDArray[Any]
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
STEP = 1
"""Tokens that a graph with a cache gets in a step of their own, after all others."""


def outputs(path: str, ids: Array, mask: Array) -> dict[str, Array]:
    """What a graph computes on the CPU, output by output.

    Args:
        path: of the graph.
        ids, mask: int64 [rows, tokens], padded on the left.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {value.name: value for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    past = {
        name: np.zeros((len(ids), value.shape[1], 0, value.shape[3]), DTYPES[value.type])
        for name, value in inputs.items()
        if name.startswith("past_key_values.")
    }
    types = {"token_type_ids": np.zeros_like(ids)} if "token_type_ids" in inputs else {}
    first = slice(None, -STEP) if past else slice(None)
    feed = {"input_ids": ids[:, first], "attention_mask": mask[:, first], **types, **past}
    found = dict(zip(names, session.run(None, feed), strict=True))
    if not past:
        return found
    past = {name: found[name.replace("past_key_values.", "present.")] for name in past}
    feed = {"input_ids": ids[:, -STEP:], "attention_mask": mask, **past}
    stepped = dict(zip(names, session.run(None, feed), strict=True))
    return {
        **{f"first {name}": value for name, value in found.items()},
        **{f"then {name}": value for name, value in stepped.items()},
    }


def main(inputs: str, target: str, graphs: Sequence[str]) -> None:
    with np.load(inputs) as given:
        ids, mask = given["ids"], given["mask"]
    found = {"version": np.array(onnxruntime.__version__)}
    for number, path in enumerate(graphs):
        found |= {f"{number} {name}": value for name, value in outputs(path, ids, mask).items()}
    np.savez(target, **found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
