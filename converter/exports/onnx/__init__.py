"""ONNX graphs: built from the config over the safetensors, and validated under onnxruntime."""
