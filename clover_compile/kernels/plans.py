"""Small helpers that launch plans share, and the plan of any op by its spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clover_compile.kernels.call import Call, UnplannedCall
from clover_compile.kernels.op import FusedOp
from clover_compile.runtime.launch_plan import Plan


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def plan_of(
    op: FusedOp, arguments: Sequence[Any], outputs: Sequence[str] | None = None,
    capability: int = 90,
) -> Plan:  # fmt: skip
    """The launch plan of `op` for arguments like these; only `outputs` (all) are written."""
    wanted = op.outputs if outputs is None else outputs
    call = Call.of(op.name, op.parameters, arguments, wanted, op.symbols, capability)
    for name in op.symbols:
        operand = call.arrays[name]
        if operand is not None and operand.shape[0] != 1:
            raise UnplannedCall(f"{op.name}: kernels take a batch of 1, not {operand.shape[0]}")
    return plan_call(op, call)


def plan_call(op: FusedOp, call: Call) -> Plan:
    """The launch plan of one call."""
    plan: Plan = op.slot("plan")(call)
    return replace(plan, scalars=dict(call.scalars))
