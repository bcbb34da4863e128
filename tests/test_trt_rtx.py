"""Real TensorRT-RTX engines of the demonstration checkpoint, built without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clover_compile import models
from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import EngineBuildFailed, NoCompiler
from clover_compile.model import interface
from clover_compile.model.load import load_model
from clover_compile.options import BuildOptions
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.runtime.manifest import read_bundle
from clover_compile.runtime.trt_build import Built
from clover_compile.targets.base import Emitted
from clover_compile.targets.trt import build as trt
from clover_compile.targets.trt.library import library
from clover_compile.targets.trt.rtx import rtx_library
from clover_compile.unit import Unit, source_of, trace_unit
from tests.command import clover_compile

pytestmark = pytest.mark.trt

CONTEXT = 512


class Watched(trt.TensorRtRtxTarget):
    """Keeps what the builder reported and what the nodes hold."""

    built: dict[str, Built]
    made: Any

    def _complete(self, folder: Path, made: Any, emitted: Emitted, say: Any) -> None:
        self.made, self.built = made, {}
        faults = trt.engine_faults

        def note(unit: Any, built: Built, nodes: Any, where: Path) -> list[str]:
            self.built[built.unit] = built
            return faults(unit, built, nodes, where)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trt, "engine_faults", note)
            super()._complete(folder, made, emitted, say)


Made = tuple[Watched, Emitted, Path, dict[str, Unit]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Every Unit in bf16 with its real kernels for one GPU, lowered, parsed and built."""
    if rtx_library() is None:
        pytest.skip("needs the package tensorrt-rtx")
    try:
        library()
    except NoCompiler as error:
        pytest.skip(str(error))
    checkpoint = Checkpoint.open(models.find())
    model = load_model(checkpoint.config, checkpoint.tensor, torch.bfloat16)
    units = {}
    for name in interface.units(checkpoint.config):
        units[name] = trace_unit(model, checkpoint.generation, name)
        run_passes(units[name], (*PIPELINE, *Watched.tail), lambda event: None)
    folder = tmp_path_factory.mktemp("rtx")
    target = Watched("89")
    source = source_of(dict(model.named_parameters()))
    emitted = target.emit(units, source, folder, CONTEXT, lambda line: None)
    return target, emitted, folder, units


def test_every_fused_op_became_a_plugin_layer(made: Made) -> None:
    target, emitted, _, units = made
    assert target.built.keys() == units.keys()
    for name, unit in units.items():
        angles = int(name not in ("replay", "pick"))
        fused = sum(unit.count_ops().values()) + angles
        assert len(target.built[name].plugins) == fused == len(emitted.units[name]["nodes"])


def test_names_and_aliases_are_those_of_the_interface(made: Made) -> None:
    target, emitted, _, units = made
    for name, unit in units.items():
        weights = sorted(w.name for w in unit.weights.values())
        assert target.built[name].inputs == [*unit.inputs, *weights]
        assert target.built[name].outputs == list(unit.outputs)
        # The builder takes aliases only where they are asked for: see test_trt_engine.
        assert bool(emitted.units[name]["aliases"]) == (name in ("commit", "replay"))


def test_output_shapes_are_those_of_the_unit(made: Made) -> None:
    target, _, _, units = made
    for name, unit in units.items():
        (result,) = (n for n in unit.graph.nodes if n.op == "output")
        for output, node in zip(unit.outputs, result.args[0], strict=True):
            meant = [x if isinstance(x, int) else -1 for x in node.meta["val"].shape]
            assert target.built[name].shapes[output] == meant, output


def test_the_kernels_are_in_the_engine_byte_for_byte(made: Made) -> None:
    target, emitted, folder, units = made
    for name in units:
        engine = (folder / emitted.units[name]["file"]).read_bytes()
        assert target.built[name].nbytes == len(engine)
        for node in target.made[name].attributes.values():
            assert node.cubins[:4] == b"\x7fELF" and len(node.cubins) > 1000
            assert node.cubins in engine and node.plan in engine
    assert not list(folder.glob("*.onnx"))


def test_the_check_finds_what_is_not_there(made: Made) -> None:
    target, emitted, folder, _ = made
    unit, built = emitted.units["pick"], target.built["pick"]
    nodes = list(target.made["pick"].attributes.values())
    assert not trt.engine_faults(unit, built, nodes, folder)
    others = list(target.made["replay"].attributes.values())[:1]
    assert "not in the engine" in trt.engine_faults(unit, built, others, folder)[0]
    renamed = {**unit, "outputs": ["ids"]}
    assert "outputs are" in trt.engine_faults(renamed, built, nodes, folder)[0]


def test_an_engine_that_is_not_as_meant_is_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    target, emitted, _, _ = made
    engines = "clover_compile.targets.trt.rtx.build_engines"
    monkeypatch.setattr(engines, lambda *_: [target.built["pick"]])
    monkeypatch.setattr(trt, "engine_faults", lambda *_: ["it is another one"])
    with pytest.raises(EngineBuildFailed, match="pick: it is another one"):
        trt.TensorRtRtxTarget("89")._complete(tmp_path, target.made, emitted, print)


@pytest.mark.slow
def test_the_whole_build(tmp_path: Path) -> None:
    if rtx_library() is None:
        pytest.skip("needs the package tensorrt-rtx")
    output = tmp_path / "demo.clover"
    options = BuildOptions(model=models.find(), output=output, target="trt-rtx")
    result = build(options, lambda line: None)
    assert result["outcome"] == "compiled, not run"
    manifest = read_bundle(output).manifest
    assert manifest["device"]["capabilities"] == [86, 89, 120]
    for unit in manifest["units"].values():
        assert unit["file"].endswith(".engine")
        for node in unit["nodes"].values():
            assert {key.rsplit("-", 2)[1] for key in node["kernels"]} == {"sm86", "sm89", "sm120"}
    done = clover_compile("run", output, "-p", "hello", "--unverified")
    assert done.exit_code == 2 and "this machine has none" in done.stderr
