"""Runs a check on random input under limits: an error of ours in one line is the only way out."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from clover_compile.runtime.errors import CloverError

T = TypeVar("T")

MOST_SECONDS = 20
"""Processor seconds one example may take: those do not pass while other processes run."""

MOST_BYTES = 1 << 30
"""Address space one example may add."""


class Hang(BaseException):
    """Not an Exception, so that nothing under test takes it for a fault of the input."""


def fuzz(
    strategy: SearchStrategy[T], check: Callable[[T], object], examples: int, seconds: float = 0
) -> int:
    """Runs `check` on `examples` inputs, and on more with other seeds for `seconds`; returns how
    many were run. Whatever escapes `check` but a CloverError of one line is a failure.
    """
    count = 0

    def run(example: T) -> None:
        nonlocal count
        count += 1
        with limits():
            said = ""
            try:
                check(example)
            except CloverError as error:
                said = str(error)
            assert said.isascii() and said.isprintable() and len(said) < 20_000, said

    checks = list(HealthCheck)
    chosen: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": checks}
    number, stop = 0, time.monotonic() + seconds
    while not number or time.monotonic() < stop:
        configure = settings(max_examples=examples, derandomize=False, **chosen)
        seed(number)(configure(given(strategy)(run)))()
        number += 1
    return count


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raises Hang after MOST_SECONDS, and lets an allocation fail beyond MOST_BYTES more."""
    before = signal.signal(signal.SIGPROF, _hang)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def _hang(number: int, frame: object) -> None:
    raise Hang(f"more than {MOST_SECONDS} s for one example")
