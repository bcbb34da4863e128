"""The targets by name; listing them imports none of what they need."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clover_compile.errors import UnknownTarget, WrongDtype
from clover_compile.options import TARGETS_OWN
from clover_compile.runtime.nearest import did_you_mean
from clover_compile.runtime.strict_json import quote

if TYPE_CHECKING:
    from clover_compile.targets.base import Target


@dataclass(frozen=True)
class Row:
    """What `clover-compile targets` says of one target."""

    target: str
    """"module:Class", or "module:Class:argument" for a class that serves several targets."""
    emits: str
    runs_on: str
    packages: tuple[str, ...]
    """Modules a build needs."""
    dtypes: tuple[str, ...]
    """Precisions it can hold weights in; the first is the default."""
    plan: str
    """"module:function" of (checkpoint, dtype, context): an Estimate of a build from headers,
    without torch."""

    def missing(self) -> tuple[str, ...]:
        """Modules that are not installed here."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)

    def dtype(self, name: str, asked: str) -> str:
        """The precision to build in; WrongDtype unless the target, called `name`, takes it."""
        dtype = self.dtypes[0] if asked == TARGETS_OWN else asked
        if dtype not in self.dtypes:
            raise WrongDtype(target=name, dtype=dtype, known=", ".join(self.dtypes))
        return dtype


def _triton(gpu: str, runs_on: str, *more: str) -> Row:
    """more: precisions beside bf16 (fp8 needs compute capability 8.9)."""
    return Row(
        f"clover_compile.targets.triton.build:TritonTarget:{gpu}",
        "launch programs, precompiled Triton kernels and one weight store",
        runs_on,
        ("torch", "triton"),
        ("bf16", *more),
        "clover_compile.targets.triton.plan:estimate",
    )


_PLUGIN = ("torch", "onnx", "triton", "kernel_lens")


def _trt(gpu: str, runs_on: str) -> Row:
    return Row(
        f"clover_compile.targets.trt.build:TensorRtTarget:{gpu}",
        "ONNX with plugin nodes, the plugin and its source; `finish` builds the engines",
        f"{runs_on}, with TensorRT 11",
        _PLUGIN,
        ("bf16",),
        "clover_compile.targets.trt.plan:estimate",
    )


TARGETS: dict[str, Row] = {
    "ort-cpu": Row(
        "clover_compile.targets.ort_cpu.build:OrtCpu",
        "ONNX and one weight store for ONNX Runtime's CPU provider, fp32",
        "any CPU; no C++ compiler",
        ("torch", "onnx", "onnxscript", "onnxruntime"),
        ("fp32",),
        "clover_compile.targets.ort_cpu.plan:estimate",
    ),
    "ort-cuda": Row(
        "clover_compile.targets.ort_cuda.build:OrtCuda",
        "ONNX and one weight store for ONNX Runtime's CUDA provider, bf16 or fp16",
        "NVIDIA GPUs, with onnxruntime-gpu",
        ("torch", "onnx"),
        ("bf16", "fp16"),
        "clover_compile.targets.triton.plan:estimate",
    ),
    "trt-h100": _trt("h100", "NVIDIA H100 (9.0)"),
    "trt-h200": _trt("h200", "NVIDIA H200 (9.0)"),
    "trt-b200": _trt("b200", "NVIDIA B200 (10.0)"),
    "trt-l40s": _trt("l40s", "NVIDIA L40S (8.9)"),
    "trt-rtx": Row(
        "clover_compile.targets.trt.build:TensorRtRtxTarget:86:89:120",
        "finished TensorRT-RTX engines with the same plugin; built without a GPU",
        "NVIDIA RTX cards of compute capability 8.6, 8.9 and 12.0, with tensorrt-rtx",
        (*_PLUGIN, "tensorrt_rtx"),
        ("bf16",),
        "clover_compile.targets.trt.plan:estimate",
    ),
    "triton-a100": _triton("a100", "NVIDIA A100 (8.0)"),
    "triton-rtx3090": _triton("rtx3090", "NVIDIA RTX 3090 (8.6)"),
    "triton-l40s": _triton("l40s", "NVIDIA L40S (8.9)", "fp8"),
    "triton-rtx4090": _triton("rtx4090", "NVIDIA RTX 4090 (8.9)", "fp8"),
    "triton-h100": _triton("h100", "NVIDIA H100 (9.0)", "fp8"),
    "triton-h200": _triton("h200", "NVIDIA H200 (9.0)", "fp8"),
    "triton-b200": _triton("b200", "NVIDIA B200 (10.0)", "fp8"),
    "triton-rtx5090": _triton("rtx5090", "NVIDIA RTX 5090 (12.0)", "fp8"),
}


def known(name: str) -> Row:
    """The row of a target; raises UnknownTarget with the known ones."""
    if name not in TARGETS:
        meant = did_you_mean(name, TARGETS)
        raise UnknownTarget(name=quote(name, 100), meant=meant, known=", ".join(TARGETS))
    return TARGETS[name]


def target(name: str) -> Target:
    """The target called `name`; raises UnknownTarget with the known ones."""
    module, attribute, *arguments = known(name).target.split(":")
    found: Target = getattr(importlib.import_module(module), attribute)(*arguments)
    return found
