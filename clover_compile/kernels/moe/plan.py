"""Launch plan of clover::moe."""

from __future__ import annotations

from clover_compile.kernels.architecture import shared_limit
from clover_compile.kernels.budget import MATRIX, Budget
from clover_compile.kernels.call import Call, UnplannedCall
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import ITEMSIZE, Launch, Operand, Plan, Size, Variant

BUDGETS = {
    "gate": Budget(registers=208),
    "group": Budget(registers=208),
    "up": Budget(registers=255, required={90: MATRIX[90]}),
    # 16 rows of the result per program, so that one GPU's programs all have some: too few for the
    # warp-group instructions. The weights set the pace here, not the products.
    "down": Budget(registers=255, required={90: "HMMA"}),
}

MODULE = "clover_compile.kernels.moe.kernel"

BLOCKS = (16, 32, 64)
"""Most rows of the variants whose rows are masked, not sorted by expert."""

CHUNK, SLOTS = 256, 16
"""Longer calls: rows that share a pass over the weights, and rows of one tile of an expert."""

GATE_ROWS = 16
"""Rows that a program of `gate` or `group` holds at a time."""

SPREAD = 64
"""Programs along the list of entries: more entries share them, fewer leave some idle."""

UP_TILE, UP_STEP = 32, 128
DOWN_TILE, DOWN_STEP = 16, 256

SCATTER_BYTES = 16384
"""Shared memory that scattering a tile's rows takes beside the pipeline's buffers."""

Constants = dict[str, int | float | bool | str | None]


def plan(call: Call) -> Plan:
    """Three launches for at most 64 rows; four for more."""
    x = call.array("x")
    outputs = {"y": Operand(x.dtype, x.shape)}
    if "kept" in call.outputs:
        outputs["kept"] = Operand("i32", (1,))
    if "y" not in call.outputs:
        raise UnplannedCall("moe: y is always computed")
    variants = [_block(call, rows) for rows in BLOCKS] + [_prompt(call)]
    return Plan(call.op, dict(call.arrays), outputs, tuple(variants))


def _gate(call: Call, programs: Size, words: int) -> Launch:
    """words: 0 where no list is made."""
    experts = call.dim("router", 2)
    columns = max(16, power_of_two(experts))
    lanes = min(32, columns)
    constants: Constants = {
        "experts": experts, "parts": columns // lanes, "lanes": lanes, "rows": GATE_ROWS,
        "stride": call.stride("router"), "top_k": call.scalars["top_k"],
        "top_p": float(call.scalars["top_p"]), "block": bool(call.scalars["block"]),
        "narrow": call.array("router").dtype == "bf16", "words": words,
    }  # fmt: skip
    there = {"router": True, "share": True, "kept": "kept" in call.outputs}
    there |= dict.fromkeys(("expert", "bits", "count"), words > 0)
    arguments = {name: name for name, is_there in there.items() if is_there}
    constants |= {name: None for name, is_there in there.items() if not is_there}
    # With 8 warps ptxas spills two registers of the form without a list on sm_100.
    warps = 16 if call.capability == 100 and not words else 8
    return Launch(
        f"{MODULE}:gate", (programs, 1, 1), arguments, constants, {"n": "n"}, warps=warps, stages=1
    )


def _widths(call: Call) -> dict[str, int]:
    width, shared = call.dim("down", 2), call.dim("shared_down", 1)
    return {
        "hidden": call.dim("x", 2), "width": width, "shared_width": shared,
        "widest": max(width, shared),
    }  # fmt: skip


def _block(call: Call, rows: int) -> Variant:
    """n <= rows: an expert's rows are the block's, masked; its weights are read once."""
    experts, top_k = call.dim("router", 2), call.scalars["top_k"]
    words = -(-rows // 32)
    listed: Size = f"min({experts}, n * {top_k})"
    first = _gate(call, 1, words)
    shape: Constants = {"chunk": rows, "entries": 0, "shared_tiles": 1, "member": None}
    programs = f"min({SPREAD}, {listed} + 1)"
    up = _up(call, {**shape, "fill": None}, rows, {"share": "share"}, programs, 1)
    down = _down(call, {**shape, "words": words, "rows": rows}, rows, {"fill": "bits"}, 1)
    widest = _widths(call)["widest"]
    workspace = {
        "expert": Operand("i32", (listed,)), "share": Operand("fp32", ("n", experts)),
        "bits": Operand("i32", (listed, words)), "count": Operand("i32", (1,)),
        "h": Operand(call.array("x").dtype, (f"{listed} + 1", rows, widest)),
    }  # fmt: skip
    return Variant(f"n <= {rows}", (first, up, down), workspace)


def _prompt(call: Call) -> Variant:
    """Any n: every chunk sorts its rows by expert."""
    experts, top_k = call.dim("router", 2), call.scalars["top_k"]
    chunks: Size = f"cdiv(n, {CHUNK})"
    # Every expert fills its tiles but the last.
    entries = experts + CHUNK * top_k // SLOTS
    programs: Size = 1 if call.scalars["block"] else f"cdiv(n, {GATE_ROWS})"
    first = _gate(call, programs, 0)
    written = ("share", "expert", "fill", "member", "weight", "count")
    group = Launch(
        f"{MODULE}:group", (chunks, 1, 1), {name: name for name in written},
        {
            "experts": experts, "columns": max(16, power_of_two(experts)), "rows": GATE_ROWS,
            "chunk": CHUNK, "slots": SLOTS, "entries": entries,
        },
        {"n": "n"}, warps=8, stages=1,
    )  # fmt: skip
    shared_tiles = CHUNK // SLOTS
    shape: Constants = {"chunk": CHUNK, "entries": entries, "shared_tiles": shared_tiles}
    lists = {"fill": "fill", "member": "member"}
    spread = min(SPREAD, entries + shared_tiles)
    up = _up(call, shape, SLOTS, {"share": "weight", **lists}, spread, chunks)
    down = _down(call, {**shape, "words": 1, "rows": CHUNK}, SLOTS, lists, chunks)
    widest = _widths(call)["widest"]
    workspace = {
        "share": Operand("fp32", ("n", experts)), "expert": Operand("i32", (chunks, entries)),
        "fill": Operand("i32", (chunks, entries)), "count": Operand("i32", (chunks,)),
        "member": Operand("i32", (chunks, entries, SLOTS)),
        "weight": Operand("fp32", (chunks, entries, SLOTS)),
        "h": Operand(call.array("x").dtype, (chunks, shared_tiles + entries, SLOTS, widest)),
    }  # fmt: skip
    return Variant("1", (first, group, up, down), workspace)


def _stages(
    call: Call, weights: int, rows: int, most: int, asynchronous: bool, other: int = 0
) -> int:
    """As many pipeline stages as fit, each a buffer of so many elements of weights and of rows.

    One buffer less than stages is needed where products wait for their operands (not asynchronous:
    wgmma, tcgen05). other: bytes of shared memory to leave.
    """
    each = weights * ITEMSIZE[call.array("down").dtype] + rows * ITEMSIZE[call.array("x").dtype]
    buffers = (shared_limit(call.capability) - other) // each
    return max(2, min(most, buffers if asynchronous else buffers + 1))


def _precision(call: Call) -> str:
    """For dots of fp32 operands, which stand in the interpreter alone."""
    return "ieee" if call.array("x").dtype == "fp32" else "tf32"


def _scales(call: Call, scales: dict[str, str], constants: Constants) -> dict[str, str]:
    """The scales of fp8 weights as arguments, kernel parameter -> array; without them None."""
    if "gate_up_scale" in call.arrays:
        return scales
    constants |= dict.fromkeys(scales)
    return {}


def _up(
    call: Call, shape: Constants, slots: int, arguments: dict[str, str], programs: Size,
    chunks: Size,
) -> Launch:  # fmt: skip
    widths = _widths(call)
    tile = min(UP_TILE, max(16, power_of_two(widths["widest"])))
    step = min(UP_STEP, max(16, power_of_two(widths["hidden"])))
    constants: Constants = {
        **shape, **widths, "slots": slots, "experts": call.dim("router", 2),
        "x_stride": call.stride("x"), "gate_stride": call.stride("shared_gate"),
        "tile": tile, "step": step, "precision": _precision(call),
    }  # fmt: skip
    asynchronous = call.capability in (90, 100)
    names = ("x", "shared_gate", "gate_up", "shared_gate_up", "expert", "count", "h")
    scales = {name: name for name in ("gate_up_scale", "shared_gate_up_scale")}
    arguments = {**arguments, **_scales(call, scales, constants)}
    return Launch(
        f"{MODULE}:up", (-(-widths["widest"] // tile), programs, chunks),
        {**{name: name for name in names}, **arguments}, constants, {"n": "n"},
        warps=4 if asynchronous or slots < 64 else 8,
        stages=_stages(call, 2 * tile * step, slots * step, 4, asynchronous),
    )  # fmt: skip


def _down(
    call: Call, shape: Constants, slots: int, arguments: dict[str, str], chunks: Size
) -> Launch:  # fmt: skip
    widths = _widths(call)
    step = min(DOWN_STEP, max(16, power_of_two(widths["widest"])))
    constants: Constants = {
        **shape, **widths, "slots": slots, "tile": DOWN_TILE, "step": step,
        "precision": _precision(call),
    }  # fmt: skip
    names = ("h", "shared_down", "expert", "count", "y")
    scales = {"expert_down_scale": "down_scale", "shared_down_scale": "shared_down_scale"}
    arguments = {**arguments, **_scales(call, scales, constants)}
    scatters = "member" in arguments
    return Launch(
        f"{MODULE}:down", (-(-widths["hidden"] // DOWN_TILE), 1, chunks),
        {**{name: name for name in names}, "expert_down": "down", **arguments}, constants,
        {"n": "n"}, warps=8 if scatters else 4,
        stages=_stages(
            call, DOWN_TILE * step, slots * step, 9, False, SCATTER_BYTES if scatters else 0
        ),
    )  # fmt: skip
