"""Clean-up: what export leaves behind and no target needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from clover_compile.passes.base import Pass
from clover_compile.unit import Unit

_aten = torch.ops.aten

CHECKS = (
    _aten._assert_tensor_metadata.default,
    _aten._assert_scalar.default,
    _aten.sym_constrain_range_for_size.default,
    _aten.sym_constrain_range.default,
)
"""Run-time checks of traced metadata; the verdict proves what they guard."""

CASTS = (_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten._to_copy.default)
COPIES = (
    _aten.lift_fresh_copy.default,
    _aten.detach.default,
    _aten.detach_.default,
    _aten.alias.default,
)


@dataclass(frozen=True)
class CleanUp(Pass):
    """Erases metadata checks, casts to the dtype a tensor has, copies of constants, dead code."""

    name: ClassVar[str] = "clean-up"

    def apply(self, unit: Unit) -> int:
        count = 0
        for node in list(unit.graph.nodes):
            if node.target in CHECKS:
                unit.graph.erase_node(node)
                count += 1
            elif node.target in COPIES or _is_idle_cast(node):
                unit.replace(node, node.args[0])
                unit.graph.erase_node(node)
                count += 1
        return count + unit.tidy()

    def ensures(self, unit: Unit) -> str | None:
        left = [n.name for n in unit.graph.nodes if n.target in CHECKS or _is_idle_cast(n)]
        return f"left behind: {', '.join(left)}" if left else None


def is_cast(node: fx.Node) -> bool:
    """Whether a node only changes the dtype."""
    return node.target in CASTS


def _is_idle_cast(node: fx.Node) -> bool:
    if not is_cast(node):
        return False
    source, value = node.args[0], node.meta.get("val")
    given = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    return given.dtype == value.dtype and given.device == value.device
