"""Compiles every kernel that some launch plans name for one GPU, and judges what each costs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from clover_compile.errors import KernelsOverBudget
from clover_compile.kernels import release
from clover_compile.kernels.budget import SET_ON, binding, budget_of
from clover_compile.kernels.compiled import (
    Compiled,
    Usage,
    assembler,
    compile_launch,
    key,
    operands,
    signature,
)
from clover_compile.runtime.launch_plan import Launch, Plan, Variant
from clover_compile.targets.base import Say


@dataclass(frozen=True)
class Job:
    """One kernel to compile."""

    plan: Plan
    variant: Variant
    launch: Launch
    capability: int

    @property
    def key(self) -> str:
        """Name of the kernel: equal exactly where its code is."""
        return key(self.launch, operands(self.plan, self.variant), self.capability)


@dataclass
class Cubins:
    """The kernels of a bundle for one compute capability."""

    capability: int
    keys: dict[str, list[list[str]]]
    """Plan -> variant -> kernel keys in launch order."""
    compiled: dict[str, Compiled]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Kernel -> what launching it takes and what it costs; see `_row`."""

    def write(self, folder: Path) -> None:
        """Writes <key>.cubin and <key>.ptx of every kernel into `folder`, which must exist."""
        for name, made in self.compiled.items():
            (folder / f"{name}.cubin").write_bytes(made.cubin)
            (folder / f"{name}.ptx").write_text(made.ptx)

    def table(self) -> dict[str, Any]:
        """What a session needs to launch them, as JSON values."""
        return {
            "capability": self.capability, "assembler": assembler(self.capability),
            "driver": driver(self.capability), "kernels": self.rows,
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The worst of all kernels, and how many miss the released model's budgets."""
        worst = {k: max(row[k] for row in self.rows.values())
                 for k in ("registers", "shared", "stack")}  # fmt: skip
        over = sum(bool(row["over_budget"]) for row in self.rows.values())
        table = self.table()
        count = len(table.pop("kernels"))
        return {**table, "count": count, **worst, "over_budget": over}


def driver(capability: int) -> int:
    """CUDA release times a thousand that a driver must support to load these cubins: drivers read
    what assemblers of their own major release, or an older one, made."""
    return int(assembler(capability).split(".")[0]) * 1000


def plan_key(plan: Plan) -> str:
    """Name of a plan in a bundle: equal exactly where the plan is."""
    text = json.dumps(plan.to_json(), sort_keys=True)
    return f"{plan.op}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def jobs_of(plans: Iterable[Plan], capability: int) -> dict[str, Job]:
    """What must be compiled for these plans, each kernel once, by its key."""
    every = (
        Job(plan, variant, launch, capability)
        for plan in plans
        for variant in plan.variants
        for launch in variant.launches
    )
    return {job.key: job for job in every}


def compile_plans(plans: Mapping[str, Plan], capability: int, target: str, say: Say) -> Cubins:
    """Compiles every kernel once, in as many processes as there are cores.

    Raises KernelsOverBudget for a kernel that could not run, and for one of the released model's
    kernels that costs more than its budget. A kernel of another size, or of another Triton than the
    budgets were set on, that does is told to `say` and noted under `over_budget`: it runs, perhaps
    slowly.
    """
    jobs = jobs_of(plans.values(), capability)
    keys = {
        name: [[Job(plan, v, x, capability).key for x in v.launches] for v in plan.variants]
        for name, plan in plans.items()
    }
    cubins = Cubins(capability, keys, _compile(jobs, say))
    faults, over = list[str](), 0
    for name, job in jobs.items():
        usage = cubins.compiled[name].usage()
        row = _row(job, cubins.compiled[name], usage)
        broken, slow = budget_of(job.launch.kernel).judge(cubins.compiled[name], usage)
        faults += broken
        if is_released(job.plan) and binding():
            faults += slow
        row["over_budget"] = slow
        over += bool(slow)
        cubins.rows[name] = row
    if faults:
        raise KernelsOverBudget(target=target, faults="; ".join(faults))
    if over:
        budget = f"the budget set for the released model's sizes on Triton {SET_ON}"
        say(f"    {over} of {len(jobs)} kernels miss {budget}")
    return cubins


def _compile(jobs: Mapping[str, Job], say: Say) -> dict[str, Compiled]:
    """Kernel -> its code, in the order of `jobs`."""
    made: dict[str, Compiled] = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _deaf) as pool:
        running = {pool.submit(_compile_job, job): name for name, job in jobs.items()}
        try:
            for done in as_completed(running):
                made[running[done]] = done.result()
                if len(made) % 10 == 0 or len(made) == len(jobs):
                    say(f"    {len(made)} of {len(jobs)} kernels compiled")
        except BaseException:
            # Whoever stops a build does not want to wait for the kernels at hand.
            for worker in list((pool._processes or {}).values()):
                worker.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: made[name] for name in jobs}


def _deaf() -> None:
    """A terminal sends Ctrl-C to workers and assemblers too: the build alone answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile_job(job: Job) -> Compiled:
    return compile_launch(job.plan, job.variant, job.launch, job.capability)


def parameters(job: Job) -> list[str]:
    """Kernel parameters that a launch passes, in order; constants are compiled in."""
    types = signature(job.launch, operands(job.plan, job.variant))
    return [name for name, kind in types.items() if kind != "constexpr"]


def _row(job: Job, made: Compiled, usage: Usage) -> dict[str, Any]:
    return {
        "function": job.launch.kernel.split(":")[1],
        "parameters": parameters(job),
        "warps": made.warps, "shared": made.shared, "registers": usage.registers,
        "instructions": usage.instructions, "stack": usage.stack,
        "sha256": hashlib.sha256(made.cubin).hexdigest(),
    }  # fmt: skip


@cache
def _released() -> dict[str, list[dict[str, Any]]]:
    """Op -> the shapes of its inputs at each of its places in the released model."""
    found: dict[str, list[dict[str, Any]]] = {}
    for place in release.places():
        found.setdefault(place.op, []).append(_shapes(place.plan(90)))
    return found


def _shapes(plan: Plan) -> dict[str, Any]:
    return {name: x.shape for name, x in plan.inputs.items() if x is not None}


def is_released(plan: Plan) -> bool:
    """Whether a plan has the sizes of the released model, for which budgets are set.

    An input may be absent (the first norm has no residual); those that are there must fit.
    """
    own = _shapes(plan)
    return any(
        all(place[name] == shape for name, shape in own.items() if name in place)
        for place in _released().get(plan.op, [])
    )
