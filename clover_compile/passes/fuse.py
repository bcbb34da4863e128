"""Fusion: every region of one kind becomes its fused op."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from clover_compile.kernels.table import fused_op
from clover_compile.passes.base import Pass
from clover_compile.unit import RegionCall, Unit


@dataclass(frozen=True)
class Fuse(Pass):
    """Replaces the regions named `op` by calls of clover::op.

    Regions are found by their module boundary in the trace, so the spelling of the maths inside is
    of no concern. The count is exact: a region more or less is an error.
    """

    op: str
    name: ClassVar[str] = "fuse"

    def label(self) -> str:
        return f"{self.name}-{self.op}"

    def apply(self, unit: Unit) -> int:
        found = [region for region in unit.regions if region.op == self.op]
        for region in found:
            _replace(unit, region)
            unit.regions.remove(region)
        unit.tidy()
        return len(found)

    def ensures(self, unit: Unit) -> str | None:
        expected, found = unit.expects.get(self.op, 0), unit.count_ops().get(self.op, 0)
        if expected == found:
            return None
        return f"expected {expected} {self.op} in the finished graph, found {found}"


def _replace(unit: Unit, region: RegionCall) -> None:
    spec = fused_op(region.op)
    live = [x for x in region.outputs if x is not None]
    if not live:
        return
    if any(x in region.arguments for x in live):
        raise ValueError(f"region {region.path} returns one of its inputs unchanged")
    first = next(n for n in unit.graph.nodes if n in live)
    with unit.graph.inserting_before(first):
        call = unit.graph.call_function(spec.overload(), region.arguments)
        results = [call] if len(spec.outputs) == 1 else _items(unit.graph, call, len(spec.outputs))
    values = [None if x is None else x.meta.get("val") for x in region.outputs]
    call.meta["val"] = values[0] if len(spec.outputs) == 1 else tuple(values)
    for old, new in zip(region.outputs, results, strict=True):
        if old is not None:
            new.meta["val"] = old.meta.get("val")
            unit.replace(old, new)


def _items(graph: fx.Graph, call: fx.Node, count: int) -> list[fx.Node]:
    return [graph.call_function(operator.getitem, (call, i)) for i in range(count)]
