"""Tail pass: the rotary angles become one node, since no engine computes in fp64."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.export.graph_signature import InputKind

from clover_compile.kernels.table import fused_op
from clover_compile.passes.base import Pass
from clover_compile.targets.triton.angles import turns_of
from clover_compile.unit import Unit

ANGLES = ("aten.cos.default", "aten.sin.default")


@dataclass(frozen=True)
class FuseAngles(Pass):
    """cos and sin of the positions become clover::rotary, proved equal to them bit for bit."""

    name: ClassVar[str] = "fuse-angles"

    def apply(self, unit: Unit) -> int:
        found = {str(n.target): n for n in unit.graph.nodes if str(n.target) in ANGLES}
        if not found:
            return 0
        for node in found.values():
            turns_of(unit, node)
        ids, length = _input(unit, "ids"), _input(unit, "length")
        with unit.graph.inserting_before(next(iter(found.values()))):
            overload = fused_op("rotary").overload()
            call = unit.graph.call_function(overload, (ids, length, _turns(unit)))
            call.meta["val"] = tuple(found[name].meta["val"] for name in ANGLES)
            for place, name in enumerate(ANGLES):
                part = unit.graph.call_function(operator.getitem, (call, place))
                part.meta["val"] = found[name].meta["val"]
                unit.replace(found[name], part)
        unit.tidy()
        return 1

    def ensures(self, unit: Unit) -> str | None:
        left = [n.name for n in unit.graph.nodes if str(n.target) in ANGLES]
        return f"{', '.join(left)} still computes an angle" if left else None


def _input(unit: Unit, name: str) -> fx.Node:
    names = dict(zip(unit.inputs, unit.program.graph_signature.user_inputs, strict=True))
    found: fx.Node = next(n for n in unit.graph.nodes if n.name == names[name])
    return found


def _turns(unit: Unit) -> fx.Node:
    """The placeholder of the one fp64 constant, which `turns_of` has looked at."""
    names = {
        spec.arg.name
        for spec in unit.program.graph_signature.input_specs
        if spec.kind == InputKind.CONSTANT_TENSOR
        and unit.program.constants[str(spec.target)].is_floating_point()
    }
    found: fx.Node = next(n for n in unit.graph.nodes if n.name in names)
    return found
