"""Units lowered to launch programs, replayed by the software twin."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_compile import models
from clover_compile.checkpoint import Checkpoint
from clover_compile.kernels import costs
from clover_compile.model import interface
from clover_compile.model.load import load_model
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.prove import rules_of
from clover_compile.runtime.expressions import evaluate
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.program_engine import ProgramEngine, Stale
from clover_compile.runtime.session import Session
from clover_compile.runtime.unit_program import UnitProgram
from clover_compile.targets.cubins import plan_key
from clover_compile.targets.triton.build import ORDER
from clover_compile.targets.triton.join import JoinWriteGate
from clover_compile.targets.triton.lowering import Lowered, Lowering
from clover_compile.unit import Unit, source_of, trace_unit
from tests.twin import Twin

WAYS: dict[str, dict[str, Any]] = {
    "denoise": {"decode": "denoise"},
    "causal": {"decode": "causal"},
    "exact": {"decode": "self-speculate", "accept": "exact"},
    "release": {"decode": "self-speculate", "accept": "release"},
}

Made = tuple[dict[str, Unit], dict[str, Lowered], Session, Twin]


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    """Every Unit of the demonstration model, lowered and sent through JSON, on the twin."""
    checkpoint = Checkpoint.open(models.find())
    model = load_model(checkpoint.config, checkpoint.tensor, torch.float32)
    source = source_of(dict(model.named_parameters()))
    units, lowered = dict[str, Unit](), dict[str, Lowered]()
    for name in ORDER:
        units[name] = trace_unit(model, checkpoint.generation, name)
        run_passes(units[name], (*PIPELINE, JoinWriteGate()), lambda event: None)
        verify = lowered["verify"].program if name == "replay" else None
        lowered[name] = Lowering(units[name], 90, plan_key, verify).lower()
    plans = {k: _copy(Plan, x) for one in lowered.values() for k, x in one.plans.items()}
    programs = {name: _copy(UnitProgram, one.program) for name, one in lowered.items()}
    weights = dict[str, Tensor]()
    for name, unit in units.items():
        weights |= {w.name: w.evaluate(source) for w in unit.weights.values()}
        weights |= lowered[name].constants
    twin = Twin()
    engine = ProgramEngine(programs, plans, weights, twin)
    with torch.no_grad():
        session = Session(engine, checkpoint.config, rules_of(checkpoint), 160)
        yield units, lowered, session, twin


def _copy(kind: Any, value: Any) -> Any:
    """Through JSON: what a bundle would hold."""
    again = kind.from_json(json.loads(json.dumps(value.to_json())))
    assert again == value
    return again


def test_launches_per_layer(made: Made) -> None:
    """Counted in the programs themselves, for a block: at most ten per layer and a few around."""
    units, lowered, session, _ = made
    layers = session.sizes.layer_types
    for name in ("commit", "verify", "preview"):
        count = 0
        for step in lowered[name].program.steps:
            plan = lowered[name].plans[step.plan]
            first = next(v for v in plan.variants if _admits(v.guard))
            count += len(first.launches)
        assert count <= costs.LAUNCHES_PER_LAYER * len(layers) + 4, name
    assert units.keys() == set(interface.units(session.sizes))  # type: ignore[arg-type]


def _admits(guard: str) -> bool:
    return bool(evaluate(guard, {"n": 32, "R": 100}))


def test_a_tape_is_read_where_its_verify_left_it(made: Made) -> None:
    _, lowered, _, _ = made
    left = lowered["verify"].program.outputs["tape.0"]
    read = lowered["replay"].program.inputs["tape.0"]
    assert [v.shape for v in left] == [v.shape for v in read]
    assert [(v.offset, v.stride) for v in left] == [(v.offset, v.stride) for v in read]
    (buffer,) = {v.buffer for v in left}
    (made_by,) = [s.plan for s in lowered["verify"].program.steps
                  if any(v.buffer == buffer for v in s.outputs.values())]  # fmt: skip
    assert made_by.startswith("projection-")


@pytest.mark.parametrize("way", WAYS)
def test_the_twin_replays_the_stored_tokens(way: str, made: Made) -> None:
    lines = (models.find() / "oracle_tokens.jsonl").read_text().splitlines()[:1]
    for line in lines:
        stored = json.loads(line)
        out = made[2].generate(stored["prompt_ids"], max_new_tokens=64, **WAYS[way])
        assert list(out.token_ids) == stored["causal" if way == "exact" else way]


def test_a_forked_state_owns_its_buffers(made: Made) -> None:
    session = made[2]
    state = session.new_state()
    session.commit(state, [1, 2, 3])
    fork = state.fork()
    before = session.preview(fork, [4, 831, 831])
    session.commit(state, [5, 6])
    assert (session.preview(fork, [4, 831, 831]) == before).all()
    assert fork.length == 3 and state.length == 5


def test_the_next_request_finds_its_graphs(made: Made) -> None:
    """State arrays go round: nothing is recorded anew and no buffers pile up."""
    session = made[2]
    engine: Any = session.engine
    gc.collect()

    def request() -> tuple[Any, int]:
        state = session.new_state()
        session.commit(state, [1, 2, 3])
        return session.preview(state, [4, 831, 831]), len(engine._slots)

    first, slots = request()
    for _ in range(3):
        again, count = request()
        assert (again == first).all() and count == slots


def test_a_profiler_sees_every_op_by_name(made: Made) -> None:
    _, lowered, session, twin = made
    state = session.new_state()
    session.commit(state, [1, 2, 3])
    twin.ranges.clear()
    session.preview(state, [4, 831])
    one = lowered["preview"]
    assert twin.ranges == [f"preview: {one.plans[s.plan].op}" for s in one.program.steps]


def test_a_stale_handle_is_refused(made: Made) -> None:
    session = made[2]
    state = session.new_state()
    session.commit(state, [1, 2, 3])
    feeds = {"ids": torch.full((1, 2), 831).numpy(), **state.feeds()}
    first = session.engine.run("preview", feeds)["logits"]
    session.engine.run("preview", feeds)
    with pytest.raises(Stale):
        first[0]
