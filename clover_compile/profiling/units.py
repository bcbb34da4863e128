"""Measures a bundle's Units: passes against their floor and their rivals, and every op inside."""

from __future__ import annotations

import tempfile
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
    Chain,
    OpTimes,
    TracedEngine,
    Watch,
    runs_by_round,
)
from clover_compile.profiling.op_work import OpWork, UnitFile
from clover_compile.profiling.rival import Rival
from clover_compile.profiling.rounds import clock_for, spread, take_turns
from clover_compile.profiling.subject import Subject
from clover_compile.profiling.unfused import Unfused
from clover_compile.runtime.engine import Arrays, Engine
from clover_compile.runtime.manifest import Checked

Make = Callable[[str, Arrays], Callable[[], object] | None]
"""Makes a run of a Unit with given feeds; None where there is no such Unit."""

BUNDLE, UNFUSED = "bundle", "unfused"

TELLING = 0.02
"""Milliseconds that both sides of an op's speedup must take: the profiler is not exact to less."""


@dataclass(frozen=True)
class Rivals:
    """What the bundle is compared with, call by call; the unfused graph op by op as well."""

    runs: Mapping[str, Make] = field(default_factory=dict)
    unfused: Unfused | None = None


@dataclass(frozen=True)
class _Watched:
    """An engine whose ops are timed."""

    engine: Engine
    checked: Checked
    files: Mapping[str, UnitFile]


@dataclass
class _Plan:
    """One call and what was measured of it so far."""

    call: Call
    feeds: Arrays
    ops: dict[str, OpWork]
    work: Work
    watches: dict[str, Watch]
    """BUNDLE, and UNFUSED where there is such a Unit."""
    rounds: list[dict[str, float]] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)


def measure(
    subject: Subject, scene: Scene, rivals: Rivals, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of every main call, and of every op in it."""
    c, clock = subject.config, clock_for(subject.threads)
    watched = _watched(subject, rivals)
    plans = [
        _plan(subject, scene, call, watched)
        for call in main_calls(subject.loaded.rules.block_size, bool(c.gdn_layers))
    ]
    runs = [_runs(subject, plan, rivals) for plan in plans]
    machine = Machine([plan.work.bytes for plan in plans], clock)
    with tempfile.TemporaryDirectory(prefix="clover-profile-") as folder:
        traced = {
            name: TracedEngine(one.checked, subject.threads, _made(Path(folder) / name))
            for name, one in watched.items()
        }
        for plan in plans:
            for name, watch in plan.watches.items():
                watch.warm_up(traced[name], watched[name].engine, plan.call.unit, plan.feeds)
        chain = Chain(subject.threads, Path(folder))
        for turn in range(rounds):
            say(f"round {turn + 1} of {rounds}")
            chain.take(clock)
            for plan, own in zip(plans, runs, strict=True):
                plan.rounds.append(take_turns(own, turn, clock))
                plan.rates.append(machine.rates(plan.work.bytes))
                for name, watch in plan.watches.items():
                    watch.take(
                        traced[name], watched[name].engine, plan.call.unit, plan.feeds, clock
                    )
        cost = chain.cost()
        times = _op_times(plans, traced, rounds, cost)
    return {
        "profiler us per kernel": 1e6 * cost,
        "calls": [_figures(plan, own) for plan, own in zip(plans, times, strict=True)],
    }


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _watched(subject: Subject, rivals: Rivals) -> dict[str, _Watched]:
    units, ops = subject.manifest["units"], subject.manifest["ops"]
    files = {
        name: UnitFile(subject.loaded.path / unit["file"], ops[name], subject.config)
        for name, unit in units.items()
    }
    found = {BUNDLE: _Watched(subject.engine, subject.checked, files)}
    if rivals.unfused is not None:
        x = rivals.unfused
        files = {
            name: UnitFile(x.folder / f"{name}.onnx", {}, subject.config, x.regions[name])
            for name in x.units
        }
        found[UNFUSED] = _Watched(x.engine, x.checked, files)
    return found


def _op_times(
    plans: Sequence[_Plan], traced: Mapping[str, TracedEngine], rounds: int, cost: float
) -> list[dict[str, OpTimes]]:
    """For every plan, its ops by engine."""
    found: list[dict[str, OpTimes]] = [{} for _ in plans]
    for name, engine in traced.items():
        own = [i for i, plan in enumerate(plans) if name in plan.watches]
        made = [(plans[i].call.unit, plans[i].watches[name].pairs) for i in own]
        parts = runs_by_round(made, engine.finish(), rounds)
        for i, part in zip(own, parts, strict=True):
            found[i][name] = plans[i].watches[name].op_times(part, cost)
    return found


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


def _plan(subject: Subject, scene: Scene, call: Call, watched: Mapping[str, _Watched]) -> _Plan:
    feeds, file = scene.feeds(call), watched[BUNDLE].files[call.unit]
    weights = subject.engine.weights  # type: ignore[attr-defined]
    routers = file.routers(feeds, weights)
    ops = file.work(call, scene.prefix, routers)
    hit = [file.used(call, router)[0] for router in routers]
    size, flop = (sum(getattr(x, name) for x in ops.values()) for name in ("bytes", "flop"))
    work = Work(size, flop, float(np.mean(hit)) if hit else 0.0)
    watches = {
        name: Watch(one.files[call.unit].op_of)
        for name, one in watched.items()
        if call.unit in one.files
    }
    return _Plan(call, feeds, ops, work, watches)


def _runs(subject: Subject, plan: _Plan, rivals: Rivals) -> dict[str, Callable[[], object]]:
    unit, feeds = plan.call.unit, plan.feeds
    makes = {BUNDLE: engine_runs(subject.engine, subject.manifest["units"])}
    if rivals.unfused is not None:
        makes[UNFUSED] = engine_runs(rivals.unfused.engine, rivals.unfused.units)
    made = {name: make(unit, feeds) for name, make in {**makes, **rivals.runs}.items()}
    return {name: run for name, run in made.items() if run is not None}


def _figures(plan: _Plan, times: Mapping[str, OpTimes]) -> dict[str, Any]:
    """What is reported of one call."""
    rounds, rates = plan.rounds, plan.rates
    floors = [rate.seconds(plan.work) for rate in rates]
    others = [name for name in rounds[0] if name != BUNDLE]
    bandwidth = float(np.median([r.bandwidth for r in rates]))
    product = float(np.median([r.product for r in rates]))
    typical = Rates(bandwidth, product)
    found: dict[str, Any] = {
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
        "of floor": spread([r[BUNDLE] / f for r, f in zip(rounds, floors, strict=True)]),
        "speedup": {name: spread([r[name] / r[BUNDLE] for r in rounds]) for name in others},
        "slowed by the profiler": {name: x.slowed for name, x in times.items()},
        "sum of ops / pass": _sum(times[BUNDLE]),
    }  # fmt: skip
    if UNFUSED in times:
        found["unfused sum of ops / pass"] = _sum(times[UNFUSED])
    names = dict.fromkeys([*plan.ops, HANDOVER, *(op for x in times.values() for op in x.kernels)])
    ops = [_op(name, plan.ops.get(name, OpWork()), times, typical) for name in names]
    found["ops"] = sorted(ops, key=lambda row: -row["ms"]["median"])
    found["rounds"] = rounds
    return found


def _sum(times: OpTimes) -> dict[str, float]:
    return spread([a / b for a, b in zip(times.sums, times.plain, strict=True)])


def _op(
    name: str, work: OpWork, times: Mapping[str, OpTimes], rates: Rates
) -> dict[str, Any]:  # fmt: skip
    """What is reported of one op of a call."""
    own = times[BUNDLE]
    took = [times_.get(name, 0.0) for times_ in own.rounds]
    floor = rates.seconds(Work(work.bytes, work.flop, 0.0))
    found: dict[str, Any] = {
        "op": name, "count": 1 if name == HANDOVER else work.count, "kernels": own.kernels[name],
        "ms": spread([1e3 * x for x in took]), "bytes": work.bytes, "flop": work.flop,
        "share": float(np.median([a / b for a, b in zip(took, own.sums, strict=True)])),
        "floor ms": 1e3 * floor, "of floor": float(np.median(took)) / floor if floor else None,
        "unfused": None, "speedup": None,
    }  # fmt: skip
    if UNFUSED in times:
        before = [times_.get(name, 0.0) for times_ in times[UNFUSED].rounds]
        found["unfused"] = {
            "kernels": times[UNFUSED].kernels[name], "ms": spread([1e3 * x for x in before])
        }  # fmt: skip
        ratios = [a / b for a, b in zip(before, took, strict=True) if b > 0]
        if ratios and min(found["ms"]["median"], found["unfused"]["ms"]["median"]) >= TELLING:
            found["speedup"] = spread(ratios)
    return found
