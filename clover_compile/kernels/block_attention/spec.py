"""The fused op clover::block_attention: its cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from clover_compile.kernels.block_attention.reference import block_attention
from clover_compile.kernels.op import Case, FusedOp, by_row, normal

EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Sizes and value regime of a case."""

    rows: int
    prefix: int
    length: tuple[int, ...]
    heads: int = 6
    heads_kv: int = 2
    dim: int = 8
    rotary: int = 4
    same: bool = False
    poison: float | None = None
    """What fills the prefix rows from `length` on."""


def inputs(s: Sizes, causal: bool, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference."""
    batch, rows = len(s.length), s.rows
    made = 1 if s.same else rows
    flat = [
        normal(g, batch, made, width).expand(-1, rows, -1).contiguous()
        for width in (2 * s.heads * s.dim, s.heads_kv * s.dim, s.heads_kv * s.dim)
    ]
    k, v = (normal(g, batch, s.prefix, s.heads_kv, s.dim) for _ in range(2))
    length = torch.tensor(s.length, dtype=torch.int32)
    if s.poison is not None:
        late = torch.arange(s.prefix)[None] >= length[:, None]
        k[late], v[late] = s.poison, s.poison
    turn = (length[:, None] + torch.arange(rows))[..., None] * normal(g, s.rotary // 2)
    q_norm, k_norm = (1.0 + normal(g, s.dim, scale=0.1) for _ in range(2))
    return *flat, k, v, length, turn.cos(), turn.sin(), q_norm, k_norm, EPS, causal


def _case(name: str, s: Sizes, causal: bool) -> Case:
    return Case(name, partial(inputs, s, causal))


def cases() -> Iterator[Case]:
    """Both visibilities: block lengths, head ratios, empty and partly filled prefixes whose unused
    rows hold anything, and one token repeated."""
    nan, inf = float("nan"), float("inf")
    for causal in (True, False):
        kind = "causal" if causal else "block"
        for rows in (1, 2, 31, 33, 70, 130):
            yield _case(f"{kind}-rows-{rows}", Sizes(rows, 9, (9,)), causal)
        yield _case(f"{kind}-empty", Sizes(4, 0, (0,)), causal)
        yield _case(f"{kind}-empty-1", Sizes(1, 0, (0,)), causal)
        yield _case(f"{kind}-unused", Sizes(5, 7, (0,), poison=nan), causal)
        yield _case(f"{kind}-poison", Sizes(5, 11, (4,), poison=nan), causal)
        yield _case(f"{kind}-infinite", Sizes(1, 11, (10,), poison=inf), causal)
        yield _case(f"{kind}-batch", Sizes(3, 6, (6, 2), poison=nan), causal)
        yield _case(f"{kind}-one-kv", Sizes(3, 5, (5,), heads=3, heads_kv=1, rotary=8), causal)
        yield _case(f"{kind}-one-to-one", Sizes(3, 5, (5,), heads=2, heads_kv=2), causal)
        yield _case(f"{kind}-repeated", Sizes(130, 3, (3,), same=True), causal)


SPEC = FusedOp(
    "block_attention",
    block_attention,
    ("y", "new_k", "new_v"),
    cases,
    onnx="clover_compile.kernels.block_attention.onnx_function:function",
    plan="clover_compile.kernels.block_attention.plan:plan",
    symbols=by_row("query_gate", "k", "v", "cos", "sin")
    | by_row("k_prefix", "v_prefix", symbol="R"),
    wide=frozenset(("cos", "sin")),
)
