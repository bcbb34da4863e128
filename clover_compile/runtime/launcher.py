"""Turns a launch plan and arrays into launches on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from clover_compile.runtime.expressions import evaluate
from clover_compile.runtime.launch_plan import (
    ITEMSIZE,
    Launch,
    Operand,
    Plan,
    Size,
    Variant,
    strides_of,
)

GRID_LIMIT = (2**31 - 1, 65535, 65535)


class BadLaunch(ValueError):
    """A call that a plan does not cover; the message names array, expected and given."""


class Device(Protocol):
    """What the launcher needs of a device; arrays are the device's own objects."""

    def describe(self, array: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """dtype (as plans spell it), shape and strides in elements."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A contiguous array, 16-byte aligned, holding anything."""

    def launch(
        self, launch: Launch, grid: tuple[int, int, int], arrays: Mapping[str, Any],
        integers: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Runs one kernel; `arrays` and `integers` are by kernel parameter."""


@dataclass(frozen=True)
class Resolved:
    """A variant with every size of one call filled in."""

    variant: Variant
    symbols: Mapping[str, int]

    def size(self, size: Size) -> int:
        return size if isinstance(size, int) else evaluate(size, self.symbols)

    def shape(self, operand: Operand) -> tuple[int, ...]:
        return tuple(self.size(x) for x in operand.shape)

    def workspace_bytes(self) -> int:
        """Bytes of scratch the call needs."""
        each = self.variant.workspace.values()
        return sum(prod(self.shape(x)) * ITEMSIZE[x.dtype] for x in each)

    def grid(self, launch: Launch) -> tuple[int, int, int]:
        """Programs per axis; BadLaunch if a device cannot hold them."""
        x, y, z = (self.size(axis) for axis in launch.grid)
        if not all(1 <= n <= most for n, most in zip((x, y, z), GRID_LIMIT, strict=True)):
            raise BadLaunch(f"{launch.kernel}: grid {(x, y, z)} outside 1..{GRID_LIMIT}")
        return x, y, z


def resolve(plan: Plan, symbols: Mapping[str, int]) -> Resolved:
    """The variant whose guard admits these symbols; BadLaunch if none does."""
    for variant in plan.variants:
        if evaluate(variant.guard, symbols):
            return Resolved(variant, symbols)
    guards = ", ".join(variant.guard for variant in plan.variants)
    raise BadLaunch(f"{plan.op}: {dict(symbols)} is outside every guard ({guards})")


def bind(plan: Plan, arrays: Mapping[str, Any], device: Device) -> dict[str, int]:
    """Values of the plan's symbols from the inputs, each checked against the plan."""
    symbols: dict[str, int] = {}
    for name, operand in plan.inputs.items():
        array = arrays.get(name)
        if (array is None) != (operand is None):
            given, meant = ("nothing", "an array") if array is None else ("an array", "nothing")
            raise BadLaunch(f"{plan.op}: {name}: the plan takes {meant}, given {given}")
        if operand is None:
            continue
        dtype, shape, strides = device.describe(array)
        if dtype != operand.dtype or len(shape) != len(operand.shape):
            raise BadLaunch(f"{plan.op}: {name}: planned {operand}, given {dtype} {list(shape)}")
        for size, found in zip(operand.shape, shape, strict=True):
            fixed = symbols.setdefault(size, found) if isinstance(size, str) else size
            if found != fixed:
                raise BadLaunch(f"{plan.op}: {name}: {size} is {fixed}, given {list(shape)}")
        _check_strides(plan.op, name, operand, shape, strides)
    return symbols


def _check_strides(
    op: str, name: str, operand: Operand, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    if 0 in shape:
        return
    planned = strides_of(shape, operand.stride)
    for axis, size in enumerate(shape):
        apart = axis > 0 or operand.stride is None
        if size > 1 and apart and strides[axis] != planned[axis]:
            raise BadLaunch(f"{op}: {name}: planned strides {list(planned)}, given {list(strides)}")


def prepare(
    plan: Plan, arrays: Mapping[str, Any], device: Device,
    outputs: Mapping[str, Any] | None = None,
) -> tuple[Callable[[], None], dict[str, Any]]:  # fmt: skip
    """Fills a call in: returns what launches it, as often as wanted, and its outputs by name.

    A call all of whose outputs are empty launches nothing.
    outputs: arrays to write into; new ones are made for those that are not given, and for scratch,
    which lives as long as what was returned.
    """
    call = resolve(plan, bind(plan, arrays, device))
    held = {name: array for name, array in arrays.items() if array is not None}
    held |= outputs or {}
    for name, operand in {**plan.outputs, **call.variant.workspace}.items():
        if name not in held:
            held[name] = device.empty(operand.dtype, call.shape(operand))
        else:
            _check_output(plan.op, name, operand.dtype, call.shape(operand), held[name], device)
    nothing = all(0 in call.shape(operand) for operand in plan.outputs.values())
    ready = [] if nothing else [
        (
            launch, call.grid(launch),
            {parameter: held[name] for parameter, name in launch.arguments.items()},
            {name: call.size(x) for name, x in launch.integers.items()},
        )
        for launch in call.variant.launches
    ]  # fmt: skip

    def launch_all() -> None:
        for each in ready:
            device.launch(*each)

    return launch_all, {name: held[name] for name in plan.outputs}


def run(plan: Plan, arrays: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Launches the op on `arrays` (inputs by name); returns its outputs by name."""
    launch_all, outputs = prepare(plan, arrays, device)
    launch_all()
    return outputs


def _check_output(
    op: str, name: str, dtype: str, shape: tuple[int, ...], array: Any, device: Device
) -> None:
    given, found, strides = device.describe(array)
    if (given, found) != (dtype, shape):
        raise BadLaunch(f"{op}: {name}: planned {dtype} {list(shape)}, given {given} {list(found)}")
    _check_strides(op, name, Operand(dtype, shape), shape, strides)
