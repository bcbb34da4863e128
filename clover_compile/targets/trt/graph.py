"""A Unit as a list of nodes: fused ops, not yet rendered, among standard ONNX ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from onnx import NodeProto
from torch import Tensor

from clover_compile.kernels.op import FusedOp
from clover_compile.runtime.launch_plan import Plan, Size

Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Array:
    """A named tensor."""

    name: str
    dtype: torch.dtype
    shape: Shape
    """Numbers, and names of dimensions that vary."""


@dataclass(frozen=True)
class FusedNode:
    """One fused op at its place."""

    name: str
    op: FusedOp
    inputs: Mapping[str, Array]
    """Parameter -> the tensor passed for it."""
    scalars: Mapping[str, Any]
    outputs: Mapping[str, str]
    """Result of the op -> tensor; results nobody reads are not here."""
    results: Mapping[str, torch.dtype]
    """dtypes of those results."""
    plans: Mapping[int, Plan]
    """Compute capability -> what is launched there."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Result -> the parameter whose memory it takes over."""


@dataclass
class Graph:
    """One Unit, lowered."""

    unit: str
    inputs: list[Array]
    """The Unit's own, in its order."""
    weights: list[Array]
    """Inputs as well: they are bound when the engine runs, so that Units share one copy."""
    outputs: list[Array]
    constants: dict[str, Tensor]
    """Small tensors that stand in the file."""
    nodes: list[NodeProto | FusedNode]

    def fused(self) -> list[FusedNode]:
        """The fused ops in order."""
        return [node for node in self.nodes if isinstance(node, FusedNode)]

    def aliases(self) -> dict[str, str]:
        """Output of the Unit -> the input whose memory it takes over."""
        return {
            node.outputs[result]: node.inputs[parameter].name
            for node in self.fused()
            for result, parameter in node.aliases.items()
        }
