"""A Unit's program with its weights as inputs: the form in which no exporter can touch a weight."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    TensorArgument,
)
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.utils import _pytree as pytree

from clover_compile.unit import Unit


def weights_as_inputs(unit: Unit) -> tuple[ExportedProgram, tuple[str, ...]]:
    """A copy of the Unit's program whose weights are user inputs, and the placeholders' names in
    order of those inputs: weights first, as they stand, then the Unit's own."""
    program = unit.program
    old = program.graph_signature
    specs = [_as_input(spec, unit) for spec in old.input_specs]
    signature = ExportGraphSignature(specs, list(old.output_specs))
    names = [spec.arg.name for spec in specs if spec.kind == InputKind.USER_INPUT]
    outputs = [spec.arg for spec in old.output_specs]
    in_spec = pytree.tree_structure((tuple(names), {}))
    out_spec = pytree.tree_structure(tuple(outputs))
    calls = ModuleCallSignature(
        inputs=[TensorArgument(name) for name in names],
        outputs=outputs,
        in_spec=in_spec,
        out_spec=out_spec,
    )
    graph = torch.fx.Graph()
    results = graph.graph_copy(program.graph, {}, return_output_node=True)
    assert results is not None
    graph.output(results[0])
    flat = ExportedProgram(
        root=torch.nn.Module(),
        graph=graph,
        graph_signature=signature,
        state_dict={},
        range_constraints=dict(program.range_constraints),
        module_call_graph=[ModuleCallEntry("", calls)],
        constants=dict(program.constants),
    )
    return flat, tuple(names)


def _as_input(spec: InputSpec, unit: Unit) -> InputSpec:
    if spec.arg.name in unit.weights:
        return InputSpec(InputKind.USER_INPUT, TensorArgument(spec.arg.name), None)
    return spec
