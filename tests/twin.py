"""The software twin of the CUDA session: a test double, no target.

Same programs, buffer tables and engine; memory is the CPU's and every step is the op's reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clover_compile.kernels.call import DTYPES, poisoned
from clover_compile.kernels.table import fused_op
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.launcher import bind, resolve


class Twin:
    """A program device on the CPU; new arrays hold NaN (integers: the largest)."""

    def __init__(self) -> None:
        self.steps = Counter[str]()
        self.spoil: dict[str, Callable[[str, Tensor], Tensor]] = {}
        """Op -> (output, value) -> what the step writes instead."""
        self.launches = 0
        self.ranges: list[str] = []

    def describe(self, array: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return DTYPES[array.dtype], tuple(array.shape), tuple(array.stride())

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        return poisoned(dtype, shape)

    def view(
        self, array: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Tensor:  # fmt: skip
        return torch.as_strided(array, shape, strides, array.storage_offset() + offset)

    def shape(self, array: Tensor) -> tuple[int, ...]:
        return tuple(array.shape)

    def write(self, array: Tensor, value: Any) -> None:
        array.copy_(torch.from_numpy(np.array(value)))

    def read(self, array: Tensor) -> Any:
        wide = array.float() if array.dtype is torch.bfloat16 else array
        return wide.numpy().copy()

    def clear(self, array: Tensor) -> None:
        array.zero_()

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert source.dtype == target.dtype and source.numel() == target.numel()
        assert source.is_contiguous() and target.is_contiguous()
        target.copy_(source.view(target.shape))

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.ranges.append(name)
        yield

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def prepare(
        self, plan: Plan, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        """The reference of the plan's op; the plan's own checks of the call are made first."""
        call = resolve(plan, bind(plan, inputs, self))  # type: ignore[arg-type]
        op = fused_op(plan.op)
        given: dict[str, Any] = {**dict.fromkeys(plan.inputs), **plan.scalars, **inputs}

        def step() -> None:
            self.steps[plan.op] += 1
            self.launches += len(call.variant.launches)
            result = op.reference(*(given[name] for name in op.parameters))
            made = result if isinstance(result, tuple) else (result,)
            for name, value in zip(op.outputs, made, strict=True):
                if name in outputs:
                    assert outputs[name].shape == value.shape, (plan.op, name)
                    assert outputs[name].dtype == value.dtype, (plan.op, name)
                    spoil = self.spoil.get(plan.op)
                    outputs[name].copy_(spoil(name, value) if spoil else value)

        return step
