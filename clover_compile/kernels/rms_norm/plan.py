"""Launch plan of clover::rms_norm."""

from __future__ import annotations

from clover_compile.kernels.budget import Budget
from clover_compile.kernels.call import Call
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

BUDGETS = {"add_norm": Budget(registers=40)}


def plan(call: Call) -> Plan:
    """One launch, a program per row."""
    x, width = call.array("x"), call.dim("x", 2)
    rows = x.shape[1]
    residual = call.arrays["residual"]
    arguments = {"x": "x", "weight": "weight", "normed": "normed"}
    constants: dict[str, int | float | None] = {
        "width": width, "x_stride": call.stride("x"), "residual_stride": 0,
        "eps": call.scalars["eps"], "columns": power_of_two(width),
    }  # fmt: skip
    outputs = {"normed": Operand(x.dtype, x.shape)}
    if residual is None:
        constants["residual"] = None
    else:
        arguments["residual"] = "residual"
        constants["residual_stride"] = call.stride("residual")
    if "total" in call.outputs:
        arguments["total"] = "total"
        outputs["total"] = Operand(x.dtype, x.shape)
    else:
        constants["total"] = None
    launch = Launch(
        "clover_compile.kernels.rms_norm.kernel:add_norm", (rows, 1, 1), arguments, constants,
        warps=4 if width <= 4096 else 8, stages=1,
    )  # fmt: skip
    return Plan(call.op, dict(call.arrays), outputs, (Variant("1", (launch,)),))
