"""Launch plan of clover::block_attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clover_compile.kernels.budget import MATRIX, Budget
from clover_compile.kernels.call import Call, UnplannedCall
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

KERNELS = "clover_compile.kernels.block_attention.kernel"

BUDGETS = {
    "attend": Budget(registers=255, required=MATRIX),
    "attend_part": Budget(registers=255, required=MATRIX),
    "merge": Budget(registers=96),
}

SHORT = {2: (16, 64, 1), 8: (32, 32, 2), 16: (64, 32, 2), 32: (64, 16, 4), 64: (64, 8, 8)}
"""Rows at most -> folded rows of a query tile, splits of the prefix, folded rows merged at once.
With the released model's two groups of eight heads each launch has about 128 programs; more splits
would write more parts than there are keys."""

UNIT = 128
"""Prefix rows a split is a multiple of."""

Constants = dict[str, int | float | bool | str | None]


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles of a launch, its warps and stages."""

    query: int
    keys: int
    block: int
    warps: int
    stages: int


def tiles(capability: int, query: int, rows: int | None) -> Tiles:
    """The tiles for query tiles of `query` folded rows and blocks of at most `rows` (None: any).

    Only capabilities 90 and 100 hold 64 folded rows: mma.sync keeps its operands in registers,
    where 32 fit; and with 16 the compiler spills for 100. A stage holds 32 keys and values of the
    prefix, 36 KB with the released model's heads: three stages fit into the 99 KB a block may use
    everywhere. Eight warps and 32 keys are what leaves sum, keys and angles in registers.
    """
    if capability == 100:
        query = max(query, 32)
    elif capability != 90:
        query = min(query, 32)
    return Tiles(query, 32, 16 if rows and rows <= 16 else 32, 8, 3)


def plan(call: Call) -> Plan:
    """Two launches for a block of at most 64 rows, whose prefix is split; one for a prompt."""
    query = call.array("query_gate")
    rows, heads_kv, dim = query.shape[1], call.dim("k_prefix", 2), call.dim("k_prefix", 3)
    heads, odd = divmod(call.dim("query_gate", 2), 2 * dim)
    if odd or heads % heads_kv or 2 * call.dim("cos", 2) > dim:
        raise UnplannedCall(f"{call.op}: {heads} heads of {dim} on {heads_kv}")
    outputs = {"y": Operand(query.dtype, (1, rows, heads * dim))}
    for name in call.outputs & {"new_k", "new_v"}:
        outputs[name] = Operand(query.dtype, (1, rows, heads_kv, dim))
    whole = _whole(call, heads // heads_kv)
    variants = [_short(call, heads // heads_kv, most) for most in SHORT]
    return Plan(call.op, dict(call.arrays), outputs, (*variants, Variant("1", (whole,))))


def _constants(call: Call, group: int, tile: Tiles) -> Constants:
    dim = call.dim("k_prefix", 3)
    return {
        "heads_kv": call.dim("k_prefix", 2), "group": group, "dim": dim,
        "half": call.dim("cos", 2), "query_stride": call.stride("query_gate"),
        "k_stride": call.stride("k"), "v_stride": call.stride("v"),
        "k_prefix_stride": call.stride("k_prefix"), "v_prefix_stride": call.stride("v_prefix"),
        "cos_stride": call.stride("cos"), "sin_stride": call.stride("sin"),
        "eps": call.scalars["eps"], "causal": call.scalars["causal"],
        "scale": dim**-0.5 * math.log2(math.e), "columns": max(16, power_of_two(dim)),
        "turning": max(16, power_of_two(2 * call.dim("cos", 2))),
        "tile_q": tile.query, "tile_k": tile.keys, "tile_b": tile.block,
        "precision": "ieee" if call.array("k").dtype == "fp32" else "tf32",
    }  # fmt: skip


def _inputs(call: Call) -> tuple[dict[str, str], Constants]:
    """Arguments of both attending kernels, and the outputs nobody reads."""
    names = [
        "query_gate", "k", "v", "k_prefix", "v_prefix", "length", "cos", "sin", "q_norm", "k_norm",
    ]  # fmt: skip
    names += sorted(call.outputs & {"new_k", "new_v"})
    return {x: x for x in names}, dict.fromkeys({"new_k", "new_v"} - call.outputs)


def _whole(call: Call, group: int) -> Launch:
    tile, rows = tiles(call.capability, 64, None), call.array("k").shape[1]
    arguments, absent = _inputs(call)
    return Launch(
        f"{KERNELS}:attend",
        (f"cdiv({rows} * {group}, {tile.query})", call.dim("k_prefix", 2), 1),
        {**arguments, "y": "y"}, {**_constants(call, group, tile), **absent}, {"rows": rows},
        tile.warps, tile.stages,
    )  # fmt: skip


def _short(call: Call, group: int, most: int) -> Variant:
    query, splits, taken = SHORT[most]
    tile, rows = tiles(call.capability, query, most), call.array("k").shape[1]
    prefix, heads_kv = call.array("k_prefix").shape[1], call.dim("k_prefix", 2)
    parts, folded = f"1 + min({splits}, cdiv({prefix}, {UNIT}))", f"{rows} * {group}"
    constants = _constants(call, group, tile)
    dim = call.dim("k_prefix", 3)
    arguments, absent = _inputs(call)
    split: Constants = {"splits": splits, "unit": UNIT}
    part = Launch(
        f"{KERNELS}:attend_part", (parts, heads_kv, f"cdiv({folded}, {tile.query})"),
        {**arguments, "part": "part", "weight": "weight"}, {**constants, **absent, **split},
        {"rows": rows}, tile.warps, tile.stages,
    )  # fmt: skip
    merge = Launch(
        f"{KERNELS}:merge", (f"cdiv({folded}, {taken})", heads_kv, 1),
        {x: x for x in ("part", "weight", "query_gate", "length", "y")},
        {x: constants[x] for x in ("heads_kv", "group", "dim", "query_stride", "columns")} | split
        | {"taken": taken, "parts": power_of_two(splits + 1), "chunk": 16 // taken},
        {"rows": rows}, warps=4, stages=2,
    )  # fmt: skip
    workspace = {
        "part": Operand("fp32", (parts, heads_kv, folded, dim)),
        "weight": Operand("fp32", (parts, heads_kv, folded)),
    }
    return Variant(f"{rows} <= {most}", (part, merge), workspace)
