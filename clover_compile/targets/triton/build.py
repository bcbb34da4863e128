"""The `triton-*` targets: a program per Unit, precompiled kernels for one GPU, one weight store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from clover_compile.kernels.architecture import ARCHITECTURES, Architecture
from clover_compile.kernels.costs import GAP
from clover_compile.passes.base import Pass
from clover_compile.runtime.gpu_needs import GpuNeeds
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.unit_program import UnitProgram
from clover_compile.targets.base import Emitted, Say, Target
from clover_compile.targets.cubins import compile_plans, driver, plan_key
from clover_compile.targets.triton import static
from clover_compile.targets.triton.join import JoinWriteGate
from clover_compile.targets.triton.lowering import Lowered, Lowering
from clover_compile.targets.triton.quantise import Quantise
from clover_compile.targets.triton.store import write_store
from clover_compile.unit import Source, Unit

PLANS, KERNELS = "plans.json", "kernels.json"
ORDER = ("verify", "replay", "commit", "preview", "pick")
"""A replay reads the tapes where its verify left them."""

NOTE = (
    "counted and modelled, nothing ran: bytes that must move at least, over the memory's published "
    f"bandwidth, and {GAP * 1e6:.0f} us for each launch"
)


class TritonTarget(Target):
    """Programs and kernels for one architecture."""

    engine: ClassVar[str] = "triton"
    tail: ClassVar[tuple[Pass, ...]] = (JoinWriteGate(),)

    def __init__(self, gpu: str) -> None:
        self.gpu: Architecture = ARCHITECTURES[gpu]
        self.name = f"triton-{gpu}"

    def passes(self, dtype: str) -> tuple[Pass, ...]:
        """The write gate joined, and fp8 where asked for."""
        return (*self.tail, Quantise()) if dtype == "fp8" else self.tail

    def cannot_run(self) -> str | None:
        """Why the bundle cannot be proved on this machine, or None."""
        capability = self.gpu.capability
        return GpuNeeds(self.name, capability, driver(capability), held=0).reason()

    def emit(
        self, units: Mapping[str, Unit], source: Source, folder: Path, context: int, say: Say
    ) -> Emitted:  # fmt: skip
        """Writes <unit>.json, plans.json, kernels and the weight store."""
        lowered: dict[str, Lowered] = {}
        for name in (n for n in ORDER if n in units):
            verify = lowered["verify"].program if name == "replay" else None
            lowered[name] = Lowering(units[name], self.gpu.capability, plan_key, verify).lower()
        plans = {k: plan for one in lowered.values() for k, plan in one.plans.items()}
        cubins = compile_plans(plans, self.gpu.capability, self.name, say)
        (folder / "kernels").mkdir()
        cubins.write(folder / "kernels")
        _write(folder / KERNELS, cubins.table())
        for name, one in lowered.items():
            _write(folder / f"{name}.json", one.program.to_json())
        described = {k: {**plan.to_json(), "kernels": cubins.keys[k]} for k, plan in plans.items()}
        _write(folder / PLANS, described)
        weights, quantisation = write_store(folder, units, lowered, source)
        return Emitted(
            units={name: _entry(name, units[name], one) for name, one in lowered.items()},
            ops={name: self._ops(one, plans) for name, one in lowered.items()},
            weights=weights,
            quantisation=quantisation,
            built_with={p: version(p) for p in ("triton", "numpy")},
            accepts={"numpy": ">=2,<3"},
            static={
                "note": NOTE,
                "kernels": cubins.summary(),
                "passes": static.table({k: x.program for k, x in lowered.items()}, plans, self.gpu),
            },
        )

    def _ops(self, one: Lowered, plans: Mapping[str, Plan]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for step in one.program.steps:
            plan = plans[step.plan]
            row = found.setdefault(plan.op, {"count": 0, "functions": [], "reason": ""})
            row["count"] += 1
            launched = {x.kernel.split(":")[1] for v in plan.variants for x in v.launches}
            row["functions"] = sorted({*row["functions"], *launched})
            row["provider"] = "Triton " + ", ".join(row["functions"])
        return found


def _entry(name: str, unit: Unit, one: Lowered) -> dict[str, Any]:
    program: UnitProgram = one.program
    stored = {str(b.weight) for b in program.buffers.values() if b.kind == "weight"}
    return {
        "file": f"{name}.json", "inputs": list(unit.inputs), "outputs": list(unit.outputs),
        "weights": sorted(stored),
    }  # fmt: skip


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
