"""What of an unfused graph belongs to which fused op, without timing anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from clover_compile.checkpoint import Checkpoint
from clover_compile.model import interface
from clover_compile.model.load import load_model
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.profiling.op_work import OTHER, UnitFile
from clover_compile.profiling.unfused import PASSES
from clover_compile.targets.ort_cpu.lowering import Lowered, lower
from clover_compile.unit import trace_unit
from tests.checkpoints import make_tiny

pytestmark = pytest.mark.ort

UNITS = ("preview", "commit")

LIGHT = {
    "Add", "Cast", "Clip", "Concat", "Cos", "Exp", "Expand", "Floor", "Gather", "Identity", "Mul",
    "Neg", "Range", "Reshape", "Shape", "Sin", "Slice", "Split", "Squeeze", "Sub", "Unsqueeze",
}  # fmt: skip
"""What may stand between regions: sizes, angles, and expressions over small weights."""

Made = tuple[Checkpoint, dict[str, Lowered], dict[str, Lowered]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Units of a tiny model before the fusions and after them."""
    checkpoint = Checkpoint.open(make_tiny(tmp_path_factory.mktemp("unfused") / "model"))
    model = load_model(checkpoint.config, checkpoint.tensor)
    found: list[dict[str, Lowered]] = []
    for passes in (PASSES, PIPELINE):
        units = {name: trace_unit(model, checkpoint.generation, name) for name in UNITS}
        for unit in units.values():
            run_passes(unit, passes, lambda event: None)
        found.append({name: lower(unit) for name, unit in units.items()})
    return checkpoint, found[0], found[1]


@pytest.mark.parametrize("unit", UNITS)
def test_fusions_replace_what_is_attributed_to_them(made: Made, unit: str) -> None:
    """Nothing that was traced in a region is left once the region is fused."""
    checkpoint, unfused, fused = made
    expected = interface.expected_ops(checkpoint.config, unit)
    assert set(unfused[unit].regions.values()) == {op for op, count in expected.items() if count}
    assert fused[unit].regions == {}


@pytest.mark.parametrize("unit", UNITS)
def test_no_heavy_node_is_left_over(made: Made, unit: str, tmp_path: Path) -> None:
    checkpoint, unfused, _ = made
    one = unfused[unit]
    names = [node.name for node in one.model.graph.node]
    assert len(set(names)) == len(names) and all(names)
    file = _file(one, checkpoint, tmp_path)
    weights = {stored.name for stored in one.weights}
    for node in one.model.graph.node:
        label = file.op_of(node.name)
        if node.name in one.regions:
            assert label == one.regions[node.name]
        elif node.op_type == "FusedMatMul":
            assert weights & set(node.input), node.name
        else:
            assert node.op_type in LIGHT, (node.name, label)


def test_kernels_are_found_by_the_names_the_engine_gives_them(made: Made, tmp_path: Path) -> None:
    checkpoint, unfused, _ = made
    one = unfused["commit"]
    file = _file(one, checkpoint, tmp_path)
    inside = next(name for name, op in one.regions.items() if op == "moe")
    assert file.op_of(inside) == file.op_of(f"{inside}/QuickGeluFusion/") == "moe"
    assert file.op_of("_inlfunc_RoutedExperts_weigh") == "moe"
    assert file.op_of("_inlfunc_DeltaRule_scan") == "gdn_scan"
    assert file.op_of("Transpose_token_7") == OTHER


def _file(one: Lowered, checkpoint: Checkpoint, folder: Path) -> UnitFile:
    path = folder / "unit.onnx"
    path.write_bytes(one.model.SerializeToString())
    return UnitFile(path, {}, checkpoint.config, one.regions)
