"""Launch plans: what a Triton op launches, as plain data that needs neither torch nor Triton.

A plan is made by `kernels/<op>/plan.py` for one place in a graph: all sizes that are fixed there
are numbers, the others are symbols. The same plan drives the launches of a session, the
ahead-of-time compilation and the TensorRT plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ITEMSIZE = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "i1": 1,
}  # fmt: skip
"""Bytes per element of the dtypes a plan may name (Triton's spelling)."""

Size = int | str
"""A number, or an expression over the plan's symbols (runtime/expressions.py)."""


@dataclass(frozen=True)
class Operand:
    """An array: dtype, shape and, if its rows stand apart, the elements from row to row.

    A row is an index of axis 1 (axis 0 is the batch of 1). The rest of the shape is contiguous.
    """

    dtype: str
    shape: tuple[Size, ...]
    stride: int | None = None


def strides_of(shape: tuple[int, ...], row: int | None = None) -> tuple[int, ...]:
    """Strides in elements: contiguous but for axis 1, `row` elements apart."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    if row is not None:
        strides[0], strides[1] = row * shape[1], row
    return tuple(strides)


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str
    """"module:function" of the @triton.jit function."""
    grid: tuple[Size, Size, Size]
    arguments: Mapping[str, str]
    """Kernel parameter -> the array (input, output or workspace) passed for it."""
    constants: Mapping[str, int | float | bool | str | None]
    """Kernel parameter -> compile-time constant; None also stands for an absent array."""
    integers: Mapping[str, Size] = field(default_factory=dict)
    """Kernel parameter -> i32 argument known at launch."""
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Variant:
    """The launches for the calls its guard admits."""

    guard: str
    launches: tuple[Launch, ...]
    workspace: Mapping[str, Operand] = field(default_factory=dict)
    """Scratch arrays; they hold anything before and after."""


@dataclass(frozen=True)
class Plan:
    """All variants of one op at one place; the first whose guard holds is launched."""

    op: str
    inputs: Mapping[str, Operand | None]
    """None: the argument is absent."""
    outputs: Mapping[str, Operand]
    """Outputs somebody reads; the kernels do not write the others."""
    variants: tuple[Variant, ...]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """The op's scalar arguments, for readers: the launches hold them as constants already."""

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` described."""
        return cls(
            data["op"],
            {name: None if x is None else _operand(x) for name, x in data["inputs"].items()},
            {name: _operand(x) for name, x in data["outputs"].items()},
            tuple(_variant(x) for x in data["variants"]),
            data["scalars"],
        )


def _operand(data: Mapping[str, Any]) -> Operand:
    return Operand(data["dtype"], tuple(data["shape"]), data["stride"])


def _variant(data: Mapping[str, Any]) -> Variant:
    launches = tuple(
        Launch(
            x["kernel"], (x["grid"][0], x["grid"][1], x["grid"][2]), x["arguments"],
            x["constants"], x["integers"], x["warps"], x["stages"],
        )
        for x in data["launches"]
    )  # fmt: skip
    workspace = {name: _operand(x) for name, x in data["workspace"].items()}
    return Variant(data["guard"], launches, workspace)
