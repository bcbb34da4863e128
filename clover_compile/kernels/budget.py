"""Static limits of compiled kernels, and the bytes a call must move at least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from math import prod

from clover_compile.kernels.architecture import shared_limit
from clover_compile.kernels.compiled import Compiled, Usage, function
from clover_compile.runtime.launch_plan import ITEMSIZE, Operand, Plan
from clover_compile.runtime.launcher import resolve

MATRIX = {80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
"""The matrix instruction of 16-bit operands each compute capability is fastest with."""

SET_ON = "3.7"
"""The Triton whose code the budgets were set on. Another one allocates registers its own way: what
it makes may cost more, and runs."""

TENSOR_MEMORY = 512
"""Columns of tensor memory of an sm_100 multiprocessor."""


@dataclass(frozen=True)
class Budget:
    """What one kernel may cost in every variant; spills, stack and local memory are never allowed.

    required: opcode that must be there, by compute capability (see MATRIX); a capability that is
    not named requires nothing.
    """

    registers: int
    required: Mapping[int, str] = field(default_factory=dict)
    ffma: int = 4000
    """FFMA instructions at most: an fp32 dot that missed the matrix units shows here."""

    def faults(self, compiled: Compiled, usage: Usage) -> Iterator[str]:
        """Everything a compiled kernel breaks, by name."""
        broken, over = self.judge(compiled, usage)
        yield from broken + over

    def judge(self, compiled: Compiled, usage: Usage) -> tuple[list[str], list[str]]:
        """Why a compiled kernel could not run, and where it costs more than its budget."""
        broken = [f"{compiled.key}: {fault}" for fault in _broken(compiled)]
        return broken, [f"{compiled.key}: {fault}" for fault in self._over(compiled, usage)]

    def _over(self, compiled: Compiled, usage: Usage) -> Iterator[str]:
        if usage.registers > self.registers:
            yield f"{usage.registers} registers, at most {self.registers}"
        for what, count in (("stack", usage.stack), ("local memory", usage.local)):
            if count:
                yield f"{count} B of {what}, none allowed"
        for opcode in ("LDL", "STL"):
            if usage.opcodes.get(opcode):
                yield f"{usage.opcodes[opcode]} {opcode}, none allowed"
        if usage.opcodes.get("FFMA", 0) > self.ffma:
            yield f"{usage.opcodes['FFMA']} FFMA, at most {self.ffma}"
        needed = self.required.get(compiled.capability)
        if needed and not usage.opcodes.get(needed):
            yield f"no {needed}, which its matrix products must use"


def _broken(compiled: Compiled) -> Iterator[str]:
    limit = shared_limit(compiled.capability)
    if compiled.shared > limit:
        yield f"{compiled.shared} B of shared memory, at most {limit}"
    if compiled.tensor_memory > TENSOR_MEMORY:
        # The compiler does not complain: it makes a kernel that only traps.
        yield f"{compiled.tensor_memory} columns of tensor memory, at most {TENSOR_MEMORY}"
    if compiled.scratch:
        yield f"{compiled.scratch} B of global scratch, none is passed"


def binding() -> bool:
    """Whether budgets are to be kept by the Triton that is installed."""
    return version("triton").startswith(f"{SET_ON}.")


def budget_of(kernel: str) -> Budget:
    """The budget that plan.py states beside the kernel "module:function"; KeyError if none."""
    module, name = kernel.split(":")
    budgets: Mapping[str, Budget] = function(f"{module.removesuffix('kernel')}plan:BUDGETS")
    return budgets[name]


def byte_floor(
    plan: Plan, symbols: Mapping[str, int], read: Mapping[str, float] | None = None
) -> int:
    """Bytes the op must read and write at least, each array once.

    read: input -> the share of it that is needed (1): experts kept, the valid part of a prefix.
    """
    call = resolve(plan, symbols)

    def size(operand: Operand) -> int:
        return prod(call.shape(operand)) * ITEMSIZE[operand.dtype]

    inputs = {name: x for name, x in plan.inputs.items() if x is not None}
    shares = {name: (read or {}).get(name, 1.0) for name in inputs}
    needed = sum(round(size(x) * shares[name]) for name, x in inputs.items())
    return needed + sum(size(x) for x in plan.outputs.values())


def share_used(plan: Plan, rows: int, experts: int) -> dict[str, float]:
    """Input -> the share of it that `rows` rows need which use `experts` experts, for `byte_floor`.

    Experts nobody uses and rows of the embedding's table nobody asks for need not be moved.
    """
    if plan.op == "embedding":
        return {"weight": min(1.0, rows / _first(plan, "weight"))}
    if not plan.op.startswith("moe"):
        return {}
    stacks = [n for n in ("gate_up", "down", "gate_up_scale", "down_scale") if n in plan.inputs]
    return {name: min(1.0, experts / _first(plan, name)) for name in stacks}


def _first(plan: Plan, name: str) -> int:
    operand = plan.inputs[name]
    assert operand is not None
    return int(operand.shape[0])
