"""Launch plan of clover::gdn_preview."""

from __future__ import annotations

from clover_compile.kernels.budget import MATRIX, Budget
from clover_compile.kernels.call import Call, UnplannedCall
from clover_compile.kernels.gdn_preview.reference import CALIBRATION_ROWS
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

BUDGETS = {"preview_head": Budget(registers=248, required={90: MATRIX[90]}, ffma=400)}

WIDE_TILES = (("n <= 64", 16, 32), ("1", 32, 32))
TILES = (("1", 16, 16),)
"""Guard, rows per program, keys per step. Few rows, so that a block of 32 fills 64 SMs; wider tiles
where the history's product reads shared memory (WIDE), for elsewhere they spill."""

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
    variants = []
    wide = call.capability in (90, 100)
    for guard, row_tile, key_tile in WIDE_TILES if wide else TILES:
        launch = Launch(
            "clover_compile.kernels.gdn_preview.kernel:preview_head",
            (heads, f"cdiv({rows}, {row_tile})", 1), {name: name for name in (*ARRAYS, "y")},
            constants | {"row_tile": row_tile, "key_tile": key_tile}, {"n": rows},
            warps=8, stages=1,
        )  # fmt: skip
        variants.append(Variant(guard, (launch,)))
    return Plan(call.op, dict(call.arrays), {"y": Operand(z.dtype, z.shape)}, tuple(variants))
