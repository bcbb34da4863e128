"""What a pass is, and the pipeline that runs a list of them with one observer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from clover_compile.errors import PassFailed
from clover_compile.unit import Unit


@dataclass(frozen=True)
class Pass:
    """One rewrite of a Unit in place."""

    name: ClassVar[str]
    lossy: ClassVar[bool] = False
    """Whether the pass means to change the numbers."""

    def label(self) -> str:
        """The name by which dumps, manifests and errors call this pass."""
        return self.name

    def apply(self, unit: Unit) -> int:
        """Rewrites the Unit; returns the number of rewrites."""
        raise NotImplementedError

    def requires(self, unit: Unit) -> str | None:
        """What is missing before the pass can run, or None."""
        return None

    def ensures(self, unit: Unit) -> str | None:
        """What is wrong after the pass, or None."""
        return None


@dataclass(frozen=True)
class Event:
    """What the observer is told after each pass, and once before the first (label "trace")."""

    unit: Unit
    label: str
    rewrites: int
    seconds: float
    lossy: bool = False


Observer = Callable[[Event], None]


def run_passes(unit: Unit, passes: tuple[Pass, ...], observer: Observer) -> dict[str, int]:
    """Runs the passes in order; returns rewrites by pass label.

    Raises PassFailed naming the pass and those already run, whatever went wrong inside.
    """
    observer(Event(unit, "trace", 0, 0.0))
    counts: dict[str, int] = {}
    for step in passes:
        start = time.perf_counter()
        try:
            problem = step.requires(unit)
            if problem is None:
                counts[step.label()] = step.apply(unit)
                unit.graph.lint()
                unit.program.graph_module.recompile()
                problem = step.ensures(unit)
            if problem is None:
                seconds = time.perf_counter() - start
                done = counts[step.label()]
                observer(Event(unit, step.label(), done, seconds, step.lossy))
        except PassFailed:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise _failed(step, unit, reason, counts) from error
        if problem is not None:
            raise _failed(step, unit, problem, counts)
    return counts


def _failed(step: Pass, unit: Unit, reason: str, counts: dict[str, int]) -> PassFailed:
    done = ", ".join(label for label in counts if label != step.label()) or "none"
    return PassFailed(name=step.label(), unit=unit.name, reason=reason, done=done)
