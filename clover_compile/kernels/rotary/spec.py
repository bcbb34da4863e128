"""The rotary angles: their cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from clover_compile.kernels.op import Case, FusedOp, by_row
from clover_compile.kernels.rotary.reference import rotary


def inputs(rows: int, length: int, half: int, g: torch.Generator) -> tuple[Any, ...]:
    """Arguments of the reference, the turns of a model's."""
    turns = 1e4 ** (-torch.arange(half).double() / half) / (2 * torch.pi)
    return torch.zeros(1, rows, dtype=torch.int64), torch.tensor([length]).int(), turns


def cases() -> Iterator[Case]:
    """One and many rows, the start and far positions, halves that are no power of two."""
    for rows in (1, 2, 33):
        yield Case(f"rows-{rows}", partial(inputs, rows, 7, 4))
    yield Case("start", partial(inputs, 3, 0, 8))
    yield Case("far", partial(inputs, 3, 262_000, 32))
    yield Case("odd", partial(inputs, 3, 50, 3))


SPEC = FusedOp(
    "rotary",
    rotary,
    ("cos", "sin"),
    cases,
    onnx="clover_compile.kernels.rotary.onnx_function:function",
    plan="clover_compile.kernels.rotary.plan:plan",
    symbols=by_row("ids"),
    wide=frozenset({"turns"}),
    tolerance={"fp32": 4e-7, "bf16": 4e-7},
)
