"""Launch plan of clover::pick."""

from __future__ import annotations

from clover_compile.kernels.budget import Budget
from clover_compile.kernels.call import Call
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

BUDGETS = {"scan_columns": Budget(registers=104, ffma=64), "choose": Budget(registers=208, ffma=64)}

SCAN_TILE, DRAW_TILE = 2048, 1024
"""Columns per program of the scan; columns per step of a draw."""

MOST_ROWS = 256
"""Rows of a call at most: the drafts before a row are compared as one vector."""

ARRAYS = (
    "logits", "counts", "row0", "close_open", "scalars", "draft", "running", "allow",
)  # fmt: skip
PARTS = ("top", "best", "mass", "moment", "draft_logit")
RESULTS = ("ids", "confidence", "p_draft", "entropy")


def packed(ids: list[int]) -> int:
    """Ids as one number, 32 bits each, the first lowest."""
    return sum(one << (32 * i) for i, one in enumerate(ids))


def plan(call: Call) -> Plan:
    """Two launches: every row's tiles of columns, then a program per row."""
    rows, columns = call.array("logits").shape[1], call.dim("logits", 2)
    tile = min(SCAN_TILE, power_of_two(columns))
    splits = -(-columns // tile)
    allowed = call.arrays["allow"] is not None
    constants = {
        "columns": columns, "stride": call.stride("logits"),
        "allow_stride": call.stride("allow") if allowed else 0,
        "mask_id": call.scalars["mask_id"], "stop_ids": packed(call.scalars["stop_ids"]),
        "stops": len(call.scalars["stop_ids"]), "think_end_id": call.scalars["think_end_id"],
        "drafts": MOST_ROWS, "splits": splits,
    } | ({} if allowed else {"allow": None})  # fmt: skip
    given = [name for name in ARRAYS if name != "allow" or allowed]
    scan = Launch(
        "clover_compile.kernels.pick.kernel:scan_columns", (rows, splits, 1),
        {name: name for name in (*given, *PARTS)}, constants | {"tile": tile}, warps=4, stages=1,
    )  # fmt: skip
    choose = Launch(
        "clover_compile.kernels.pick.kernel:choose", (rows, 1, 1),
        {name: name for name in (*given, "noise", *PARTS, *RESULTS)},
        constants | {"tile": min(DRAW_TILE, tile), "padded": power_of_two(splits)},
        warps=8, stages=1,
    )  # fmt: skip
    parts = {name: Operand("fp32", (1, rows, splits)) for name in PARTS}
    parts |= {"best": Operand("i32", (1, rows, splits)), "draft_logit": Operand("fp32", (1, rows))}
    outputs = {name: Operand("fp32", (1, rows)) for name in RESULTS}
    outputs["ids"] = Operand("i64", (1, rows))
    variant = Variant(f"{rows} <= {MOST_ROWS}", (scan, choose), parts)
    return Plan(call.op, dict(call.arrays), outputs, (variant,))
