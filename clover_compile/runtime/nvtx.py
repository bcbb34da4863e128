"""NVTX ranges: names that a profiler (Nsight Systems) shows around the launches of an op.

The library is looked for once; without it ranges do nothing. A CUDA graph is replayed without
ranges: they stand around the first, unrecorded run of each Unit and row count, and in the replays
kernels bear their own names. Never run where this project is built.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

LIBRARIES = ("libnvToolsExt.so.1", "libnvToolsExt.so")


@cache
def _library() -> ctypes.CDLL | None:
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "nvtxRangePushA"):
            return library
    return None


@contextmanager
def named(name: str) -> Iterator[None]:
    """What is queued inside bears `name` in a profile."""
    library = _library()
    if library is None:
        yield
        return
    library.nvtxRangePushA(name.encode())
    try:
        yield
    finally:
        library.nvtxRangePop()
