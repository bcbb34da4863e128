"""Files for the CUDA provider: what they hold, and in fp16 what they compute, on the CPU provider.

No kernel of the CUDA provider runs here: that a graph is right says nothing of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto

from clover_compile import models, verify
from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.eager import EagerEngine
from clover_compile.model import interface
from clover_compile.model.load import load_model
from clover_compile.options import BuildOptions
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.probes import inputs, run_script
from clover_compile.runtime.bundle import load
from clover_compile.runtime.errors import WrongMachine
from clover_compile.runtime.manifest import read_bundle
from clover_compile.targets.ort_cuda.build import OrtCuda
from clover_compile.unit import Unit, source_of, trace_unit
from tests.checkpoints import make_tiny

CHECKPOINT = Checkpoint.open(models.find())

Made = tuple[Path, dict[str, Any], dict[str, Unit], EagerEngine]


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Every Unit of the demonstration model in 16 bits."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[request.param]
    model = load_model(CHECKPOINT.config, CHECKPOINT.tensor, dtype)
    units = {}
    for name in interface.units(CHECKPOINT.config):
        units[name] = trace_unit(model, CHECKPOINT.generation, name)
        run_passes(units[name], (*PIPELINE, *OrtCuda.tail), lambda event: None)
    folder = tmp_path_factory.mktemp(request.param)
    source = source_of(dict(model.named_parameters()))
    emitted = OrtCuda().emit(units, source, folder, 512, lambda line: None)
    return folder, emitted.ops, units, EagerEngine(model, CHECKPOINT.generation)


def test_a_file_holds_the_fused_ops_and_fp32_arrays(made: Made) -> None:
    folder, ops, units, _ = made
    for name, unit in units.items():
        model = onnx.load(folder / f"{name}.onnx", load_external_data=False)
        onnx.checker.check_model(str(folder / f"{name}.onnx"))
        functions = {f.name for f in model.functions}
        nodes = [node.op_type for node in model.graph.node if node.domain == "clover"]
        assert set(nodes) == functions
        for op, count in unit.count_ops().items():
            assert ops[name][op]["count"] == count
            assert count == sum(nodes.count(f) for f in ops[name][op]["functions"])
        assert [x.name for x in model.graph.input] == list(unit.inputs)
        assert [x.name for x in model.graph.output] == list(unit.outputs)
        narrow = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
        for value in (*model.graph.input, *model.graph.output):
            assert value.type.tensor_type.elem_type not in narrow
        stored = {t.name for t in model.graph.initializer if t.external_data}
        assert stored == {w.name for w in unit.weights.values()}


class Session:
    """Runs the files on the CPU provider, which carries fp16 out in fp32."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self.sessions = {
            x.stem: ort.InferenceSession(str(x), options, providers=["CPUExecutionProvider"])
            for x in folder.glob("*.onnx")
        }

    def run(self, unit: str, feeds: Mapping[str, Any], outputs: Any = None) -> dict[str, Any]:
        session = self.sessions[unit]
        names = [x.name for x in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))


@pytest.mark.parametrize("made", ["fp16"], indirect=True)
def test_fp16_answers_as_the_eager_model(made: Made) -> None:
    folder, _, _, eager = made
    given = inputs(CHECKPOINT.config, 0)
    engine: Any = Session(folder)
    found = run_script(engine, CHECKPOINT.config, given)
    meant = run_script(eager, CHECKPOINT.config, given)
    errors = list[float]()
    for name in (n.removesuffix(".rows") for n in meant if n.endswith(".rows")):
        error = np.abs(meant[name] - found[name])[0].max(-1) / np.abs(meant[name]).max()
        errors += error[: int(meant[f"{name}.rows"])].tolist()
    # A near-tie in routing, which rounding decides, moves a row or two.
    assert len(errors) >= 128 and np.mean(np.array(errors) < 1e-2) > 0.95
    for name in (n for n in meant if n.startswith(("state.", "replay."))):
        assert verify.relative(meant[name], found[name]) < 1e-2, name


def test_a_bundle_says_that_it_was_not_run(tmp_path: Path) -> None:
    options = BuildOptions(
        model=make_tiny(tmp_path / "model"), output=tmp_path / "x.clover", target="ort-cuda"
    )
    result = build(options, lambda line: None)
    assert result["outcome"] == "compiled, not run"
    assert result["reason"].startswith("needs an NVIDIA GPU and onnxruntime-gpu>=1.25,<2; this")
    assert read_bundle(tmp_path / "x.clover").manifest["dtype"] == "bf16"
    assert "onnxruntime-gpu>=1.25,<2\n" in (tmp_path / "x.clover/requirements.txt").read_text()
    with pytest.raises(WrongMachine, match="ort-cuda needs an NVIDIA GPU and onnxruntime-gpu"):
        load(tmp_path / "x.clover", unverified=True)
