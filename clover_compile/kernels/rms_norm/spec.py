"""The fused op clover::rms_norm: its cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from clover_compile.kernels.op import Case, FusedOp, by_row, normal
from clover_compile.kernels.rms_norm.reference import rms_norm

EPS = 1e-6


def _make(batch: int, rows: int, width: int, residual: bool, scale: float = 1.0) -> Any:
    def make(g: torch.Generator) -> tuple[Any, ...]:
        x = normal(g, batch, rows, width, scale=scale)
        added = normal(g, batch, rows, width, scale=scale) if residual else None
        return x, added, 1.0 + normal(g, width, scale=0.1), EPS

    return make


def cases() -> Iterator[Case]:
    """Both forms, one and many rows, sums near zero (the epsilon matters) and large ones."""
    for residual in (False, True):
        name = "added" if residual else "plain"
        yield Case(f"{name}-1", _make(1, 1, 64, residual))
        yield Case(f"{name}-31", _make(2, 31, 24, residual))
        yield Case(f"{name}-tiny", _make(1, 2, 24, residual, scale=1e-4))
        yield Case(f"{name}-large", _make(1, 2, 24, residual, scale=1e4))
    yield Case("zero", lambda g: (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.ones(8), EPS))


SPEC = FusedOp(
    "rms_norm",
    rms_norm,
    ("total", "normed"),
    cases,
    onnx="clover_compile.kernels.rms_norm.onnx_function:function",
    plan="clover_compile.kernels.rms_norm.plan:plan",
    symbols=by_row("x", "residual"),
)
