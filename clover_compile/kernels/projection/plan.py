"""Launch plan of the matrix products between the fused ops."""

from __future__ import annotations

from clover_compile.kernels.budget import MATRIX, Budget
from clover_compile.kernels.call import Call
from clover_compile.runtime.launch_plan import ITEMSIZE, Launch, Operand, Plan, Variant

KERNELS = "clover_compile.kernels.projection.kernel"

BUDGETS = {
    "project": Budget(registers=176, required=MATRIX, ffma=0),
    "project_narrow": Budget(registers=80, required=dict.fromkeys(MATRIX, "HMMA"), ffma=0),
}

PROGRAMS = 96
"""Programs from which on tiles of 64 outputs are taken; reckoned for 132 SMs, not measured."""


def tile_of_outputs(outputs: int) -> int:
    """64 outputs per program, or fewer where that leaves most SMs idle.

    2048 outputs by 64 are 32 programs: each would have to take in 100 GB/s, about all an SM can. By
    32 they are 64 programs with 40 KB of weights in flight each, which is what 3.35 TB/s need at a
    latency of 0.8 us; by 16, x is read from L2 twice as often for the same weights.
    """
    if -(-outputs // 64) >= PROGRAMS:
        return 64
    return 32 if -(-outputs // 32) >= PROGRAMS // 2 else 16


def plan(call: Call) -> Plan:
    """One launch: tiles of 16, 32 or 64 rows for a block, of 128 for a prompt."""
    x, outputs = call.array("x"), call.dim("weight", 0)
    rows, small = x.shape[1], tile_of_outputs(outputs)
    y = Operand("fp32" if call.scalars["wide"] else x.dtype, (1, rows, outputs))
    # Two tiles of 128 rows, for products that the matrix units bound; a few outputs never are.
    prompt = _launch(call, 128, 128) if outputs >= 1024 else _launch(call, 64, 64)
    variants = (
        Variant(f"{rows} <= 16", (_launch(call, small, 16),)),
        Variant(f"{rows} <= 32", (_launch(call, small, 32),)),
        Variant(f"{rows} <= 256", (_launch(call, small, 64),)),
        Variant("1", (prompt,)),
    )
    return Plan(call.op, dict(call.arrays), {"y": y}, variants)


def _launch(call: Call, tile_m: int, tile_n: int) -> Launch:
    x, outputs = call.array("x"), call.dim("weight", 0)
    rows, width = x.shape[1], call.dim("x", 2)
    tile_k = 128 if tile_n <= 32 else 64
    if call.capability == 120 and tile_n == 32 and "scale" in call.arrays:
        tile_k = 64  # at 128 ptxas spills two registers of fp8 on their way to bf16
    # As many tiles in flight as 96 KB hold, which every architecture grants a block. Where the
    # operands of products are registers (mma.sync) the ring of tiles is one shorter than stages.
    each = tile_m * ITEMSIZE[call.array("weight").dtype] + tile_n * ITEMSIZE[x.dtype]
    held = min(7, 98304 // (each * tile_k))
    stages = held if tile_m >= 64 and call.capability in (90, 100) else held + 1
    constants: dict[str, int | float | bool | str | None] = {
        "width": width, "outputs": outputs, "x_stride": call.stride("x"),
        "tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k,
        "precision": "ieee" if x.dtype == "fp32" else "tf32",
    }  # fmt: skip
    arguments = {name: name for name in ("x", "weight", "y")}
    if "scale" in call.arrays:
        arguments["scale"] = "scale"
    else:
        constants["scale"] = None
    name = "project" if tile_m >= 64 else "project_narrow"
    return Launch(
        f"{KERNELS}:{name}", (f"cdiv({rows}, {tile_n})", -(-outputs // tile_m), 1),
        arguments, constants, {"rows": rows},
        warps=8 if tile_n == 128 else 4, stages=max(2, stages),
    )  # fmt: skip
