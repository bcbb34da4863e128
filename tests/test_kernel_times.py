"""What is taken off the profiler's figures, and when a profile is doubted. Nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clover_compile.profiling import doubts
from clover_compile.profiling.kernel_times import (
    HANDOVER,
    PAIRS,
    Pair,
    Traced,
    Watch,
    _traced,
    runs_by_round,
)

COST = 5e-6
TRUE = {"a": 2e-6, "b": 30e-6, "c": 1e-6}
OUTSIDE = 20e-6


def test_a_kernel_lasts_until_the_next_begins() -> None:
    run = _traced([("a", 100), ("b", 103), ("a", 110)], 111)
    assert run.kernels == pytest.approx({"a": 4e-6, "b": 7e-6})
    assert run.executed == pytest.approx(11e-6) == pytest.approx(sum(run.kernels.values()))


def _watch(plain: Callable[[int], float], share: float = 1.0) -> tuple[Watch, list[list[Traced]]]:
    """Three rounds of a call of three kernels; `plain`: seconds of a plain run by its number."""
    kernels = {name: took + COST for name, took in TRUE.items()}
    run = Traced({k: x / share for k, x in kernels.items()}, sum(kernels.values()) / share)
    noted = sum(kernels.values()) + OUTSIDE
    pairs = [Pair(noted, plain(i), noted / share) for i in range(PAIRS)]
    watch = Watch(lambda kernel: "short" if kernel in "ac" else "long", [pairs] * 3)
    return watch, [[run] * PAIRS] * 3


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_profiler_s_cost_is_found_and_taken_off(share: float) -> None:
    whole = sum(TRUE.values()) + OUTSIDE
    watch, noted = _watch(lambda i: whole, share)
    found = watch.op_times(noted)
    assert found.cost == pytest.approx(COST)
    assert found.kernels == {"short": 2, "long": 1}
    for times, total in zip(found.rounds, found.sums, strict=True):
        want = {"short": TRUE["a"] + TRUE["c"], "long": TRUE["b"], HANDOVER: OUTSIDE}
        assert times == pytest.approx(want)
        assert total == pytest.approx(whole)


def test_the_sum_is_not_made_to_fit() -> None:
    """The pass is that of runs which took no part in the cost: where they differ it shows."""
    whole = sum(TRUE.values()) + OUTSIDE
    watch, noted = _watch(lambda i: whole if i % 2 == 0 else 2 * whole)
    found = watch.op_times(noted)
    assert [a / b for a, b in zip(found.sums, found.plain, strict=True)] == pytest.approx([0.5] * 3)


def test_runs_go_to_the_calls_that_made_them() -> None:
    calls, rounds = ["x", "y", "x"], 2
    made: dict[str, list[Traced]] = {"x": [], "y": []}
    for unit in calls:  # the warm-up
        made[unit].append(Traced({}, -1.0))
    for turn in range(rounds):
        for place, unit in enumerate(calls):
            made[unit] += [Traced({}, 10.0 * place + turn)] * PAIRS
    parts = runs_by_round(calls, made, rounds)
    for place, part in enumerate(parts):
        assert [[run.executed for run in one] for one in part] == [
            [10.0 * place + turn] * PAIRS for turn in range(rounds)
        ]


def _profile(bundle: float, unfused: float) -> dict[str, Any]:
    call = {
        "name": "replay, 16 rows", "sum of ops / pass": {"median": bundle},
        "unfused sum of ops / pass": {"median": unfused},
    }  # fmt: skip
    return {"units": {"calls": [call]}}


def test_a_steady_profile_is_not_doubted() -> None:
    taken = [{"commit": 1.0}, {"commit": 1.1}, {"commit": 0.9}]
    assert doubts.warning(_profile(0.93, 1.08), taken) is None
    assert doubts.warning({}, taken) is None


@pytest.mark.parametrize(
    ("sums", "rounds", "said"),
    [
        ((3.1, 1.0), (1.0, 1.0), "ops add up to 310% of 'replay, 16 rows'"),
        ((1.0, 0.1), (1.0, 1.0), "ops of the unfused graph add up to 10%"),
        ((1.0, 1.0), (1.0, 9.0), "rounds of 'commit' lie"),
    ],
)
def test_a_profile_of_a_busy_machine_is(
    sums: tuple[float, float], rounds: tuple[float, float], said: str
) -> None:
    told = doubts.warning(_profile(*sums), [{"commit": x, "verify": 1.0} for x in rounds])
    assert told is not None and said in told and "more)" not in told
