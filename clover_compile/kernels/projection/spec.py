"""The matrix product of a few rows: its cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from clover_compile.kernels.op import Case, FusedOp, by_row, normal
from clover_compile.kernels.projection.reference import projection


def inputs(rows: int, width: int, outputs: int, wide: bool, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference."""
    return normal(g, 1, rows, width), normal(g, outputs, width, scale=width**-0.5), wide


def cases() -> Iterator[Case]:
    """Rows around the tiles; widths and outputs that no tile divides, and widths of several."""
    for rows in (1, 2, 16, 31, 33, 64):
        yield Case(f"rows-{rows}", partial(inputs, rows, 64, 48, False))
    for outputs in (1, 17, 130, 257):
        yield Case(f"outputs-{outputs}", partial(inputs, 5, 40, outputs, False))
    for width in (8, 24, 200, 256, 384):
        yield Case(f"width-{width}", partial(inputs, 3, width, 40, True))


SPEC = FusedOp(
    "projection",
    projection,
    ("y",),
    cases,
    onnx=None,
    plan="clover_compile.kernels.projection.plan:plan",
    symbols=by_row("x"),
)
