"""One call of a fused op as a launch plan is made for it: dtypes, shapes and scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clover_compile.runtime.launch_plan import Operand, Size

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.bool: "i1",
}
"""torch dtypes -> their names in launch plans."""

TORCH = {name: dtype for dtype, name in DTYPES.items()}
"""The other way round."""


def poisoned(dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """An array of NaN (integers: the largest), so that what is read unwritten shows."""
    kind = TORCH[dtype]
    if kind.is_floating_point:
        return torch.full(shape, torch.nan, device=device).to(kind)
    most = 1 if kind is torch.bool else torch.iinfo(kind).max
    return torch.full(shape, most, dtype=kind, device=device)


class UnplannedCall(ValueError):
    """A call that no launch plan covers; the message says which op and why."""


@dataclass(frozen=True)
class Call:
    """The arguments of a fused op, arrays as operands; dims that vary are symbols."""

    op: str
    arrays: Mapping[str, Operand | None]
    scalars: Mapping[str, Any]
    outputs: frozenset[str]
    """Outputs somebody reads; the others need not be written."""
    capability: int = 90
    """Compute capability the variants are chosen for, e.g. 90."""

    def array(self, name: str) -> Operand:
        """An argument that must be there."""
        operand = self.arrays[name]
        if operand is None:
            raise UnplannedCall(f"{self.op}: {name} is needed")
        return operand

    def dim(self, name: str, axis: int) -> int:
        """A dimension that must be fixed."""
        size = self.array(name).shape[axis]
        if not isinstance(size, int):
            raise UnplannedCall(f"{self.op}: dimension {axis} of {name} must be fixed, not {size}")
        return size

    def stride(self, name: str) -> int:
        """Elements from one row (axis 1) of an array to the next."""
        operand = self.array(name)
        if operand.stride is not None:
            return operand.stride
        count = 1
        for axis in range(2, len(operand.shape)):
            count *= self.dim(name, axis)
        return count

    @classmethod
    def of(
        cls, op: str, parameters: Sequence[str], arguments: Sequence[Any], outputs: Sequence[str],
        symbols: Mapping[str, Mapping[int, str]], capability: int = 90,
    ) -> Call:  # fmt: skip
        """The call of `op` with these arguments (tensors, fake or real, and scalars).

        symbols: parameter -> axis -> name of a dim that varies from call to call.
        """
        arrays: dict[str, Operand | None] = {}
        scalars: dict[str, Any] = {}
        for name, value in zip(parameters, arguments, strict=True):
            if isinstance(value, Tensor):
                arrays[name] = _operand(op, name, value, symbols.get(name, {}))
            elif value is None:
                arrays[name] = None
            else:
                scalars[name] = value
        return cls(op, arrays, scalars, frozenset(outputs), capability)


def _operand(op: str, name: str, value: Tensor, symbols: Mapping[int, str]) -> Operand:
    if value.dtype not in DTYPES:
        raise UnplannedCall(f"{op}: {name}: no kernel reads {value.dtype}")
    shape: list[Size] = [symbols.get(i) or int(size) for i, size in enumerate(value.shape)]
    stride = None
    if value.dim() >= 3 and isinstance(shape[1], str):
        row = int(value.stride(1))
        dense = 1
        for axis in range(2, value.dim()):
            dense *= int(value.shape[axis])
        stride = None if row == dense else row
    return Operand(DTYPES[value.dtype], tuple(shape), stride)
