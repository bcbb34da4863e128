"""The targets by name; listing them imports none of what they need."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clover_compile.errors import PlannedTarget, UnknownTarget, WrongDtype
from clover_compile.options import TARGETS_OWN

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
    """"module:function" that estimates a build from a checkpoint's headers, without torch."""

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


TARGETS: dict[str, Row] = {
    "ort-cpu": Row(
        "clover_compile.targets.ort_cpu.build:OrtCpu",
        "ONNX and one weight store for ONNX Runtime's CPU provider, fp32",
        "any CPU; no C++ compiler",
        ("torch", "onnx", "onnxscript", "onnxruntime"),
        ("fp32",),
        "clover_compile.targets.ort_cpu.plan:estimate",
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


PLANNED = (
    "ort-cuda", "trt-h100", "trt-h200", "trt-b200", "trt-l40s", "trt-rtx",
)  # fmt: skip
"""Targets that are designed but not in this version."""


def known(name: str) -> Row:
    """The row of a target; raises PlannedTarget or UnknownTarget with the known ones."""
    if name in PLANNED:
        raise PlannedTarget(name=name, known=", ".join(TARGETS))
    if name not in TARGETS:
        raise UnknownTarget(name=name, known=", ".join(TARGETS))
    return TARGETS[name]


def target(name: str) -> Target:
    """The target called `name`; raises UnknownTarget with the known ones."""
    module, attribute, *arguments = known(name).target.split(":")
    found: Target = getattr(importlib.import_module(module), attribute)(*arguments)
    return found
