"""How each op of a Unit's graph becomes ONNX: fused ops as functions, the few others as nodes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir
import torch
from onnxscript import values
from onnxscript.onnx_opset import opset24 as op

from clover_compile.kernels.onnx_text import DOMAIN, DOMAIN_VERSION, OPSETS, OnnxFunction, Shape
from clover_compile.kernels.table import OPS, fused_op

PRIMITIVES = {
    "delta_rule": "clover_compile.kernels.gdn_scan.onnx_function:primitive",
    "routed_experts": "clover_compile.kernels.moe.onnx_function:primitive",
}
"""Opaque ops of the eager model that an unfused graph still holds."""

DOMAINS = {DOMAIN: DOMAIN_VERSION, **OPSETS}
"""Version of every domain in a file."""

UNREAD = "not computed"
"""Value of a result that no function computes; it must not be in a finished graph."""

_ANY = ["tensor(float)", "tensor(int64)", "tensor(int32)", "tensor(bool)"]


def _node_type(
    domain: str, name: str, inputs: int, outputs: int, attributes: Sequence[str] = ()
) -> values.Op:
    """A node type that takes and returns any tensors, with integer attributes; what it means is
    the engine's affair."""
    schema = onnx.defs.OpSchema
    sources = [f"in{i}" for i in range(inputs)]
    results = [f"out{i}" for i in range(outputs)]
    found = schema(
        name,
        domain,
        DOMAINS[domain],
        inputs=[schema.FormalParameter(x, f"T{x}") for x in sources],
        outputs=[schema.FormalParameter(x, f"T{x}") for x in results],
        type_constraints=[(f"T{x}", _ANY, "") for x in (*sources, *results)],
        attributes=[schema.Attribute(x, schema.AttrType.INT, required=False) for x in attributes],
    )
    return values.Op(values.Opset(domain, DOMAINS[domain]), name, op_schema=found)


def _shape(value: onnx_ir.Value) -> Shape:
    assert value.shape is not None
    return tuple(n if isinstance(n, int) else None for n in value.shape)


@dataclass
class Translation:
    """The table torch.onnx.export is given, and the functions it called for."""

    functions: dict[str, OnnxFunction] = field(default_factory=dict)
    """By name."""
    owners: dict[str, str] = field(default_factory=dict)
    """Function -> the op it implements."""

    def table(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        """Torch op -> what writes its nodes."""
        made: dict[Callable[..., Any], Callable[..., Any]] = {
            torch.ops.aten.linear.default: _linear,
            torch.ops.aten.sort.stable: _sort,
        }
        for name in OPS:
            spec = fused_op(name)
            overload = spec.overload()
            made[overload] = self._writer(name, overload, spec.slot("onnx"))
        for name, slot in PRIMITIVES.items():
            overload = getattr(torch.ops.clover, name).default
            module, attribute = slot.split(":")
            maker = getattr(importlib.import_module(module), attribute)
            made[overload] = self._writer(name, overload, maker)
        return made

    def _writer(
        self, op_name: str, overload: torch._ops.OpOverload, maker: Callable[..., OnnxFunction]
    ) -> Callable[..., Any]:
        parameters = [argument.name for argument in overload._schema.arguments]
        results = len(overload._schema.returns)

        def write(*arguments: Any) -> Any:
            given = dict(zip(parameters, arguments, strict=True))
            tensors = {k: x for k, x in given.items() if isinstance(x, onnx_ir.Value)}
            constants = {k: x for k, x in given.items() if k not in tensors and x is not None}
            shapes = {k: _shape(x) for k, x in tensors.items()}
            function = self._keep(op_name, maker(shapes, constants))
            sources = [tensors[name] for name in function.inputs]
            node = _node_type(DOMAIN, function.name, len(sources), len(function.outputs))
            made = node(*sources)
            made = made if isinstance(made, Sequence) else (made,)
            by_place = dict(zip(function.outputs, made, strict=True))
            outputs = tuple(
                by_place.get(i) or _missing(function, i, tensors) for i in range(results)
            )
            return outputs[0] if results == 1 else outputs

        return write

    def _keep(self, op_name: str, function: OnnxFunction) -> OnnxFunction:
        known = self.functions.setdefault(function.name, function)
        if known.proto != function.proto:
            raise ValueError(f"two different functions {function.name} in one Unit")
        self.owners[function.name] = op_name
        return known


def _missing(function: OnnxFunction, place: int, tensors: Mapping[str, Any]) -> Any:
    """A result the function does not return: a parameter it equals, or one nobody may read."""
    if place in function.aliases:
        return op.Identity(tensors[function.aliases[place]])
    return op.Constant(value_string=UNREAD)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x W^T on the weight as stored: a transposed copy would cost as much memory as the weight."""
    if bias is not None:
        raise NotImplementedError("a linear layer with a bias")
    return _FUSED_MATMUL(x, weight, transB=1)


def _sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """A stable sort: of equal values TopK puts the lower index first."""
    axis = dim % len(x.shape)
    size = op.Shape(x, start=axis, end=axis + 1)
    return op.TopK(x, size, axis=axis, largest=int(descending), sorted=1)


_FUSED_MATMUL = _node_type("com.microsoft", "FusedMatMul", 2, 1, ["transB"])
