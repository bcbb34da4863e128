"""What a target is: the compiler half of one kind of bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from clover_compile.passes.base import Pass
from clover_compile.unit import Source, Unit

Say = Callable[[str], None]
"""Takes one line of progress."""


@dataclass
class Emitted:
    """What a target wrote into a bundle folder, in the manifest's own terms."""

    units: dict[str, dict[str, Any]]
    """Unit -> {file, inputs, outputs}."""
    ops: dict[str, dict[str, Any]]
    """Unit -> op -> {count, provider, reason}."""
    weights: dict[str, dict[str, Any]]
    """Stored tensor -> {file, offset, shape, dtype}."""
    built_with: dict[str, str] = field(default_factory=dict)
    accepts: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    """What an engine that is built in a second step takes: see targets/trt/build.py."""
    quantisation: dict[str, Any] = field(default_factory=dict)
    """What rounding did to the weights, by group; empty where they are as in the checkpoint."""
    static: dict[str, Any] = field(default_factory=dict)
    """What passes cost by count: {note, passes}, see targets/triton/static.py; may be empty."""


class Target:
    """One target; stateless."""

    name: str
    engine: ClassVar[str]
    """Key of the runner's engine table."""
    tail: ClassVar[tuple[Pass, ...]] = ()
    """Passes appended to the pipeline whatever the precision."""
    requirements: ClassVar[tuple[str, ...]] = ()
    """What the runner needs beside numpy, tokenizers, jinja2 and safetensors."""

    def passes(self, dtype: str) -> tuple[Pass, ...]:
        """Passes appended to the pipeline for weights of this precision."""
        return self.tail

    def cannot_run(self) -> str | None:
        """Why a bundle cannot be run, and so not be proved, on this machine; None if it can."""
        return None

    def emit(
        self, units: Mapping[str, Unit], source: Source, folder: Path, context: int, say: Say
    ) -> Emitted:  # fmt: skip
        """Lowers the fused Units and writes unit files and weights into `folder`.

        context: most rows a sequence may reach. `say` gets a line now and then where that takes
        long.
        """
        raise NotImplementedError
