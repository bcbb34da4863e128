"""The fused op clover::gdn_preview: its cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from clover_compile.kernels.gdn_preview.reference import gdn_preview
from clover_compile.kernels.op import Case, FusedOp, by_row, normal

EPS = 1e-6


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
    """Of the causal half, the row itself included."""
    same: bool = False
    empty: bool = False
    a: float | None = None
    scale: float = 1.0
    """Of the channels; small ones are where the eps of the unit norms matters."""
    history: float = 0.0
    """Added to the history slot's bias."""


def inputs(s: Sizes, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference."""
    width = 2 * s.key_heads * s.dk + s.heads * s.dv
    u = normal(g, s.batch, 1 if s.same else s.rows, width).expand(-1, s.rows, -1).contiguous()
    u = u * s.scale
    z, a = normal(g, s.batch, s.rows, s.heads * s.dv), normal(g, s.batch, s.rows, s.heads)
    if s.a is not None:
        a[:, ::2, ::2] = s.a
    ring, state = normal(g, s.batch, s.taps - 1, width), normal(g, s.batch, s.heads, s.dk, s.dv)
    if s.empty:
        ring, state = torch.zeros_like(ring), torch.zeros_like(state)
    taps = normal(g, width, 2 * s.taps - 1, scale=0.5)
    decay, dt_bias = -normal(g, s.heads).exp(), normal(g, s.heads)
    scale, bias, c = 4 * normal(g, s.heads), normal(g, s.heads) + s.history, normal(g, s.heads)
    norm = 1.0 + normal(g, s.dv, scale=0.1)
    return u, z, a, ring, state, taps, decay, dt_bias, scale, bias, c, norm, EPS, s.key_heads


def _case(name: str, s: Sizes) -> Case:
    return Case(name, partial(inputs, s))


def cases() -> Iterator[Case]:
    """Block lengths, head ratios, an empty prefix, one token repeated, extreme gates and slots."""
    for rows in (1, 2, 3, 31, 33, 70, 130):
        yield _case(f"rows-{rows}", Sizes(rows))
    yield _case("batch", Sizes(5, batch=2, key_heads=1, heads=3))
    yield _case("one-to-one", Sizes(5, key_heads=3, heads=3, dk=16, dv=8))
    yield _case("empty-prefix", Sizes(7, empty=True))
    yield _case("repeated", Sizes(130, same=True))
    yield _case("tiny", Sizes(5, scale=1e-3, empty=True))
    for a in (1e4, -1e4):
        yield _case(f"gate-a{a:+.0e}", Sizes(9, a=a))
    for history in (-1e4, 1e4):
        yield _case(f"history{history:+.0e}", Sizes(4, history=history))


SPEC = FusedOp(
    "gdn_preview",
    gdn_preview,
    ("y",),
    cases,
    onnx="clover_compile.kernels.gdn_preview.onnx_function:function",
    plan="clover_compile.kernels.gdn_preview.plan:plan",
    symbols=by_row("u", "z", "a"),
    wide=frozenset(("state", "decay", "dt_bias", "logit_scale", "history_bias", "history_c")),
)
