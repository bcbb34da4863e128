"""What a decode loop tells its observer after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One pass over a block, one causal token, or one round of drafts."""

    kind: str
    """`denoise`, `causal` or `speculate`."""
    start: int
    """Response tokens before this block or round."""
    turn: int
    """Pass number within the block, or number of the round; from 0."""
    ids: tuple[int, ...]
    """The block's ids after the step (mask id where open), or the tokens of the round."""
    fixed: tuple[bool, ...]
    """Which of them will not change any more."""
    confidence: tuple[float, ...]
    """Probability of each row's choice in this step."""


OnStep = Callable[[Step], None]
