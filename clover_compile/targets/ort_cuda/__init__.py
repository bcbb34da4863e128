"""ONNX Runtime on an NVIDIA GPU."""
