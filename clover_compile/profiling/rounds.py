"""Timing in rounds: what is compared runs by turns, so whatever disturbs the machine hits all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Clock = Callable[[], float]
Runs = Mapping[str, Callable[[], object]]


def clock_for(threads: int) -> Clock:
    """What to measure with: for one thread its own processor time, which on an idle machine is the
    time that passes, and which other jobs on a busy one disturb far less."""
    return time.process_time if threads == 1 else time.perf_counter


def seconds(call: Callable[[], object], clock: Clock) -> float:
    """How long a call takes."""
    start = clock()
    call()
    return clock() - start


def turns(names: Sequence[str], turn: int) -> list[str]:
    """The names in the order of one round: each round begins with another."""
    start = turn % len(names) if names else 0
    return [*names[start:], *names[:start]]


def take_turns(runs: Runs, turn: int, clock: Clock, best_of: int = 3) -> dict[str, float]:
    """Seconds of every run in one round: the best of some, after one that warms up."""
    took = {}
    for name in turns(list(runs), turn):
        runs[name]()
        took[name] = min(seconds(runs[name], clock) for _ in range(best_of))
    return took


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and the least of some values."""
    low, middle, high = np.percentile(values, (10, 50, 90)).tolist()
    return {"median": middle, "p10": low, "p90": high, "min": min(values)}
