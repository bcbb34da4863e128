"""Whether ONNX Runtime can run a bundle on this machine's GPU."""

from __future__ import annotations

from clover_compile.runtime import cuda_driver
from clover_compile.runtime.trt_checks import Wrong

CUDA_PROVIDER = "CUDAExecutionProvider"
PACKAGE = "onnxruntime-gpu>=1.25,<2"


def wrong_provider() -> Wrong:
    """What is needed, what is here and what to do; None if the CUDA provider can be used."""
    needs = f"an NVIDIA GPU and {PACKAGE}"
    if cuda_driver.device_count() == 0:
        return needs, f"no GPU ({cuda_driver.why_no_device()})", "build for this machine"
    import onnxruntime

    if CUDA_PROVIDER in onnxruntime.get_available_providers():
        return None
    here = f"onnxruntime {onnxruntime.__version__} without CUDA"
    return needs, here, f"pip uninstall onnxruntime, then pip install '{PACKAGE}'"
