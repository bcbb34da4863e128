"""The matrix product of a few rows by an fp8 matrix: its cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from clover_compile.kernels.fp8 import quantised, scales
from clover_compile.kernels.op import Case, FusedOp, by_row
from clover_compile.kernels.projection.spec import inputs as plain
from clover_compile.kernels.projection_fp8.reference import projection_fp8


def inputs(rows: int, width: int, outputs: int, wide: bool, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference; channels differ in size by up to a thousand."""
    x, weight, wide = plain(rows, width, outputs, wide, g)
    weight = weight * 10 ** (3 * torch.rand(outputs, 1, generator=g) - 2)
    return x, quantised(weight), scales(weight), wide


def cases() -> Iterator[Case]:
    """Rows around the tiles, widths and outputs that no tile divides, a channel of zeros."""
    for rows in (1, 16, 33, 64):
        yield Case(f"rows-{rows}", partial(inputs, rows, 64, 48, False))
    for outputs in (1, 130):
        yield Case(f"outputs-{outputs}", partial(inputs, 5, 40, outputs, False))
    for width in (24, 256):
        yield Case(f"width-{width}", partial(inputs, 3, width, 40, True))
    yield Case("zero-channel", _zero)


def _zero(g: torch.Generator) -> tuple[Any, ...]:
    x, weight, scale, wide = inputs(3, 32, 20, True, g)
    weight[7] = 0
    return x, weight, scale, wide


SPEC = FusedOp(
    "projection_fp8",
    projection_fp8,
    ("y",),
    cases,
    onnx=None,
    plan="clover_compile.kernels.projection.plan:plan",
    symbols=by_row("x"),
    wide=frozenset({"weight", "scale"}),
)
