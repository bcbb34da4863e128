"""Weight folding: what depends on weights alone becomes a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from clover_compile.passes.base import Pass
from clover_compile.passes.clean_up import is_cast
from clover_compile.unit import Unit, Weight


@dataclass(frozen=True)
class FoldWeights(Pass):
    """Folds 1 + w, -exp(A_log), joined taps and gates: every expression over weights and numbers
    but a mere cast, which would store a weight wider than it is.

    The expression is kept, not its value; it is evaluated when the weight is stored.
    """

    name: ClassVar[str] = "fold-weights"

    def apply(self, unit: Unit) -> int:
        known: dict[fx.Node, Weight] = {
            n: unit.weights[n.name] for n in unit.graph.nodes if n.name in unit.weights
        }
        for node in unit.graph.nodes:
            weight = _fold(node, known)
            if weight is not None and not is_cast(node):
                known[node] = weight
        count = 0
        for node, weight in known.items():
            if node.op == "call_function" and any(user not in known for user in node.users):
                unit.replace(node, unit.add_weight(weight, node.meta["val"]))
                count += 1
        unit.tidy()
        return count

    def ensures(self, unit: Unit) -> str | None:
        known = {n: unit.weights[n.name] for n in unit.graph.nodes if n.name in unit.weights}
        left = [n.name for n in unit.graph.nodes if _fold(n, known) and not is_cast(n)]
        return f"expressions over weights left: {', '.join(left)}" if left else None


def _fold(node: fx.Node, known: dict[fx.Node, Weight]) -> Weight | None:
    """The node as a weight expression, or None if it reads anything else or has several results."""
    value = node.meta.get("val")
    if node.op != "call_function" or node.kwargs or not isinstance(value, torch.Tensor):
        return None
    if not node.all_input_nodes or any(n not in known for n in node.all_input_nodes):
        return None
    arguments: Any = fx.node.map_arg(node.args, lambda n: known[n])  # type: ignore[arg-type, return-value]
    assert callable(node.target)
    return Weight(tuple(value.shape), value.dtype, target=node.target, arguments=tuple(arguments))
