"""What `clover-compile profile` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProfileOptions:
    """Where, against what, on what, and how often."""

    bundle: Path
    model: str | None = None
    against: str | None = None
    """Another bundle, or `eager`."""
    messages: Path | None = None
    answers: int = 20
    max_new_tokens: int = 256
    rounds: int = 9
    threads: int | None = None
    output: Path | None = None
    allow_native: bool = False
