"""ONNX graphs of converted repositories: another engine runs what ``convert`` wrote."""
