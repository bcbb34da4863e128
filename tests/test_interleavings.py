"""Sessions, states and forks at once, in any order, give what each gives alone, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from clover_compile.runtime import Session
from clover_compile.runtime.state import State
from tests import built, interleaving
from tests.interleaving import Record, Script

SCRIPTS = 40
"""Different scripts, of which every interleaving takes a few."""

ORDERS: tuple[Callable[..., list[Record]], ...] = (
    interleaving.by_turns, interleaving.by_turns, interleaving.nested, interleaving.at_once,
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Three sessions, two of which share an engine, and what every script gives alone."""

    sessions: list[Session]
    shared: list[list[State]]
    alone: dict[Script, Record]


@pytest.fixture(scope="module")
def stage() -> Stage:
    first, second = (Session.load(built.demonstration()) for _ in range(2))
    # With penalties the answer hangs on what a response has counted so far.
    rules = dataclasses.replace(
        first.rules, presence_penalty=3.0, frequency_penalty=2.0, repetition_penalty=1.5
    )
    third = Session(first.engine, first.sizes, rules, first.context, first.text)
    sessions = [first, second, third]
    shared = [interleaving.shared_states(session) for session in sessions]
    scripts = [Script(seed, seed % 3) for seed in range(SCRIPTS)]
    alone = {
        script: interleaving.carry_out(script, sessions, shared, lambda: None) for script in scripts
    }
    return Stage(sessions, shared, alone)


HUNDREDS = [pytest.param(n, marks=[pytest.mark.slow] if n else []) for n in range(0, 1000, 100)]


@pytest.mark.parametrize("first", HUNDREDS)
def test_any_interleaving_equals_the_sequence(stage: Stage, first: int) -> None:
    before = [interleaving.snapshot(state) for states in stage.shared for state in states]
    for seed in range(first, first + 100):
        draw = random.Random(seed)
        scripts = draw.sample(sorted(stage.alone, key=lambda s: s.seed), draw.randint(2, 3))
        jobs: list[Any] = [
            lambda pause, script=script: interleaving.carry_out(
                script, stage.sessions, stage.shared, pause
            )
            for script in scripts
        ]
        records = draw.choice(ORDERS)(jobs, draw)
        for script, record in zip(scripts, records, strict=True):
            assert interleaving.same(record, stage.alone[script]), (seed, script)
    after = [interleaving.snapshot(state) for states in stage.shared for state in states]
    assert interleaving.same(before, after)


def test_the_scripts_do_everything(stage: Stage) -> None:
    words = {type(x).__name__ for record in stage.alone.values() for x in record}
    assert {"ndarray", "Step", "dict", "tuple"} <= words
    kinds = {x.kind for record in stage.alone.values() for x in record if hasattr(x, "kind")}
    assert kinds == {"denoise", "causal", "draft", "verify"}
    counts = [x for record in stage.alone.values() for x in record if isinstance(x, dict)]
    assert any(row["drafts_kept"] for row in counts) and any(row["rounds"] for row in counts)
    lengths = [x for record in stage.alone.values() for x in record if type(x) is int]
    assert min(lengths) < 10 and max(lengths) > 256  # a cache has grown
