"""The demonstration model through launch plans: one message, one block, every Unit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from clover_compile import models, probes
from clover_compile.checkpoint import Checkpoint
from clover_compile.eager import EagerEngine
from clover_compile.model import interface
from clover_compile.model.load import load_model
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.prove import rules_of
from clover_compile.runtime.session import Session
from clover_compile.unit import source_of, trace_unit
from clover_compile.verify import LIMITS, relative
from tests.interpreted.plan_engine import PlanEngine

BLOCK, DRAFTED, KEPT = 32, 9, 4


@pytest.fixture(scope="module")
def engines() -> tuple[EagerEngine, PlanEngine]:
    checkpoint = Checkpoint.open(models.find())
    model = load_model(checkpoint.config, checkpoint.tensor, torch.float32)
    units = {}
    for name in interface.units(model.config):
        units[name] = trace_unit(model, checkpoint.generation, name)
        run_passes(units[name], PIPELINE, lambda event: None)
    source = source_of(dict(model.named_parameters()))
    return EagerEngine(model, checkpoint.generation), PlanEngine(units, source)


def _block(engine: Any, c: Any, ids: Any, prefix: int) -> dict[str, Any]:
    """Every Unit once around `prefix` rows: logits and state arrays by name."""
    out: dict[str, Any] = {}
    first, block = ids[:, :prefix], ids[:, prefix : prefix + BLOCK]
    state = probes.empty_state(c)
    new = probes.commit(engine, c, state, first, 1)
    out["commit.logits"] = new["logits"]
    state = probes.advance(c, state, new, prefix)
    masked = np.where(np.arange(BLOCK) % 3 == 0, block, c.mask_token_id)
    feeds = {name: state[name] for name in interface.inputs(c, "preview") if name in state}
    out["preview.logits"] = engine.run("preview", {"ids": masked, **feeds})["logits"]
    verified = engine.run("verify", {"ids": block[:, :DRAFTED], **feeds})
    out["verify.logits"] = verified["logits"]
    tapes = {
        name: verified.get(name, state.get(name)) for name in interface.inputs(c, "replay")
    } | {"rows": np.array([KEPT], np.int32)}
    out |= {f"replay.{k}": x for k, x in engine.run("replay", tapes).items()}
    new = probes.commit(engine, c, state, block, BLOCK)
    return out | {f"commit.block.{k}": x for k, x in new.items()}


@pytest.mark.parametrize("prefix", [13, pytest.param(70, marks=pytest.mark.slow)])
def test_every_unit_agrees_with_the_eager_model(
    prefix: int, engines: tuple[EagerEngine, PlanEngine]
) -> None:
    eager, planned = engines
    c = eager.config
    ids = np.random.default_rng(3).integers(0, c.mask_token_id, (1, prefix + BLOCK))
    planned.calls.clear()
    meant, got = _block(eager, c, ids, prefix), _block(planned, c, ids, prefix)
    assert meant.keys() == got.keys()
    limits = LIMITS["fp32"]
    for name, right in meant.items():
        most = limits.max_error if "logits" in name else limits.state
        assert most is not None
        assert relative(right, got[name]) <= most, name
        if "logits" in name:
            assert (right.argmax(-1) == got[name].argmax(-1)).all(), name
    layers, attention = c.num_hidden_layers, len(c.attention_layers)
    passes = 4
    assert planned.calls["moe"] == passes * layers
    assert planned.calls["block_attention"] == passes * attention
    assert planned.calls["gdn_preview"] == layers - attention
    assert planned.calls["gdn_scan"] == passes * (layers - attention)
    assert planned.calls["rms_norm"] == passes * (2 * layers + 1)
    assert planned.calls["projection"] >= passes * (3 * layers + 1)


def test_one_message_one_block(engines: tuple[EagerEngine, PlanEngine]) -> None:
    """The decode loop over planned Units, `pick` included, gives the stored tokens."""
    eager, planned = engines
    rules = rules_of(Checkpoint.open(models.find()))
    stored = json.loads((models.find() / "oracle_tokens.jsonl").read_text().splitlines()[0])
    planned.calls.clear()
    session = Session(planned, eager.config, rules, 512)
    answer = session.generate(stored["prompt_ids"], max_new_tokens=BLOCK)
    assert list(answer.token_ids) == stored["denoise"]
    assert answer.stats["passes"] == stored["passes"] == planned.calls["pick"]
