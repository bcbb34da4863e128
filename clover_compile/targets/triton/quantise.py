"""Tail pass of fp8 builds: large matrices become e4m3 with a scale per output channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from clover_compile.kernels.fp8 import dequantise, quantised, scales
from clover_compile.passes.base import Pass
from clover_compile.targets.triton.angles import args_of
from clover_compile.unit import Unit, Weight

_linear = torch.ops.aten.linear.default
ROUTING = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
"""Weights that choose: they stay as they are."""

EXPERTS = (3, 4, 5, 6)
"""Arguments of moe that are weights: routed and shared experts."""


@dataclass(frozen=True)
class Quantise(Pass):
    """Every matrix of a product and every expert stack; the router, the shared gate beside it,
    norms, the embedding's table and what the delta rule reads stay as they are.

    Activations and sums keep their precision. The numbers change, so the check after this pass
    starts anew from its result: the verdict judges how far it is from the model.
    """

    name: ClassVar[str] = "quantise-fp8"
    lossy: ClassVar[bool] = True

    def apply(self, unit: Unit) -> int:
        matrices: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        for node, index in _uses(unit):
            matrix = args_of(node)[index]
            matrices.setdefault(matrix, []).append((node, index))
        for matrix, users in matrices.items():
            _quantise(unit, matrix, users)
        unit.tidy()
        return len(matrices)

    def ensures(self, unit: Unit) -> str | None:
        """Counted, not believed: no matrix is left behind."""
        left = [args_of(node)[index].name for node, index in _uses(unit)]
        return f"not quantised: {', '.join(left)}" if left else None


def _uses(unit: Unit) -> list[tuple[fx.Node, int]]:
    """Products and experts, and which argument of each is a weight to quantise."""
    found = []
    for node in unit.graph.nodes:
        indices: tuple[int, ...] = (1,) if node.target is _linear else ()
        if str(node.target) == "clover.moe.default":
            indices = EXPERTS
        for index in indices:
            matrix = args_of(node)[index]
            weight = unit.weights.get(matrix.name)
            if weight is not None and not any(leaf.endswith(ROUTING) for leaf in weight.leaves):
                found.append((node, index))
    return found


def _quantise(unit: Unit, matrix: fx.Node, users: list[tuple[fx.Node, int]]) -> None:
    weight, value = unit.weights[matrix.name], matrix.meta["val"]
    small = Weight(weight.shape, torch.float8_e4m3fn, target=quantised, arguments=(weight,))
    factor = Weight(weight.shape[:-1], torch.float32, target=scales, arguments=(weight,))
    parts = (
        unit.add_weight(small, value.to(torch.float8_e4m3fn)),
        unit.add_weight(factor, value[..., 0].float()),
    )
    with unit.graph.inserting_before(users[0][0]):
        made = unit.graph.call_function(dequantise._opoverload, parts)
    made.meta["val"] = value
    for node, index in users:
        node.update_arg(index, made)
