"""Checks that OpenVINO and onnxruntime compute the same from a portable graph. See README.md.

pip install openvino onnxruntime
python benchmarks/openvino_loads.py FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openvino

TOLERANCE = 1e-4
"""Largest difference in float32, relative to the largest logit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="a converted repository with a portable model.onnx")
    path = parser.parse_args().folder / "model.onnx"

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    core = openvino.Core()
    compiled = core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    print(f"OpenVINO {openvino.__version__}, onnxruntime {onnxruntime.__version__}")

    vocabulary = session.get_outputs()[0].shape[2]
    ids = np.random.default_rng(0).integers(0, vocabulary, size=(2, 400))
    mask = np.ones_like(ids)
    mask[1, :150] = 0  # padding on the left
    pasts = [item for item in session.get_inputs() if item.name.startswith("past_key_values.")]
    cache: dict[str, Any] = {
        item.name: np.zeros((2, item.shape[1], 0, item.shape[3]), np.float32) for item in pasts
    }
    worst = 0.0
    for name, start, end in (("prefill", 0, 360), ("chunk", 360, 399), ("decoding", 399, 400)):
        feed = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end], **cache}
        right, *presents = session.run(None, feed)
        found = compiled(feed)[compiled.output("logits")]
        real = mask[:, start:end].astype(bool)
        difference = float(np.abs(found - right)[real].max() / np.abs(right[real]).max())
        print(f"{name}: largest difference {difference:.1e} of the largest logit")
        worst = max(worst, difference)
        cache = dict(zip(cache, presents, strict=True))
    if not worst <= TOLERANCE:
        raise SystemExit(f"error: OpenVINO and onnxruntime differ by {worst:.1e}")


if __name__ == "__main__":
    main()
