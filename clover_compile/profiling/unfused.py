"""The same Units before the fusion passes, for the same engine: what the fusions are worth."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from clover_compile.checkpoint import Checkpoint
from clover_compile.model.load import load_model
from clover_compile.passes.base import run_passes
from clover_compile.passes.clean_up import CleanUp
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.ort_engine import OrtEngine
from clover_compile.targets.ort_cpu.build import OrtCpu
from clover_compile.targets.ort_cpu.lowering import INLINE_LIMIT, lower
from clover_compile.unit import source_of, trace_unit

PASSES = (CleanUp(),)
"""What a trace needs before it can be lowered at all; no fusion, no folding, no joining."""

ID_BYTES = 8
"""Bytes of constants that an unfused `pick` has for every id."""


def lowerable(checkpoint: Checkpoint, units: Iterable[str]) -> tuple[str, ...]:
    """The Units whose unfused graph can be lowered: an unfused `pick` spells lists of all ids as
    constants, and a file may not hold many of those.
    """
    small = ID_BYTES * checkpoint.config.vocab_size <= INLINE_LIMIT
    return tuple(unit for unit in units if unit != "pick" or small)


class Unfused:
    """An engine over unfused Units in a folder of its own, gone with `close`.

    The two opaque primitives, the delta rule and the routed experts, are lowered as in the fused
    Units. `regions` tells, by Unit, which node a fusion would replace by which op.
    """

    def __init__(
        self, checkpoint: Checkpoint, units: Iterable[str], threads: int, say: Callable[[str], None]
    ) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="clover-unfused-")
        self.folder = Path(self._held.name)
        self.units = lowerable(checkpoint, units)
        try:
            model = load_model(checkpoint.config, checkpoint.tensor)
            traced = {}
            for name in self.units:
                say(f"tracing {name} without fusions")
                traced[name] = trace_unit(model, checkpoint.generation, name)
                run_passes(traced[name], PASSES, lambda event: None)
            say("lowering and opening the graphs without fusions")
            source = source_of(dict(model.named_parameters()))
            lowered = {name: lower(unit) for name, unit in traced.items()}
            self.regions = {name: one.regions for name, one in lowered.items()}
            emitted = OrtCpu().write(lowered, traced, source, self.folder)
            manifest = {"units": emitted.units, "weights": emitted.weights}
            self.checked = Checked(self.folder, "", manifest, {})
            self.engine = OrtEngine(self.checked, threads)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes the folder."""
        self._held.cleanup()
