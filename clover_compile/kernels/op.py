"""A fused op: everything that is said about it once, and its registration with torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "clover"


@dataclass(frozen=True)
class Case:
    """One set of arguments an implementation of an op must get right."""

    name: str
    make: Callable[[torch.Generator], tuple[Any, ...]]
    """Positional arguments of the reference; floating tensors are fp32."""


@dataclass(frozen=True)
class FusedOp:
    """A region of the model that targets implement as one node.

    The reference is the meaning, the CPU implementation and the test oracle; schema and shapes
    come from it unless `shapes` states them (a reference whose loops cannot run on fake tensors).
    """

    name: str
    reference: Callable[..., Any]
    outputs: tuple[str, ...]
    cases: Callable[[], Iterator[Case]]
    onnx: str | None
    """"module:function" giving the op's ONNX functions; None: the graph keeps plain ops."""
    plan: str
    """"module:function" giving the launch plan of a kernels.call.Call."""
    symbols: Mapping[str, Mapping[int, str]]
    """Parameter -> axis -> name of a dim that varies from call to call (n rows, R prefix rows)."""
    shapes: Callable[..., Any] | None = None
    wide: frozenset[str] = frozenset()
    """Parameters that stay fp32 whatever the activation dtype."""
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"fp32": 2e-5, "bf16": 1e-2})
    """Largest error of a kernel's output, as a share of its largest value, by storage dtype."""

    @property
    def qualified(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the reference's parameters, in order."""
        code = self.reference.__code__
        return code.co_varnames[: code.co_argcount]

    def overload(self) -> torch._ops.OpOverload:
        """The registered torch op; registers it on first use."""
        packet = getattr(torch.ops, NAMESPACE)
        if not hasattr(packet, self.name):
            op = torch.library.custom_op(self.qualified, self.reference, mutates_args=())
            op.register_fake(self.shapes or self.reference)
        found: torch._ops.OpOverload = getattr(packet, self.name).default
        return found

    def slot(self, name: str) -> Callable[..., Any]:
        """Loads the function behind the slot `name` ("onnx", "plan")."""
        target = getattr(self, name)
        if target is None:
            raise LookupError(f"{self.name} has no {name}")
        module, function = target.split(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return found


def normal(g: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """A random fp32 tensor for cases."""
    return torch.randn(*shape, generator=g) * scale


def by_row(*names: str, symbol: str = "n") -> dict[str, dict[int, str]]:
    """`FusedOp.symbols` of parameters whose axis 1 varies from call to call."""
    return {name: {1: symbol} for name in names}
