"""What the Units of a TensorRT bundle cost before their engines exist: read off the ONNX files that
the engines are built of.

Every plugin node carries its launch plan, so its launches, scratch and bytes are known. A matrix
product and a lookup count as one launch each, with their arrays moved once. What the builder makes
of the nodes between them (casts, splits, joins, slices) is its own affair: they are counted under
`other`, with no launch and no byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from clover_compile.kernels.architecture import ARCHITECTURES, Architecture
from clover_compile.kernels.budget import byte_floor, share_used
from clover_compile.kernels.onnx_text import DOMAIN
from clover_compile.runtime.launch_plan import ITEMSIZE, Launch, Operand, Plan, Variant
from clover_compile.runtime.launcher import Resolved, resolve
from clover_compile.runtime.manifest import Checked
from clover_compile.targets.triton.static import OpCall, dense_elements

OTHER = "other"
NOTE = (
    "launches are those of the plugins and one for every matrix product and lookup; the nodes "
    "under `other` are fused or not as TensorRT's builder decides, which is unknown here, and "
    "count as no launch and no byte; registers and shared memory of the kernels are not recorded"
)
_TYPES = {
    TensorProto.DOUBLE: "fp64", TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16", TensorProto.INT64: "i64", TensorProto.INT32: "i32",
    TensorProto.BOOL: "i1",
}  # fmt: skip


def has_graphs(checked: Checked) -> bool:
    """Whether the bundle still holds the ONNX files: an engine tells nobody what it launches."""
    return all(unit["file"].endswith(".onnx") for unit in checked.manifest["units"].values())


class EngineGraphs:
    """The Units of a `trt-*` bundle that is not finished."""

    note = NOTE

    def __init__(self, checked: Checked) -> None:
        self.gpu: Architecture = ARCHITECTURES[checked.manifest["target"].split("-")[1]]
        top_k = checked.manifest["model"]["config"]["num_experts_per_tok"]
        self.units = {
            name: _Graph(checked.path / unit["file"], unit["weights"], top_k)
            for name, unit in checked.manifest["units"].items()
        }

    def calls(self, unit: str, symbols: Mapping[str, int]) -> list[OpCall]:
        """The ops of one call."""
        return list(_Walk(self.units[unit], symbols).calls())


class _Graph:
    """One file."""

    def __init__(self, path: Path, weights: Sequence[str], top_k: int) -> None:
        self.graph = onnx.load(str(path), load_external_data=False).graph
        self.weights, self.top_k = set(weights), top_k
        self.plans = {x.name: _plan(x) for x in self.graph.node if x.domain == DOMAIN}


def _plan(node: NodeProto) -> Plan:
    """The launch plan of a plugin node, as far as counting needs it."""
    (held,) = (x.t.raw_data for x in node.attribute if x.name == "plan")
    data = json.loads(held)
    target = data["targets"][0]
    variants = tuple(
        Variant(
            x["guard"],
            tuple(
                Launch(data["kernels"][y["kernel"]]["function"], tuple(y["grid"]), {}, {})
                for y in x["launches"]
            ),
            {y["name"]: _operand(y) for y in x["scratch"]},
        )
        for x in target["variants"]
    )
    inputs = {x["name"]: _operand(x) for x in data["inputs"]}
    return Plan(data["op"], inputs, {x["name"]: _operand(x) for x in data["outputs"]}, variants)


def _operand(data: Mapping[str, Any]) -> Operand:
    return Operand(data["dtype"], tuple(data["shape"]))


class _Walk:
    """One call of a Unit: shapes of all arrays from the sizes of its inputs."""

    def __init__(self, graph: _Graph, symbols: Mapping[str, int]) -> None:
        self.graph = graph
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}
        self.values: dict[str, list[int]] = {"keep": [symbols["keep"]]}
        """Sizes that are computed on the way."""
        self.whose = {name: name for name in graph.weights}
        """A weight, or what it was turned or cast into, to the weight."""
        for x in graph.graph.input:
            kind = x.type.tensor_type
            shape = tuple(
                symbols[d.dim_param] if d.dim_param else d.dim_value for d in kind.shape.dim
            )
            self._note(x.name, shape, _TYPES[kind.elem_type])
        for tensor in graph.graph.initializer:
            array = numpy_helper.to_array(tensor)
            self._note(tensor.name, array.shape, _TYPES[tensor.data_type])
            if array.dtype.kind == "i" and array.size <= 8:
                self.values[tensor.name] = array.flatten().tolist()

    def calls(self) -> Iterator[OpCall]:
        """The ops in order; those that have no row to work on are left out."""
        for node in self.graph.graph.node:
            call = self._plugin(node) if node.domain == DOMAIN else self._standard(node)
            if call is not None:
                yield call

    def _note(self, name: str, shape: Sequence[int], dtype: str) -> None:
        self.shapes[name], self.types[name] = tuple(shape), dtype

    def _bytes(self, name: str) -> int:
        return prod(self.shapes[name]) * ITEMSIZE[self.types[name]]

    def _plugin(self, node: NodeProto) -> OpCall | None:
        plan = self.graph.plans[node.name]
        given = dict(zip(plan.inputs, node.input, strict=True))
        own: dict[str, int] = {}
        for name, array in given.items():
            operand = plan.inputs[name]
            assert operand is not None
            sizes = zip(operand.shape, self.shapes[array], strict=True)
            own |= {planned: size for planned, size in sizes if isinstance(planned, str)}
        planned_as = Resolved(plan.variants[0], own)
        for operand, name in zip(plan.outputs.values(), node.output, strict=True):
            self._note(name, planned_as.shape(operand), operand.dtype)
        if not all(own.values()):
            return None
        call = resolve(plan, own)
        top_k = self.graph.top_k if plan.op.startswith("moe") else 0
        least, most = (
            byte_floor(plan, own, share_used(plan, own["n"], experts))
            for experts in (top_k, top_k * own["n"])
        )
        held = {x: prod(self.shapes[y]) for x, y in given.items() if y in self.graph.weights}
        launches = len(call.variant.launches)
        dense = dense_elements(plan, held)
        return OpCall(plan.op, launches, call.workspace_bytes(), least, most, dense)

    def _standard(self, node: NodeProto) -> OpCall | None:
        shapes, dtype = _SHAPES[node.op_type](self, node)
        for name, shape in zip(node.output, shapes, strict=True):
            self._note(name, shape, dtype)
        moved = sum(self._bytes(name) for name in (*node.input, *node.output))
        if node.op_type == "MatMul":
            weight = self.whose.get(node.input[1])
            dense = prod(self.shapes[weight]) if weight else 0
            rows = prod(self.shapes[node.input[0]][:-1])
            return OpCall("projection", 1, 0, moved, moved, dense) if rows else None
        if node.op_type == "Gather":
            ids, out = node.input[1], node.output[0]
            moved = self._bytes(ids) + 2 * self._bytes(out)
            return OpCall("embedding", 1, 0, moved, moved)
        return OpCall(OTHER, 0, 0, 0, 0)

    def same(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Shapes and dtype of a copy or cast."""
        source = node.input[0]
        if source in self.values:
            self.values[node.output[0]] = self.values[source]
        if source in self.whose:
            self.whose[node.output[0]] = self.whose[source]
        kind = next((x.i for x in node.attribute if x.name == "to"), None)
        return [self.shapes[source]], self.types[source] if kind is None else _TYPES[kind]

    def turned(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of a transpose of a matrix."""
        source = node.input[0]
        if source in self.whose:
            self.whose[node.output[0]] = self.whose[source]
        return [self.shapes[source][::-1]], self.types[source]

    def product(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of rows times a matrix."""
        a, b = node.input
        return [(*self.shapes[a][:-1], self.shapes[b][-1])], self.types[a]

    def gathered(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of rows of a table."""
        table, ids = node.input
        return [(*self.shapes[ids], *self.shapes[table][1:])], self.types[table]

    def parts(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of a split into known sizes."""
        shape, axis = list(self.shapes[node.input[0]]), _axis(node)
        made = []
        for size in self.values[node.input[1]]:
            shape[axis] = size
            made.append(tuple(shape))
        return made, self.types[node.input[0]]

    def joined(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of arrays side by side."""
        shape, axis = list(self.shapes[node.input[0]]), _axis(node)
        shape[axis] = sum(self.shapes[name][axis] for name in node.input)
        return [tuple(shape)], self.types[node.input[0]]

    def cut(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of the rows from one size to another."""
        start, end, (axis,) = (self.values[name] for name in node.input[1:4])
        shape = list(self.shapes[node.input[0]])
        shape[axis] = end[0] - start[0]
        return [tuple(shape)], self.types[node.input[0]]

    def size(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of a shape's own values."""
        start, end = (next(x.i for x in node.attribute if x.name == n) for n in ("start", "end"))
        self.values[node.output[0]] = list(self.shapes[node.input[0]][start:end])
        return [(end - start,)], "i64"

    def counted(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of a sum or difference of sizes."""
        (a,), (b,) = (self.values[name] for name in node.input)
        self.values[node.output[0]] = [a + b if node.op_type == "Add" else a - b]
        return [(1,)], "i64"

    def one(self, node: NodeProto) -> tuple[list[tuple[int, ...]], str]:
        """Of a size as an array of one."""
        self.values[node.output[0]] = self.values[node.input[0]]
        return [(1,)], "i64"


def _axis(node: NodeProto) -> int:
    return next(int(x.i) for x in node.attribute if x.name == "axis")


_SHAPES: dict[str, Callable[[_Walk, NodeProto], tuple[list[tuple[int, ...]], str]]] = {
    "Identity": _Walk.same, "Cast": _Walk.same, "Transpose": _Walk.turned,
    "MatMul": _Walk.product, "Gather": _Walk.gathered, "Split": _Walk.parts,
    "Concat": _Walk.joined, "Slice": _Walk.cut, "Shape": _Walk.size, "Add": _Walk.counted,
    "Sub": _Walk.counted, "Reshape": _Walk.one,
}  # fmt: skip
