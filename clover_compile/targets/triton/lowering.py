"""Lowers a fused Unit to a program: ordered launches over a table of buffers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from clover_compile.kernels.call import DTYPES, Call
from clover_compile.kernels.op import FusedOp
from clover_compile.kernels.plans import plan_call
from clover_compile.kernels.table import OPS, fused_op
from clover_compile.runtime.launch_plan import Operand, Plan, Size
from clover_compile.runtime.unit_program import Buffer, Step, UnitProgram, View
from clover_compile.targets.triton.angles import args_of, is_angle, turns_of
from clover_compile.unit import Unit

PlanKey = Callable[[Plan], str]
"""Gives a plan its key in plans.json."""


class CannotLower(ValueError):
    """A node that no launch covers; the message names it."""


@dataclass(frozen=True)
class Parts:
    """Views side by side along the last axis: a concatenation that is never carried out."""

    views: tuple[View, ...]


@dataclass(frozen=True)
class Widened:
    """A view whose values a product takes as fp32: exact in a kernel that multiplies 16-bit
    values and adds up in fp32, so no cast is carried out."""

    view: View


@dataclass(frozen=True)
class Scaled:
    """An fp8 weight and its scales, which the kernels take apart from each other."""

    weight: View
    scale: View


@dataclass
class Lowered:
    """A Unit's program, the plans it names and where its weights come from."""

    program: UnitProgram
    plans: dict[str, Plan]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Stored arrays that are no checkpoint weight, by name."""


class Lowering:
    """One Unit on its way down."""

    def __init__(
        self, unit: Unit, capability: int, plan_key: PlanKey, verify: UnitProgram | None = None
    ) -> None:
        """verify: the program whose tapes a replay reads where they were left."""
        self.unit, self.capability, self.plan_key = unit, capability, plan_key
        self.verify = verify
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Step] = []
        self.plans: dict[str, Plan] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: dict[str, tuple[View, ...]] = {}
        self.values: dict[fx.Node, Any] = {}
        self._angles: tuple[View, View] | None = None

    def lower(self) -> Lowered:
        """Walks the graph once."""
        self._placeholders()
        for node in self.unit.graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._call(node)
        (result,) = (n for n in self.unit.graph.nodes if n.op == "output")
        outputs = {
            name: self._parts_of(self.values[node])
            for name, node in zip(self.unit.outputs, args_of(result)[0], strict=True)
        }
        symbols = tuple(sorted({*self.unit.dimensions.values(), *self._keep()}))
        kept = {view.buffer for parts in outputs.values() for view in parts}
        buffers = {
            name: replace(b, kind="output") if name in kept and b.kind == "temporary" else b
            for name, b in self.buffers.items()
        }
        program = UnitProgram(
            self.unit.name, symbols, buffers, self.inputs, outputs, tuple(self.steps)
        )
        return Lowered(program, self.plans, self.constants)

    def _keep(self) -> set[str]:
        return {"keep"} & set(self.unit.inputs)

    # Arrays.

    def _size(self, size: Any) -> Size:
        """A dimension of the graph in the Unit's own symbols."""
        if isinstance(size, int):
            return size
        name = self.unit.dimensions.get(str(size))
        if name is None:
            if "keep" in self.unit.inputs:
                return "keep"
            raise CannotLower(f"{self.unit.name}: dimension {size} has no name")
        return name

    def _shape(self, node: fx.Node) -> tuple[Size, ...]:
        return tuple(self._size(x) for x in node.meta["val"].shape)

    def _whole(self, name: str, buffer: Buffer) -> View:
        self.buffers[name] = buffer
        return View(name, buffer.shape)

    def _placeholders(self) -> None:
        specs = {s.arg.name: s for s in self.unit.program.graph_signature.input_specs}
        names = iter(self.unit.inputs)
        for node in (n for n in self.unit.graph.nodes if n.op == "placeholder"):
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                self.values[node] = self._input(next(names), node)
            elif node.name in self.unit.weights:
                weight = self.unit.weights[node.name]
                dtype = DTYPES[weight.dtype]
                made = Buffer(dtype, weight.shape, "weight", weight.name)
                self.values[node] = self._whole(weight.name, made)
            else:
                self.values[node] = self.unit.program.constants[str(spec.target)]

    def _input(self, name: str, node: fx.Node) -> Any:
        if name == "keep":
            return "keep"
        if self.verify is not None and name.startswith("tape."):
            return self._tape(self.verify, name)
        value = node.meta["val"]
        made = Buffer(DTYPES[value.dtype], self._shape(node), "input")
        view = self._whole(name, made)
        self.inputs[name] = (view,)
        return view

    def _tape(self, verify: UnitProgram, name: str) -> Parts:
        """A tape as the verify left it: parts of the projection it came from."""
        parts = verify.outputs[name]
        (buffer,) = {view.buffer for view in parts}
        self.buffers[name] = replace(verify.buffers[buffer], kind="input")
        self.inputs[name] = tuple(replace(view, buffer=name) for view in parts)
        return Parts(self.inputs[name])

    # Nodes.

    def _call(self, node: fx.Node) -> Any:
        name = str(node.target)
        if name.startswith("clover.") and name.split(".")[1] in OPS:
            return self._fused(node, fused_op(name.split(".")[1]))
        handler = _HANDLERS.get(name) or _HANDLERS.get(getattr(node.target, "__name__", ""))
        if handler is not None:
            return handler(self, node)
        if is_angle(node):
            return node
        raise CannotLower(f"{self.unit.name}: {node.format_node()} has no launch")

    def _fused(self, node: fx.Node, op: FusedOp) -> Any:
        arguments = [self._argument(op, i, x) for i, x in enumerate(args_of(node))]
        arguments += [None] * (len(op.parameters) - len(arguments))
        scaled = [x for x in arguments if isinstance(x, Scaled)]
        if scaled:
            op, arguments = _over_fp8(op, arguments, scaled)
        if len(op.outputs) == 1:
            return self._step(op, arguments, op.outputs, node.name)[op.outputs[0]]
        used = {args_of(user)[1] for user in node.users if user.target is operator.getitem}
        wanted = tuple(out for i, out in enumerate(op.outputs) if i in used)
        made = self._step(op, arguments, wanted, node.name)
        return tuple(made.get(out) for out in op.outputs)

    def _argument(self, op: FusedOp, index: int, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        found = self.values[value]
        if isinstance(found, fx.Node):
            if op.name != "block_attention" or op.parameters[index] not in ("cos", "sin"):
                raise CannotLower(f"{self.unit.name}: {found.format_node()} has no launch")
            return self._angle(value, op.parameters[index])
        return found

    def _angle(self, node: fx.Node, which: str) -> View:
        """cos and sin come from the rotary kernel, once per Unit."""
        if self._angles is None:
            turns = turns_of(self.unit, node)
            self.constants["rotary.turns"] = turns
            made = Buffer("fp64", tuple(turns.shape), "weight", "rotary.turns")
            views = [self.inputs["ids"][0], self.inputs["length"][0]]
            views.append(self._whole("rotary.turns", made))
            out = self._step(fused_op("rotary"), views, ("cos", "sin"), "rotary")
            self._angles = (out["cos"], out["sin"])
        return self._angles[which == "sin"]

    def _step(
        self, op: FusedOp, arguments: Sequence[Any], wanted: Sequence[str], stem: str
    ) -> dict[str, View]:
        """Plans a call and appends it; returns the views of its outputs."""
        given = dict(zip(op.parameters, arguments, strict=True))
        views = {name: x for name, x in given.items() if isinstance(x, View)}
        absent = {name for name, x in given.items() if x is None}
        known: dict[str, Size] = {}
        arrays: dict[str, Operand | None] = dict.fromkeys(absent)
        for name, view in views.items():
            symbols = op.symbols.get(name, {})
            known |= {symbol: view.shape[axis] for axis, symbol in symbols.items()}
            shape = tuple(symbols.get(i, size) for i, size in enumerate(view.shape))
            arrays[name] = Operand(self.buffers[view.buffer].dtype, shape, view.stride)
        ordered = {name: arrays[name] for name in op.parameters if name in arrays}
        scalars = {k: x for k, x in given.items() if k not in arrays}
        call = Call(op.name, ordered, scalars, frozenset(wanted), self.capability)
        plan = plan_call(op, call)
        key = self.plan_key(plan)
        self.plans[key] = plan
        outputs = {}
        for name, operand in plan.outputs.items():
            shape = tuple(known.get(x, x) if isinstance(x, str) else x for x in operand.shape)
            buffer = Buffer(operand.dtype, shape, "temporary")
            outputs[name] = self._whole(f"{stem}.{name}", buffer)
        inputs = {name: views[name] for name in plan.inputs if name in views}
        self.steps.append(Step(key, inputs, outputs))
        return {name: outputs[name] for name in wanted}

    # Plain nodes.

    def _linear(self, node: fx.Node) -> View:
        users = list(node.users)
        wide = len(users) == 1 and str(users[0].target) == "aten.to.dtype"
        wide = wide and args_of(users[0])[1] is torch.float32
        x, weight = (self.values[n] for n in args_of(node))
        if isinstance(weight, Scaled):
            arguments = [x, weight.weight, weight.scale, wide]
            return self._step(fused_op("projection_fp8"), arguments, ("y",), node.name)["y"]
        if isinstance(x, Widened) and isinstance(weight, Widened):
            x, weight, wide = x.view, weight.view, True
        return self._step(fused_op("projection"), [x, weight, wide], ("y",), node.name)["y"]

    def _to(self, node: fx.Node) -> Any:
        source = self.values[args_of(node)[0]]
        if isinstance(source, View) and args_of(node)[1] is torch.float32:
            if self.buffers[source.buffer].dtype == "fp32":
                return source
            if all(str(user.target) == "aten.linear.default" for user in node.users):
                return Widened(source)
            raise CannotLower(f"{self.unit.name}: {node.format_node()} is no cast of logits")
        return node

    def _dequantise(self, node: fx.Node) -> Scaled:
        return Scaled(*(self.values[n] for n in args_of(node)))

    def _embedding(self, node: fx.Node) -> View:
        weight, ids = (self.values[n] for n in args_of(node)[:2])
        return self._step(fused_op("embedding"), [ids, weight], ("y",), node.name)["y"]

    def _split(self, node: fx.Node) -> Any:
        source, sizes, axis = (
            self.values[args_of(node)[0]],
            list(args_of(node)[1]),
            args_of(node)[2],
        )
        if isinstance(source, Parts):
            if [view.shape[-1] for view in source.views] != sizes:
                raise CannotLower(f"{self.unit.name}: {node.name} splits a tape elsewhere")
            return source.views
        if axis != 2 or len(source.shape) != 3 or not isinstance(source.offset, int):
            raise CannotLower(f"{self.unit.name}: {node.format_node()} is no split of columns")
        stride, at, views = source.stride or source.shape[2], source.offset, []
        for size in sizes:
            views.append(replace(source, shape=(*source.shape[:2], size), offset=at, stride=stride))
            at += size
        return tuple(views)

    def _narrow(self, node: fx.Node) -> View:
        source, axis, start, count = (
            self.values.get(x, x) if isinstance(x, fx.Node) else x for x in args_of(node)
        )
        if axis != 1 or source.stride is not None or source.offset != 0:
            raise CannotLower(f"{self.unit.name}: {node.format_node()} is no choice of rows")
        assert isinstance(source, View)
        return replace(
            source, shape=(1, count, *source.shape[2:]), offset=f"({start}) * {source.shape[2]}"
        )

    def _cat(self, node: fx.Node) -> Parts:
        parts, axis = args_of(node)
        if axis != 2:
            raise CannotLower(f"{self.unit.name}: {node.format_node()} joins no columns")
        return Parts(tuple(self.values[x] for x in parts))

    def _item(self, node: fx.Node) -> Any:
        return self.values[args_of(node)[0]]

    def _sym_size(self, node: fx.Node) -> Size:
        return (
            self._size(node.meta["val"])
            if not isinstance(node.meta["val"], int)
            else (node.meta["val"])
        )

    def _getitem(self, node: fx.Node) -> Any:
        return self.values[args_of(node)[0]][args_of(node)[1]]

    def _sub(self, node: fx.Node) -> Size:
        a, b = (self.values.get(x, x) if isinstance(x, fx.Node) else x for x in args_of(node))
        return f"{a} - {b}"

    def _nothing(self, _: fx.Node) -> None:
        return None

    def _parts_of(self, value: Any) -> tuple[View, ...]:
        if isinstance(value, Parts):
            return value.views
        if isinstance(value, View):
            return (value,)
        raise CannotLower(f"{self.unit.name}: an output is no array: {value}")


def _over_fp8(
    op: FusedOp, arguments: Sequence[Any], scaled: Sequence[Scaled]
) -> tuple[FusedOp, list[Any]]:
    """The op over fp8 weights: the scales follow the weights they belong to."""
    found = [x.weight if isinstance(x, Scaled) else x for x in arguments]
    last = max(i for i, x in enumerate(arguments) if isinstance(x, Scaled))
    found[last + 1 : last + 1] = [x.scale for x in scaled]
    return fused_op(f"{op.name}_fp8"), found


_HANDLERS: dict[str, Any] = {
    "aten.linear.default": Lowering._linear,
    "aten.to.dtype": Lowering._to,
    "clover.dequantise.default": Lowering._dequantise,
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
