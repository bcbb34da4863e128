"""Time of every op of a call, from ONNX Runtime's profiler without what the profiler itself takes.

A kernel lasts from its own start to that of the next: the engine's step between them is in it, and
the profiler's whole microseconds, which would cut a short kernel by a third, cancel in a sum.

Noting a kernel takes longer than many a kernel runs. How long at least is measured on a chain of
trivial nodes, with and without the profiler (it is the same within a third whether they read one
array or eight), and taken off every kernel. Beyond that the profiler drives from the caches what
the kernels work on, the more the longer they work: what is left is scaled by one factor for the
whole call, which pairs of its own runs with and without the profiler tell.

Every second pair only tells that factor; ops are timed, and their sum is compared with the pass, on
the others. Independent of each other are therefore the traced runs, what corrects them and the
pass. The sum shows whether the machine held still; how the time of a pass is divided among its ops
rests on the cost from the chain, which no sum can check.
"""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from clover_compile.profiling.rounds import Clock, seconds
from clover_compile.runtime.engine import Arrays, Engine
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.ort_engine import OrtEngine

LEAST, MOST, SPAN = 8, 40, 0.25
"""Pairs of runs with and without the profiler in each round, half of them to tell how it slows: at
least and at most so many, and as many as fit into SPAN seconds. Short calls need many."""

CHAIN = 300
"""Nodes of the chain that tells what noting a kernel takes."""

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
    noted: Counter[str]
    """Kernel -> how often the profiler noted it, or a kernel of a graph that it runs."""
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
    runs = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "model_run")
    ends = sorted(e["ts"] + e["dur"] for e in events if e["name"] == EXECUTED)
    starts = [e["ts"] for e in kernels]
    found: list[Traced] = []
    for start, end in runs:
        inside = kernels[bisect_left(starts, start) : bisect_right(starts, end)]
        # The last to end is the run's own; others are of graphs inside kernels.
        last = ends[bisect_right(ends, end) - 1]
        found.append(_traced([(e["name"].removesuffix(_SUFFIX), e["ts"], e["dur"])
                              for e in inside], last))  # fmt: skip
    return found


def _traced(kernels: Sequence[tuple[str, int, int]], end: int) -> Traced:
    """A run from name, start and duration of its kernels, in order, and its end; microseconds.

    What begins before the kernel before it has ended is of a graph inside that one, such as a
    loop's body, and is its time.
    """
    outer: list[tuple[str, int]] = []
    noted: Counter[str] = Counter()
    until = -1
    for name, start, took in kernels:
        if start >= until:
            outer.append((name, start))
            until = start + took
        noted[outer[-1][0]] += 1
    times: Times = defaultdict(float)
    bounds = [*(start for _, start in outer), end]
    for (name, start), after in zip(outer, bounds[1:], strict=True):
        times[name] += (after - start) * 1e-6
    return Traced(dict(times), noted, (end - bounds[0]) * 1e-6)


def function_of(kernel: str) -> str | None:
    """The function a kernel was inlined from; None for a node of the graph itself."""
    match = _INLINED.match(kernel)
    return match and match[1]


def typical(values: Sequence[float]) -> list[int]:
    """Where the values are that are neither of the highest quarter, in which another job had the
    core, nor of the lowest tenth."""
    order = np.argsort(values, kind="stable")
    low, high = int(0.1 * len(order)), max(1, int(np.ceil(0.75 * len(order))))
    return [int(i) for i in order[low:high]]


def steady(values: Sequence[float]) -> float:
    """The mean of the typical ones."""
    return float(np.mean([values[i] for i in typical(values)]))


@dataclass(frozen=True)
class Pair:
    """A run with the profiler and one without: seconds by the clock, and as the first passed."""

    traced: float
    plain: float
    passed: float


@dataclass(frozen=True)
class OpTimes:
    """A call, op by op."""

    slowed: float
    """How much longer kernels take beside the profiler, noting them apart."""
    kernels: Counter[str]
    """Op -> its kernels in one run."""
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
    pairs: int = LEAST
    """In each round."""

    def warm_up(self, traced: TracedEngine, engine: Engine, unit: str, feeds: Arrays) -> None:
        """Runs both once, before the first round, and sees how many pairs a round has time for."""
        for one in (traced, engine):
            one.run(unit, feeds)
        took = seconds(partial(engine.run, unit, feeds), time.perf_counter)
        self.pairs = 2 * int(np.clip(SPAN / took / 6, LEAST / 2, MOST / 2))

    def take(
        self, traced: TracedEngine, engine: Engine, unit: str, feeds: Arrays, clock: Clock
    ) -> None:
        """One round. The profiler knows only the time that passed; what share of it a run had the
        core is noted too."""
        pairs = []
        for _ in range(self.pairs):
            start = time.perf_counter()
            noted = seconds(partial(traced.run, unit, feeds), clock)
            passed = time.perf_counter() - start
            pairs.append(Pair(noted, seconds(partial(engine.run, unit, feeds), clock), passed))
        self.rounds.append(pairs)

    def op_times(self, noted: Sequence[Sequence[Traced]], cost: float) -> OpTimes:
        """The call op by op, from the runs that the profiler noted, round by round; `cost`: seconds
        that noting a kernel takes."""
        kernels: Counter[str] = Counter()
        for kernel, count in noted[0][0].noted.items():
            kernels[self.label(kernel)] += count
        ratios, looked = [], []
        cost = min(cost, self._most(noted, kernels))
        for pairs, runs in zip(self.rounds, noted, strict=True):
            told = self._round(pairs[0::2], runs[0::2], kernels, cost)
            inside = steady([p.plain for p in pairs[0::2]]) - told.pop(HANDOVER)
            ratios.append(sum(told.values()) / inside if inside > 0 else 1.0)
            looked.append(self._round(pairs[1::2], runs[1::2], kernels, cost))
        slowed = max(float(np.median(ratios)), 1e-3)
        rounds = [
            {op: took if op == HANDOVER else took / slowed for op, took in times.items()}
            for times in looked
        ]
        plain = [steady([p.plain for p in pairs[1::2]]) for pairs in self.rounds]
        return OpTimes(slowed, kernels, rounds, plain)

    def _most(self, noted: Sequence[Sequence[Traced]], kernels: Counter[str]) -> float:
        """Seconds that noting a kernel can take at most: all that the profiler adds to the call."""
        more = []
        for pairs, runs in zip(self.rounds, noted, strict=True):
            told = self._round(pairs[0::2], runs[0::2], kernels, 0.0)
            more.append(sum(told.values()) - steady([p.plain for p in pairs[0::2]]))
        return max(0.0, float(np.median(more))) / max(1, kernels.total())

    def _round(
        self, pairs: Sequence[Pair], runs: Sequence[Traced], kernels: Counter[str], cost: float
    ) -> Times:
        """Op -> seconds beside the profiler, noting the kernels taken off."""
        looked = typical([pair.traced for pair in pairs])
        times: Times = defaultdict(float)
        outside = []
        for i in looked:
            share = min(1.0, pairs[i].traced / pairs[i].passed)
            for kernel, took in runs[i].kernels.items():
                times[self.label(kernel)] += took * share / len(looked)
            outside.append(pairs[i].traced - runs[i].executed * share)
        # Another job that has the core between two calls is no part of them.
        times[HANDOVER] = float(np.median(outside))
        return {op: max(0.0, took - cost * kernels[op]) for op, took in times.items()}


class Chain:
    """Trivial nodes in a row, with and without the profiler: what noting a kernel takes."""

    def __init__(self, threads: int, folder: Path) -> None:
        self._plain, self._traced = _chain(threads), _chain(threads, folder / "chain")
        self._feed = {"v0": np.zeros((1, 32), np.float32)}
        self.rounds: list[float] = []
        """Seconds of each round."""

    def take(self, clock: Clock) -> None:
        """One round."""
        took: list[list[float]] = [[], []]
        for _ in range(MOST // 2):
            for times, session in zip(took, (self._traced, self._plain), strict=True):
                times.append(seconds(partial(session.run, None, self._feed), clock))
        traced, plain = map(steady, took)
        self.rounds.append(max(0.0, traced - plain) / CHAIN)

    def cost(self) -> float:
        """Seconds that noting a kernel takes in the calmest round; the chain is spent then."""
        self._traced.end_profiling()
        return min(self.rounds)


def _chain(threads: int, prefix: Path | None = None) -> ort.InferenceSession:
    """A session over additions in a row."""
    steps = [
        helper.make_node("Add", [f"v{i}", "c"], [f"v{i + 1}"], name=f"n{i}") for i in range(CHAIN)
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 32])
        for name in ("v0", f"v{CHAIN}")
    ]
    one = helper.make_tensor("c", TensorProto.FLOAT, [32], [0.5] * 32)
    graph = helper.make_graph(steps, "chain", ends[:1], ends[1:], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(prefix)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def runs_by_round(
    calls: Sequence[tuple[str, int]], noted: Mapping[str, list[Traced]], rounds: int
) -> list[list[list[Traced]]]:
    """For every call, given by its Unit and the pairs of a round, its traced runs round by round:
    noted in the order in which they were made, the first of each call a warm-up before all rounds.
    """
    left = {unit: iter(runs) for unit, runs in noted.items()}
    for unit, _ in calls:
        next(left[unit])
    found: list[list[list[Traced]]] = [[] for _ in calls]
    for _ in range(rounds):
        for part, (unit, pairs) in zip(found, calls, strict=True):
            part.append([next(left[unit]) for _ in range(pairs)])
    return found
