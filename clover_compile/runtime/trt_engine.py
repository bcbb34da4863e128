"""Runs the engines of a finished `trt-*` or `trt-rtx` bundle. Never run where this is built.

One class for both products. Weights, state and what a Unit hands to the next stay on the
device; `ring` and `S` are updated in place by commit and replay, new rows of k and v are copied to
their place by the state.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from clover_compile.runtime.cuda_device import CudaArray, CudaDevice
from clover_compile.runtime.cuda_driver import CudaError
from clover_compile.runtime.engine import Array, Sizes
from clover_compile.runtime.errors import BadBundle, EngineFailed
from clover_compile.runtime.launch_plan import strides_of
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.program_engine import ProgramState, Stale, rows_of
from clover_compile.runtime.state_pool import StatePool
from clover_compile.runtime.terminal import one_line
from clover_compile.runtime.triton_engine import upload
from clover_compile.runtime.trt_build import last_fault, load_plugin, quiet_logger
from clover_compile.runtime.trt_checks import check

TYPES = {
    "FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT64": "i64", "INT32": "i32", "BOOL": "i1",
}  # fmt: skip
"""TensorRT's names of dtypes -> those of launch plans."""


class Output:
    """An output of a Unit on the device; valid until the same Unit runs again."""

    def __init__(self, unit: _Unit, array: CudaArray) -> None:
        self.unit, self.array, self.turn = unit, array, unit.turn
        self.shape = array.shape

    def live(self) -> tuple[CudaArray, ...]:
        """The array."""
        if self.turn != self.unit.turn:
            raise Stale(f"{self.unit.name} has run since")
        return (self.array,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        made = self.unit.engine.device.read(self.live()[0])
        return made if dtype is None else made.astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]


class _Unit:
    """One engine with its context, and buffers for arrays that come from or go to the host."""

    def __init__(self, engine: TrtEngine, name: str, row: Mapping[str, Any], code: bytes) -> None:
        self.engine, self.name, self.row, self.turn = engine, name, row, 0
        self.built = engine.runtime.deserialize_cuda_engine(code)
        if self.built is None:
            raise EngineFailed(unit=name, reason=engine.fault())
        self.context = self.built.create_execution_context()
        self.buffers: dict[str, CudaArray] = {}
        self.sizes: dict[str, Array] = {}
        for weight in row["weights"]:
            self.bind(weight, engine.weights[weight])

    def dtype(self, name: str) -> str:
        """The dtype of one of its arrays, as plans spell it."""
        return TYPES[self.built.get_tensor_dtype(name).name]

    def most(self, name: str) -> tuple[int, ...]:
        """The largest shape of an input."""
        if name in self.row["shapes"]:
            return tuple(self.row["shapes"][name][2])
        return tuple(self.built.get_tensor_shape(name))

    def buffer(self, name: str, shape: tuple[int, ...]) -> CudaArray:
        """The array's own buffer, large enough for the shape, seen with it."""
        held = self.buffers.get(name)
        if held is None or prod(held.shape) < prod(shape):
            self.engine.device.stream.wait()
            held = self.buffers[name] = self.engine.device.empty(self.dtype(name), shape)
        return self.engine.device.view(held, 0, shape, strides_of(shape))

    def bind(self, name: str, array: CudaArray) -> None:
        """Gives the engine an array."""
        # An empty array has no memory, but an engine wants an address.
        address = array.address or self.engine.nowhere.address
        self.context.set_tensor_address(name, address)

    def give(self, name: str, array: CudaArray) -> None:
        """Binds an input, whose shape must lie inside the profile."""
        if name in self.row["shapes"]:
            least, _, most = self.row["shapes"][name]
            if not all(
                low <= n <= high for low, n, high in zip(least, array.shape, most, strict=True)
            ):
                reason = f"{name} is {list(array.shape)}, the engine takes {least} to {most}"
                raise EngineFailed(unit=self.name, reason=f"{reason}: send other pieces")
            self.context.set_input_shape(name, array.shape)
        self.bind(name, array)

    def size(self, name: str, value: Array) -> None:
        """Gives an input that is a size: it stays on the host, and must outlive the call."""
        least, _, most = self.row["values"][name]
        if not least <= int(value) <= most:
            reason = f"{name} is {int(value)}, the engine takes {least} to {most}"
            raise EngineFailed(unit=self.name, reason=f"{reason}: send other pieces")
        self.sizes[name] = np.array(value, np.int32)
        self.context.set_tensor_address(name, self.sizes[name].ctypes.data)

    def run(self, inputs: Mapping[str, CudaArray]) -> dict[str, CudaArray]:
        """Binds the outputs and queues the engine."""
        outputs = {}
        for name in self.row["outputs"]:
            alias = self.row["aliases"].get(name)
            if alias is None:
                outputs[name] = self.buffer(name, tuple(self.context.get_tensor_shape(name)))
            else:
                outputs[name] = inputs[alias]
            self.bind(name, outputs[name])
        self.turn += 1
        if not self.context.execute_async_v3(self.engine.device.stream.handle.value or 0):
            raise EngineFailed(unit=self.name, reason=self.engine.fault())
        return outputs


class TrtEngine:
    """The runner's engine over TensorRT."""

    def __init__(self, checked: Checked, allow_native: bool = False) -> None:
        """Raises BadBundle unless machine, versions and plugin are those the bundle needs."""
        device = check(checked, allow_native)
        self.words: list[str] = []
        try:
            self._open(checked, device)
        except CudaError as error:
            raise BadBundle(one_line(str(checked.path)), one_line(str(error))) from None

    def _open(self, checked: Checked, device: Mapping[str, Any]) -> None:
        self.device = CudaDevice({}, lambda launch: "")
        trt = importlib.import_module(device["module"])
        self.logger = quiet_logger(trt, self.words)
        self.plugin: ctypes.CDLL = load_plugin(trt, checked.path / device["plugin"])
        self.runtime = trt.Runtime(self.logger)
        self.nowhere = self.device.empty("i8", (256,))
        self.weights = upload(checked, self.device)
        self.pool = StatePool(self.device, self.state_layout)
        self.units = {
            name: _Unit(self, name, row, (checked.path / row["file"]).read_bytes())
            for name, row in checked.manifest["units"].items()
        }

    def fault(self) -> str:
        """Why the last call failed: the plugin's words, or TensorRT's."""
        words = last_fault(self.plugin) or " ".join(self.words[-2:]) or "no reason given"
        self.words.clear()
        return words[:300]

    def new_state(self, sizes: Sizes, context: int) -> ProgramState:
        """The state of an empty sequence, in device buffers of its own."""
        return ProgramState(self, sizes, context)

    def state_layout(self, context: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape of each state array; k and v hold as many rows as the engine takes."""
        unit = self.units["commit"]
        names = [n for n in unit.row["inputs"] if n not in ("ids", "length", "keep")]
        return {name: (unit.dtype(name), unit.most(name)) for name in names}

    def run(
        self, unit: str, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Runs one Unit. Fed with a state or outputs of other Units it returns outputs on the
        device; fed with numpy alone, and from `pick`, it returns numpy."""
        if unit not in self.units:
            raise EngineFailed(unit=unit, reason="the bundle has no such Unit")
        one = self.units[unit]
        state = feeds.get("state")
        held = {} if state is None else state.arrays
        given: dict[str, CudaArray] = {}
        for name in one.row["inputs"]:
            value = held.get(name, feeds.get(name))
            if value is None:
                raise EngineFailed(unit=unit, reason=f"{name} is missing")
            if name in one.row["values"]:
                one.size(name, value)
                continue
            given[name] = self._array(one, name, value)
            one.give(name, given[name])
        made = one.run(given)
        stays = unit != "pick" and (
            state is not None or any(isinstance(x, Output) for x in feeds.values())
        )
        wanted = one.row["outputs"] if outputs is None else outputs
        if stays:
            return {name: Output(one, made[name]) for name in wanted}
        return {name: self.device.read(made[name]) for name in wanted}

    def _array(self, unit: _Unit, name: str, value: Any) -> CudaArray:
        """A feed as an array on the device."""
        if isinstance(value, CudaArray):
            return value
        if isinstance(value, Output):
            return value.live()[0]
        host = np.asarray(value)
        if name[:2] not in ("k.", "v."):
            made = unit.buffer(name, host.shape)
            self.device.write(made, host)
            return made
        # Rows beyond `length` are not read; the buffer has the engine's whole capacity.
        most = unit.most(name)
        made = unit.buffer(name, most)
        if host.shape[1]:
            self.device.write(rows_of(self.device, made, 0, host.shape[1]), host)
        return made
