"""What a decode loop tells its observer after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One pass over a block, one causal token, one guess of drafts, or one verified round."""

    kind: str
    """`denoise`, `causal`, `draft` (a guess: none is fixed) or `verify` (what was kept)."""
    start: int
    """Response tokens before this block or round."""
    turn: int
    """Pass number within the block, from 0; for `draft` and `verify` the round, from 1."""
    ids: tuple[int, ...]
    """The block's ids after the step (mask id where open), the drafts, or what a round emitted."""
    fixed: tuple[bool, ...]
    """Which of them will not change any more."""
    confidence: tuple[float, ...]
    """Probability of each row's choice in this step."""


OnStep = Callable[[Step], None]
