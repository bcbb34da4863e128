"""Builds where the eager model does not fit: unproved, and saying so, but of the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clover_compile import models, oversize, plan
from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import NoProbes, PassFailed
from clover_compile.options import BuildOptions
from clover_compile.passes.base import Pass
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.reprove import reprove
from clover_compile.runtime import Session
from clover_compile.runtime.errors import NotProved
from clover_compile.runtime.manifest import read_bundle
from tests import sparse
from tests.built import demonstration

FREE = 200_000_000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration model, on a machine that seems to have too little memory."""
    path = tmp_path_factory.mktemp("oversize") / "demo.clover"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "free_memory", lambda: FREE)
        result = build(BuildOptions(models.find(), path), lambda line: None)
    assert result["outcome"] == "unproved"
    assert "200 MB are free" in result["reason"] and "small twin" in result["reason"]
    return path


def test_it_is_refused_until_proved(built: Path) -> None:
    with pytest.raises(NotProved, match="unproved"):
        Session.load(built)
    with pytest.raises(NoProbes, match="--model"):
        reprove(built, None, lambda line: None)


def test_everything_but_the_probes_is_what_a_proved_build_writes(built: Path) -> None:
    own, proved = (read_bundle(path).manifest for path in (built, demonstration()))
    files = {name for name in proved["files"] if name != "probes.safetensors"}
    assert set(own["files"]) == files
    differing = {n for n in files if own["files"][n]["sha256"] != proved["files"][n]["sha256"]}
    assert not differing
    assert own["passes"] == proved["passes"]


@pytest.mark.slow
def test_the_checkpoint_proves_it_afterwards(built: Path) -> None:
    assert reprove(built, str(models.find()), lambda line: None)["outcome"] == "passed"


def test_passes_are_checked_on_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that breaks the numbers stops the build although the model itself is never run."""

    class Spoil(Pass):
        name = "spoil"

        def apply(self, unit: object) -> int:
            for node in unit.graph.nodes:  # type: ignore[attr-defined]
                if str(node.target) == "clover.rms_norm.default":
                    node.args = (*node.args[:3], 0.5)
                    return 1
            return 0

    monkeypatch.setattr(plan, "free_memory", lambda: FREE)
    monkeypatch.setattr("clover_compile.build.PIPELINE", (*PIPELINE, Spoil()))
    with pytest.raises(PassFailed, match=r"spoil.*moved by"):
        build(BuildOptions(models.find(), tmp_path / "x.clover"), lambda line: None)
    assert not list(tmp_path.iterdir())


def test_the_twin_has_the_real_widths() -> None:
    checkpoint = Checkpoint.open(models.find())
    small, generation = oversize.twin(checkpoint.config, checkpoint.generation)
    assert small.config.hidden_size == checkpoint.config.hidden_size
    assert set(small.config.layer_types) == set(checkpoint.config.layer_types)
    assert max(generation.stop_token_ids) < small.config.vocab_size
    assert all(x.isfinite().all() for x in small.parameters())


def test_a_shell_takes_no_memory() -> None:
    """Forty times the demonstration model in address space, untouched."""
    config = sparse.config(layers=8)
    model = oversize.shell(config, torch.bfloat16)
    assert sum(x.numel() for x in model.parameters()) > 5e9


@pytest.mark.slow
def test_layers_of_the_released_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes of the checkpoint are holes of the bundle; kernels keep the released budgets."""
    monkeypatch.setattr(plan, "free_memory", lambda: FREE)
    model = sparse.write(tmp_path / "model", layers=4)
    path = tmp_path / "x.clover"
    build(BuildOptions(model, path, "triton-h100"), lambda line: None)
    store = (path / "weights/model.safetensors").stat()
    assert store.st_size > 8e9 and store.st_blocks * 512 < 50e6
    kernels = read_bundle(path).manifest["static"]["kernels"]
    assert kernels["over_budget"] == 0 and kernels["stack"] == 0
