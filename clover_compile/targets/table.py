"""The targets by name; listing them imports none of what they need."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clover_compile.errors import PlannedTarget, UnknownTarget, WrongDtype

if TYPE_CHECKING:
    from clover_compile.targets.base import Target


@dataclass(frozen=True)
class Row:
    """What `clover-compile targets` says of one target."""

    target: str
    """"module:Class"."""
    emits: str
    runs_on: str
    packages: tuple[str, ...]
    """Modules a build needs."""
    dtypes: tuple[str, ...]
    """Precisions it can hold weights in."""
    plan: str
    """"module:function" that estimates a build from a checkpoint's headers, without torch."""

    def missing(self) -> tuple[str, ...]:
        """Modules that are not installed here."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)

    def check_dtype(self, name: str, dtype: str) -> None:
        """Raises WrongDtype unless the target, called `name`, takes `dtype`."""
        if dtype not in self.dtypes:
            raise WrongDtype(target=name, dtype=dtype, known=", ".join(self.dtypes))


TARGETS: dict[str, Row] = {
    "ort-cpu": Row(
        "clover_compile.targets.ort_cpu.build:OrtCpu",
        "ONNX and one weight store for ONNX Runtime's CPU provider, fp32",
        "any CPU; no C++ compiler",
        ("torch", "onnx", "onnxscript", "onnxruntime"),
        ("fp32",),
        "clover_compile.targets.ort_cpu.plan:estimate",
    ),
}


PLANNED = (
    "ort-cuda", "triton-a100", "triton-rtx3090", "triton-l40s", "triton-rtx4090", "triton-h100",
    "triton-h200", "triton-b200", "triton-rtx5090", "trt-h100", "trt-h200", "trt-b200",
    "trt-l40s", "trt-rtx",
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
    module, attribute = known(name).target.split(":")
    found: Target = getattr(importlib.import_module(module), attribute)()
    return found
