"""The proof itself: an honest engine passes, and every kind of wrong one is caught."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_compile import probes, verify
from clover_compile.checkpoint import Checkpoint
from clover_compile.eager import EagerEngine
from clover_compile.model.config import ModelConfig
from clover_compile.model.load import load_model
from clover_compile.runtime.engine import Arrays
from tests.checkpoints import Weights, make_tiny, weights

Spoil = Callable[[str, Arrays, Arrays], None]


class Spoiled:
    """An engine whose feeds and outputs a function may spoil."""

    def __init__(self, engine: EagerEngine, spoil: Spoil) -> None:
        self.engine, self.spoil = engine, spoil

    def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
        """Runs a Unit, then spoils it."""
        out = {name: x.copy() for name, x in self.engine.run(unit, feeds, outputs).items()}
        self.spoil(unit, feeds, out)
        return out


def eager(folder: Path) -> EagerEngine:
    """The eager engine of a checkpoint."""
    opened = Checkpoint.open(folder)
    return EagerEngine(load_model(opened.config, opened.tensor), opened.generation)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> EagerEngine:
    return eager(make_tiny(tmp_path_factory.mktemp("model"), block_size=8))


@pytest.fixture(scope="module")
def probe(honest: EagerEngine) -> Arrays:
    arrays, enough = probes.make(honest, honest.config)
    assert enough
    return arrays


def faults(engine: Any, c: ModelConfig, probe: Arrays, dtype: str = "fp32") -> str:
    """What the proof finds wrong."""
    return "; ".join(verify.compare(engine, c, probe, dtype)["faults"])


def test_an_honest_engine_passes(honest: EagerEngine, probe: Arrays) -> None:
    assert faults(honest, honest.config, probe) == ""


def _logits(of: str) -> Spoil:
    def spoil(unit: str, feeds: Arrays, out: Arrays) -> None:
        if unit == of and out["logits"].size:
            out["logits"][..., 3] += np.float32(1e-3) * np.abs(out["logits"]).max()

    return spoil


def _nan(unit: str, feeds: Arrays, out: Arrays) -> None:
    if unit == "preview":
        out["logits"][0, 0, 0] = np.nan


def _state(unit: str, feeds: Arrays, out: Arrays) -> None:
    if unit == "commit":
        out["S.0.new"] *= np.float32(1.001)


def _far_only(unit: str, feeds: Arrays, out: Arrays) -> None:
    # Right in the first chunk bucket, wrong beyond it: what a baked length does.
    if unit == "preview" and feeds["length"][0] > 64:
        out["logits"] = out["logits"][..., ::-1].copy()


def _replay(unit: str, feeds: Arrays, out: Arrays) -> None:
    if unit == "replay":
        out["ring.0.new"] = np.zeros_like(out["ring.0.new"])


def _writes(unit: str, feeds: Arrays, out: Arrays) -> None:
    if unit == "preview":
        feeds["S.0"][..., 0] += np.float32(1e-7)


def _in_parts(unit: str, feeds: Arrays, out: Arrays) -> None:
    if unit == "commit" and feeds["ids"].shape[1] == 1:
        out["S.0.new"] += np.float32(1e-4) * np.abs(out["S.0.new"]).max()


def _pick(unit: str, feeds: Arrays, out: Arrays) -> None:
    if unit == "pick" and feeds["counts"].any():
        out["ids"] = feeds["logits"].argmax(-1)


def _constant(unit: str, feeds: Arrays, out: Arrays) -> None:
    if "logits" in out and unit != "pick":
        out["logits"] = np.zeros_like(out["logits"])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_logits("commit"), "commit: max error"),
        (_logits("verify"), "verify: max error"),
        (_logits("preview"), "preview: max error"),
        (_nan, "preview: max error"),
        (_state, "state S: max error"),
        (_far_only, "preview: max error"),
        (_replay, "replay ring: max error"),
        (_writes, "a preview changed the state"),
        (_in_parts, "commit in parts"),
        (_pick, "pick ids"),
        (_constant, "commit: mean KL"),
    ],
)
def test_a_wrong_engine_is_caught(
    honest: EagerEngine, probe: Arrays, spoil: Spoil, says: str
) -> None:
    assert says in faults(Spoiled(honest, spoil), honest.config, probe)


def test_probes_of_one_answer_prove_nothing(honest: EagerEngine, probe: Arrays) -> None:
    same = {n: np.zeros_like(x) if x.ndim == 3 else x for n, x in probe.items()}
    assert "would not catch a constant" in faults(honest, honest.config, same)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_looser_weights_have_looser_limits(honest: EagerEngine, probe: Arrays, dtype: str) -> None:
    assert faults(Spoiled(honest, _logits("preview")), honest.config, probe, dtype) == ""
    assert "preview" in faults(Spoiled(honest, _far_only), honest.config, probe, dtype)


def _tied_router(w: Weights) -> None:
    for name in w:
        if name.endswith("mlp.gate.weight"):
            w[name][:] = 0


def test_a_router_that_always_ties_proves_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    weights(_tied_router)(make_tiny(tmp_path / "model", block_size=8))
    engine = eager(tmp_path / "model")
    arrays, enough = probes.make(engine, engine.config)
    assert not enough
    assert faults(engine, engine.config, arrays) == ""
    assert "pick ids" in faults(Spoiled(engine, _pick), engine.config, arrays)


class TiedOnce(EagerEngine):
    """The eager engine, claiming a near-tie in one row of its first commit."""

    committed = False

    def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
        """Runs a Unit; the claim is made once."""
        out = super().run(unit, feeds, outputs)
        if unit == "commit" and not self.committed:
            self.committed, self.gaps.rows[20] = True, 0.0
        return out


def test_nothing_is_compared_after_a_commit_with_a_tie(tmp_path: Path) -> None:
    opened = Checkpoint.open(make_tiny(tmp_path / "model", block_size=8))
    engine = TiedOnce(load_model(opened.config, opened.tensor), opened.generation)
    c = opened.config
    out = probes.run_script(engine, c, probes.inputs(c, 0))
    rows = {name: int(x) for name, x in out.items() if name.endswith(".rows")}
    hidden = probes.FIRST - probes.KEPT_ROWS // 2
    assert rows.pop("commit.near.rows") == 20 - hidden
    assert set(rows.values()) == {0}
