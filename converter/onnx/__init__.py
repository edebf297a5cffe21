"""ONNX graphs: built from the config over the safetensors, and validated under onnxruntime."""

import os

# onnxruntime reads this when it is imported. Else it writes to the user's home and sends what it measured.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
