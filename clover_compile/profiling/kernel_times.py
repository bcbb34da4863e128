"""Time of every op of a call, from ONNX Runtime's profiler without what the profiler itself takes.

A kernel lasts from its own start to that of the next: the engine's step between them is in it, and
the profiler's whole microseconds, which would cut a short kernel by a third, cancel in a sum.

Noting a kernel takes longer than many a kernel runs, and how long depends on its arrays and on what
the caches hold. So the call itself tells it: pairs of runs with and without the profiler differ by
so much for each kernel. Every second pair only tells that; ops are timed, and their sum is compared
with the pass, on the others. Independent of each other are therefore the traced runs, the cost that
is taken off them and the pass; that cost is the same for every kernel of a call, and how well it
fits any one of them the sum cannot say.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort

from clover_compile.profiling.rounds import Clock, seconds
from clover_compile.runtime.engine import Arrays, Engine
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.ort_engine import OrtEngine

PAIRS, KEPT = 8, 3
"""Runs with and without the profiler in each round, half of them to tell its cost; and those of the
other half that are looked at: where other jobs disturb, the ones that had the core most."""

EXECUTED = "SequentialExecutor::Execute"
HANDOVER = "hand-over"
"""What a call takes outside the kernels: arrays to the engine and back."""

_INLINED = re.compile(r"_inlfunc_([A-Za-z0-9]+)_")
_SUFFIX = "_kernel_time"

Times = dict[str, float]
"""Name -> seconds in one run."""


@dataclass(frozen=True)
class Traced:
    """One run with the profiler."""

    kernels: Times
    executed: float
    """Seconds from the start of the first kernel to the end of the last, profiler included."""


class TracedEngine(OrtEngine):
    """The same engine with ONNX Runtime's profiler on; each `run` is one entry of `finish`."""

    def __init__(self, checked: Checked, threads: int, folder: Path) -> None:
        self._folder = folder
        super().__init__(checked, threads)

    def _options(self, name: str) -> ort.SessionOptions:
        options = super()._options(name)
        options.enable_profiling = True
        options.profile_file_prefix = str(self._folder / name)
        return options

    def finish(self) -> dict[str, list[Traced]]:
        """Unit -> its runs in order; the engine is spent then."""
        return {name: _runs(Path(s.end_profiling())) for name, (s, _) in self._sessions.items()}


def _runs(path: Path) -> list[Traced]:
    events = json.loads(path.read_text())
    path.unlink()
    kernels = [e for e in events if e["cat"] == "Node" and e["name"].endswith(_SUFFIX)]
    kernels.sort(key=lambda e: e["ts"])
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == EXECUTED)
    found: list[Traced] = []
    at = 0
    for start, end in spans:
        inside = []
        while at < len(kernels) and kernels[at]["ts"] <= end:
            if kernels[at]["ts"] >= start:
                inside.append(kernels[at])
            at += 1
        found.append(_traced([(e["name"].removesuffix(_SUFFIX), e["ts"]) for e in inside], end))
    return found


def _traced(starts: Sequence[tuple[str, int]], end: int) -> Traced:
    """A run from the starts of its kernels, in order, and its end, in microseconds."""
    times: Times = defaultdict(float)
    bounds = [*(ts for _, ts in starts), end]
    for (name, ts), after in zip(starts, bounds[1:], strict=True):
        times[name] += (after - ts) * 1e-6
    return Traced(dict(times), (end - bounds[0]) * 1e-6)


def function_of(kernel: str) -> str | None:
    """The function a kernel was inlined from; None for a node of the graph itself."""
    match = _INLINED.match(kernel)
    return match and match[1]


def steady(values: Sequence[float]) -> float:
    """The mean without the highest quarter, in which another job had the core, and the lowest
    tenth."""
    ordered = np.sort(values)
    low, high = int(0.1 * len(ordered)), max(1, int(np.ceil(0.75 * len(ordered))))
    return float(ordered[low:high].mean())


@dataclass(frozen=True)
class Pair:
    """A run with the profiler and one without: seconds by the clock, and as the first passed."""

    traced: float
    plain: float
    passed: float


@dataclass(frozen=True)
class OpTimes:
    """A call, op by op."""

    cost: float
    """Seconds that noting a kernel takes."""
    kernels: Counter[str]
    """Op -> its kernels."""
    rounds: list[Times]
    """Op -> seconds, by round; with the hand-over they are the whole call."""
    plain: list[float]
    """Seconds of the pass beside them, by round."""

    @property
    def sums(self) -> list[float]:
        """Seconds of all ops together, by round."""
        return [sum(times.values()) for times in self.rounds]


@dataclass
class Watch:
    """One call of one engine, run by turns with and without the profiler."""

    label: Callable[[str], str]
    """Kernel -> op."""
    rounds: list[list[Pair]] = field(default_factory=list)

    def take(
        self, traced: TracedEngine, engine: Engine, unit: str, feeds: Arrays, clock: Clock
    ) -> None:
        """One round. The profiler knows only the time that passed; what share of it a run had the
        core is noted too."""
        pairs = []
        for _ in range(PAIRS):
            start = time.perf_counter()
            noted = seconds(partial(traced.run, unit, feeds), clock)
            passed = time.perf_counter() - start
            pairs.append(Pair(noted, seconds(partial(engine.run, unit, feeds), clock), passed))
        self.rounds.append(pairs)

    def op_times(self, noted: Sequence[Sequence[Traced]]) -> OpTimes:
        """The call op by op, from the runs that the profiler noted, round by round."""
        kernels = Counter(self.label(kernel) for kernel in noted[0][0].kernels)
        told = [pairs[0::2] for pairs in self.rounds]
        more = [steady([p.traced for p in x]) - steady([p.plain for p in x]) for x in told]
        cost = max(0.0, float(np.median(more))) / max(1, kernels.total())
        looked = [
            self._round(pairs[1::2], runs[1::2], kernels, cost)
            for pairs, runs in zip(self.rounds, noted, strict=True)
        ]
        plain = [steady([p.plain for p in pairs[1::2]]) for pairs in self.rounds]
        return OpTimes(cost, kernels, looked, plain)

    def _round(
        self, pairs: Sequence[Pair], runs: Sequence[Traced], kernels: Counter[str], cost: float
    ) -> Times:
        shares = [min(1.0, pair.traced / pair.passed) for pair in pairs]
        best = sorted(range(len(pairs)), key=lambda i: (-shares[i], pairs[i].traced))[:KEPT]
        times: Times = defaultdict(float)
        for i in best:
            for kernel, took in runs[i].kernels.items():
                times[self.label(kernel)] += took * shares[i] / len(best)
            outside = pairs[i].traced - runs[i].executed * shares[i]
            times[HANDOVER] += outside / len(best)
        return {op: max(0.0, took - cost * kernels[op]) for op, took in times.items()}


def runs_by_round(
    calls: Sequence[str], noted: Mapping[str, list[Traced]], rounds: int
) -> list[list[list[Traced]]]:
    """For every call, given by its Unit, its traced runs round by round: noted in the order in
    which they were made, the first of each call a warm-up before all rounds."""
    left = {unit: iter(runs) for unit, runs in noted.items()}
    for unit in calls:
        next(left[unit])
    found: list[list[list[Traced]]] = [[] for _ in calls]
    for _ in range(rounds):
        for part, unit in zip(found, calls, strict=True):
            part.append([next(left[unit]) for _ in range(PAIRS)])
    return found
