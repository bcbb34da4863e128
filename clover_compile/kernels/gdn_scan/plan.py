"""Launch plan of clover::gdn_scan."""

from __future__ import annotations

from clover_compile.kernels.budget import Budget
from clover_compile.kernels.call import Call, UnplannedCall
from clover_compile.kernels.plans import power_of_two
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

BUDGETS = {
    "gdn_scan": Budget(registers=255, required={90: "HGMMA", 100: "UTCHMMA"}, ffma=400),
}

_SHORT = (("n <= 1", 16, 0), ("n <= 16", 16, 4))
_NARROW = (*_SHORT, ("1", 16, 4))
_WIDE = (*_SHORT, ("n <= 32", 32, 5), ("1", 16, 4))
"""Guard, rows of a chunk, levels of halving. Chunks of 32 take matrix units that read operands from
shared memory (sm_90, sm_100): elsewhere registers spill. So they do in a loop over such chunks, with
some releases of Triton."""


def plan(call: Call) -> Plan:
    """One launch, a program per value head; without y the columns of v are split further."""
    heads, dk, dv = (call.dim("state", axis) for axis in (1, 2, 3))
    taps = call.dim("conv", 1)
    z, rows = call.arrays["z"], call.arrays["rows"]
    if z is not None and rows is not None:
        raise UnplannedCall("gdn_scan: rows are counted on the device only where there is no z")
    y = "y" in call.outputs and z is not None
    dv_tile = max(16, power_of_two(dv) if y else min(64, power_of_two(dv)))
    dk_tile = max(16, power_of_two(dk))
    parts = 2 if dk_tile > 16 else 1
    names = ["u", "b", "a", "ring", "state", "conv", "decay", "dt_bias"]
    names += ["z", "norm"] if y else []
    names += ["rows"] if rows is not None else []
    outputs = _outputs(call)
    names += [name for name in outputs if name != "y" or y]
    constants: dict[str, int | float | bool | str | None] = {
        **{f"{x}_stride": call.stride(x) if x in names else 0 for x in ("u", "z", "b", "a")},
        "key_heads": call.scalars["key_heads"], "heads": heads, "dk": dk, "dv": dv,
        "taps": taps, "eps": call.scalars["eps"],
        "dk_part": dk_tile // parts, "parts": parts, "dv_tile": dv_tile,
        "ring_tile": power_of_two(taps - 1),
    }  # fmt: skip
    optional = ("z", "norm", "rows", "y", "new_ring", "new_state")
    constants |= {name: None for name in optional if name not in names}
    grid = (heads, -(-dv // dv_tile), 1)
    name = "clover_compile.kernels.gdn_scan.kernel:gdn_scan"
    variants = []
    for guard, chunk, levels in _WIDE if call.capability in (90, 100) else _NARROW:
        single = guard != "1"
        chosen = constants | {"chunk": chunk, "levels": levels, "single": single}
        given, scratch = {x: x for x in names}, {}
        if not single and "new_state" not in given:
            # A long call keeps the state of one chunk for the next in memory.
            given["new_state"], scratch = "carried", {"carried": call.array("state")}
            del chosen["new_state"]
        warps = 8 if dv_tile >= 128 else 4
        launch = Launch(name, grid, given, chosen, {"n": "n"}, warps, stages=1)
        variants.append(Variant(guard, (launch,), scratch))
    return Plan(call.op, dict(call.arrays), outputs, tuple(variants))


def _outputs(call: Call) -> dict[str, Operand]:
    """The outputs that are wanted; y is 0 wide where there is no z."""
    u, z = call.array("u"), call.arrays["z"]
    y = Operand(u.dtype, (1, "n", 0) if z is None else z.shape)
    made = {"y": y, "new_ring": call.array("ring"), "new_state": call.array("state")}
    return {name: made[name] for name in made if name in call.outputs}
