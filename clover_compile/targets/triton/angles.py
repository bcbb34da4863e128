"""Finds the rotary angles in a graph, and proves that the rotary kernel computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from clover_compile.kernels.rotary.reference import rotary
from clover_compile.unit import Unit

_STEPS = {
    "aten.unsqueeze.default", "aten.arange.default", "aten.add.Tensor", "aten.to.dtype",
    "aten.mul.Tensor", "aten.floor.default", "aten.sub.Tensor", "aten.cos.default",
    "aten.sin.default",
}  # fmt: skip

PROBES = ((3, 0), (2, 77), (5, 250_001))
"""Rows and length the graph's own angles are compared at."""


class NotRotary(ValueError):
    """Angles of a graph are not those of the rotary kernel."""


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, loosely typed."""
    return node.args


def is_angle(node: fx.Node) -> bool:
    """Whether a node is of a kind that positions and angles are made of."""
    return str(node.target) in _STEPS


def turns_of(unit: Unit, node: fx.Node) -> Tensor:
    """The turns per position (fp64 [half]) behind an angle node.

    Raises NotRotary unless rotary() with these turns equals the graph's cos and sin bit for bit.
    """
    constants = [x for x in unit.program.constants.values() if x.dtype is torch.float64]
    if len(constants) != 1:
        raise NotRotary(f"{unit.name}: {len(constants)} tables of turns instead of one")
    turns: Tensor = constants[0]
    which = str(node.target)
    for rows, length in PROBES:
        ids = torch.zeros(1, rows, dtype=torch.int64)
        start = torch.tensor([length], dtype=torch.int32)
        cos, sin = rotary(ids, start, turns)
        meant = cos if which == "aten.cos.default" else sin
        got = _evaluate(unit, node, {"ids": ids, "length": start}, {})
        if which not in ("aten.cos.default", "aten.sin.default") or not torch.equal(got, meant):
            raise NotRotary(f"{unit.name}: {node.name} is no rotary angle")
    return turns


def _evaluate(
    unit: Unit, node: fx.Node, inputs: dict[str, Tensor], known: dict[fx.Node, Any]
) -> Any:  # fmt: skip
    """The value of a node of the graph for these inputs."""
    if node in known:
        return known[node]
    if node.op == "placeholder":
        signature = unit.program.graph_signature
        by_node = dict(zip(signature.user_inputs, unit.inputs, strict=True))
        if node.name in by_node:
            known[node] = inputs[by_node[node.name]]
        else:
            spec = next(s for s in signature.input_specs if s.arg.name == node.name)
            known[node] = unit.program.constants[str(spec.target)]
        return known[node]
    arguments = [
        _evaluate(unit, x, inputs, known) if isinstance(x, fx.Node) else x for x in args_of(node)
    ]
    assert callable(node.target)
    known[node] = node.target(*arguments, **node.kwargs)
    return known[node]
