"""What a build can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_TARGET = "ort-cpu"


@dataclass(frozen=True)
class BuildOptions:
    """The options of `clover-compile build`; a new one needs a test that fails without it."""

    model: Path
    output: Path
    target: str = DEFAULT_TARGET
    dtype: str = "fp32"
    context: int | None = None
    """Most rows a sequence may reach; None takes the model's own limit."""
    force: bool = False
    dump_passes: Path | None = None
