"""Observers of a pipeline: dump the text, note the time, check the numbers after every pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from clover_compile.errors import PassFailed
from clover_compile.passes.base import Event, Observer
from clover_compile.unit import Source

DRIFT = 1e-4
"""Most a pass may move an output, relative to its largest value: fp32 rounding of another order."""


def both(*observers: Observer) -> Observer:
    """Tells several observers in turn."""

    def tell(event: Event) -> None:
        for observer in observers:
            observer(event)

    return tell


def dump(folder: Path) -> Observer:
    """Writes the Unit's text after each pass to `folder`/<unit>/<number>-<pass>.txt."""
    counts: dict[str, int] = {}

    def write(event: Event) -> None:
        number = counts[event.unit.name] = counts.get(event.unit.name, -1) + 1
        path = folder / event.unit.name / f"{number:02}-{event.label}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(event.unit.text())

    return write


def check(examples: Sequence[tuple[Tensor, ...]], source: Source) -> Observer:
    """Runs the Unit on every example after every pass and compares with the trace, or with what
    the last pass gave that means to change the numbers."""
    truth: list[tuple[Tensor, ...]] = []

    def compare(event: Event) -> None:
        found = [event.unit.run(arrays, source) for arrays in examples]
        if not truth or event.lossy:
            truth[:] = found
        for want, got in zip(truth, found, strict=True):
            for name, a, b in zip(event.unit.outputs, want, got, strict=True):
                drift = _drift(a, b)
                if not drift <= DRIFT:
                    reason = f"output {name} moved by {drift:.1e} of its largest value"
                    raise PassFailed(
                        name=event.label, unit=event.unit.name, reason=reason, done="see the dump"
                    )

    return compare


def _drift(want: Tensor, got: Tensor) -> float:
    """Largest difference over the largest value; inf where shapes, NaN or Inf differ."""
    if want.shape != got.shape:
        return float("inf")
    wide, other = want.double(), got.double()
    odd = ~(wide.isfinite() & other.isfinite())
    if not torch.allclose(wide[odd], other[odd], equal_nan=True):
        return float("inf")
    if odd.all():  # also of nothing at all
        return 0.0
    error = (wide - other)[~odd].abs().max()
    return float(error / wide[~odd].abs().max().clamp(min=1e-6))
