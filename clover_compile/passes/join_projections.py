"""Joined projections: matrix products that read the same rows become one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from clover_compile.passes.base import Pass
from clover_compile.passes.clean_up import is_cast
from clover_compile.unit import Unit, Weight

_aten = torch.ops.aten

GROUPS: tuple[tuple[str, ...], ...] = (
    (
        "linear_attn.in_proj_qkv.weight",
        "linear_attn.in_proj_z.weight",
        "linear_attn.in_proj_a.weight",
    ),
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
)
"""Weights joined along their outputs. in_proj_b stays apart: previews do not read it, and a weight
must be the same in every Unit."""


@dataclass(frozen=True)
class JoinProjections(Pass):
    """Joins each group of a layer into one matrix product, split afterwards."""

    name: ClassVar[str] = "join-projections"

    def apply(self, unit: Unit) -> int:
        by_weight = {unit.weights[_matrix(n).name].leaf: n for n in _linears(unit)}
        count = 0
        for leaf in list(by_weight):
            for group in GROUPS:
                if leaf is not None and leaf.endswith(group[0]):
                    stem = leaf.removesuffix(group[0])
                    _join(unit, [by_weight[stem + name] for name in group])
                    count += 1
        unit.tidy()
        return count


def _linears(unit: Unit) -> list[fx.Node]:
    return [
        n
        for n in unit.graph.nodes
        if n.target is _aten.linear.default and _matrix(n).name in unit.weights
    ]


def _matrix(linear: fx.Node) -> fx.Node:
    """The weight of a product, also of one that is made in a wider dtype."""
    matrix = linear.args[1]
    assert isinstance(matrix, fx.Node)
    stored = matrix.args[0] if is_cast(matrix) else matrix
    assert isinstance(stored, fx.Node)
    return stored


def _join(unit: Unit, members: list[fx.Node]) -> None:
    rows = members[0].args[0]
    if any(member.args[0] is not rows for member in members):
        raise ValueError(f"{members[0].name} and its group read different rows")
    weights = [unit.weights[_matrix(member).name] for member in members]
    sizes = [weight.shape[0] for weight in weights]
    joined = Weight(
        (sum(sizes), weights[0].shape[1]),
        weights[0].dtype,
        target=_aten.cat.default,
        arguments=(tuple(weights), 0),
    )
    values = [member.meta["val"] for member in members]
    matrix = unit.add_weight(joined, torch.cat([_matrix(member).meta["val"] for member in members]))
    with unit.graph.inserting_before(members[0]):
        given = members[0].args[1]
        if isinstance(given, fx.Node) and is_cast(given):
            matrix = _cast(unit.graph, matrix, given)
        product = unit.graph.call_function(_aten.linear.default, (rows, matrix))
        product.meta["val"] = torch.cat(values, -1)
        parts = unit.graph.call_function(_aten.split_with_sizes.default, (product, sizes, 2))
        parts.meta["val"] = values
        items = [unit.graph.call_function(operator.getitem, (parts, i)) for i in range(len(sizes))]
    for member, item, value in zip(members, items, values, strict=True):
        item.meta["val"] = value
        unit.replace(member, item)


def _cast(graph: fx.Graph, matrix: fx.Node, like: Any) -> fx.Node:
    """The same cast of the joined weight as its members had."""
    made = graph.call_function(like.target, (matrix, *like.args[1:]), dict(like.kwargs))
    made.meta["val"] = matrix.meta["val"].to(like.meta["val"].dtype)
    return made
