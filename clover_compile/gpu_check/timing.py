"""Times of kernels under CUDA graphs, with arguments that rotate through more than the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CACHE = 160 * 2**20
"""Bytes that the rotating arguments together exceed: more than any L2 of these GPUs, twice."""

ROUNDS, LAUNCHES = 15, 24
COPIES = 32
"""Most sets of arguments that are made."""


@dataclass(frozen=True)
class Time:
    """Microseconds per call over the rounds."""

    median: float
    low: float
    high: float

    def row(self) -> dict[str, float]:
        return {"median_us": self.median, "p10_us": self.low, "p90_us": self.high}


def copies(size: int) -> int:
    """How many sets of arguments of `size` bytes rotate."""
    return max(2, min(COPIES, -(-CACHE // max(1, size))))


def measure(call: Callable[[Any], object], arguments: Sequence[Any]) -> Time:
    """Times `call` over the rotating `arguments`: LAUNCHES calls per graph, ROUNDS replays."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for each in arguments:
            call(each)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            call(arguments[i % len(arguments)])
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(ROUNDS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / LAUNCHES)
    found.sort()
    tenth = len(found) // 10
    return Time(statistics.median(found), found[tenth], found[-1 - tenth])


def bandwidth() -> float:
    """Bytes per second that a sum over 4 GB reads, the best of ten."""
    data = torch.zeros(2**30, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return data.numel() * 4 / best
