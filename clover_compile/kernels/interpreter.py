"""Runs launch plans in Triton's interpreter on CPU tensors, with bfloat16 made exact.

A process interprets or compiles, never both: TRITON_INTERPRET=1 must be set before Triton is
imported. The interpreter as it comes does integer arithmetic on bfloat16 bits and truncates when it
stores them; `install` patches that, and `self_test` fails if the patch no longer bites.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from clover_compile.kernels.call import DTYPES, poisoned
from clover_compile.kernels.compiled import function as load_kernel
from clover_compile.kernels.watched_memory import Watched
from clover_compile.runtime.launch_plan import Launch
from clover_compile.runtime.launcher import BadLaunch

_FLOATS = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
"""Types whose numpy carrier is an integer."""


def _convert(data: Any, source: Any, target: Any, *_: Any) -> Any:
    """Casts the bits of one float type to another as hardware does: nearest, ties to even."""
    flat = np.ascontiguousarray(data).reshape(-1)
    bits = torch.from_numpy(flat.view(np.dtype(f"i{flat.itemsize}") if flat.itemsize > 1 else "u1"))
    made = bits.view(_FLOATS[source]).to(_FLOATS[target])
    out = made.view(_CARRIER[made.element_size()]).numpy()
    return out.view(f"u{out.itemsize}").reshape(np.shape(data))


def _widen(handle: Any) -> Any:
    kind = handle.dtype.scalar
    if kind not in _NARROW:
        return handle
    data = _convert(handle.data, kind, tl.float32).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def _around(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an elementwise operation compute narrow floats in float32 and round its result."""

    def wrapped(self: Any, *arguments: Any) -> Any:
        handles = [x for x in arguments if isinstance(x, interpreter.TensorHandle)]
        narrow = next((x.dtype.scalar for x in handles if x.dtype.scalar in _NARROW), None)
        if narrow is None:
            return method(self, *arguments)
        wide = [_widen(x) if isinstance(x, interpreter.TensorHandle) else x for x in arguments]
        result = method(self, *wide)
        if result.data.dtype == np.float32:
            data = _convert(result.data, tl.float32, narrow)
            return interpreter.TensorHandle(data, narrow)
        return result

    return wrapped


def _cast(method: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, value: Any, target: Any) -> Any:
        source, kind = value.dtype.scalar, target.scalar
        if source not in _NARROW and kind not in _NARROW:
            return method(self, value, target)
        if source not in _FLOATS:
            value, source = method(self, value, tl.float32), tl.float32
        if kind in _FLOATS:
            data = _convert(value.data, source, kind)
            carrier = interpreter._get_np_dtype(kind)
            return interpreter.TensorHandle(data.view(carrier), kind)
        return method(self, _widen(value), target)

    return cast_impl


def _dot(method: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return method(self, _widen(a), _widen(b), d, *rest)

    return create_dot


_watched: list[Watched] = []
"""The memory of the launch that runs, if any."""


def _load(method: Callable[..., Any]) -> Callable[..., Any]:
    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        if _watched:
            _watched[-1].touch(pointers.data, mask.data, store=False)
        return method(self, pointers, mask, *rest)

    return create_masked_load


def _store(method: Callable[..., Any]) -> Callable[..., Any]:
    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if _watched:
            _watched[-1].touch(pointers.data, mask.data, store=True)
        return method(self, pointers, value, mask, *rest)

    return create_masked_store


def _index(method: Callable[..., Any]) -> Callable[..., Any]:
    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        if _watched:
            nx, ny, _ = self.grid_dim
            _watched[-1].program = x + nx * (y + ny * z)
        method(self, x, y, z)

    return set_grid_idx


def _reduce(method: Callable[..., Any]) -> Callable[..., Any]:
    def check_tensor(self: Any, values: Any) -> Any:
        if any(x.dtype.scalar in _NARROW for x in values):
            raise TypeError("reductions and scans are written in float32: convert first")
        return method(self, values)

    return check_tensor


def install() -> None:
    """Patches the interpreter once and tests the patch; RuntimeError outside interpreter mode."""
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before Triton is imported")
    builder, base = interpreter.InterpreterBuilder, interpreter.ReduceScanOpInterface
    if interpreter._convert_float is not _convert:
        interpreter._convert_float = _convert
        for name in ("binary_op", "unary_op", "ternary_op"):
            setattr(builder, name, _around(getattr(builder, name)))
        builder.cast_impl = _cast(builder.cast_impl)
        builder.create_dot = _dot(builder.create_dot)
        builder.create_masked_load = _load(builder.create_masked_load)
        builder.create_masked_store = _store(builder.create_masked_store)
        builder.set_grid_idx = _index(builder.set_grid_idx)
        base.check_tensor = _reduce(base.check_tensor)
    self_test()


def _roundings(x, y, product, total, more, eighth, whole, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    wide = a.to(tl.float32) + b.to(tl.float32)
    tl.store(product + at, tl.dot(a, b))
    tl.store(total + at, wide)
    tl.store(more + at, tl.where(a > b, a * b, a + b))
    tl.store(eighth + at, (wide * 1.03125).to(tl.float8e4nv))
    tl.store(whole + at, (at * 3).to(tl.bfloat16))


_roundings_kernel: Any = triton.jit(_roundings)


def self_test() -> None:
    """RuntimeError unless dots, comparisons, arithmetic, casts and stores are those of hardware."""
    n = 16
    x = ((torch.arange(n * n) % 23) - 11).view(n, n).bfloat16()
    y = ((torch.arange(n * n) % 17) - 8).view(n, n).bfloat16() * 1.0078125
    product = torch.empty(n, n)
    total, more, whole = (torch.empty(n, n, dtype=torch.bfloat16) for _ in range(3))
    eighth = torch.empty(n, n, dtype=torch.float8_e4m3fn)
    _roundings_kernel[(1,)](x, y, product, total, more, eighth, whole, n)
    wide = x.float() + y.float()
    meant = {
        "dot": torch.equal(product, x.float() @ y.float()),
        "store": torch.equal(total, wide.bfloat16()),
        "arithmetic": torch.equal(more, torch.where(x > y, x * y, x + y)),
        "float8": torch.equal(eighth.float(), (wide * 1.03125).to(eighth.dtype).float()),
        "integers": torch.equal(whole, (3 * torch.arange(n * n)).view(n, n).bfloat16()),
    }
    wrong = [name for name, right in meant.items() if not right]
    if wrong:
        raise RuntimeError(f"narrow floats in Triton's interpreter are wrong: {', '.join(wrong)}")


class Interpreter:
    """A launcher device: torch CPU tensors, kernels interpreted one program after another.

    New arrays are filled with NaN (integers: the largest), to show what is read unwritten; every
    access is checked for bounds and races (watched_memory.py).
    """

    def __init__(self) -> None:
        self.launches = 0
        self._made: dict[int, Tensor] = {}

    def describe(self, array: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return DTYPES[array.dtype], tuple(array.shape), tuple(array.stride())

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        made = poisoned(dtype, shape)
        self._made[made.untyped_storage().data_ptr()] = made
        return made

    def launch(
        self, launch: Launch, grid: tuple[int, int, int], arrays: Mapping[str, Tensor],
        integers: Mapping[str, int],
    ) -> None:  # fmt: skip
        function = load_kernel(launch.kernel)
        given = {**arrays, **integers, **launch.constants}
        if set(given) != set(function.arg_names):
            odd = sorted(set(given) ^ set(function.arg_names))
            raise BadLaunch(f"{launch.kernel}: parameters and arguments differ: {odd}")
        self.launches += 1
        _watched.append(Watched(arrays, set(self._made)))
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore", RuntimeWarning)
                function[grid](**given)
        finally:
            _watched.pop()
