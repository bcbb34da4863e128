"""A Unit's program with its weights as inputs: so no exporter or optimiser can touch a weight."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from clover_compile.unit import Unit


def weights_as_inputs(unit: Unit) -> tuple[ExportedProgram, tuple[str, ...]]:
    """A copy of the Unit's program in which weights are ordinary inputs.

    Also the names of those inputs in order: a weight by its own name, the others as the Unit calls
    them.
    """
    program = unit.program
    specs = [_as_input(spec, unit) for spec in program.graph_signature.input_specs]
    outputs = list(program.graph_signature.output_specs)
    places = [spec.arg.name for spec in specs if spec.kind == InputKind.USER_INPUT]
    own = iter(unit.inputs)
    names = tuple(
        unit.weights[place].name if place in unit.weights else next(own) for place in places
    )
    # Nothing reads the argument names of the root call; the verifier refuses names that go stale.
    unnamed = TensorArgument("")
    root = ModuleCallSignature(
        inputs=[unnamed] * len(places),
        outputs=[unnamed] * len(outputs),
        in_spec=pytree.tree_structure((tuple(places), {})),
        out_spec=pytree.tree_structure(tuple(unit.outputs)),
    )
    graph = torch.fx.Graph()
    copied = graph.graph_copy(program.graph, {}, return_output_node=True)
    assert isinstance(copied, tuple)
    graph.output(copied[0])
    flat = ExportedProgram(
        root=torch.nn.Module(),
        graph=graph,
        graph_signature=ExportGraphSignature(specs, outputs),
        state_dict={},
        range_constraints=dict(program.range_constraints),
        module_call_graph=[ModuleCallEntry("", root)],
        constants=dict(program.constants),
    )
    return flat, names


def _as_input(spec: InputSpec, unit: Unit) -> InputSpec:
    if spec.arg.name in unit.weights:
        return InputSpec(InputKind.USER_INPUT, TensorArgument(spec.arg.name), None)
    return spec
