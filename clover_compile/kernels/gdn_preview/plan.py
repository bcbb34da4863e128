"""Launch plan of clover::gdn_preview."""

from __future__ import annotations

from clover_compile.kernels.budget import MATRIX, Budget
from clover_compile.kernels.call import Call, UnplannedCall
from clover_compile.kernels.gdn_preview.reference import CALIBRATION_ROWS
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

BUDGETS = {"preview_head": Budget(registers=224, required={90: MATRIX[90]}, ffma=400)}

ROW_TILE = 16
"""Rows per program: few, so that a block of 32 rows fills 64 SMs."""

ARRAYS = (
    "u", "z", "a", "ring", "state", "taps", "decay", "dt_bias", "logit_scale", "history_bias",
    "history_c", "norm",
)  # fmt: skip


def plan(call: Call) -> Plan:
    """One launch: a program per value head and tile of rows."""
    u, z = call.array("u"), call.array("z")
    heads, dk, dv = (call.dim("state", axis) for axis in (1, 2, 3))
    key_heads, kernel = call.scalars["key_heads"], call.dim("ring", 1) + 1
    width = 2 * key_heads * dk + heads * dv
    if call.dim("u", 2) != width or call.dim("taps", 1) != 2 * kernel - 1 or heads % key_heads:
        raise UnplannedCall(f"{call.op}: u, taps, ring, state and key_heads do not fit together")
    rows = u.shape[1]
    constants = {
        "heads": heads, "key_heads": key_heads, "dk": dk, "dv": dv, "kernel": kernel,
        "eps": call.scalars["eps"], "calibration": CALIBRATION_ROWS,
        "u_stride": call.stride("u"), "z_stride": call.stride("z"), "a_stride": call.stride("a"),
        "padded_dk": max(16, power_of_two(dk)), "padded_dv": max(16, power_of_two(dv)),
        "slots": power_of_two(2 * kernel - 1), "exact": u.dtype == "fp32",
    }  # fmt: skip
    # Where the history's product runs from shared memory, registers are left for twice the keys.
    key_tile = 32 if call.capability in (90, 100) else 16
    launch = Launch(
        "clover_compile.kernels.gdn_preview.kernel:preview_head",
        (heads, f"cdiv({rows}, {ROW_TILE})", 1), {name: name for name in (*ARRAYS, "y")},
        constants | {"row_tile": ROW_TILE, "key_tile": key_tile}, {"n": rows}, warps=8, stages=1,
    )  # fmt: skip
    outputs = {"y": Operand(z.dtype, z.shape)}
    return Plan(call.op, dict(call.arrays), outputs, (Variant("1", (launch,)),))
