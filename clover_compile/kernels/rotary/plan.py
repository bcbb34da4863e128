"""Launch plan of the rotary angles."""

from __future__ import annotations

from clover_compile.kernels.budget import Budget
from clover_compile.kernels.call import Call
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

BUDGETS = {"angles": Budget(registers=64)}


def plan(call: Call) -> Plan:
    """One launch, a program per row."""
    rows, half = call.array("ids").shape[1], call.dim("turns", 0)
    launch = Launch(
        "clover_compile.kernels.rotary.kernel:angles", (rows, 1, 1),
        {"length": "length", "turns": "turns", "cosine": "cos", "sine": "sin"},
        {"half": half, "columns": power_of_two(half)}, warps=1, stages=1,
    )  # fmt: skip
    out = Operand("fp32", (1, rows, half))
    return Plan(call.op, dict(call.arrays), {"cos": out, "sin": out}, (Variant("1", (launch,)),))
