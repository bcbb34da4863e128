"""A Unit: one exported graph with named arrays and weights, that prints and runs on CPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from clover_compile import trace, unit_text
from clover_compile.errors import SpecialisedDimension
from clover_compile.model import interface
from clover_compile.model.clover import Clover
from clover_compile.model.config import GenerationConfig, ModelConfig
from clover_compile.model.layers import REGIONS

Source = Callable[[str], Tensor]
"""Gives a checkpoint tensor by its canonical name, in the activation dtype."""


@dataclass(frozen=True)
class Weight:
    """A checkpoint tensor, or an expression over such tensors, evaluated when it is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    leaf: str | None = None
    target: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()

    @property
    def leaves(self) -> tuple[str, ...]:
        """Checkpoint names it is made of, in order of use."""
        if self.leaf is not None:
            return (self.leaf,)
        inner = (x for x in pytree.tree_leaves(self.arguments) if isinstance(x, Weight))
        return tuple(name for x in inner for name in x.leaves)

    @property
    def name(self) -> str:
        """The checkpoint name, or `<module>.fold(<expression>)`."""
        if self.leaf is not None:
            return self.leaf
        parts = [name.split(".") for name in self.leaves]
        depth = next(
            (i for i, level in enumerate(zip(*parts, strict=False)) if len(set(level)) > 1),
            min(map(len, parts)) - 1,
        )
        return ".".join([*parts[0][:depth], f"fold({self._expression(depth)})"])

    def _expression(self, depth: int) -> str:
        if self.leaf is not None:
            return ".".join(self.leaf.split(".")[depth:])
        flat = pytree.tree_leaves(self.arguments)
        inner = ",".join(x._expression(depth) if isinstance(x, Weight) else str(x) for x in flat)
        assert self.target is not None
        return f"{self.target.__name__.split('.')[0]}({inner})"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def evaluate(self, source: Source) -> Tensor:
        """The tensor itself; leaves come from `source`."""
        if self.leaf is not None:
            return source(self.leaf)
        assert self.target is not None
        arguments = pytree.tree_map(
            lambda x: x.evaluate(source) if isinstance(x, Weight) else x, self.arguments
        )
        value: Tensor = self.target(*arguments)
        return value


@dataclass
class RegionCall:
    """One call of a region in the trace: the op it stands for, its arguments and its outputs."""

    path: str
    op: str
    arguments: tuple[Any, ...]
    outputs: tuple[fx.Node | None, ...]


@dataclass
class Unit:
    """One role of the model as a graph; passes change it in place."""

    name: str
    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: dict[str, Weight]
    """By the name of the weight's placeholder in the graph."""
    expects: dict[str, int]
    """How many of each fused op the finished graph must hold."""
    dimensions: dict[str, str]
    """Symbol of the graph -> declared name (T, n, R)."""
    regions: list[RegionCall] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        graph: fx.Graph = self.program.graph
        return graph

    def fused(self, op: str | None = None) -> Iterator[fx.Node]:
        """Nodes of the fused op `op`, or of any of them."""
        names = REGIONS if op is None else (op,)
        targets = {f"clover.{name}.default" for name in names}
        return (n for n in self.graph.nodes if n.op == "call_function" and str(n.target) in targets)

    def primitives(self) -> Iterator[fx.Node]:
        """Calls of an opaque op of the model that no fused op has absorbed."""
        names = {"clover.delta_rule.default", "clover.routed_experts.default"}
        return (n for n in self.graph.nodes if str(n.target) in names)

    def count_ops(self) -> dict[str, int]:
        """Fused ops in the graph by name."""
        return dict(Counter(str(node.target).split(".")[1] for node in self.fused()))

    def text(self) -> str:
        """The canonical, stable text of the graph."""
        return unit_text.render(self)

    def _node(self, name: str) -> fx.Node:
        found: fx.Node = next(n for n in self.graph.nodes if n.name == name)
        return found

    def add_weight(self, weight: Weight, value: Tensor) -> fx.Node:
        """Adds a weight as a placeholder; `value` is its fake tensor."""
        for node_name, known in self.weights.items():
            if known.name == weight.name:
                return self._node(node_name)
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.placeholder("folded")
        node.target = node.name
        node.meta["val"] = value
        self.program.graph_signature.input_specs.insert(
            0, InputSpec(InputKind.PARAMETER, TensorArgument(node.name), weight.name)
        )
        self.program.state_dict[weight.name] = torch.empty_like(value, device="meta")
        self.weights[node.name] = weight
        return node

    def tidy(self) -> int:
        """Removes dead nodes and weights nobody reads; returns how many."""
        before = len(self.graph.nodes)
        self.graph.eliminate_dead_code()
        signature = self.program.graph_signature
        pending = {x for r in self.regions for x in r.arguments if isinstance(x, fx.Node)}
        unused = {
            n.name: n
            for n in self.graph.nodes
            if n.op == "placeholder" and not n.users and n not in pending
            if _is_held(signature.input_specs, n.name)
        }
        for name, node in unused.items():
            self.graph.erase_node(node)
            self.weights.pop(name, None)
        dropped = [s for s in signature.input_specs if s.arg.name in unused]
        signature.input_specs[:] = [s for s in signature.input_specs if s.arg.name not in unused]
        for spec in dropped:
            if spec.kind == InputKind.PARAMETER and spec.target is not None:
                self.program.state_dict.pop(spec.target, None)
        return before - len(self.graph.nodes)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Puts `new` in place of `old` everywhere: graph, signature and pending regions."""
        for spec in self.program.graph_signature.output_specs:
            if spec.kind == OutputKind.USER_OUTPUT and spec.arg.name == old.name:
                spec.arg = TensorArgument(new.name)
        old.replace_all_uses_with(new)
        for region in self.regions:
            region.arguments = tuple(new if x is old else x for x in region.arguments)
            region.outputs = tuple(new if x is old else x for x in region.outputs)

    def run(self, arrays: Sequence[Tensor], source: Source) -> tuple[Tensor, ...]:
        """Runs the graph on CPU; `arrays` in the order of `inputs`.

        Arrays and weights may be fp32 where the graph was traced in 16 bits: what it asserts of
        dtypes is not looked at, and it rounds nothing to 16 bits.
        """
        values: list[Any] = []
        given = iter(arrays)
        for spec in self.program.graph_signature.input_specs:
            if spec.kind == InputKind.USER_INPUT:
                values.append(next(given))
            elif spec.arg.name in self.weights:
                values.append(self.weights[spec.arg.name].evaluate(source))
            else:
                values.append(self.program.constants[str(spec.target)])
        with torch.no_grad():
            results = _Interpreter(self.program.graph_module).run(*values)
        return tuple(results)


class _Interpreter(fx.Interpreter):
    """Runs a graph in the dtype it is given."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return None
        if target is torch.ops.aten.to.dtype and args[1] in (torch.bfloat16, torch.float16):
            return args[0]
        value = super().call_function(target, args, kwargs)
        if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            return value.float()
        return value


def _is_held(specs: Sequence[InputSpec], name: str) -> bool:
    return any(s.arg.name == name and s.kind != InputKind.USER_INPUT for s in specs)


def _regions(program: ExportedProgram) -> list[RegionCall]:
    """Reads the region calls off the preserved module signatures, then forgets the signatures."""
    nodes = {n.name: n for n in program.graph.nodes}
    found = []
    for call in program.module_call_graph:
        op, signature = call.fqn.split(".")[-1], call.signature
        if signature is not None and op in REGIONS:
            flat = [
                nodes[a.name] if isinstance(a, TensorArgument) else a.value
                for a in signature.inputs
            ]
            positional, _ = pytree.tree_unflatten(flat, signature.in_spec)
            outputs = tuple(nodes.get(a.name) for a in signature.outputs)
            found.append(
                RegionCall(call.fqn.removeprefix("clover."), op, tuple(positional), outputs)
            )
        if call.fqn:
            call.signature = None
    return found


def _dimensions(c: ModelConfig, unit: str, program: ExportedProgram) -> dict[str, str]:
    """Symbols by declared name; refuses a dimension that has none or several."""
    by_name: dict[str, set[str]] = {}
    names = set(program.graph_signature.user_inputs)
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
    for node, dims in zip(placeholders, trace.dynamic_shapes(c, unit), strict=True):
        for axis, dim in dims.items():
            by_name.setdefault(dim.__name__, set()).add(str(node.meta["val"].shape[axis]))
    for name, symbols in by_name.items():
        if len(symbols) != 1 or next(iter(symbols)).isdigit():
            raise SpecialisedDimension(unit=unit, dimension=name, found=", ".join(sorted(symbols)))
    return {symbols.pop(): name for name, symbols in by_name.items()}


def trace_unit(model: Clover, generation: GenerationConfig, name: str) -> Unit:
    """Exports one Unit of a model and takes the weights out of the program."""
    program = trace.export(model, generation, name)
    c = model.config
    nodes = {n.name: n for n in program.graph.nodes}
    weights = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.PARAMETER:
            spec_target = str(spec.target)
            value = nodes[spec.arg.name].meta["val"]
            leaf = spec_target.removeprefix("clover.")
            weights[spec.arg.name] = Weight(tuple(value.shape), value.dtype, leaf=leaf)
            program.state_dict.pop(spec_target, None)
            spec.target = leaf
            program.state_dict[leaf] = torch.empty_like(value, device="meta")
    return Unit(
        name=name,
        program=program,
        inputs=interface.inputs(c, name),
        outputs=interface.outputs(c, name),
        weights=weights,
        expects=interface.expected_ops(c, name),
        dimensions=_dimensions(c, name, program),
        regions=_regions(program),
    )


def source_of(tensors: Mapping[str, Tensor]) -> Source:
    """A Source over a mapping."""
    return tensors.__getitem__
