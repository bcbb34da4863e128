"""What a build can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clover_compile.errors import ContextTooLong
from clover_compile.model.config import ModelConfig

DEFAULT_TARGET = "ort-cpu"

TARGETS_OWN = "default"
"""A dtype: the first that the target takes."""


@dataclass(frozen=True)
class BuildOptions:
    """The options of `clover-compile build`; a new one needs a test that fails without it."""

    model: Path
    output: Path
    target: str = DEFAULT_TARGET
    dtype: str = TARGETS_OWN
    """Precision of the weights."""
    context: int | None = None
    """Most rows a sequence may reach; None takes the model's own limit."""
    force: bool = False
    dump_passes: Path | None = None


def context_of(options: BuildOptions, config: ModelConfig) -> int:
    """The context a bundle will have; raises ContextTooLong."""
    limit = config.max_position_embeddings
    context = limit if options.context is None else options.context
    if not config.block_size < context <= limit:
        raise ContextTooLong(context=context, block=config.block_size, limit=limit)
    return context
