"""Static costs of the released model's passes: launches, scratch, bytes, and modelled times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clover_compile.kernels import release
from clover_compile.kernels.architecture import ARCHITECTURES
from clover_compile.kernels.budget import byte_floor, share_used
from clover_compile.runtime.launcher import resolve

GAP = 2e-6
"""Seconds between two launches of a CUDA graph: an assumption, stated wherever it is used."""

LAUNCHES_PER_LAYER = 10
"""At most so many kernels per layer in any pass."""

KEPT = (8, 32, 48, 96, 163)
"""Experts read per layer: one row, and blocks whose coreset keeps so many."""

ROWS = {"preview": 32, "verify": 16, "commit": 32, "step": 1, "replay": 16}
"""Rows of each pass."""


@dataclass(frozen=True)
class Cost:
    """One op at one place: launches, scratch and the bytes it must move."""

    launches: int
    workspace: int
    bytes: int


def cost(place: release.Place, rows: int, prefix: int, kept: int, capability: int = 90) -> Cost:
    """The static cost of one call with `prefix` rows before it and `kept` experts read."""
    plan = place.plan(capability)
    symbols = {"n": rows, "R": prefix}
    call = resolve(plan, symbols)
    floor = byte_floor(plan, symbols, share_used(plan, rows, kept))
    return Cost(len(call.variant.launches), call.workspace_bytes(), floor)


def passes(prefix: int = 1024) -> Iterator[dict[str, Any]]:
    """Launches, bytes and modelled milliseconds of each pass for each number of experts kept."""
    by_name = {place.name: place for place in release.places()}
    for name, (gdn, attention, around) in release.PASSES.items():
        rows = ROWS[name]
        for kept in KEPT:
            if (name == "step") != (kept == KEPT[0]) or (name == "replay" and kept != KEPT[1]):
                continue
            parts = {
                "gdn": (release.GDN_LAYERS, gdn),
                "attention": (release.ATTENTION_LAYERS, attention),
                "around": (1, around),
            }
            launches, size, per_layer = 0, 0, {}
            for part, (count, members) in parts.items():
                costs = [cost(by_name[member], rows, prefix, kept) for member in members]
                per_layer[part] = sum(x.launches for x in costs)
                launches += count * per_layer[part]
                size += count * sum(x.bytes for x in costs)
            yield {
                "pass": name, "rows": rows, "prefix": prefix, "experts": kept,
                "launches": launches, "launches_per_gdn_layer": per_layer["gdn"],
                "launches_per_attention_layer": per_layer["attention"], "bytes": size,
                "modelled_ms": {
                    gpu.name: 1e3 * (size / gpu.bandwidth + launches * GAP)
                    for gpu in ARCHITECTURES.values()
                },
            }  # fmt: skip


def places(rows: int = 32, prefix: int = 1024, kept: int = 48) -> Iterator[dict[str, Any]]:
    """Launches, workspace, bytes and the time they take at least, per place and GPU."""
    for place in release.places():
        made = cost(place, rows, prefix, kept)
        yield {
            "place": place.name, "launches": made.launches, "workspace_bytes": made.workspace,
            "floor_bytes": made.bytes,
            "floor_us": {g.name: 1e6 * made.bytes / g.bandwidth for g in ARCHITECTURES.values()},
        }  # fmt: skip
