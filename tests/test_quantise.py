"""fp8 weights: what is quantised, what it does to the numbers, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from clover_compile import models, prove
from clover_compile import plan as planner
from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import PassFailed, VerdictError, WrongDtype
from clover_compile.inspection import _quantisation
from clover_compile.kernels.fp8 import LARGEST, quantised, scales, widened
from clover_compile.model.load import load_model
from clover_compile.options import BuildOptions
from clover_compile.passes import observe
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.runtime.bundle import LoadedBundle
from clover_compile.runtime.gpu_needs import RESERVE
from clover_compile.runtime.manifest import read_bundle
from clover_compile.runtime.program_engine import state_layout
from clover_compile.runtime.program_files import read_programs, read_table
from clover_compile.runtime.triton_engine import _needs
from clover_compile.targets.table import known
from clover_compile.targets.triton import plan
from clover_compile.targets.triton import quantise as module
from clover_compile.targets.triton.join import JoinWriteGate
from clover_compile.targets.triton.quantisation import report
from clover_compile.targets.triton.quantise import Quantise
from clover_compile.trace import example
from clover_compile.unit import Unit, Weight, source_of, trace_unit
from tests.test_triton_target import SPOILED, on_the_twin


def test_a_channel_has_its_own_scale() -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(4, 6, 32, generator=g) * 10 ** torch.linspace(-6, 3, 24).view(4, 6, 1)
    q, s = quantised(w), scales(w)
    assert q.dtype == torch.float8_e4m3fn and s.shape == (4, 6)
    assert float(q.float().abs().amax(-1).min()) == LARGEST
    error = (widened(q, s) - w).norm(dim=-1) / w.norm(dim=-1)
    assert float(error.max()) < 0.04
    assert widened(quantised(torch.zeros(2, 3)), scales(torch.zeros(2, 3))).eq(0).all()


def _unit(name: str) -> tuple[Unit, Any, Any]:
    checkpoint = Checkpoint.open(models.find())
    model = load_model(checkpoint.config, checkpoint.tensor, torch.float32)
    unit = trace_unit(model, checkpoint.generation, name)
    return unit, source_of(dict(model.named_parameters())), checkpoint.config


def test_every_large_matrix_and_nothing_else() -> None:
    """Counted from the config: joined inputs, outputs, head; four weights of every moe."""
    unit, source, c = _unit("verify")
    checks = observe.check([example(c, "verify", 5, 7)], source)
    counts = run_passes(unit, (*PIPELINE, JoinWriteGate(), Quantise()), checks)
    layers = c.num_hidden_layers
    assert counts["quantise-fp8"] == 2 * layers + 1 + 4 * layers
    small = [w for w in unit.weights.values() if w.dtype is torch.float8_e4m3fn]
    assert len(small) == counts["quantise-fp8"]
    stay = [w for w in unit.weights.values() if w.target not in (quantised, scales)]
    names = {leaf for w in stay for leaf in w.leaves}
    assert any(n.endswith("mlp.gate.weight") for n in names)
    assert any(n.endswith("shared_expert_gate.weight") for n in names)
    assert not any("experts." in n or "lm_head" in n or "_proj.weight" in n for n in names)
    _planned(small)


def _planned(small: list[Weight]) -> None:
    """`build --plan` counts the same tensors, and their bytes with the scales."""
    checkpoint = Checkpoint.open(models.find())
    names = {name for name in checkpoint.names if plan._is_quantised(name)}
    assert {leaf for weight in small for leaf in weight.leaves} == names
    stored = sum(w.nbytes + 4 * prod(w.shape[:-1]) for w in small)
    assert stored == sum(plan._in_fp8(checkpoint.shape(name)) for name in names)


def test_a_matrix_left_behind_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, _, _ = _unit("preview")
    seen = module._uses
    monkeypatch.setattr(module, "_quantise", lambda *arguments: None)
    with pytest.raises(PassFailed, match="not quantised"):
        run_passes(unit, (*PIPELINE, JoinWriteGate(), Quantise()), lambda event: None)
    assert seen(unit)


def test_the_report_names_experts_of_unusual_range() -> None:
    stack = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))
    stack[5] *= 50
    leaf = Weight((8, 4, 6), torch.float32, leaf="model.layers.0.mlp.experts.down_proj")
    small = Weight((8, 4, 6), torch.float8_e4m3fn, target=quantised, arguments=(leaf,))
    found = report([small], lambda name: stack)
    assert [x["expert"] for x in found["unusual_experts"]] == [5]
    row = found["groups"]["experts"]
    assert row["bytes"] == 8 * 4 * 6 + 4 * 8 * 4 and row["bytes_before"] == 4 * 8 * 4 * 6
    assert 0 < row["error"] < 0.04 and row["worst"] == pytest.approx(row["error"])


def test_inspect_shows_the_report() -> None:
    row = {"tensors": 16, "bytes": 1_600_000, "bytes_before": 3_100_000, "error": 0.0254,
           "worst": 0.0258, "worst_tensor": "x"}  # fmt: skip
    odd = [{"tensor": "t", "expert": i, "largest": 9.0, "median": 1.0} for i in range(10)]
    lines = _quantisation({"groups": {"experts": row}, "unusual_experts": odd})
    assert "3.1 -> 1.6 MB  error 2.54%, at most 2.58%" in lines[1]
    assert "t 0, t 1" in lines[2] and lines[2].endswith("and 2 more")
    assert _quantisation({}) == []
    assert "none" in _quantisation({"groups": {}, "unusual_experts": []})[-1]


@pytest.mark.parametrize("name", ["triton-a100", "triton-rtx3090"])
def test_gpus_without_fp8_refuse_it(name: str) -> None:
    with pytest.raises(WrongDtype, match="bf16"):
        known(name).dtype(name, "fp8")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration model for an H100, in fp8."""
    path = tmp_path_factory.mktemp("fp8") / "demo.clover"
    build(BuildOptions(models.find(), path, "triton-h100", dtype="fp8"), lambda line: None)
    return path


@pytest.fixture
def twin(built: Path) -> Iterator[LoadedBundle]:
    with on_the_twin(built) as loaded:
        yield loaded


@pytest.mark.slow
def test_a_plan_says_what_it_takes(built: Path) -> None:
    options = BuildOptions(models.find(), built.with_name("x"), "triton-h100", dtype="fp8")
    needs, checked = planner.plan(options)["needs"], read_bundle(built)
    store = checked.manifest["files"]["weights/model.safetensors"]["size"]
    stored = sum(row["bytes"] for row in checked.manifest["precision"].values())
    used = sum(path.stat().st_size for path in built.rglob("*"))
    state = state_layout(read_programs(checked)["commit"], checked.manifest["context"])
    held = _needs(checked, read_table(checked, "kernels.json"), state).held
    assert stored == pytest.approx(store, rel=0.02)  # but for the header
    assert needs["weight_bytes"] == pytest.approx(stored, rel=0.02)
    assert needs["device_bytes"] - RESERVE == pytest.approx(held, rel=0.02)
    assert used < needs["disk_bytes"] < used + plan.KERNELS


@pytest.mark.slow
def test_the_twin_passes_the_proof(twin: LoadedBundle) -> None:
    verdict = prove.prove(twin, "fp8", lambda line: None)
    assert verdict["outcome"] == "passed"
    manifest = read_bundle(twin.path).manifest
    assert sum(x["tensors"] for x in manifest["quantisation"]["groups"].values()) == 49
    assert manifest["precision"]["experts float8_e4m3fn"]["tensors"] == 16
    assert json.loads((twin.path / "verdict.json").read_text())["outcome"] == "compiled, not run"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention that misses a head", "a channel of previews lost"])
def test_the_proof_notices_a_wrong_engine(name: str, twin: LoadedBundle) -> None:
    """fp8 excuses more than 16 bits do, but not these."""
    op, change = SPOILED[name]
    twin.engine.device.spoil[op] = change  # type: ignore[attr-defined]
    with pytest.raises(VerdictError, match="KL"):
        prove.prove(twin, "fp8", lambda line: None)
