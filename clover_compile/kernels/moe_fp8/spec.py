"""moe over fp8 weights: its cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from clover_compile.kernels.fp8 import quantised, scales
from clover_compile.kernels.moe.spec import SPEC as PLAIN
from clover_compile.kernels.moe.spec import Sizes
from clover_compile.kernels.moe.spec import inputs as plain
from clover_compile.kernels.moe_fp8.reference import moe_fp8
from clover_compile.kernels.op import Case, FusedOp, by_row


def inputs(s: Sizes, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference; channels differ in size by up to a hundred."""
    made = list(plain(s, g))
    weights = [
        w * 10 ** (2 * torch.rand(w.shape[:-1], generator=g)[..., None] - 1) for w in made[3:7]
    ]
    return (*made[:3], *map(quantised, weights), *map(scales, weights), *made[7:])


def cases() -> Iterator[Case]:
    """Few and many rows, with and without a coreset, one expert, uneven widths."""
    for rows in (1, 5, 33, 70):
        yield Case(f"rows-{rows}", partial(inputs, Sizes(rows, 3)))
        yield Case(f"coreset-{rows}", partial(inputs, Sizes(rows, 3, block=True, top_p=0.5)))
    yield Case("same", partial(inputs, Sizes(5, 3, router="same")))


SPEC = FusedOp(
    "moe_fp8",
    moe_fp8,
    ("y", "kept"),
    cases,
    onnx=None,
    plan="clover_compile.kernels.moe.plan:plan",
    symbols=by_row("x", "router", "shared_gate"),
    wide=frozenset(
        {
            "gate_up", "down", "shared_gate_up", "shared_down", "gate_up_scale", "down_scale",
            "shared_gate_up_scale", "shared_down_scale",
        }
    ),
    tolerance=PLAIN.tolerance,
)  # fmt: skip
