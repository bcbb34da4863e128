"""Time of every kernel from ONNX Runtime's profiler, without what the profiler itself takes.

Noting an event takes longer than many a small kernel. How long is measured on a chain of trivial
nodes, run with and without the profiler, and taken off every kernel; what is left includes the
engine's own step from kernel to kernel.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from clover_compile.profiling.rounds import Clock, seconds
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.ort_engine import OrtEngine

CHAIN, SHORT = 400, 20
"""Nodes of the two chains; their difference is free of what a call takes."""

_INLINED = re.compile(r"_inlfunc_([A-Za-z0-9]+)_")
_SUFFIX = "_kernel_time"

Times = dict[str, float]
"""Name of a kernel -> seconds in one run."""

EXECUTED = "SequentialExecutor::Execute"
HANDOVER = "hand-over"
"""What a call takes outside the kernels: arrays to the engine and back."""


@dataclass(frozen=True)
class Traced:
    """One run with the profiler."""

    kernels: Times
    executed: float
    """Seconds from the first kernel to the last, profiler included."""

    def had(self, share: float) -> Traced:
        """The run if it had the core for this share of the time that passed."""
        return Traced({k: x * share for k, x in self.kernels.items()}, self.executed * share)


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
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "model_run"]
    kernels = [e for e in events if e["cat"] == "Node" and e["name"].endswith(_SUFFIX)]
    kernels.sort(key=lambda e: e["ts"])
    executed = [(e["ts"], e["dur"]) for e in events if e["name"] == EXECUTED]
    found: list[Traced] = []
    at = 0
    for start, end in sorted(spans):
        times: Times = defaultdict(float)
        while at < len(kernels) and kernels[at]["ts"] <= end:
            if kernels[at]["ts"] >= start:
                times[kernels[at]["name"].removesuffix(_SUFFIX)] += kernels[at]["dur"] * 1e-6
            at += 1
        inside = max(took for ts, took in executed if start <= ts <= end)
        found.append(Traced(dict(times), inside * 1e-6))
    return found


def function_of(kernel: str) -> str | None:
    """The function a kernel was inlined from; None for a node of the graph itself."""
    match = _INLINED.match(kernel)
    return match and match[1]


def profiler_cost(threads: int, clock: Clock) -> float:
    """Seconds that noting one event adds to the kernel it notes."""
    with tempfile.TemporaryDirectory() as folder:
        plain = {n: _chain(n, threads) for n in (CHAIN, SHORT)}
        traced = _chain(CHAIN, threads, Path(folder) / "chain")
        feed = {"v0": np.zeros((1, 32), np.float32)}
        best = {
            n: min(seconds(partial(s.run, None, feed), clock) for _ in range(40))
            for n, s in plain.items()
        }
        for _ in range(40):
            traced.run(None, feed)
        runs = _runs(Path(traced.end_profiling()))[8:]
    node = (best[CHAIN] - best[SHORT]) / (CHAIN - SHORT)
    noted = [steady([run.kernels[kernel] for run in runs]) for kernel in runs[0].kernels]
    return max(0.0, float(np.mean(noted)) - node)


def steady(values: list[float]) -> float:
    """The mean without the highest quarter, in which another job had the core, and the lowest
    tenth: unlike a median it is not bound to the profiler's whole microseconds."""
    ordered = np.sort(values)
    low, high = int(0.1 * len(ordered)), max(1, int(np.ceil(0.75 * len(ordered))))
    return float(ordered[low:high].mean())


def _chain(nodes: int, threads: int, prefix: Path | None = None) -> ort.InferenceSession:
    """A session over so many additions in a row."""
    shape = [1, 32]
    steps = [
        helper.make_node("Add", [f"v{i}", "c"], [f"v{i + 1}"], name=f"n{i}") for i in range(nodes)
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name in ("v0", f"v{nodes}")
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


def per_op(
    runs: Sequence[Traced], labels: Mapping[str, str], owners: Callable[[str], str], cost: float
) -> tuple[dict[str, float], Counter[str]]:
    """Op -> seconds, and how many kernels, in one round of a few runs of the same call.

    `labels`: node -> op; `owners`: function -> op; `cost`: what the profiler takes per kernel.
    """
    found: dict[str, float] = defaultdict(float)
    kernels: Counter[str] = Counter()
    for kernel in runs[0].kernels:
        function = function_of(kernel)
        label = labels.get(kernel, "other") if function is None else owners(function)
        took = [run.kernels.get(kernel, 0.0) for run in runs]
        found[label] += float(np.mean(took)) - cost
        kernels[label] += 1
    return {label: max(0.0, took) for label, took in found.items()}, kernels
