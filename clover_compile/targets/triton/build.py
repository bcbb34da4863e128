"""The `triton-*` targets: a program per Unit, precompiled kernels for one GPU, one weight store."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

from clover_compile.errors import KernelsOverBudget
from clover_compile.kernels.architecture import ARCHITECTURES, Architecture
from clover_compile.kernels.budget import budget_of
from clover_compile.kernels.compiled import Compiled, compile_launch, key, operands, signature
from clover_compile.passes.base import Pass
from clover_compile.runtime import cuda_driver
from clover_compile.runtime.launch_plan import Launch, Plan, Variant
from clover_compile.runtime.unit_program import UnitProgram
from clover_compile.targets.base import Emitted, Target
from clover_compile.targets.triton.join import JoinWriteGate
from clover_compile.targets.triton.lowering import Lowered, Lowering
from clover_compile.targets.triton.store import write_store
from clover_compile.unit import Source, Unit

PLANS, KERNELS = "plans.json", "kernels.json"
ORDER = ("verify", "replay", "commit", "preview", "pick")
"""A replay reads the tapes where its verify left them."""


@dataclass(frozen=True)
class Job:
    """One kernel to compile."""

    plan: Plan
    variant: Variant
    launch: Launch
    capability: int


class TritonTarget(Target):
    """Programs and kernels for one architecture."""

    engine: ClassVar[str] = "triton"
    tail: ClassVar[tuple[Pass, ...]] = (JoinWriteGate(),)

    def __init__(self, gpu: str) -> None:
        self.gpu: Architecture = ARCHITECTURES[gpu]
        self.name = f"triton-{gpu}"

    def cannot_run(self) -> str | None:
        """Why the bundle cannot be proved on this machine, or None."""
        needs = f"needs an NVIDIA GPU of compute capability {self.gpu.capability / 10:.1f}"
        if cuda_driver.device_count() == 0:
            return f"{needs} ({self.gpu.name}); this machine has none"
        here = cuda_driver.capability()
        if here != self.gpu.capability:
            return f"{needs} ({self.gpu.name}); this machine has {here / 10:.1f}"
        return None

    def emit(self, units: Mapping[str, Unit], source: Source, folder: Path) -> Emitted:
        """Writes <unit>.json, plans.json, kernels and the weight store."""
        lowered: dict[str, Lowered] = {}
        for name in (n for n in ORDER if n in units):
            verify = lowered["verify"].program if name == "replay" else None
            lowered[name] = Lowering(units[name], self.gpu.capability, plan_key, verify).lower()
        plans = {k: plan for one in lowered.values() for k, plan in one.plans.items()}
        names = self._compile(plans, folder)
        for name, one in lowered.items():
            _write(folder / f"{name}.json", one.program.to_json())
        described = {k: {**plan.to_json(), "kernels": names[k]} for k, plan in plans.items()}
        _write(folder / PLANS, described)
        weights = write_store(folder, units, lowered, source)
        return Emitted(
            units={name: _entry(name, units[name], one) for name, one in lowered.items()},
            ops={name: self._ops(one, plans) for name, one in lowered.items()},
            weights=weights,
            built_with={p: version(p) for p in ("triton", "numpy")},
            accepts={"numpy": ">=2,<3"},
        )

    def _compile(self, plans: Mapping[str, Plan], folder: Path) -> dict[str, list[list[str]]]:
        """Compiles every kernel once; returns plan -> variant -> kernel keys in launch order."""
        jobs: dict[str, Job] = {}
        names: dict[str, list[list[str]]] = {}
        for plan_name, plan in plans.items():
            names[plan_name] = []
            for variant in plan.variants:
                arrays = operands(plan, variant)
                row = [key(x, arrays, self.gpu.capability) for x in variant.launches]
                names[plan_name].append(row)
                made = zip(row, variant.launches, strict=True)
                jobs |= {k: Job(plan, variant, x, self.gpu.capability) for k, x in made}
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
            compiled = dict(zip(jobs, pool.map(_compile_job, jobs.values()), strict=True))
        self._write_kernels(jobs, compiled, folder)
        return names

    def _write_kernels(
        self, jobs: Mapping[str, Job], compiled: Mapping[str, Compiled], folder: Path
    ) -> None:
        """Cubin and PTX of each kernel, and one table of what launching them takes."""
        (folder / "kernels").mkdir()
        table, faults = {}, list[str]()
        for name, made in compiled.items():
            job, usage = jobs[name], made.usage()
            faults += budget_of(job.launch.kernel).faults(made, usage)
            (folder / "kernels" / f"{name}.cubin").write_bytes(made.cubin)
            (folder / "kernels" / f"{name}.ptx").write_text(made.ptx)
            types = signature(job.launch, operands(job.plan, job.variant))
            table[name] = {
                "function": job.launch.kernel.split(":")[1],
                "parameters": [p for p, kind in types.items() if kind != "constexpr"],
                "warps": made.warps, "shared": made.shared, "registers": usage.registers,
                "instructions": usage.instructions, "stack": usage.stack,
                "sha256": hashlib.sha256(made.cubin).hexdigest(),
            }  # fmt: skip
        if faults:
            raise KernelsOverBudget(target=self.name, faults="; ".join(faults))
        _write(folder / KERNELS, {"capability": self.gpu.capability, "kernels": table})

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


def plan_key(plan: Plan) -> str:
    """Name of a plan in plans.json: equal exactly where the plan is."""
    text = json.dumps(plan.to_json(), sort_keys=True)
    return f"{plan.op}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _compile_job(job: Job) -> Compiled:
    return compile_launch(job.plan, job.variant, job.launch, job.capability)


def _entry(name: str, unit: Unit, one: Lowered) -> dict[str, Any]:
    program: UnitProgram = one.program
    stored = {str(b.weight) for b in program.buffers.values() if b.kind == "weight"}
    return {
        "file": f"{name}.json", "inputs": list(unit.inputs), "outputs": list(unit.outputs),
        "weights": sorted(stored),
    }  # fmt: skip


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
