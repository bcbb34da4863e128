"""The lowering to ONNX: what is in the file, what is not, and that it computes the Unit."""

from __future__ import annotations

import dataclasses
import operator
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from clover_compile import trace
from clover_compile.checkpoint import Checkpoint
from clover_compile.model.clover import Clover
from clover_compile.model.config import GenerationConfig
from clover_compile.model.load import load_model
from clover_compile.passes.clean_up import CleanUp
from clover_compile.passes.fold_weights import FoldWeights
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.targets.ort_cpu.lowering import Lowered, arrange, attach, lower
from clover_compile.unit import Source, Unit, Weight, source_of, trace_unit
from clover_compile.weight_store import Stored, write_weights
from tests.checkpoints import make_checkpoint
from tests.onnx_runs import error, session

# One layer of each kind, unequal sizes everywhere.
FIELDS: dict[str, Any] = {
    "vocab_size": 331, "mask_token_id": 330, "num_hidden_layers": 2, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "num_experts": 7, "num_experts_per_tok": 3, "block_size": 16,
}  # fmt: skip

PRIMITIVES = {
    "commit": {"delta_rule": 1, "routed_experts": 2},
    "preview": {"routed_experts": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Clover, GenerationConfig]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), scale=0.12, **FIELDS)
    opened = Checkpoint.open(folder)
    return load_model(opened.config, opened.tensor), opened.generation


@pytest.fixture(scope="module")
def preview(model: tuple[Clover, GenerationConfig]) -> tuple[Unit, Lowered]:
    """The fused preview, lowered once."""
    unit = unit_of(model, "preview")
    return unit, lower(unit)


def unit_of(model: tuple[Clover, GenerationConfig], name: str, fused: bool = True) -> Unit:
    """A Unit before or after the fusion passes."""
    unit = trace_unit(*model, name)
    for one in PIPELINE if fused else (CleanUp(), FoldWeights()):
        one.apply(unit)
    return unit


def _value(weight: Weight, layout: str, source: Source) -> torch.Tensor:
    return arrange(weight.evaluate(source), layout)


def placed(unit: Unit, lowered: Lowered, source: Source, folder: Path) -> Path:
    """Writes weights and file as a target does."""
    by_name = {weight.name: weight for weight in unit.weights.values()}
    stored = [
        Stored(s.name, s.shape, torch.float32, partial(_value, by_name[s.weight], s.layout, source))
        for s in lowered.weights
    ]
    (folder / "weights").mkdir()
    written = write_weights(folder / "weights" / "model.safetensors", stored)
    places = {
        s.name: (written[s.name]["file"], written[s.name]["offset"], s.nbytes) for s in stored
    }
    path = folder / f"{unit.name}.onnx"
    path.write_bytes(attach(lowered, places))
    onnx.checker.check_model(str(path))
    return path


def compare(unit: Unit, path: Path, source: Source, model: Clover) -> None:
    """Runs file and graph on an empty, a short and a longer prefix."""
    made = session(path)
    assert tuple(x.name for x in made.get_inputs()) == unit.inputs
    assert tuple(x.name for x in made.get_outputs()) == unit.outputs
    for rows, prefix in ((1, 0), (2, 1), (33, 70)):
        arrays = trace.example(model.config, unit.name, rows, prefix)
        found = made.run(None, dict(zip(unit.inputs, (x.numpy() for x in arrays), strict=True)))
        for name, value, wanted in zip(unit.outputs, found, unit.run(arrays, source), strict=True):
            assert error(value, wanted.numpy()) <= 2e-5, (name, rows, prefix)


@pytest.mark.parametrize("name", ["commit", "replay", "preview", "pick"])
def test_fused_unit(
    name: str,
    model: tuple[Clover, GenerationConfig],
    preview: tuple[Unit, Lowered],
    tmp_path: Path,
) -> None:
    unit = preview[0] if name == "preview" else unit_of(model, name)
    source = source_of(dict(model[0].named_parameters()))
    lowered = preview[1] if name == "preview" else lower(unit)
    assert {op: row.count for op, row in lowered.ops.items()} == unit.expects
    assert all(row.kernels for row in lowered.ops.values())
    graph = lowered.model.graph
    called = {node.op_type for node in graph.node if node.domain == "clover"}
    assert called == {function.name for function in lowered.model.functions}
    assert {"Transpose", "MatMul", "Gemm"}.isdisjoint({node.op_type for node in graph.node})
    compare(unit, placed(unit, lowered, source, tmp_path), source, model[0])


@pytest.mark.parametrize("name", ["commit", "preview"])
def test_unfused_unit(name: str, model: tuple[Clover, GenerationConfig], tmp_path: Path) -> None:
    unit, source = (
        unit_of(model, name, fused=False),
        source_of(dict(model[0].named_parameters())),
    )
    lowered = lower(unit)
    assert {op: row.count for op, row in lowered.ops.items()} == PRIMITIVES[name]
    compare(unit, placed(unit, lowered, source, tmp_path), source, model[0])


def test_no_weight_is_in_the_file(preview: tuple[Unit, Lowered]) -> None:
    unit, lowered = preview
    weights = {stored.name: stored for stored in lowered.weights}
    assert {stored.weight for stored in weights.values()} == {
        weight.name for weight in unit.weights.values()
    }
    layouts = {stored.layout for name, stored in weights.items() if "gate_up_proj" in name}
    assert layouts == {"interleaved"}
    inline = [t for t in lowered.model.graph.initializer if t.name not in weights]
    assert sum(t.ByteSize() for t in inline) < 2000
    assert not any(t.raw_data for t in lowered.model.graph.initializer if t.name in weights)
    with pytest.raises(KeyError):
        attach(lowered, {})


def test_the_same_unit_gives_the_same_file(model: tuple[Clover, GenerationConfig]) -> None:
    unit = unit_of(model, "replay")
    text = unit.text()
    assert lower(unit).model.SerializeToString() == lower(unit).model.SerializeToString()
    assert unit.text() == text


def test_arrange_interleaves_gate_and_up() -> None:
    x = torch.arange(2 * 6 * 3).reshape(2, 6, 3)
    y = arrange(x, "interleaved")
    assert torch.equal(y[:, 0::2], x[:, :3])
    assert torch.equal(y[:, 1::2], x[:, 3:])
    assert arrange(x, "") is x
    # Two experts in three parts: gate row and up row of a part together, all first parts first.
    parts = arrange(x, "interleaved/3")
    assert torch.equal(parts, torch.stack([x[e][[p, p + 3]] for p in range(3) for e in range(2)]))
    down = torch.arange(2 * 3 * 6).reshape(2, 3, 6)
    columns = [down[e][:, 3 * p : 3 * p + 3] for p in range(2) for e in range(2)]
    assert torch.equal(arrange(down, "columns/2"), torch.stack(columns))
    with pytest.raises(ValueError, match="unknown layout"):
        arrange(x, "sideways")


def test_a_result_nobody_computes_may_not_be_read(model: tuple[Clover, GenerationConfig]) -> None:
    """A replay has no y: a graph that reads it is refused instead of given something else."""
    unit = unit_of(model, "replay")
    scan = next(unit.fused("gdn_scan"))
    with unit.graph.inserting_after(scan):
        y = unit.graph.call_function(operator.getitem, (scan, 0))
    y.meta["val"] = scan.meta["val"][0]
    first = next(iter(unit.graph.find_nodes(op="output")))
    first.args = ((y, *first.args[0][1:]),)
    unit.program.graph_signature.output_specs[0].arg = dataclasses.replace(
        unit.program.graph_signature.output_specs[0].arg, name=y.name
    )
    with pytest.raises(ValueError, match="not computed"):
        lower(unit)
