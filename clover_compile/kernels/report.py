"""What every kernel costs before it ever runs: `python -m clover_compile.kernels.report`.

Registers, shared memory and instructions are read from the compiled code; bytes and times are the
least the memory allows. Nothing here ran on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from clover_compile.kernels import costs, release
from clover_compile.kernels.architecture import CAPABILITIES
from clover_compile.kernels.budget import Budget, budget_of
from clover_compile.kernels.compiled import Compiled, compile_launch
from clover_compile.runtime.launch_plan import Launch

NOTE = (
    "Compiled, not run: registers, shared memory and instructions are read from the code; bytes "
    "and times are floors of the released model in bf16; a launch counts "
    f"{costs.GAP * 1e6:.0f} us."
)

MATRIX = ("HGMMA", "HMMA", "UTCHMMA", "QGMMA", "QMMA", "UTCQMMA")


@dataclass(frozen=True)
class Kernel:
    """One launch of one variant at one place, compiled for one compute capability."""

    place: str
    guard: str
    launch: Launch
    compiled: Compiled

    @property
    def budget(self) -> Budget:
        """What the kernel may cost; KeyError if its plan states no budget for it."""
        return budget_of(self.launch.kernel)

    def row(self) -> dict[str, Any]:
        """Its figures."""
        usage = self.compiled.usage()
        matrix = {name: usage.opcodes[name] for name in MATRIX if usage.opcodes.get(name)}
        return {
            "kernel": self.compiled.key,
            "capability": self.compiled.capability, "warps": self.compiled.warps,
            "registers": usage.registers, "stack": usage.stack, "shared": self.compiled.shared,
            "instructions": usage.instructions, "matrix": matrix,
            "ffma": usage.opcodes.get("FFMA", 0),
            "faults": list(self.budget.faults(self.compiled, usage)),
        }  # fmt: skip


def kernels(place: release.Place, capability: int) -> Iterator[Kernel]:
    """Compiles everything a place launches, in every variant."""
    plan = place.plan(capability)
    for variant in plan.variants:
        for launch in variant.launches:
            compiled = compile_launch(plan, variant, launch, capability)
            yield Kernel(place.name, variant.guard, launch, compiled)


def gather(capabilities: tuple[int, ...], only: str = "") -> dict[str, Any]:
    """The whole report; `only`: part of the names of the places to compile. Says where it is."""
    found: dict[str, dict[str, Any]] = {}
    for place in release.places():
        if only not in place.name:
            continue
        print(f"compiling {place.name}", file=sys.stderr, flush=True)
        for capability in (c for c in capabilities if c >= place.least):
            for kernel in kernels(place, capability):
                key = kernel.compiled.key
                if key not in found:
                    found[key] = {**kernel.row(), "places": []}
                found[key]["places"].append(f"{kernel.place}: {kernel.guard}")
    return {
        "note": NOTE,
        "triton": version("triton"),
        "kernels": list(found.values()),
        "places": list(costs.places()),
        "passes": list(costs.passes()),
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as a table."""
    lines = [report["note"], ""]
    lines.append(f"{'kernel':<44} warps regs shared  instr  ffma matrix")
    for row in report["kernels"]:
        matrix = " ".join(f"{n} {name}" for name, n in row["matrix"].items())
        lines.append(
            f"{row['kernel']:<44} {row['warps']:>5} {row['registers']:>4} {row['shared']:>6} "
            f"{row['instructions']:>6} {row['ffma']:>5} {matrix}"
        )
        lines += [f"    {fault}" for fault in row["faults"]]
    lines += ["", f"{'place':<24} launches workspace KB  floor MB  us on h100"]
    for row in report["places"]:
        lines.append(
            f"{row['place']:<24} {row['launches']:>8} {row['workspace_bytes'] / 1e3:>12.1f} "
            f"{row['floor_bytes'] / 1e6:>9.3f} {row['floor_us']['h100']:>11.2f}"
        )
    lines += ["", "pass     rows experts launches (GDN, attention)       MB  ms on h100 (modelled)"]
    for row in report["passes"]:
        layers = f"({row['launches_per_gdn_layer']}, {row['launches_per_attention_layer']})"
        lines.append(
            f"{row['pass']:<8} {row['rows']:>4} {row['experts']:>7} {row['launches']:>8} "
            f"{layers:<17} {row['bytes'] / 1e6:>9.1f}  {row['modelled_ms']['h100']:>6.3f}"
        )
    return "\n".join(lines)


@click.command(help="Compile every kernel at the released model's sizes and print what it costs.")
@click.option(
    "--capability",
    "chosen",
    multiple=True,
    type=click.Choice([str(x) for x in CAPABILITIES]),
    help="Compute capability times ten; may be repeated.  [default: all]",
)
@click.option("--only", default="", help="Places whose name holds this.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Also write it as JSON.")
def main(chosen: tuple[str, ...], only: str, target: Path | None) -> None:
    """Exit status 1 if a kernel breaks its budget."""
    names = [place.name for place in release.places()]
    if not any(only in name for name in names):
        raise click.UsageError(f"no place has {only!r} in its name; known: {', '.join(names)}")
    report = gather(tuple(map(int, chosen)) or CAPABILITIES, only)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(render(report))
    sys.exit(any(row["faults"] for row in report["kernels"]))


if __name__ == "__main__":
    main()
