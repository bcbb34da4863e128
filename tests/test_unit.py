"""Units as objects: names of folded weights, replacing nodes, dead code, weights nobody reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clover_compile import trace
from clover_compile.checkpoint import Checkpoint
from clover_compile.model.load import load_model
from clover_compile.passes.clean_up import CleanUp
from clover_compile.unit import Source, Unit, Weight, source_of, trace_unit
from tests.checkpoints import make_tiny

_aten = torch.ops.aten
_F32 = torch.float32


@pytest.fixture
def traced(tmp_path: Path) -> tuple[Unit, Source, tuple[torch.Tensor, ...]]:
    """The `replay` Unit of the smallest model as traced, its weights and one set of inputs."""
    opened = Checkpoint.open(make_tiny(tmp_path))
    model = load_model(opened.config, opened.tensor)
    unit = trace_unit(model, opened.generation, "replay")
    inputs = trace.example(opened.config, "replay", 5, 0)
    return unit, source_of(dict(model.named_parameters())), inputs


def test_a_folded_weight_is_named_after_what_it_is() -> None:
    gate = Weight((4,), _F32, leaf="layers.0.mlp.gate.weight")
    up = Weight((4,), _F32, leaf="layers.0.mlp.up.weight")
    plus = Weight((4,), _F32, target=_aten.add.Tensor, arguments=(gate, 1.0))
    both = Weight((8,), _F32, target=_aten.cat.default, arguments=((plus, up), 0))
    assert plus.name == "layers.0.mlp.gate.fold(add(weight,1.0))"
    assert both.name == "layers.0.mlp.fold(cat(add(gate.weight,1.0),up.weight,0))"
    assert both.leaves == ("layers.0.mlp.gate.weight", "layers.0.mlp.up.weight")
    assert both.nbytes == 32


def test_a_folded_weight_is_evaluated_when_it_is_needed() -> None:
    gate = Weight((2,), _F32, leaf="gate")
    plus = Weight((2,), _F32, target=_aten.add.Tensor, arguments=(gate, 1.0))
    both = Weight((4,), _F32, target=_aten.cat.default, arguments=((plus, gate), 0))
    value = both.evaluate(source_of({"gate": torch.tensor([3.0, 5.0])}))
    assert value.tolist() == [4.0, 6.0, 3.0, 5.0]


def test_dead_code_takes_its_weight_along(
    traced: tuple[Unit, Source, tuple[torch.Tensor, ...]],
) -> None:
    unit, source, inputs = traced
    unit.tidy()
    text, truth = unit.text(), unit.run(inputs, source)
    weight = Weight((2, 2), _F32, leaf="nobody.reads.this")
    node = unit.add_weight(weight, torch.empty(2, 2, device="meta"))
    with unit.graph.inserting_after(node):
        unit.graph.call_function(_aten.neg.default, (node,))
    assert node.name in unit.weights
    assert unit.tidy() == 2
    assert unit.text() == text
    assert all(w.leaf != weight.leaf for w in unit.weights.values())
    assert weight.name not in unit.program.state_dict
    assert all(torch.equal(a, b) for a, b in zip(truth, unit.run(inputs, source), strict=True))


def test_an_input_nobody_reads_stays(
    traced: tuple[Unit, Source, tuple[torch.Tensor, ...]],
) -> None:
    unit, source, inputs = traced
    CleanUp().apply(unit)  # Traced checks of metadata count as used.
    outputs = next(n for n in unit.graph.nodes if n.op == "output")
    ring = unit.program.graph_signature.user_inputs[0]
    first = next(n for n in unit.graph.nodes if n.name == ring)
    outputs.args = (tuple(first for _ in unit.outputs),)
    unit.regions.clear()
    assert unit.tidy() > 0
    assert not unit.weights
    assert len(unit.program.graph_signature.user_inputs) == len(unit.inputs) == len(inputs)
    assert torch.equal(unit.run(inputs, source)[0], inputs[0])


def test_the_same_weight_is_added_once(
    traced: tuple[Unit, Source, tuple[torch.Tensor, ...]],
) -> None:
    unit, _, _ = traced
    weight = Weight((2,), _F32, leaf="new")
    value = torch.empty(2, device="meta")
    assert unit.add_weight(weight, value) is unit.add_weight(weight, value)


def test_a_replaced_output_is_replaced_everywhere(
    traced: tuple[Unit, Source, tuple[torch.Tensor, ...]],
) -> None:
    unit, source, inputs = traced
    truth = unit.run(inputs, source)
    old = next(n for n in unit.graph.nodes if n.op == "output").args[0][0]
    touched = [r for r in unit.regions if any(x is old for x in r.outputs)]
    with unit.graph.inserting_after(old):
        new = unit.graph.call_function(_aten.clone.default, (old,))
    new.meta["val"] = old.meta["val"]
    unit.replace(old, new)
    new.args = (old,)
    assert unit.program.graph_signature.user_outputs[0] == new.name
    assert touched
    assert all(any(x is new for x in r.outputs) for r in touched)
    unit.graph.lint()
    assert all(torch.equal(a, b) for a, b in zip(truth, unit.run(inputs, source), strict=True))
