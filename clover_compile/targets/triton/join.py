"""Tail pass of the Triton targets: the write gate joins the projections beside it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from clover_compile.passes.base import Pass
from clover_compile.targets.triton.angles import args_of
from clover_compile.unit import Unit, Weight

_aten = torch.ops.aten

GATE = "linear_attn.in_proj_b.weight"


@dataclass(frozen=True)
class JoinWriteGate(Pass):
    """in_proj_b becomes the last rows of the joined qkv, z, a product of commit and verify.

    Previews keep the shorter matrix, whose rows are the first of the longer one: the weight store
    of these targets keeps one copy (store.py). It saves a launch per layer.
    """

    name: ClassVar[str] = "join-write-gate"

    def apply(self, unit: Unit) -> int:
        count = 0
        for gate in list(unit.graph.nodes):
            if gate.target is not _aten.linear.default or not _is_gate(unit, gate):
                continue
            joined = next(n for n in args_of(gate)[0].users if _is_joined(unit, n))
            _join(unit, joined, gate)
            count += 1
        unit.tidy()
        return count


def _weight(unit: Unit, linear: fx.Node) -> Weight | None:
    matrix = args_of(linear)[1]
    return unit.weights.get(matrix.name) if isinstance(matrix, fx.Node) else None


def _is_gate(unit: Unit, linear: fx.Node) -> bool:
    weight = _weight(unit, linear)
    return weight is not None and (weight.leaf or "").endswith(GATE)


def _is_joined(unit: Unit, node: fx.Node) -> bool:
    if node.target is not _aten.linear.default:
        return False
    weight = _weight(unit, node)
    return weight is not None and weight.leaves[0].endswith("in_proj_qkv.weight")


def _join(unit: Unit, joined: fx.Node, gate: fx.Node) -> None:
    """Widens the joined product by the gate's rows; its split gets one more part."""
    first, last = _weight(unit, joined), _weight(unit, gate)
    (split,) = joined.users
    assert first is not None and last is not None
    wide = Weight(
        (first.shape[0] + last.shape[0], first.shape[1]), first.dtype,
        target=_aten.cat.default, arguments=((*first.arguments[0], last), 0),
    )  # fmt: skip
    matrices = [args_of(joined)[1], args_of(gate)[1]]
    values = [m.meta["val"] for m in matrices if isinstance(m, fx.Node)]
    matrix = unit.add_weight(wide, torch.cat(values))
    joined.args = (args_of(joined)[0], matrix)
    joined.meta["val"] = torch.cat([joined.meta["val"], gate.meta["val"]], -1)
    sizes = args_of(split)[1]
    assert isinstance(sizes, list | tuple)
    split.args = (joined, [*sizes, last.shape[0]], 2)
    split.meta["val"] = [*split.meta["val"], gate.meta["val"]]
    with unit.graph.inserting_after(split):
        part = unit.graph.call_function(operator.getitem, (split, len(sizes)))
        part.meta["val"] = gate.meta["val"]
    unit.replace(gate, part)
