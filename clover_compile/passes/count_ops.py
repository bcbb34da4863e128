"""The last look: the finished graph holds exactly the fused ops it must."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clover_compile.passes.base import Pass
from clover_compile.unit import Unit


@dataclass(frozen=True)
class CountOps(Pass):
    """Changes nothing. Counts after dead code is gone: a stale twin beside a fused op keeps results
    right and shows only here.
    """

    name: ClassVar[str] = "count-ops"

    def apply(self, unit: Unit) -> int:
        unit.tidy()
        return 0

    def ensures(self, unit: Unit) -> str | None:
        found = unit.count_ops()
        wrong = [
            f"expected {unit.expects.get(op, 0)} {op}, found {found.get(op, 0)}"
            for op in sorted({*unit.expects, *found})
            if unit.expects.get(op, 0) != found.get(op, 0)
        ]
        wrong += [f"{node.target} was left unfused" for node in unit.primitives()]
        return "; ".join(wrong) or None
