"""What is known of a bundle that cannot run here: counts of its programs, and modelled times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clover_compile.kernels.architecture import ARCHITECTURES, Architecture
from clover_compile.kernels.costs import GAP, ROWS
from clover_compile.profiling.cost_table import COMMITTED, neutral
from clover_compile.runtime.auto import WIDTHS
from clover_compile.runtime.costs import CostTable, Points
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.program_files import guarded, read_plans, read_programs
from clover_compile.targets.triton import static

PREFIX = static.PREFIX
NOTE = (
    "compiled, not run: bytes that must move at least, over the memory's published bandwidth, and "
    f"{GAP * 1e6:.0f} us for each launch; of the experts, halfway between all rows choosing the "
    "same and no two"
)


class Programs:
    """The Units of a Triton bundle as programs."""

    def __init__(self, checked: Checked) -> None:
        self.gpu: Architecture = ARCHITECTURES[checked.manifest["target"].split("-")[1]]
        self.units = read_programs(checked)
        self.plans: Mapping[str, Plan] = read_plans(checked)

    def calls(self, unit: str, rows: int, keep: int = 0) -> list[static.OpCall]:
        """The ops of one call."""
        symbols = {"n": rows, "T": rows, "R": static.PREFIX, "keep": keep}
        return list(static.op_calls(self.units[unit], self.plans, symbols))

    def seconds(self, unit: str, rows: int, keep: int = 0) -> float:
        """The modelled time of one call."""
        calls = self.calls(unit, rows, keep)
        size = sum(call.least + call.most for call in calls) / 2
        return static.seconds(size, sum(call.launches for call in calls), self.gpu)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def profile(checked: Checked) -> tuple[list[dict[str, Any]], CostTable]:
    """Every main pass op by op, and the modelled cost table of a Triton bundle."""
    return guarded(checked, "its programs", lambda: _profile(checked))


def _profile(checked: Checked) -> tuple[list[dict[str, Any]], CostTable]:
    programs = Programs(checked)
    passes = []
    for label, rows in ROWS.items():
        unit, keep = ("commit", 1) if label == "step" else (label, 0)
        if unit in programs.units:
            passes.append(_pass(programs, label, unit, rows, keep))
    block = _read(checked.path / "generation.json")["block_size"]
    counts = {
        "commit": COMMITTED, "verify": WIDTHS, "preview": sorted({*WIDTHS, block}),
        "pick": sorted({1, *WIDTHS, block}), "replay": WIDTHS,
    }  # fmt: skip
    units: dict[str, Points] = {
        unit: tuple((n, programs.seconds(unit, n)) for n in rows)
        for unit, rows in counts.items()
        if unit in programs.units
    }
    head = programs.seconds("commit", 1, keep=1) - programs.seconds("commit", 1)
    return passes, CostTable("modelled", units, max(0.0, head), neutral(block))


def _pass(programs: Programs, label: str, unit: str, rows: int, keep: int) -> dict[str, Any]:
    """One pass and its ops, the longest first."""
    found: dict[str, dict[str, Any]] = {}
    for call in programs.calls(unit, rows, keep):
        row = found.setdefault(call.op, {"op": call.op, "count": 0, "launches": 0, "bytes": [0, 0]})
        row["count"] += 1
        row["launches"] += call.launches
        row["bytes"] = [row["bytes"][0] + call.least, row["bytes"][1] + call.most]
    total = programs.seconds(unit, rows, keep)
    for row in found.values():
        row["modelled ms"] = 1e3 * static.seconds(
            sum(row["bytes"]) / 2, row["launches"], programs.gpu
        )
        row["share"] = row["modelled ms"] / (1e3 * total)
    return {
        "pass": label, "unit": unit, "rows": rows, "keep": keep,
        "launches": sum(row["launches"] for row in found.values()),
        "modelled ms": 1e3 * total,
        "ops": sorted(found.values(), key=lambda row: -row["modelled ms"]),
    }  # fmt: skip
