"""What the Units of a Triton bundle cost before they ever run: launches, buffers, bytes, times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from clover_compile.kernels.architecture import Architecture
from clover_compile.kernels.budget import byte_floor, share_used
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
    calls = list(op_calls(program, plans, symbols))
    launches = sum(call.launches for call in calls)
    sizes = [sum(call.least for call in calls), sum(call.most for call in calls)]
    return {
        "pass": label, "rows": symbols["n"], "prefix": symbols["R"], "launches": launches,
        "buffer_bytes": buffer_bytes(program, symbols),
        "scratch_bytes": sum(call.scratch for call in calls),
        "floor_bytes": sizes,
        "modelled_ms": [1e3 * seconds(size, launches, gpu) for size in sizes],
    }  # fmt: skip


@dataclass(frozen=True)
class OpCall:
    """One op of a Unit, counted."""

    op: str
    launches: int
    scratch: int
    least: int
    """Bytes it must move if all rows choose the same experts; `most`: if no two do."""
    most: int
    dense: int = 0
    """Elements of the weights that every row is multiplied by: no experts, no table of rows."""


def op_calls(
    program: UnitProgram, plans: Mapping[str, Plan], symbols: Mapping[str, int]
) -> Iterator[OpCall]:
    """The ops of a Unit in order; those that have no row to work on are left out."""
    for step in program.steps:
        plan = plans[step.plan]
        own = _bind(program, step.inputs, plan, symbols)
        if all(own.values()):  # else no logits were asked for
            call = resolve(plan, own)
            top_k = int(plan.scalars.get("top_k", 0))
            least, most = (
                byte_floor(plan, own, share_used(plan, own["n"], experts))
                for experts in (top_k, top_k * own["n"])
            )
            launches, scratch = len(call.variant.launches), call.workspace_bytes()
            held = {
                name: prod(x for x in view.shape if isinstance(x, int))
                for name, view in step.inputs.items()
                if program.buffers[view.buffer].kind == "weight"
            }
            yield OpCall(plan.op, launches, scratch, least, most, dense_elements(plan, held))


def dense_elements(plan: Plan, held: Mapping[str, int]) -> int:
    """Elements that every row is multiplied by, of the inputs that are weights."""
    left_out = share_used(plan, 1, 1)
    return sum(size for name, size in held.items() if name not in left_out)


def seconds(size: float, launches: int, gpu: Architecture) -> float:
    """The modelled time of so many bytes and launches."""
    return size / gpu.bandwidth + launches * GAP


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
