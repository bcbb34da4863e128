"""The runner's engine over launch programs: buffers stay on the device, the host sees few numbers.

What a Unit returns are handles on its output buffers. A handle turns into numpy when somebody looks
at it; given to another Unit (logits to pick, a tape to replay) or to the state, it never leaves the
device. It is valid until the same Unit runs again with the same row count.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clover_compile.runtime.engine import Sizes
from clover_compile.runtime.launch_plan import Plan, strides_of
from clover_compile.runtime.state import State
from clover_compile.runtime.state_pool import StatePool
from clover_compile.runtime.unit_program import UnitProgram
from clover_compile.runtime.unit_runner import ProgramDevice, UnitRunner

Array = NDArray[Any]

RUNNERS = 64
"""Sets of buffers (and graphs) that are kept; the one unused for longest goes first."""


class EngineDevice(ProgramDevice, Protocol):
    """What the engine needs of a device beside running programs."""

    def shape(self, array: Any) -> tuple[int, ...]:
        """The shape of an array."""

    def write(self, array: Any, value: Array) -> None:
        """Copies numpy to the device, converted to the array's dtype."""

    def read(self, array: Any) -> Array:
        """The array as numpy; bfloat16 becomes float32."""

    def clear(self, array: Any) -> None:
        """Sets every byte of a contiguous array to zero."""

    def copy(self, source: Any, target: Any) -> None:
        """Copies between contiguous arrays of one dtype and size."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Something that repeats the launches of `work`."""


class Stale(RuntimeError):
    """A handle was used after its Unit had run again."""


class Handle:
    """An output of a Unit on the device."""

    def __init__(self, device: EngineDevice, slot: _Slot, parts: tuple[Any, ...],
                 shape: tuple[int, ...]) -> None:  # fmt: skip
        self.device, self.slot, self.parts, self.shape = device, slot, parts, shape
        self.turn = slot.turn

    def live(self) -> tuple[Any, ...]:
        """The arrays, side by side along the last axis."""
        if self.turn != self.slot.turn:
            raise Stale(f"{self.slot.runner.program.name} has run since")
        return self.parts

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        parts = [self.device.read(part) for part in self.live()]
        made = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        return made if dtype is None else made.astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]


class _Slot:
    """A runner, the launches recorded of it, and how often it ran."""

    def __init__(self, runner: UnitRunner) -> None:
        self.runner, self.turn = runner, 0
        self._repeat: Callable[[], None] | None = None

    def run(self, device: EngineDevice) -> None:
        """Every launch once; they are recorded at the first run, when the inputs are there."""
        if self._repeat is None:
            self._repeat = device.record(self.runner.run)
        self._repeat()
        self.turn += 1


class Holder(Protocol):
    """What a state on the device needs of its engine."""

    @property
    def device(self) -> Any: ...

    @property
    def pool(self) -> StatePool: ...


class ProgramState(State):
    """The state of one sequence on the device."""

    def __init__(self, engine: Holder, sizes: Sizes, context: int) -> None:
        self.engine, self.sizes, self.context, self.length = engine, sizes, context, 0
        self.arrays = engine.pool.take(context)
        back = weakref.finalize(self, engine.pool.give_back, context, self.arrays)
        back.atexit = False

    def feeds(self) -> dict[str, Any]:
        """What a Unit that reads the state is given."""
        return {"state": self}

    def recurrent(self) -> dict[str, Any]:
        """What `replay` is given."""
        return {"state": self}

    def advance(self, rows: int, new: Mapping[str, Any]) -> None:
        """Takes the outputs of a commit, or those of a replay and its verify, over `rows` rows."""
        self.require(rows)
        device = self.engine.device
        for name, array in self.arrays.items():
            if name == "length":
                continue
            (made,) = new[f"{name}.new"].live()
            if name[0] in "kv":
                made = rows_of(device, made, 0, rows)
                array = rows_of(device, array, self.length, rows)
            if made is not array:  # an engine may have updated the state in place
                device.copy(made, array)
        self._advance_length(self.length + rows)

    def _advance_length(self, length: int) -> None:
        self.length = length
        self.engine.device.write(self.arrays["length"], np.array([length], np.int32))

    def fork(self) -> ProgramState:
        """An independent copy with buffers of its own."""
        twin = ProgramState(self.engine, self.sizes, self.context)
        for name, array in self.arrays.items():
            self.engine.device.copy(array, twin.arrays[name])
        twin.length = self.length
        return twin


def rows_of(device: EngineDevice, array: Any, start: int, count: int) -> Any:
    """Rows of axis 1 of a contiguous array."""
    shape = device.shape(array)
    part = (shape[0], count, *shape[2:])
    return device.view(array, start * prod(shape[2:]), part, strides_of(part))


def state_layout(commit: UnitProgram, context: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each state array with room for `context` rows."""
    found = {}
    for name in (n for n in commit.inputs if n not in ("ids", "length")):
        buffer = commit.buffers[commit.inputs[name][0].buffer]
        shape = tuple(context if x == "R" else int(x) for x in buffer.shape)
        found[name] = (buffer.dtype, shape)
    return found


class ProgramEngine:
    """Runs a bundle's Units by their programs."""

    def __init__(
        self, programs: Mapping[str, UnitProgram], plans: Mapping[str, Plan],
        weights: Mapping[str, Any], device: EngineDevice,
    ) -> None:  # fmt: skip
        self.programs, self.plans, self.weights = programs, plans, weights
        self.device = device
        self.pool = StatePool(device, partial(state_layout, programs["commit"]))
        self._slots: OrderedDict[tuple[Any, ...], _Slot] = OrderedDict()

    def new_state(self, sizes: Sizes, context: int) -> ProgramState:
        """The state of an empty sequence, on the device."""
        return ProgramState(self, sizes, context)

    def run(
        self, unit: str, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Runs one Unit; feeds are numpy arrays, handles, or `state`; outputs are handles."""
        program = self.programs[unit]
        state = feeds.get("state")
        held = {} if state is None else state.arrays
        symbols = {"keep": int(np.asarray(feeds["keep"]))} if "keep" in feeds else {}
        given: dict[str, Any] = {}
        written: dict[str, Any] = {}
        for name, parts in program.inputs.items():
            value = held.get(name, feeds.get(name))
            if value is None:
                raise KeyError(f"{unit} needs {name}")
            shape = tuple(np.shape(value)) if name not in held else self.device.shape(value)
            _match(unit, name, program, shape, symbols)
            if name in held:
                given[parts[0].buffer] = value
            elif isinstance(value, Handle) and len(value.live()) == len(parts):
                given[parts[0].buffer] = value.slot.runner.buffers[_buffer_of(value)]
            else:
                written[name] = value
        slot = self._slot(unit, program, symbols, given)
        for name, value in written.items():
            self._write(slot.runner.inputs[name], np.asarray(value))
        slot.run(self.device)
        return self._handles(slot, outputs)

    def _slot(
        self, unit: str, program: UnitProgram, symbols: Mapping[str, int], given: Mapping[str, Any]
    ) -> _Slot:
        key = (unit, *sorted(symbols.items()), *sorted((k, id(x)) for k, x in given.items()))
        if key not in self._slots:
            runner = UnitRunner(program, self.plans, self.weights, given, symbols, self.device)
            self._slots[key] = _Slot(runner)
            while len(self._slots) > RUNNERS:
                self._slots.popitem(last=False)
        self._slots.move_to_end(key)
        return self._slots[key]

    def _write(self, parts: tuple[Any, ...], value: Array) -> None:
        at = 0
        for part in parts:
            width = self.device.shape(part)[-1] if value.ndim else 0
            self.device.write(part, value[..., at : at + width] if len(parts) > 1 else value)
            at += width

    def _handles(self, slot: _Slot, outputs: Sequence[str] | None) -> dict[str, Any]:
        made = {}
        for name, parts in slot.runner.outputs.items():
            if outputs is None or name in outputs:
                shape = self.device.shape(parts[0])
                if len(parts) > 1:
                    shape = (*shape[:-1], sum(self.device.shape(part)[-1] for part in parts))
                made[name] = Handle(self.device, slot, parts, shape)
        return made


def _buffer_of(handle: Handle) -> str:
    """Name of the buffer that all parts of a handle lie in."""
    for name, parts in handle.slot.runner.outputs.items():
        if parts is handle.parts:
            (buffer,) = {view.buffer for view in handle.slot.runner.program.outputs[name]}
            return buffer
    raise AssertionError("a handle is an output of its runner")


def _match(
    unit: str, name: str, program: UnitProgram, shape: tuple[int, ...], symbols: dict[str, int]
) -> None:
    """Binds the symbols of an input's shape; ValueError where it does not fit the program."""
    parts = program.inputs[name]
    planned = list(parts[0].shape)
    if len(parts) > 1:
        planned[-1] = sum(int(part.shape[-1]) for part in parts)
    if len(shape) != len(planned):
        raise ValueError(f"{unit}: {name} is planned as {planned}, given {list(shape)}")
    for size, found in zip(planned, shape, strict=True):
        fixed = symbols.setdefault(size, found) if isinstance(size, str) else size
        if fixed != found:
            raise ValueError(f"{unit}: {name} is planned as {planned}, given {list(shape)}")
