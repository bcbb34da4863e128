"""Runs a Unit's program with its symbols filled in: buffers once, then the steps as often as asked.

The device decides what a step is: launches of precompiled kernels, or (in tests) the op's
reference. Arrays are the device's own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Protocol

from clover_compile.runtime.expressions import evaluate
from clover_compile.runtime.launch_plan import ITEMSIZE, Plan, Size, strides_of
from clover_compile.runtime.unit_program import Buffer, UnitProgram, View

ALIGNMENT = 256
"""Bytes between the starts of buffers in an arena."""


class ProgramDevice(Protocol):
    """What a program needs of a device."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A contiguous array, 256-byte aligned, holding anything."""

    def view(
        self, array: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:  # fmt: skip
        """Part of an array; offset and strides in elements."""

    def prepare(
        self, plan: Plan, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> Callable[[], None]:
        """What computes one op from `inputs` into `outputs`, as often as it is called."""

    def named(self, name: str) -> AbstractContextManager[None]:
        """Gives what is queued inside a name that a profiler shows."""


class UnitRunner:
    """One Unit for one set of symbol values (rows, prefix rows, keep)."""

    def __init__(
        self, program: UnitProgram, plans: Mapping[str, Plan], weights: Mapping[str, Any],
        given: Mapping[str, Any], symbols: Mapping[str, int], device: ProgramDevice,
    ) -> None:  # fmt: skip
        """weights: by stored name; given: buffers that exist already (the state's), by name."""
        missing = set(program.symbols) - symbols.keys()
        if missing:
            raise ValueError(f"{program.name}: no value for {', '.join(sorted(missing))}")
        self.program, self.plans, self.symbols, self.device = program, plans, symbols, device
        self.buffers: dict[str, Any] = {}
        for name, buffer in program.buffers.items():
            if buffer.kind == "weight":
                self.buffers[name] = weights[str(buffer.weight)]
            elif name in given:
                self.buffers[name] = given[name]
            else:
                self.buffers[name] = device.empty(buffer.dtype, self._shape(buffer.shape))
        # A step without rows (no logits asked for) is left out.
        self.steps = [
            (
                f"{program.name}: {plans[step.plan].op}",
                device.prepare(
                    plans[step.plan], self._views(step.inputs), self._views(step.outputs)
                ),
            )
            for step in program.steps
            if all(prod(self._shape(view.shape)) for view in step.outputs.values())
        ]
        self.inputs = {name: self._parts(parts) for name, parts in program.inputs.items()}
        self.outputs = {name: self._parts(parts) for name, parts in program.outputs.items()}

    def _size(self, size: Size) -> int:
        return size if isinstance(size, int) else evaluate(size, self.symbols)

    def _shape(self, shape: tuple[Size, ...]) -> tuple[int, ...]:
        return tuple(self._size(x) for x in shape)

    def _view(self, view: View) -> Any:
        shape = self._shape(view.shape)
        strides = strides_of(shape, view.stride)
        return self.device.view(self.buffers[view.buffer], self._size(view.offset), shape, strides)

    def _views(self, views: Mapping[str, View]) -> dict[str, Any]:
        return {name: self._view(view) for name, view in views.items()}

    def _parts(self, parts: tuple[View, ...]) -> tuple[Any, ...]:
        return tuple(self._view(view) for view in parts)

    def run(self) -> None:
        """Every step once, on what the input buffers hold now."""
        for name, step in self.steps:
            with self.device.named(name):
                step()


def buffer_bytes(program: UnitProgram, symbols: Mapping[str, int]) -> int:
    """Bytes of the buffers a runner makes for these symbols: all but weights and state."""

    def size(buffer: Buffer) -> int:
        dims = (x if isinstance(x, int) else evaluate(x, symbols) for x in buffer.shape)
        return -(-prod(dims) * ITEMSIZE[buffer.dtype] // ALIGNMENT) * ALIGNMENT

    return sum(size(b) for b in program.buffers.values() if b.kind in ("temporary", "output"))
