"""What is taken off the profiler's figures, and when a profile is doubted. Nothing is timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from clover_compile.profiling import doubts
from clover_compile.profiling.kernel_times import (
    HANDOVER,
    LEAST,
    Pair,
    Traced,
    Watch,
    _traced,
    runs_by_round,
)

COST, SLOWED = 5e-6, 1.5
TRUE = {"a": 2e-6, "b": 30e-6, "c": 1e-6}
OUTSIDE = 20e-6


def test_a_kernel_lasts_until_the_next_begins() -> None:
    run = _traced([("a", 100, 2), ("b", 103, 6), ("a", 110, 0)], 111)
    assert run.kernels == pytest.approx({"a": 4e-6, "b": 7e-6})
    assert run.noted == {"a": 2, "b": 1}
    assert run.executed == pytest.approx(11e-6) == pytest.approx(sum(run.kernels.values()))


def test_what_a_kernel_runs_inside_is_its_own() -> None:
    run = _traced([("loop", 10, 9), ("body", 11, 3), ("body", 14, 5), ("next", 19, 1)], 20)
    assert run.kernels == pytest.approx({"loop": 9e-6, "next": 1e-6})
    assert run.noted == {"loop": 3, "next": 1}


def _watch(
    plain: Callable[[int], float], share: float = 1.0, slowed: float = SLOWED
) -> tuple[Watch, list[list[Traced]]]:
    """Three rounds of a call of three kernels; `plain`: seconds of a plain run by its number."""
    kernels = {name: slowed * took + COST for name, took in TRUE.items()}
    executed = sum(kernels.values()) / share
    run = Traced({k: x / share for k, x in kernels.items()}, Counter(TRUE.keys()), executed)
    noted = sum(kernels.values()) + OUTSIDE
    pairs = [Pair(noted, plain(i), noted / share) for i in range(LEAST)]
    watch = Watch(lambda kernel: "short" if kernel in "ac" else "long", [pairs] * 3)
    return watch, [[run] * LEAST] * 3


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_profiler_s_cost_is_found_and_taken_off(share: float) -> None:
    whole = sum(TRUE.values()) + OUTSIDE
    watch, noted = _watch(lambda i: whole, share)
    found = watch.op_times(noted, COST)
    assert found.slowed == pytest.approx(SLOWED)
    assert found.kernels == {"short": 2, "long": 1}
    for times, total in zip(found.rounds, found.sums, strict=True):
        want = {"short": TRUE["a"] + TRUE["c"], "long": TRUE["b"], HANDOVER: OUTSIDE}
        assert times == pytest.approx(want)
        assert total == pytest.approx(whole)


def test_noting_takes_no_more_than_the_call_tells() -> None:
    """A chain that was timed while another job ran."""
    whole = sum(TRUE.values()) + OUTSIDE
    watch, noted = _watch(lambda i: whole, slowed=1.0)
    found = watch.op_times(noted, 3 * COST)
    assert found.slowed == pytest.approx(1.0)
    assert found.sums == pytest.approx([whole] * 3)


def test_the_sum_is_not_made_to_fit() -> None:
    """The pass is that of runs which took no part in the cost: where they differ it shows."""
    whole = sum(TRUE.values()) + OUTSIDE
    watch, noted = _watch(lambda i: whole if i % 2 == 0 else 2 * whole)
    found = watch.op_times(noted, COST)
    assert [a / b for a, b in zip(found.sums, found.plain, strict=True)] == pytest.approx([0.5] * 3)


def test_runs_go_to_the_calls_that_made_them() -> None:
    calls, rounds = [("x", 8), ("y", 12), ("x", 10)], 2
    made: dict[str, list[Traced]] = {"x": [], "y": []}
    for unit, _ in calls:  # the warm-up
        made[unit].append(Traced({}, Counter(), -1.0))
    for turn in range(rounds):
        for place, (unit, pairs) in enumerate(calls):
            made[unit] += [Traced({}, Counter(), 10.0 * place + turn)] * pairs
    parts = runs_by_round(calls, made, rounds)
    for place, part in enumerate(parts):
        assert [[run.executed for run in one] for one in part] == [
            [10.0 * place + turn] * calls[place][1] for turn in range(rounds)
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


def test_a_crowded_machine_is_told_by_its_load() -> None:
    machine = {"machine": {"cores": 2}}
    assert doubts.warning(machine | {"load": 2.9}, [{"commit": 1.0}]) is None
    told = doubts.warning(machine | {"load": 3.2}, [{"commit": 1.0}])
    assert told is not None and "the load was 3.2 on 2 cores" in told


def test_a_call_too_short_to_count_is_no_doubt() -> None:
    taken = [{"commit": 1.0, "verify": 1.0, "pick": x} for x in (0.01, 0.09, 0.05)]
    assert doubts.warning({}, taken) is None
