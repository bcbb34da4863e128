"""The few calls of the CUDA driver that launching precompiled kernels takes.

libcuda is opened when it is first needed, so this imports on machines without a GPU. A context must
be current (torch.cuda makes one). Written against the CUDA driver API's documentation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

STATIC_LIMIT = 48 * 1024
"""Bytes of dynamic shared memory a kernel may use without asking."""


class CudaError(RuntimeError):
    """The driver refused a call; the message names the call and the driver's words."""


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from None
    _checked(library, "cuInit", library.cuInit(0))
    return library


def _checked(library: ctypes.CDLL, call: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        words = (text.value or b"unknown error").decode()
        raise CudaError(f"{call}: {words} ({status})")


def driver_version() -> int:
    """CUDA version the driver supports, e.g. 13000."""
    found = ctypes.c_int()
    library = _driver()
    _checked(library, "cuDriverGetVersion", library.cuDriverGetVersion(ctypes.byref(found)))
    return found.value


class Kernel:
    """One kernel of a loaded cubin."""

    def __init__(self, cubin: bytes, name: str, warps: int, shared: int) -> None:
        """Loads `cubin` into the current context and finds the function `name`.

        warps: per block; shared: bytes of dynamic shared memory per block.
        """
        library = _driver()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        load = library.cuModuleLoadData(ctypes.byref(self._module), cubin)
        _checked(library, f"cuModuleLoadData of {name}", load)
        found = library.cuModuleGetFunction(
            ctypes.byref(self._function), self._module, name.encode()
        )
        _checked(library, f"cuModuleGetFunction of {name}", found)
        if shared > STATIC_LIMIT:
            asked = library.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared)
            _checked(library, f"{shared} bytes of shared memory for {name}", asked)
        self.name, self.threads, self.shared = name, 32 * warps, shared

    def launch(
        self, grid: tuple[int, int, int], arguments: Sequence[int | None], integers: Sequence[bool],
        stream: int,
    ) -> None:  # fmt: skip
        """Queues the kernel on `stream` (a CUstream).

        arguments: values in the kernel's order, addresses or i32; integers: which of them are i32.
        Triton appends two pointers to scratch memory; these kernels use none.
        """
        library = _driver()
        values = [
            ctypes.c_int32(value or 0) if small else ctypes.c_uint64(value or 0)
            for value, small in zip(arguments, integers, strict=True)
        ] + [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in values)
        )
        status = library.cuLaunchKernel(
            self._function, *grid, self.threads, 1, 1, self.shared,
            ctypes.c_void_p(stream), pointers, None,
        )  # fmt: skip
        _checked(library, f"launch of {self.name} over {grid}", status)
