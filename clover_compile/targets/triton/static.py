"""What the Units of a Triton bundle cost before they ever run: launches, buffers, bytes, times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clover_compile.kernels.architecture import Architecture
from clover_compile.kernels.budget import byte_floor
from clover_compile.kernels.costs import GAP, ROWS
from clover_compile.runtime.expressions import evaluate
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.launcher import resolve
from clover_compile.runtime.unit_program import UnitProgram
from clover_compile.runtime.unit_runner import buffer_bytes

PREFIX = 1024
"""Rows committed before the call that is counted."""


def table(
    programs: Mapping[str, UnitProgram], plans: Mapping[str, Plan], gpu: Architecture
) -> list[dict[str, Any]]:
    """One row for each pass that decoding makes; times are modelled, nothing ran.

    A step is a commit of one row with its logits, as causal decoding makes it. Where experts are
    chosen at run time, bytes and times are a pair: every row choosing the same ones, and no two.
    """
    found = []
    for label, rows in ROWS.items():
        unit, keep = ("commit", 1) if label == "step" else (label, 0)
        if unit in programs:
            symbols = {"n": rows, "T": rows, "R": PREFIX, "keep": keep}
            found.append(_row(label, programs[unit], plans, gpu, symbols))
    return found


def _row(
    label: str, program: UnitProgram, plans: Mapping[str, Plan], gpu: Architecture,
    symbols: Mapping[str, int],
) -> dict[str, Any]:  # fmt: skip
    launches, scratch, least, most = 0, 0, 0, 0
    for step in program.steps:
        plan = plans[step.plan]
        own = _bind(program, step.inputs, plan, symbols)
        if not all(own.values()):  # no logits asked for
            continue
        call = resolve(plan, own)
        launches += len(call.variant.launches)
        scratch += call.workspace_bytes()
        least += byte_floor(plan, own, _share(plan, own, fewest=True))
        most += byte_floor(plan, own, _share(plan, own, fewest=False))
    return {
        "pass": label, "rows": symbols["n"], "prefix": symbols["R"], "launches": launches,
        "buffer_bytes": buffer_bytes(program, symbols), "scratch_bytes": scratch,
        "floor_bytes": [least, most],
        "modelled_ms": [1e3 * (size / gpu.bandwidth + launches * GAP) for size in (least, most)],
    }  # fmt: skip


def _bind(
    program: UnitProgram, views: Mapping[str, Any], plan: Plan, symbols: Mapping[str, int]
) -> dict[str, int]:
    """The plan's own symbols from the Unit's."""
    own: dict[str, int] = {}
    for name, view in views.items():
        operand = plan.inputs[name]
        assert operand is not None
        for planned, size in zip(operand.shape, view.shape, strict=True):
            if isinstance(planned, str):
                own[planned] = size if isinstance(size, int) else evaluate(size, symbols)
    return own


def _share(plan: Plan, own: Mapping[str, int], fewest: bool) -> dict[str, float]:
    """Share of the weights that must be read: the ids' rows of the table, the experts in use."""
    if plan.op == "embedding":
        weight = plan.inputs["weight"]
        assert weight is not None
        return {"weight": own["n"] / int(weight.shape[0])}
    if plan.op != "moe":
        return {}
    stack = plan.inputs["gate_up"]
    assert stack is not None
    experts, top_k = int(stack.shape[0]), int(plan.scalars["top_k"])
    used = top_k if fewest else min(experts, top_k * own["n"])
    return dict.fromkeys(("gate_up", "down"), used / experts)
