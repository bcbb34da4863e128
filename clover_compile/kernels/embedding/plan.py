"""Launch plan of the embedding."""

from __future__ import annotations

from clover_compile.kernels.budget import Budget
from clover_compile.kernels.call import Call
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

BUDGETS = {"embed": Budget(registers=32)}
MOST = 1024
"""Columns per program."""


def plan(call: Call) -> Plan:
    """One launch."""
    weight, width = call.array("weight"), call.dim("weight", 1)
    rows = call.array("ids").shape[1]
    columns = min(MOST, power_of_two(width))
    launch = Launch(
        "clover_compile.kernels.embedding.kernel:embed", (rows, -(-width // columns), 1),
        {"ids": "ids", "weight": "weight", "y": "y"}, {"width": width, "columns": columns},
        warps=4, stages=1,
    )  # fmt: skip
    outputs = {"y": Operand(weight.dtype, (1, rows, width))}
    return Plan(call.op, dict(call.arrays), outputs, (Variant("1", (launch,)),))
