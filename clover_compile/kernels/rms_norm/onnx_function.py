"""clover::rms_norm as an ONNX function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clover_compile.kernels.onnx_text import OnnxFunction, Shape, build


def function(inputs: Mapping[str, Shape], constants: Mapping[str, Any]) -> OnnxFunction:
    """RmsNorm, whose sum is its input and therefore no output, or AddRmsNorm."""
    eps = constants["eps"]
    if "residual" not in inputs:
        body = f"normed = RMSNormalization <axis = -1, epsilon = {eps!r}> (x, weight)"
        return build(
            "RmsNorm", ("x", "weight"), ("normed",), body,
            returns=(1,), kernels=("RMSNormalization",), aliases={0: "x"},
        )  # fmt: skip
    body = (
        "normed, mean, deviation, total = com.microsoft.SkipSimplifiedLayerNormalization"
        f" <epsilon = {eps!r}> (x, residual, weight)"
    )
    names = ("x", "residual", "weight")
    kernels = ("com.microsoft:SkipSimplifiedLayerNormalization",)
    outputs = ("total", "normed")
    return build("AddRmsNorm", names, outputs, body, returns=(0, 1), kernels=kernels)
