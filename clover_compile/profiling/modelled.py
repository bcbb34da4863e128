"""What is known of a bundle that cannot run here: counts of its programs, and modelled times."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from clover_compile.kernels.architecture import ARCHITECTURES, Architecture
from clover_compile.kernels.costs import GAP, ROWS
from clover_compile.model.config import ModelConfig
from clover_compile.profiling import engine_graphs
from clover_compile.profiling.cost_table import COMMITTED, neutral
from clover_compile.profiling.engine_graphs import EngineGraphs
from clover_compile.profiling.floor import own_flop
from clover_compile.runtime.auto import WIDTHS
from clover_compile.runtime.bundle import rules_and_sizes
from clover_compile.runtime.costs import CostTable, Points
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.program_files import guarded, read_plans, read_programs
from clover_compile.targets.triton import static

PREFIX = static.PREFIX
NOTE = (
    "compiled, not run: bytes that must move at least, over the memory's published bandwidth, and "
    f"{GAP * 1e6:.0f} us for each launch; of the experts, halfway between all rows choosing the "
    "same and no two; FLOP are counted, not timed"
)


class Counted(Protocol):
    """The Units of a bundle, as far as they can be counted."""

    @property
    def gpu(self) -> Architecture:
        """Where they would run."""

    @property
    def note(self) -> str | None:
        """What is not known of them."""

    @property
    def units(self) -> Collection[str]:
        """Their names."""

    def calls(self, unit: str, symbols: Mapping[str, int]) -> list[static.OpCall]:
        """The ops of one call; `symbols`: n, T, R and keep."""


class Programs:
    """The Units of a Triton bundle as programs."""

    note = None

    def __init__(self, checked: Checked) -> None:
        self.gpu: Architecture = ARCHITECTURES[checked.manifest["target"].split("-")[1]]
        self.units = read_programs(checked)
        self.plans: Mapping[str, Plan] = read_plans(checked)

    def calls(self, unit: str, symbols: Mapping[str, int]) -> list[static.OpCall]:
        """The ops of one call."""
        return list(static.op_calls(self.units[unit], self.plans, symbols))


def can_model(checked: Checked) -> bool:
    """Whether a bundle says what its passes launch and move."""
    engine = checked.manifest["engine"]
    return engine == "triton" or (engine == "trt" and engine_graphs.has_graphs(checked))


class _Model:
    """Calls of the Units, and times from their counts."""

    def __init__(self, checked: Checked) -> None:
        made = Programs if checked.manifest["engine"] == "triton" else EngineGraphs
        self.counted: Counted = made(checked)
        # A bundle keeps its sizes under the names of the config.
        self.sizes = cast(ModelConfig, rules_and_sizes(checked)[1])

    def calls(self, unit: str, rows: int, keep: int = 0) -> list[static.OpCall]:
        """The ops of one call."""
        return self.counted.calls(unit, {"n": rows, "T": rows, "R": PREFIX, "keep": keep})

    def seconds(self, unit: str, rows: int, keep: int = 0) -> float:
        """The modelled time of one call."""
        calls = self.calls(unit, rows, keep)
        size = sum(call.least + call.most for call in calls) / 2
        return static.seconds(size, sum(call.launches for call in calls), self.counted.gpu)

    def flop(self, call: static.OpCall, unit: str, rows: int) -> int:
        """FLOP of an op: every row by its dense weights, and what the op does beside them."""
        pairs = rows * self.sizes.num_experts_per_tok
        own = own_flop(
            self.sizes, call.op, block=unit == "preview", rows=rows, prefix=PREFIX, pairs=pairs
        )
        return own + 2 * rows * call.dense


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def profile(checked: Checked) -> tuple[dict[str, Any], CostTable]:
    """What is known of a bundle that cannot run: every main pass op by op, its kernels and notes;
    and the modelled cost table. Raises BadBundle for files that hold something else.
    """
    return guarded(checked, "its programs", lambda: _profile(checked))


def _profile(checked: Checked) -> tuple[dict[str, Any], CostTable]:
    model = _Model(checked)
    passes = []
    for label, rows in ROWS.items():
        unit, keep = ("commit", 1) if label == "step" else (label, 0)
        if unit in model.counted.units:
            passes.append(_pass(model, label, unit, rows, keep))
    block = _read(checked.path / "generation.json")["block_size"]
    counts = {
        "commit": COMMITTED, "verify": WIDTHS, "preview": sorted({*WIDTHS, block}),
        "pick": sorted({1, *WIDTHS, block}), "replay": WIDTHS,
    }  # fmt: skip
    units: dict[str, Points] = {
        unit: tuple((n, model.seconds(unit, n)) for n in rows)
        for unit, rows in counts.items()
        if unit in model.counted.units
    }
    head = model.seconds("commit", 1, keep=1) - model.seconds("commit", 1)
    notes = [NOTE, *([model.counted.note] if model.counted.note else [])]
    found = {"passes": passes, "kernels": _kernels(checked), "notes": notes}
    return found, CostTable("modelled", units, max(0.0, head), neutral(block))


def _kernels(checked: Checked) -> dict[str, Any]:
    """What is known of the compiled kernels; of those of a TensorRT bundle their number alone."""
    held: dict[str, Any] | None = (checked.manifest.get("static") or {}).get("kernels")
    if held is not None:
        return held
    nodes = [x for unit in checked.manifest["units"].values() for x in unit["nodes"].values()]
    return {"count": len({key for node in nodes for key in node["kernels"]})}


def _pass(model: _Model, label: str, unit: str, rows: int, keep: int) -> dict[str, Any]:
    """One pass and its ops, the longest first."""
    found: dict[str, dict[str, Any]] = {}
    gpu = model.counted.gpu
    for call in model.calls(unit, rows, keep):
        row = found.setdefault(
            call.op, {"op": call.op, "count": 0, "launches": 0, "bytes": [0, 0], "flop": 0}
        )
        row["count"] += 1
        row["launches"] += call.launches
        row["bytes"] = [row["bytes"][0] + call.least, row["bytes"][1] + call.most]
        row["flop"] += model.flop(call, unit, rows)
    total = model.seconds(unit, rows, keep)
    for row in found.values():
        row["floor ms"] = [1e3 * size / gpu.bandwidth for size in row["bytes"]]
        row["modelled ms"] = 1e3 * static.seconds(sum(row["bytes"]) / 2, row["launches"], gpu)
        row["share"] = row["modelled ms"] / (1e3 * total)
    return {
        "pass": label, "unit": unit, "rows": rows, "keep": keep,
        "launches": sum(row["launches"] for row in found.values()),
        "flop": sum(row["flop"] for row in found.values()),
        "modelled ms": 1e3 * total,
        "ops": sorted(found.values(), key=lambda row: -row["modelled ms"]),
    }  # fmt: skip
