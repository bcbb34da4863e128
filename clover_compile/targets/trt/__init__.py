"""TensorRT and TensorRT-RTX: ONNX whose fused ops are nodes of one plugin."""
