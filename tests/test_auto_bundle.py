"""`--decode auto` on the demonstration bundle: what it costs beside every single way, in calls."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from clover_compile import models
from clover_compile.profiling.workload import Calls, Counted, cost_of
from clover_compile.runtime import Session
from clover_compile.runtime.costs import CostTable
from tests.built import demonstration
from tests.test_auto import TABLES

pytestmark = pytest.mark.ort

TOKENS = 2048
WAYS: dict[str, dict[str, Any]] = {
    "causal": {"decode": "causal"},
    "denoise": {"decode": "denoise"},
    **{
        f"{rule} {width}": {"decode": "self-speculate", "accept": rule, "width": width}
        for rule, widths in (("exact", (4, 16, 32)), ("release", (16, 32)))
        for width in widths
    },
}
"""Widths that never come near the best are left out: they take longest."""


@pytest.fixture(scope="module")
def opened() -> Session:
    """The demonstration bundle."""
    return Session.load(demonstration())


def prompts() -> list[str]:
    """The demonstration messages."""
    lines = (models.find() / "messages.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def fresh(opened: Session, machine: str, endless: bool = False) -> tuple[Session, Counted]:
    """A session that has learned nothing, with costs that do not depend on this machine."""
    counted = Counted(opened.engine)
    rules = opened.rules
    if endless:
        rules = dataclasses.replace(rules, stop_token_ids=(rules.mask_token_id,))
    made = Session(counted, opened.sizes, rules, opened.context, opened.text, TABLES[machine])
    return made, counted


def calls_of(
    opened: Session, machine: str, name: str, options: dict[str, Any]
) -> tuple[Calls, int]:
    """Calls and tokens of at least TOKENS tokens of a workload in one session."""
    asked, endless = WORKLOADS[name]
    session, counted = fresh(opened, machine, endless)
    tokens = number = 0
    while tokens < TOKENS:
        out = session.generate(asked[number % len(asked)], 128, **options)
        tokens, number = tokens + len(out.token_ids), number + 1
    return counted.calls, tokens


def noise() -> list[list[int]]:
    """Prompts that mean nothing: what drafts guess of their continuation is wrong."""
    drawn = np.random.default_rng(5).integers(0, 800, (16, 40))
    return [[int(x) for x in row] for row in drawn]


WORKLOADS: dict[str, tuple[list[Any], bool]] = {
    "the demonstration messages": (prompts(), False),
    "noise without an end": (noise(), True),
    "one message again and again": (prompts()[1:2], False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_regret(opened: Session, name: str) -> None:
    single = {way: calls_of(opened, "cpu", name, options) for way, options in WAYS.items()}
    for machine, table in TABLES.items():

        def cost(calls: Calls, tokens: int, table: CostTable = table) -> float:
            return cost_of(calls, table) / tokens

        costs = {way: cost(*found) for way, found in single.items()}
        auto = cost(*calls_of(opened, machine, name, {"decode": "auto"}))
        exact = cost(*calls_of(opened, machine, name, {"decode": "auto", "exact": True}))
        told = (machine, name, auto, exact, costs)
        print(*told)
        assert auto <= 1.05 * min(costs.values()), told
        allowed = [x for way, x in costs.items() if way == "causal" or way.startswith("exact")]
        assert exact <= 1.05 * min(allowed), told
        assert max(auto, exact) <= 1.03 * costs["causal"], told


def _same_as_causal(opened: Session, count: int) -> int:
    session, _ = fresh(opened, "cpu")
    same = 0
    for prompt in prompts()[:count]:
        want = session.generate(prompt, decode="causal").token_ids
        same += session.generate(prompt, decode="auto", exact=True).token_ids == want
    return same


def test_exact_equals_causal_on_the_first_messages(opened: Session) -> None:
    assert _same_as_causal(opened, 6) == 6


@pytest.mark.slow
def test_exact_equals_causal_on_all_messages(opened: Session) -> None:
    assert _same_as_causal(opened, 200) == 200


def test_auto_spends_less_than_causal_on_the_first_messages(opened: Session) -> None:
    costs = {}
    for way in ("causal", "auto"):
        session, counted = fresh(opened, "cpu")
        for prompt in prompts()[:4]:
            session.generate(prompt, decode=way)
        costs[way] = cost_of(counted.calls, TABLES["cpu"])
    assert costs["auto"] < 0.8 * costs["causal"]
