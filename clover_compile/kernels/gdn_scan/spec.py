"""The fused op clover::gdn_scan: its shapes, cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clover_compile.kernels.gdn_scan.reference import gdn_scan
from clover_compile.kernels.op import Case, FusedOp, by_row, normal

EPS = 1e-6


def shapes(
    u: Tensor, z: Tensor | None, b: Tensor, a: Tensor, ring: Tensor, state: Tensor, conv: Tensor,
    decay: Tensor, dt_bias: Tensor, norm: Tensor, rows: Tensor | None, eps: float, key_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Empty y, ring and state with the shapes and dtypes of the reference's results."""
    y = u.new_empty(u.shape[0], u.shape[1], 0) if z is None else torch.empty_like(z)
    return y, torch.empty_like(ring), torch.empty_like(state)


@dataclass(frozen=True)
class Sizes:
    """Sizes and value regime of a case."""

    rows: int
    batch: int = 1
    key_heads: int = 2
    heads: int = 6
    dk: int = 8
    dv: int = 12
    taps: int = 4
    scale: float = 1.0
    """Of the channels; small ones are where the eps of the unit norms matters."""
    same: bool = False
    """Every row is one token whose gates neither forget (g ~ 0) nor hold back (beta ~ 1)."""
    empty: bool = False
    """The state of an empty prefix."""
    a: float | None = None
    b: float | None = None
    replay: tuple[int, ...] | None = None
    """`rows` of a replay; z is None then."""


def inputs(s: Sizes, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference."""
    width = 2 * s.key_heads * s.dk + s.heads * s.dv
    u = normal(g, s.batch, 1 if s.same else s.rows, width).expand(-1, s.rows, -1).contiguous()
    u = u * s.scale
    ring, state = normal(g, s.batch, s.taps - 1, width), normal(g, s.batch, s.heads, s.dk, s.dv)
    if s.empty:
        ring, state = torch.zeros_like(ring), torch.zeros_like(state)
    b, a = normal(g, s.batch, s.rows, s.heads), normal(g, s.batch, s.rows, s.heads)
    if s.same:
        b, a = torch.full_like(b, 12.0), torch.full_like(a, -12.0)
    # Extreme gates stand beside ordinary ones.
    for gate, value in ((b, s.b), (a, s.a)):
        if value is not None:
            gate[:, ::2, ::2] = value
    replay = None if s.replay is None else torch.tensor(s.replay, dtype=torch.int32)
    z = normal(g, s.batch, s.rows, s.heads * s.dv) if s.replay is None else None
    decay, dt_bias = -normal(g, s.heads).exp(), normal(g, s.heads)
    conv, norm = normal(g, width, s.taps, scale=0.5), 1.0 + normal(g, s.dv, scale=0.1)
    return u, z, b, a, ring, state, conv, decay, dt_bias, norm, replay, EPS, s.key_heads


def _case(name: str, s: Sizes) -> Case:
    return Case(name, partial(inputs, s))


def cases() -> Iterator[Case]:
    """Lengths around the chunk, head ratios, an empty prefix, one token repeated, closed and open
    gates, and replays that stop anywhere."""
    for rows in (1, 2, 31, 33, 70, 130):
        yield _case(f"rows-{rows}", Sizes(rows))
    yield _case("batch", Sizes(5, batch=2, key_heads=1, heads=3))
    yield _case("one-to-one", Sizes(5, key_heads=3, heads=3, dk=16, dv=8))
    yield _case("empty-prefix", Sizes(7, empty=True))
    yield _case("repeated", Sizes(130, same=True))
    yield _case("tiny", Sizes(5, scale=1e-3, empty=True))
    for a in (1e4, -1e4):
        yield _case(f"gate-a{a:+.0e}", Sizes(9, a=a))
    for b in (-1e30, 50.0):
        yield _case(f"gate-b{b:+.0e}", Sizes(9, b=b))
    yield _case("gates-all", Sizes(3, a=1e4, b=50.0))
    for kept in (0, 1, 3, 6):
        yield _case(f"replay-{kept}", Sizes(6, replay=(kept,)))
    yield _case("replay-ragged", Sizes(6, batch=3, replay=(6, 0, 2)))
    yield _case("replay-1", Sizes(1, replay=(1,), key_heads=1))


SPEC = FusedOp(
    "gdn_scan",
    gdn_scan,
    ("y", "new_ring", "new_state"),
    cases,
    onnx="clover_compile.kernels.gdn_scan.onnx_function:function",
    plan="clover_compile.kernels.gdn_scan.plan:plan",
    symbols=by_row("u", "z", "b", "a"),
    shapes=shapes,
    wide=frozenset(("state", "decay", "dt_bias")),
)
