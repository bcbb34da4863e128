"""The few calls of the CUDA driver that a session takes, through ctypes: no CUDA package needed.

libcuda is opened when it is first needed, so this imports on machines without a GPU. Written
against the CUDA driver API's documentation; never run where this project is built.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

ALIGNED = 64
"""Bytes between the starts of pieces of pinned memory."""

STATIC_LIMIT = 48 * 1024
"""Bytes of dynamic shared memory a kernel may use without asking."""


class CudaError(RuntimeError):
    """The driver refused a call; the message names the call and the driver's words."""


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError("no CUDA driver, libcuda.so.1") from error
    _check(library, "cuInit", library.cuInit(0))
    return library


def _check(library: ctypes.CDLL, call: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        words = (text.value or b"unknown error").decode()
        raise CudaError(f"{call}: {words} ({status})")


def call(name: str, *arguments: Any) -> None:
    """Calls the driver's function `name`; CudaError with the driver's words if it fails."""
    library = _driver()
    _check(library, name, getattr(library, name)(*arguments))


def _number(name: str, *arguments: Any) -> int:
    found = ctypes.c_int()
    call(name, ctypes.byref(found), *arguments)
    return found.value


def driver_version() -> int:
    """CUDA version the driver supports, e.g. 13000."""
    return _number("cuDriverGetVersion")


def device_count() -> int:
    """CUDA devices of this machine; 0 without a driver."""
    try:
        return _number("cuDeviceGetCount")
    except CudaError:
        return 0


def why_no_device() -> str:
    """What the driver says where `device_count` is 0."""
    try:
        return f"the driver reports {_number('cuDeviceGetCount')} devices"
    except CudaError as error:
        return str(error)


def capability(device: int = 0) -> int:
    """Compute capability times ten of a device."""
    return sum(
        factor * _number("cuDeviceGetAttribute", which, device)
        for factor, which in ((10, MAJOR), (1, MINOR))
    )


def device_name(device: int = 0) -> str:
    """What the driver calls a device."""
    text = ctypes.create_string_buffer(128)
    call("cuDeviceGetName", text, len(text), device)
    return text.value.decode(errors="replace")


def make_current(device: int = 0) -> None:
    """Makes the device's primary context, which torch uses as well, current in this thread."""
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)


def free_memory() -> tuple[int, int]:
    """Bytes free and bytes in all on the current device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


class Memory:
    """A piece of device memory; freed with this object."""

    def __init__(self, size: int) -> None:
        """size: bytes; the driver aligns to 256."""
        self.size, self.address = size, 0
        if size:
            address = ctypes.c_uint64()
            call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self.address = address.value

    def __del__(self) -> None:
        if self.address:
            _driver().cuMemFree_v2(ctypes.c_uint64(self.address))


class Stream:
    """A stream of work, and graphs recorded from it."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(self.handle), 1)

    def wait(self) -> None:
        """Until everything queued is done."""
        call("cuStreamSynchronize", self.handle)

    def upload(self, address: int, host: int, size: int) -> None:
        """Queues a copy of `size` bytes from host memory."""
        call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), ctypes.c_void_p(host),
             ctypes.c_size_t(size), self.handle)  # fmt: skip

    def download(self, host: int, address: int, size: int) -> None:
        """Copies `size` bytes to host memory and waits for them."""
        call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), ctypes.c_uint64(address),
             ctypes.c_size_t(size), self.handle)  # fmt: skip
        self.wait()

    def copy(self, target: int, source: int, size: int) -> None:
        """Queues a copy within device memory."""
        call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source),
             ctypes.c_size_t(size), self.handle)  # fmt: skip

    def clear(self, address: int, size: int) -> None:
        """Queues `size` zero bytes into device memory."""
        if size:
            call("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(0),
                 ctypes.c_size_t(size), self.handle)  # fmt: skip

    def begin(self) -> None:
        """Starts recording: launches are noted, not run."""
        call("cuStreamBeginCapture_v2", self.handle, CAPTURE_RELAXED)

    def end(self) -> Graph:
        """What was recorded since `begin`, ready to be launched."""
        graph = ctypes.c_void_p()
        call("cuStreamEndCapture", self.handle, ctypes.byref(graph))
        return Graph(graph)


class PinnedRing:
    """Page-locked host memory handed out in turn: a copy from it queues and returns at once.

    A copy from other host memory would wait for everything queued before it.
    """

    def __init__(self, stream: Stream, size: int = 16 * 2**20) -> None:
        """size: bytes; the oldest piece is handed out again once `stream` has done its work."""
        self._stream, self._size, self._at = stream, size, 0
        start = ctypes.c_void_p()
        call("cuMemHostAlloc", ctypes.byref(start), ctypes.c_size_t(size), ctypes.c_uint(0))
        self._start = int(start.value or 0)

    def hold(self, host: int, size: int) -> int | None:
        """Copies `size` bytes at the address `host` into the ring; returns where they are, None
        if the ring is smaller."""
        if size > self._size:
            return None
        if self._at + size > self._size:
            self._stream.wait()
            self._at = 0
        at = self._start + self._at
        ctypes.memmove(at, host, size)
        self._at += -(-size // ALIGNED) * ALIGNED
        return at

    def __del__(self) -> None:
        if getattr(self, "_start", 0):
            _driver().cuMemFreeHost(ctypes.c_void_p(self._start))


class Graph:
    """A recorded sequence of launches."""

    def __init__(self, graph: ctypes.c_void_p) -> None:
        self._graph, self._ready = graph, ctypes.c_void_p()
        call("cuGraphInstantiateWithFlags", ctypes.byref(self._ready), graph, ctypes.c_uint64(0))

    def launch(self, stream: Stream) -> None:
        """Queues the whole sequence."""
        call("cuGraphLaunch", self._ready, stream.handle)

    def __del__(self) -> None:
        if self._ready:
            _driver().cuGraphExecDestroy(self._ready)
        if self._graph:
            _driver().cuGraphDestroy(self._graph)


class Kernel:
    """One kernel of a loaded cubin."""

    def __init__(self, cubin: bytes, name: str, warps: int, shared: int) -> None:
        """Loads `cubin` into the current context and finds the function `name`.

        warps: per block; shared: bytes of dynamic shared memory per block.
        """
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        if shared > STATIC_LIMIT:
            call("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED, shared)
        self.name, self.threads, self.shared = name, 32 * warps, shared

    def launch(
        self, grid: tuple[int, int, int], arguments: Sequence[int], integers: Sequence[bool],
        stream: Any,
    ) -> None:  # fmt: skip
        """Queues the kernel on `stream` (a CUstream).

        arguments: values in the kernel's order, addresses or i32; integers: which of them are i32.
        Triton appends two pointers to scratch memory; these kernels use none.
        """
        values: list[Any] = [
            ctypes.c_int32(value) if small else ctypes.c_uint64(value)
            for value, small in zip(arguments, integers, strict=True)
        ]
        values += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in values)
        )
        call("cuLaunchKernel", self._function, *grid, self.threads, 1, 1, self.shared,
             ctypes.c_void_p(stream) if isinstance(stream, int) else stream,
             pointers, None)  # fmt: skip
