"""Measures a bundle's Units: passes against their floor and their rivals, and every op inside."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clover_compile.profiling.calls import Call, Scene, main_calls
from clover_compile.profiling.floor import Machine, Rates, Work
from clover_compile.profiling.kernel_times import (
    HANDOVER,
    Traced,
    TracedEngine,
    per_op,
    profiler_cost,
    steady,
)
from clover_compile.profiling.op_work import OpWork, UnitFile
from clover_compile.profiling.rival import Rival
from clover_compile.profiling.rounds import Clock, clock_for, seconds, spread, take_turns
from clover_compile.profiling.subject import Subject
from clover_compile.runtime.engine import Arrays, Engine

TRACED, KEPT = 6, 4
"""Runs with the profiler, and as many without, in each round; and those that are looked at: where
other jobs disturb, the ones that had the core for most of the time."""

Make = Callable[[str, Arrays], Callable[[], object] | None]
"""Makes a run of a Unit with given feeds; None where there is no such Unit."""

Rivals = Mapping[str, Make]


@dataclass
class _Plan:
    """One call and what was measured of it so far."""

    call: Call
    feeds: Arrays
    ops: dict[str, OpWork]
    work: Work
    rounds: list[dict[str, float]] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    """Seconds of a pass beside the traced ones, by round."""
    traced: list[list[tuple[float, float]]] = field(default_factory=list)
    """Seconds of the traced runs by the clock and as they passed, by round."""


def measure(
    subject: Subject, scene: Scene, rivals: Rivals, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of every main call, and what the profiler took per kernel."""
    c, clock = subject.config, clock_for(subject.threads)
    files = _files(subject)
    plans = [
        _plan(subject, scene, call, files[call.unit])
        for call in main_calls(subject.loaded.rules.block_size, bool(c.gdn_layers))
    ]
    machine = Machine([plan.work.bytes for plan in plans], clock)
    with tempfile.TemporaryDirectory(prefix="clover-profile-") as folder:
        traced = TracedEngine(subject.checked, subject.threads, Path(folder))
        cost = profiler_cost(subject.threads, clock)
        for plan in plans:
            traced.run(plan.call.unit, plan.feeds)
        for turn in range(rounds):
            say(f"round {turn + 1} of {rounds}")
            for plan in plans:
                runs = _runs(subject, plan, rivals)
                plan.rounds.append(take_turns(runs, turn, clock))
                plan.rates.append(machine.rates(plan.work.bytes))
                _beside(subject, traced, plan, clock)
        noted = traced.finish()
    return {
        "profiler": {"us per kernel": 1e6 * cost},
        "calls": [_figures(plan, part, files[plan.call.unit], cost)
                  for plan, part in zip(plans, _parts(plans, noted, rounds), strict=True)],
    }  # fmt: skip


def engine_runs(engine: Engine, names: Container[str]) -> Make:
    """Runs of another engine that has these Units."""
    return lambda unit, feeds: partial(engine.run, unit, feeds) if unit in names else None


def eager_runs(rival: Rival) -> Make:
    """Runs of the eager model, experts grouped; it has no pick of its own."""

    def make(unit: str, feeds: Arrays) -> Callable[[], object] | None:
        if not rival.has(unit):
            return None
        return partial(rival.run, unit, rival.arguments(unit, feeds))

    return make


def _files(subject: Subject) -> dict[str, UnitFile]:
    units, ops = subject.manifest["units"], subject.manifest["ops"]
    return {
        name: UnitFile(subject.loaded.path / unit["file"], ops[name], subject.config)
        for name, unit in units.items()
    }


def _plan(subject: Subject, scene: Scene, call: Call, file: UnitFile) -> _Plan:
    feeds = scene.feeds(call)
    weights = subject.engine.weights  # type: ignore[attr-defined]
    routers = file.routers(feeds, weights)
    ops = file.work(call, scene.prefix, routers)
    hit = [file.used(call, router)[0] for router in routers]
    size, flop = (sum(getattr(x, name) for x in ops.values()) for name in ("bytes", "flop"))
    return _Plan(call, feeds, ops, Work(size, flop, float(np.mean(hit)) if hit else 0.0))


def _runs(subject: Subject, plan: _Plan, rivals: Rivals) -> dict[str, Callable[[], object]]:
    unit, feeds = plan.call.unit, plan.feeds
    runs: dict[str, Callable[[], object]] = {"bundle": lambda: subject.engine.run(unit, feeds)}
    for name, make in rivals.items():
        run = make(unit, feeds)
        if run is not None:
            runs[name] = run
    return runs


def _beside(subject: Subject, traced: TracedEngine, plan: _Plan, clock: Clock) -> None:
    """Runs with and without the profiler by turns, and notes what each took by `clock`.

    The profiler knows only the time that passed; what share of it a run had the core is noted too.
    """
    unit, feeds = plan.call.unit, plan.feeds
    took: dict[str, list[float]] = {"traced": [], "passed": [], "plain": []}
    for _ in range(TRACED):
        start = time.perf_counter()
        took["traced"].append(seconds(partial(traced.run, unit, feeds), clock))
        took["passed"].append(time.perf_counter() - start)
        took["plain"].append(seconds(partial(subject.engine.run, unit, feeds), clock))
    plan.plain.append(steady(took["plain"]))
    plan.traced.append(list(zip(took["traced"], took["passed"], strict=True)))


def _parts(
    plans: Sequence[_Plan], noted: Mapping[str, list[Traced]], rounds: int
) -> list[list[list[Traced]]]:
    """For every plan, round by round, its traced runs: in the order in which they were made."""
    left = {unit: iter(runs) for unit, runs in noted.items()}
    for plan in plans:
        next(left[plan.call.unit])  # it warmed up
    found: list[list[list[Traced]]] = [[] for _ in plans]
    for _ in range(rounds):
        for part, plan in zip(found, plans, strict=True):
            part.append([next(left[plan.call.unit]) for _ in range(TRACED)])
    return found


def _figures(
    plan: _Plan, traced: list[list[Traced]], file: UnitFile, cost: float
) -> dict[str, Any]:
    """What is reported of one call."""
    by_round = []
    for noted, clocked in zip(traced, plan.traced, strict=True):
        shares = [min(1.0, own / passed) for own, passed in clocked]
        best = sorted(range(len(noted)), key=lambda i: (-shares[i], clocked[i][0]))[:KEPT]
        runs = [noted[i].had(shares[i]) for i in best]
        took, kernels = per_op(runs, file.labels, file.owner, cost)
        outside = [clocked[i][0] - run.executed for i, run in zip(best, runs, strict=True)]
        took[HANDOVER] = max(0.0, float(np.mean(outside)))
        by_round.append((took, kernels))
    sums = [sum(took.values()) for took, _ in by_round]
    rounds, rates = plan.rounds, plan.rates
    floors = [rate.seconds(plan.work) for rate in rates]
    others = [name for name in rounds[0] if name != "bundle"]
    bandwidth = float(np.median([r.bandwidth for r in rates]))
    product = float(np.median([r.product for r in rates]))
    typical = Rates(bandwidth, product)
    ops = [_op(name, work, by_round, sums, typical) for name, work in plan.ops.items()]
    ops.append(_op(HANDOVER, OpWork(1), by_round, sums, typical))
    return {
        "name": plan.call.name, "unit": plan.call.unit, "rows": plan.call.rows,
        "keep": plan.call.keep, "bytes": plan.work.bytes, "flop": plan.work.flop,
        "experts per layer": plan.work.experts,
        "bound": "bandwidth" if plan.work.bytes / bandwidth > plan.work.flop / product
        else "product",
        "GB/s": bandwidth / 1e9, "GFLOP/s": product / 1e9,
        "ms": {
            **{name: spread([1e3 * r[name] for r in rounds]) for name in rounds[0]},
            "floor": spread([1e3 * x for x in floors]),
        },
        "of floor": spread([r["bundle"] / f for r, f in zip(rounds, floors, strict=True)]),
        "speedup": {name: spread([r[name] / r["bundle"] for r in rounds]) for name in others},
        "sum of ops / pass": spread([a / b for a, b in zip(sums, plan.plain, strict=True)]),
        "ops": sorted(ops, key=lambda row: -row["ms"]["median"]),
        "rounds": rounds,
    }  # fmt: skip


def _op(
    name: str, work: OpWork, by_round: list[tuple[dict[str, float], Counter[str]]],
    sums: list[float], rates: Rates,
) -> dict[str, Any]:  # fmt: skip
    """What is reported of one op of a call."""
    took = [times.get(name, 0.0) for times, _ in by_round]
    floor = rates.seconds(Work(work.bytes, work.flop, 0.0))
    return {
        "op": name, "count": work.count, "kernels": by_round[0][1][name],
        "ms": spread([1e3 * x for x in took]), "bytes": work.bytes, "flop": work.flop,
        "share": float(np.median([a / b for a, b in zip(took, sums, strict=True)])),
        "floor ms": 1e3 * floor, "of floor": float(np.median(took)) / floor if floor else None,
    }  # fmt: skip
