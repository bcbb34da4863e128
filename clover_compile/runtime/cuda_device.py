"""A CUDA device for launch programs: memory, precompiled kernels, graphs. Never run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clover_compile.runtime import launcher, nvtx
from clover_compile.runtime.cuda_driver import Kernel, Memory, PinnedRing, Stream, make_current
from clover_compile.runtime.launch_plan import ITEMSIZE, Launch, Plan, strides_of

Array = NDArray[Any]

NUMPY: dict[str, Any] = {
    "fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "i64": np.int64, "i32": np.int32,
    "i16": np.int16, "i8": np.int8, "i1": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class CudaArray:
    """An array in device memory; strides in elements."""

    memory: Memory
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    """Elements from the start of the memory."""

    @property
    def address(self) -> int:
        return self.memory.address + self.offset * ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Module:
    """A precompiled kernel as a bundle holds it."""

    cubin: bytes
    function: str
    parameters: tuple[str, ...]
    """Parameters that are passed, in order (constants are compiled in)."""
    warps: int
    shared: int


class CudaDevice:
    """Runs the steps of launch programs on one GPU."""

    def __init__(self, modules: Mapping[str, Module], keys: Callable[[Launch], str]) -> None:
        """modules: by kernel key; keys: the key of a launch."""
        make_current()
        self.stream = Stream()
        self._pinned = PinnedRing(self.stream)
        self.modules, self.keys = modules, keys
        self._kernels: dict[str, Kernel] = {}

    # What the launcher needs.

    def describe(self, array: CudaArray) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """dtype, shape and strides."""
        return array.dtype, array.shape, array.strides

    def shape(self, array: CudaArray) -> tuple[int, ...]:
        """The shape."""
        return array.shape

    def empty(self, dtype: str, shape: tuple[int, ...]) -> CudaArray:
        """New memory, holding anything."""
        memory = Memory(prod(shape) * ITEMSIZE[dtype])
        return CudaArray(memory, dtype, shape, strides_of(shape))

    def view(
        self, array: CudaArray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> CudaArray:  # fmt: skip
        """Part of an array."""
        return replace(array, shape=shape, strides=strides, offset=array.offset + offset)

    def launch(
        self, launch: Launch, grid: tuple[int, int, int], arrays: Mapping[str, CudaArray],
        integers: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Queues one kernel."""
        key = self.keys(launch)
        module = self.modules[key]
        if key not in self._kernels:
            self._kernels[key] = Kernel(module.cubin, module.function, module.warps, module.shared)
        given = {**{name: x.address for name, x in arrays.items()}, **integers}
        values = [given[name] for name in module.parameters]
        small = [name in integers for name in module.parameters]
        self._kernels[key].launch(grid, values, small, self.stream.handle)

    def prepare(
        self, plan: Plan, inputs: Mapping[str, CudaArray], outputs: Mapping[str, CudaArray]
    ) -> Callable[[], None]:
        """What queues one op; its scratch lives as long."""
        return launcher.prepare(plan, inputs, self, outputs)[0]

    def named(self, name: str) -> AbstractContextManager[None]:
        """An NVTX range."""
        return nvtx.named(name)

    # What the engine needs.

    def write(self, array: CudaArray, value: Array) -> None:
        """Queues a copy of numpy to the device; `value` may change afterwards."""
        host = _narrow(np.broadcast_to(value, array.shape), array.dtype)
        width, size = array.shape[-1] if array.shape else 1, ITEMSIZE[array.dtype]
        flat = host.reshape(-1, width)
        if _dense(array):
            self._send(array.address, host, array.nbytes)
        else:
            for row in range(flat.shape[0]):
                at = array.address + row * array.strides[-2] * size
                self._send(at, flat[row : row + 1], width * size)

    def _send(self, address: int, host: Array, size: int) -> None:
        held = self._pinned.hold(host.ctypes.data, size)
        self.stream.upload(address, host.ctypes.data if held is None else held, size)
        if held is None:
            self.stream.wait()

    def upload(self, array: CudaArray, start: int, data: bytes) -> None:
        """Copies raw bytes into a contiguous array, `start` bytes in, and waits."""
        host = np.frombuffer(data, np.uint8)
        self.stream.upload(array.address + start, host.ctypes.data, len(data))
        self.stream.wait()

    def read(self, array: CudaArray) -> Array:
        """The array as numpy, bfloat16 as float32, once all queued work is done."""
        size = ITEMSIZE[array.dtype]
        kind = np.dtype("u2") if array.dtype == "bf16" else np.dtype(NUMPY[array.dtype])
        host = np.empty(array.shape, kind)
        if _dense(array):
            self.stream.download(host.ctypes.data, array.address, array.nbytes)
        else:
            flat = host.reshape(-1, array.shape[-1])
            for row in range(flat.shape[0]):
                at = array.address + row * array.strides[-2] * size
                self.stream.download(flat[row : row + 1].ctypes.data, at, flat.shape[1] * size)
        if array.dtype != "bf16":
            return host
        return (host.astype(np.uint32) << 16).view(np.float32)

    def clear(self, array: CudaArray) -> None:
        """Queues zeros into a contiguous array."""
        self.stream.clear(array.address, array.nbytes)

    def copy(self, source: CudaArray, target: CudaArray) -> None:
        """Queues a copy between contiguous arrays of one size."""
        if source.dtype != target.dtype or source.nbytes != target.nbytes:
            raise ValueError(f"copy of {source.dtype} {source.shape} to {target.shape}")
        self.stream.copy(target.address, source.address, source.nbytes)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of the launches of `work`, which must outlive it."""
        work()  # kernels are loaded before anything is recorded
        self.stream.wait()
        self.stream.begin()
        work()
        graph = self.stream.end()
        return lambda: graph.launch(self.stream)


def _dense(array: CudaArray) -> bool:
    pairs = zip(array.shape, array.strides, strides_of(array.shape), strict=True)
    return all(size == 1 or stride == meant for size, stride, meant in pairs)


def _narrow(value: Array, dtype: str) -> Array:
    """numpy in the device's representation; float32 to bfloat16 rounds to nearest even."""
    if dtype != "bf16":
        return np.ascontiguousarray(value, NUMPY[dtype])
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    made: Array = np.where(np.isnan(value), 0x7FC0, rounded).astype(np.uint16)
    return made
