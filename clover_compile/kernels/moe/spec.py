"""The fused op clover::moe: its shapes, cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clover_compile.kernels.moe.reference import moe
from clover_compile.kernels.op import Case, FusedOp, by_row, normal


def shapes(
    x: Tensor, router: Tensor, shared_gate: Tensor, gate_up: Tensor, down: Tensor,
    shared_gate_up: Tensor, shared_down: Tensor, top_k: int, top_p: float, block: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Empty y and count with the shapes and dtypes of the reference's results."""
    return torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.int32)


@dataclass(frozen=True)
class Sizes:
    """Sizes and value regime of a case."""

    rows: int
    top_k: int
    experts: int = 8
    batch: int = 1
    hidden: int = 24
    width: int = 10
    shared: int = 6
    block: bool = False
    top_p: float = 0.9
    router: str = "normal"
    """normal; equal: every expert ties; pairs: experts tie in twos; same: one row repeated; sharp:
    all rows want expert 5; far: logits hundreds apart."""


def _router(s: Sizes, g: torch.Generator) -> Tensor:
    shape = (s.batch, s.rows, s.experts)
    if s.router == "equal":
        return torch.full(shape, 0.25)
    if s.router == "pairs":
        return normal(g, s.batch, s.rows, (s.experts + 1) // 2).repeat_interleave(2, 2)[
            ..., : s.experts
        ]
    if s.router == "same":
        return normal(g, s.batch, 1, s.experts).expand(shape).contiguous()
    x = normal(g, *shape)
    if s.router == "sharp":
        x[..., 5] += 30.0
    return x * 200 if s.router == "far" else x


def inputs(s: Sizes, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference."""
    x = normal(g, s.batch, s.rows, s.hidden)
    gate_up = normal(g, s.experts, 2 * s.width, s.hidden, scale=0.3)
    down = normal(g, s.experts, s.hidden, s.width, scale=0.3)
    shared_gate_up = normal(g, 2 * s.shared, s.hidden, scale=0.3)
    shared_down = normal(g, s.hidden, s.shared, scale=0.3)
    shared_gate = normal(g, s.batch, s.rows, 1)
    return (
        x, _router(s, g), shared_gate, gate_up, down, shared_gate_up, shared_down,
        s.top_k, s.top_p, s.block,
    )  # fmt: skip


def _case(name: str, s: Sizes) -> Case:
    return Case(name, partial(inputs, s))


def cases() -> Iterator[Case]:
    """Rows, every top-k, ties; coresets that keep one, some, fewer than top-k or all experts."""
    for rows in (1, 2, 33, 70):
        yield _case(f"rows-{rows}", Sizes(rows, 3))
    for top_k in (1, 2, 7, 8):
        yield _case(f"top-{top_k}", Sizes(4, top_k))
    yield _case("odd-experts", Sizes(4, 3, experts=7, batch=2))
    for router in ("equal", "pairs", "same", "sharp", "far"):
        yield _case(f"router-{router}", Sizes(5, 3, router=router))
        yield _case(f"coreset-{router}", Sizes(5, 3, router=router, block=True, top_p=0.5))
    for top_p in (0.0, 0.3, 0.9, 1.0):
        yield _case(f"coreset-{top_p}", Sizes(33, 3, block=True, top_p=top_p))
    yield _case("coreset-one", Sizes(5, 3, block=True, top_p=0.0, router="sharp"))
    yield _case("coreset-few", Sizes(5, 8, block=True, top_p=0.4))
    yield _case("coreset-all", Sizes(6, 8, block=True, top_p=1.0))
    yield _case("coreset-1-row", Sizes(1, 4, block=True, top_p=0.6))
    yield _case("coreset-batch", Sizes(4, 2, batch=3, block=True, top_p=0.7))


SPEC = FusedOp(
    "moe",
    moe,
    ("y", "kept"),
    cases,
    onnx="clover_compile.kernels.moe.onnx_function:function",
    plan="clover_compile.kernels.moe.plan:plan",
    symbols=by_row("x", "router", "shared_gate"),
    shapes=shapes,
)
