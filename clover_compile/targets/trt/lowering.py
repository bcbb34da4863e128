"""Lowers a fused Unit to a graph for TensorRT: fused ops and the standard ops between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx import NodeProto, TensorProto, helper
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from clover_compile.kernels.call import DTYPES, Call
from clover_compile.kernels.op import FusedOp
from clover_compile.kernels.plans import plan_call
from clover_compile.kernels.table import KERNELS, fused_op
from clover_compile.runtime.launch_plan import Operand, Plan, Size
from clover_compile.targets.triton.angles import args_of
from clover_compile.targets.trt.graph import Array, FusedNode, Graph
from clover_compile.unit import Unit

ELEMENTS: dict[torch.dtype, int] = {
    torch.float64: TensorProto.DOUBLE,
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.bool: TensorProto.BOOL,
}

ALIASES = {"gdn_scan": {"new_ring": "ring", "new_state": "state"}}
"""Op -> result -> parameter whose memory it may take over. Keys and values do not: whoever holds
the cache places new rows."""


class CannotLower(ValueError):
    """A node that no standard op and no fused op covers; the message names it."""


class Lowering:
    """One Unit on its way down."""

    def __init__(self, unit: Unit, capabilities: Sequence[int]) -> None:
        self.unit, self.capabilities = unit, tuple(capabilities)
        self.nodes: list[NodeProto | FusedNode] = []
        self.inputs: list[Array] = []
        self.weights: list[Array] = []
        self.constants: dict[str, Tensor] = {}
        self.values: dict[fx.Node, Any] = {}
        self.names: dict[fx.Node, str] = {}

    def lower(self) -> Graph:
        """Walks the graph once."""
        (result,) = (n for n in self.unit.graph.nodes if n.op == "output")
        returned: Sequence[fx.Node] = args_of(result)[0]
        for node, name in zip(returned, self.unit.outputs, strict=True):
            self.names.setdefault(node, name)
        self._placeholders()
        for node in self.unit.graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._call(node)
        outputs = [
            self._output(node, name) for node, name in zip(returned, self.unit.outputs, strict=True)
        ]
        weights = sorted(self.weights, key=lambda x: x.name)
        return Graph(
            self.unit.name, self.inputs, weights, outputs, self.constants, self.nodes
        )  # fmt: skip

    # Tensors.

    def _size(self, size: Any) -> Size:
        if isinstance(size, int):
            return size
        # The only size that comes from data is the number of logits rows.
        return self.unit.dimensions.get(str(size), "keep")

    def _array(self, node: fx.Node, name: str | None = None) -> Array:
        value = node.meta["val"]
        shape = tuple(self._size(x) for x in value.shape)
        return Array(name or self.names.get(node, node.name), value.dtype, shape)

    def _placeholders(self) -> None:
        specs = {s.arg.name: s for s in self.unit.program.graph_signature.input_specs}
        names = iter(self.unit.inputs)
        for node in (n for n in self.unit.graph.nodes if n.op == "placeholder"):
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                self.values[node] = self._array(node, next(names))
                self.inputs.append(self.values[node])
            elif node.name in self.unit.weights:
                weight = self.unit.weights[node.name]
                self.values[node] = Array(weight.name, weight.dtype, weight.shape)
                self.weights.append(self.values[node])
            else:
                value = self.unit.program.constants[str(spec.target)]
                made = Array(f"constant.{spec.target}", value.dtype, tuple(value.shape))
                self.values[node], self.constants[made.name] = made, value

    def _output(self, node: fx.Node, name: str) -> Array:
        found: Array = self.values[node]
        if found.name != name:
            self._node("Identity", [found.name], name)
        return Array(name, found.dtype, found.shape)

    # Nodes.

    def _node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        made = helper.make_node(kind, list(inputs), [output], name=output, **attributes)
        self.nodes.append(made)
        return output

    def _ints(self, name: str, *values: int) -> str:
        self.constants.setdefault(name, torch.tensor(values, dtype=torch.int64))
        return name

    def _call(self, node: fx.Node) -> Any:
        name = str(node.target)
        if name.startswith("clover.") and name.split(".")[1] in KERNELS:
            return self._fused(node, fused_op(name.split(".")[1]))
        handler = _HANDLERS.get(name) or _HANDLERS.get(getattr(node.target, "__name__", ""))
        if handler is None:
            raise CannotLower(f"{self.unit.name}: {node.format_node()} has no ONNX")
        return handler(self, node)

    def _fused(self, node: fx.Node, op: FusedOp) -> Any:
        arguments = list(args_of(node)) + [None] * (len(op.parameters) - len(args_of(node)))
        given = dict(zip(op.parameters, arguments, strict=True))
        inputs = {k: self.values[x] for k, x in given.items() if isinstance(x, fx.Node)}
        scalars = {k: x for k, x in given.items() if k not in inputs and x is not None}
        absent = {k for k, x in given.items() if x is None}
        outputs = self._results(node, op)
        plans = {
            c: _plan(op, inputs, scalars, absent, tuple(outputs), c) for c in self.capabilities
        }
        aliases = {
            result: parameter
            for result, parameter in ALIASES.get(op.name, {}).items()
            if result in outputs and outputs[result] in self.unit.outputs
        }
        value = node.meta["val"]
        values = dict(
            zip(op.outputs, value if isinstance(value, tuple | list) else (value,), strict=True)
        )
        types = {result: values[result].dtype for result in outputs}
        self.nodes.append(FusedNode(node.name, op, inputs, scalars, outputs, types, plans, aliases))
        return node

    def _results(self, node: fx.Node, op: FusedOp) -> dict[str, str]:
        """Result -> tensor of those that are read."""
        if len(op.outputs) == 1:
            return {op.outputs[0]: self.names.get(node, node.name)}
        parts = {args_of(user)[1]: user for user in node.users if user.target is operator.getitem}
        return {
            name: self.names.get(parts[i], parts[i].name)
            for i, name in enumerate(op.outputs)
            if i in parts
        }

    def _linear(self, node: fx.Node) -> Array:
        x, weight = (self.values[n] for n in args_of(node))
        turned = f"{node.name}.weight"
        self._node("Transpose", [weight.name], turned, perm=[1, 0])
        made = self._array(node)
        self._node("MatMul", [x.name, turned], made.name)
        return made

    def _cast(self, node: fx.Node) -> Array:
        made = self._array(node)
        source: Array = self.values[args_of(node)[0]]
        self._node("Cast", [source.name], made.name, to=ELEMENTS[made.dtype])
        return made

    def _embedding(self, node: fx.Node) -> Array:
        weight, ids = (self.values[n] for n in args_of(node)[:2])
        made = self._array(node)
        self._node("Gather", [weight.name, ids.name], made.name, axis=0)
        return made

    def _split(self, node: fx.Node) -> fx.Node:
        source, sizes, axis = args_of(node)
        parts = {args_of(user)[1]: user for user in node.users}
        names = [
            self.names.get(parts[i], parts[i].name) if i in parts else f"{node.name}.{i}"
            for i in range(len(sizes))
        ]
        lengths = self._ints(f"{node.name}.sizes", *sizes)
        source_name = self.values[source].name
        self.nodes.append(
            helper.make_node("Split", [source_name, lengths], names, name=node.name, axis=axis)
        )
        return node

    def _cat(self, node: fx.Node) -> Array:
        parts, axis = args_of(node)
        made = self._array(node)
        names = [self.values[x].name for x in parts]
        self._node("Concat", names, made.name, axis=axis)
        return made

    def _narrow(self, node: fx.Node) -> Array:
        """Rows [start, start + count): sizes are int64 [1] tensors."""
        source, axis, start, count = args_of(node)
        made = self._array(node)
        first, length = self.values[start], self.values[count]
        end = self._node("Add", [first, length], f"{node.name}.end")
        axes = self._ints(f"axis.{axis}", axis)
        name = self.values[source].name
        self._node("Slice", [name, first, end, axes], made.name)
        return made

    def _item(self, node: fx.Node) -> str:
        source: Array = self.values[args_of(node)[0]]
        wide = self._node("Cast", [source.name], f"{node.name}.wide", to=TensorProto.INT64)
        return self._node("Reshape", [wide, self._ints("one", 1)], node.name)

    def _sym_size(self, node: fx.Node) -> str:
        source, axis = args_of(node)
        name = self.values[source].name
        return self._node("Shape", [name], node.name, start=axis, end=axis + 1)

    def _sub(self, node: fx.Node) -> str:
        return self._node("Sub", [self.values[x] for x in args_of(node)], node.name)

    def _getitem(self, node: fx.Node) -> Array:
        return self._array(node)

    def _nothing(self, _: fx.Node) -> None:
        return None


_HANDLERS: dict[str, Callable[[Lowering, fx.Node], Any]] = {
    "aten.linear.default": Lowering._linear,
    "aten.to.dtype": Lowering._cast,
    "aten.embedding.default": Lowering._embedding,
    "aten.split_with_sizes.default": Lowering._split,
    "aten.narrow.default": Lowering._narrow,
    "aten.cat.default": Lowering._cat,
    "aten.item.default": Lowering._item,
    "aten.sym_size.int": Lowering._sym_size,
    "getitem": Lowering._getitem,
    "sub": Lowering._sub,
    "aten._assert_scalar.default": Lowering._nothing,
    "aten.sym_constrain_range_for_size.default": Lowering._nothing,
}


def _plan(
    op: FusedOp, inputs: dict[str, Array], scalars: dict[str, Any], absent: set[str],
    outputs: tuple[str, ...], capability: int,
) -> Plan:  # fmt: skip
    """The launch plan of an op whose arrays are contiguous."""
    arrays: dict[str, Operand | None] = {}
    for name in op.parameters:
        if name in absent:
            arrays[name] = None
        elif name in inputs:
            symbols = op.symbols.get(name, {})
            shape = tuple(symbols.get(i, size) for i, size in enumerate(inputs[name].shape))
            arrays[name] = Operand(DTYPES[inputs[name].dtype], shape)
    call = Call(op.name, arrays, scalars, frozenset(outputs), capability)
    return plan_call(op, call)
