"""The fused op clover::pick: its cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from clover_compile.kernels.op import Case, FusedOp, by_row, normal
from clover_compile.kernels.pick.reference import SCALARS, pick

NEUTRAL = dict.fromkeys(SCALARS, 0.0) | {"repetition": 1.0, "top_p": 1.0}
PENALTIES = {"presence": 0.7, "frequency": 0.4, "repetition": 1.3}
RAMPS = {
    "length_penalty": 3.0, "length_penalty_start": 4.0, "length_penalty_window": 5.0,
    "think_end_bias": 4.0, "think_end_start": 2.0, "think_end_window": 7.0,
}  # fmt: skip
MASK, STOPS, THINK = 5, (2, 9), 7


@dataclass(frozen=True)
class Sizes:
    """Sizes and settings of a case."""

    rows: int = 6
    vocab: int = 40
    batch: int = 1
    scalars: dict[str, float] = field(default_factory=dict)
    running: bool = False
    draft: tuple[int, ...] = ()
    """Repeated or cut to the rows; empty: random ids."""
    close: bool = True
    counted: bool = True
    spread: float = 3.0
    levels: int | None = None
    """Logits take that many values only: ties."""
    bad: tuple[int, int, float] | None = None
    """(row, id, value) put into the logits."""
    allow: bool = False
    think: int = THINK
    stops: tuple[int, ...] = STOPS


def inputs(s: Sizes, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference."""
    shape = (s.batch, s.rows, s.vocab)
    logits = normal(g, *shape, scale=s.spread)
    if s.levels is not None:
        logits = torch.randint(0, s.levels, shape, generator=g).float()
    if s.bad is not None:
        logits[:, s.bad[0], s.bad[1]] = s.bad[2]
    counts = torch.randint(0, 3, (s.batch, s.vocab), generator=g, dtype=torch.int32) * int(
        s.counted
    )
    row0 = torch.arange(3, 3 + s.batch, dtype=torch.int32)
    draft = torch.randint(-1, s.vocab, (s.batch, s.rows), generator=g)
    if s.draft:
        repeats = -(-s.rows // len(s.draft))
        draft = torch.tensor((s.draft * repeats)[: s.rows]).expand(s.batch, -1).contiguous()
    values = NEUTRAL | s.scalars
    scalars = torch.tensor([values[name] for name in SCALARS])
    noise = torch.rand(s.batch, s.rows, generator=g)
    allow = (torch.rand(*shape, generator=g) < 0.5) if s.allow else None
    close = torch.full((s.batch,), s.close)
    return (
        logits, counts, row0, close, scalars, draft, torch.tensor(s.running), noise, allow,
        MASK, list(s.stops), s.think,
    )  # fmt: skip


def _case(name: str, s: Sizes) -> Case:
    return Case(name, partial(inputs, s))


def _greedy() -> Iterator[Case]:
    yield _case("plain", Sizes())
    yield _case("plain-uncounted", Sizes(counted=False, draft=(-1,), close=False))
    yield _case("one-row", Sizes(rows=1))
    yield _case("rows-33", Sizes(rows=33, batch=2))
    yield _case("mask-best", Sizes(bad=(2, MASK, 50.0)))
    yield _case("ties", Sizes(levels=2))
    yield _case("all-equal", Sizes(levels=1))
    yield _case("wide", Sizes(spread=60.0))
    for name in PENALTIES:
        yield _case(name, Sizes(scalars={name: PENALTIES[name]}))
    yield _case("penalties", Sizes(scalars=PENALTIES, batch=2))
    yield _case("penalties-uncounted", Sizes(scalars=PENALTIES, counted=False))
    yield _case("ramps", Sizes(scalars=RAMPS))
    yield _case("ramps-closed", Sizes(scalars=RAMPS, close=False))
    yield _case("ramps-window-0", Sizes(scalars=RAMPS | {"length_penalty_window": 0.0}))
    yield _case("ramps-no-think", Sizes(scalars=RAMPS, think=-1, stops=()))
    yield _case("all", Sizes(rows=9, scalars=PENALTIES | RAMPS, levels=4))
    yield _case("allow", Sizes(scalars=PENALTIES | RAMPS, allow=True))


def _running() -> Iterator[Case]:
    every = PENALTIES | RAMPS
    yield _case("running", Sizes(scalars=every, running=True))
    yield _case("running-uncounted", Sizes(scalars=every, running=True, counted=False))
    yield _case("running-repeats", Sizes(rows=9, scalars=every, running=True, draft=(3, 3, 8, -1)))
    yield _case("running-think", Sizes(rows=9, scalars=RAMPS, running=True, draft=(1, THINK, 4)))
    yield _case("running-think-first", Sizes(scalars=RAMPS, running=True, draft=(THINK, -1)))
    yield _case("running-one", Sizes(rows=1, scalars=every, running=True))
    yield _case("running-no-think", Sizes(scalars=every, running=True, think=-1, draft=(-1, 4)))


def _bad() -> Iterator[Case]:
    nan, inf = float("nan"), float("inf")
    yield _case("nan", Sizes(bad=(1, 11, nan)))
    yield _case("nan-first", Sizes(bad=(0, 0, nan)))
    yield _case("nan-mask", Sizes(bad=(3, MASK, nan)))
    yield _case("nan-all-on", Sizes(bad=(4, 39, nan), scalars=PENALTIES | RAMPS, running=True))
    yield _case("nan-forbidden", Sizes(bad=(2, 6, nan), allow=True))
    yield _case("minus-infinity", Sizes(bad=(1, 11, -inf)))


def _draws() -> Iterator[Case]:
    for temperature in (0.1, 1.0, 3.0):
        yield _case(f"draw-{temperature}", Sizes(scalars={"temperature": temperature}))
    yield _case("draw-top-k", Sizes(rows=9, scalars={"temperature": 2.0, "top_k": 3.0}))
    yield _case(
        "draw-top-k-ties", Sizes(rows=9, levels=3, scalars={"temperature": 2.0, "top_k": 2.0})
    )
    yield _case("draw-top-k-1", Sizes(scalars={"temperature": 5.0, "top_k": 1.0}))
    yield _case("draw-top-k-most", Sizes(scalars={"temperature": 5.0, "top_k": 1e6}))
    yield _case("draw-top-p", Sizes(rows=9, scalars={"temperature": 2.0, "top_p": 0.5}))
    yield _case("draw-top-p-0", Sizes(scalars={"temperature": 2.0, "top_p": 0.0}))
    both = {"temperature": 1.5, "top_k": 12.0, "top_p": 0.8}
    yield _case("draw-both", Sizes(rows=9, batch=2, scalars=both | PENALTIES | RAMPS, running=True))


def _long_draws() -> Iterator[Case]:
    """A vocabulary of which only the largest logits are sorted first, and draws beyond those."""
    for spread in (0.1, 1.0, 8.0):
        sizes = Sizes(rows=40, vocab=3000, spread=spread)
        yield _case(f"long-{spread}", replace(sizes, scalars={"temperature": 1.0}))
        for top_p in (0.2, 0.9):
            scalars = {"temperature": 1.0, "top_p": top_p}
            yield _case(f"long-{spread}-top-p-{top_p}", replace(sizes, scalars=scalars))
    for top_k in (1, 50, 1023, 1024, 1025, 2999):
        scalars = {"temperature": 3.0, "top_k": float(top_k), "top_p": 0.95}
        yield _case(f"long-top-k-{top_k}", Sizes(rows=20, vocab=3000, scalars=scalars))
    ties = Sizes(rows=20, vocab=3000, levels=2, scalars={"temperature": 2.0, "top_k": 5.0})
    yield _case("long-ties-past-the-list", ties)
    yield _case("long-batch", Sizes(batch=2, vocab=2500, scalars={"temperature": 1.5} | PENALTIES))


def cases() -> Iterator[Case]:
    """Greedy choice with and without each setting, ties, running drafts, bad numbers and draws."""
    yield from _greedy()
    yield from _running()
    yield from _bad()
    yield from _draws()
    yield from _long_draws()


SPEC = FusedOp(
    "pick",
    pick,
    ("ids", "confidence", "p_draft", "entropy"),
    cases,
    onnx="clover_compile.kernels.pick.onnx_function:function",
    plan="clover_compile.kernels.pick.plan:plan",
    symbols=by_row("logits", "draft", "noise", "allow"),
    wide=frozenset(("logits", "scalars", "noise")),
)
