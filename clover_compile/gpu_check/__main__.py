"""python -m clover_compile.gpu_check [--dry] [--only TEXT] [--json FILE] [--seconds S]

Compiles every kernel for the GPU that is present, compares it with its reference in bf16 (at the
released model's sizes over rows and prefix lengths, and over the op's own cases), times it with
rotating arguments against its byte floor, builds and proves the demonstration bundle, times layers
of the released sizes, and writes one JSON. Needs no network and no compiler but Triton's. --dry
does all but launch, on any machine, and says that no kernel ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clover_compile.gpu_check import end_to_end, layers, timing, values
from clover_compile.gpu_check.device import Gpu, compile_all
from clover_compile.gpu_check.layers import MODELS
from clover_compile.kernels import costs, release
from clover_compile.kernels.op import FusedOp
from clover_compile.kernels.plans import plan_of
from clover_compile.kernels.table import KERNELS, fused_op
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.launcher import run
from clover_compile.targets.cubins import jobs_of

ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 130)
PREFIXES = (0, 1, 63, 64, 65, 1000)
TIMED_ROWS, TIMED_PREFIX = (1, 16, 32, 64), 1024
DRY = "no kernel ran: this was a dry run"


@dataclass(frozen=True)
class Check:
    """One comparison with the reference."""

    name: str
    op: FusedOp
    plan: Plan
    outputs: tuple[str, ...]
    make: Any
    """() -> arguments on the GPU."""


def real_checks(only: str, capability: int, device: str) -> Iterator[Check]:
    """The released model's calls over rows and prefix lengths."""
    for place in _places(only, capability):
        op, plan = fused_op(place.op), place.plan(capability)
        outputs = place.outputs or op.outputs
        attends = place.op == "block_attention"
        for rows in ROWS:
            for prefix in PREFIXES if attends and rows in (1, 32, 65) else (100,):
                make = partial(values.arguments, place, rows, prefix, device, rows, spare=7)
                yield Check(f"{place.name} n={rows} R={prefix}", op, plan, outputs, make)


def _places(only: str, capability: int) -> list[release.Place]:
    """The places whose name holds `only` and whose dtypes the GPU has."""
    return [p for p in release.places() if only in p.name and p.least <= capability]


def _case_arguments(op: FusedOp, case: Any, device: str) -> list[Any]:
    made = case.make(torch.Generator().manual_seed(0))
    return [
        _stored(op, name, x).to(device) if isinstance(x, Tensor) else x
        for name, x in zip(op.parameters, made, strict=True)
    ]


def _stored(op: FusedOp, name: str, x: Tensor) -> Tensor:
    return x.bfloat16() if x.is_floating_point() and name not in op.wide else x


def case_checks(only: str, capability: int, device: str) -> Iterator[Check]:
    """The ops' own cases: odd sizes, extreme gates, ties, poisoned padding."""
    fp8 = capability >= release.FP8
    for op in (fused_op(name) for name in KERNELS if only in name and (fp8 or "fp8" not in name)):
        for case in op.cases():
            arguments = _case_arguments(op, case, "cpu")
            if arguments[0].shape[0] == 1:
                plan = plan_of(op, arguments, capability=capability)
                make = partial(_case_arguments, op, case, device)
                yield Check(f"{op.name} {case.name}", op, plan, op.outputs, make)


def compare(check: Check, gpu: Gpu) -> dict[str, Any]:
    """Errors of one check, and whether all are within the op's tolerance."""
    given = check.make()
    named = dict(zip(check.op.parameters, given, strict=True))
    got = run(check.plan, {k: named[k] for k in check.plan.inputs}, gpu)
    torch.cuda.synchronize()
    meant = values.truth(check.op, given)
    errors = {k: values.difference(got[k], meant[k]) for k in check.outputs}
    most = check.op.tolerance["bf16"]
    right = all(e <= (most if meant[k].is_floating_point() else 0) for k, e in errors.items())
    return {"check": check.name, "errors": errors, "tolerance": most, "right": right}


def measure(place: release.Place, rows: int, gpu: Gpu, bandwidth: float) -> dict[str, Any]:
    """Time of one place beside its byte floor at the bandwidth measured in this run."""
    plan, op = place.plan(gpu.capability), fused_op(place.op)
    floor = costs.cost(place, rows, TIMED_PREFIX, release.EXPERTS, gpu.capability).bytes
    sets = []
    for seed in range(timing.copies(floor)):
        given = values.arguments(place, rows, TIMED_PREFIX, "cuda", seed)
        sets.append({k: x for k, x in zip(op.parameters, given, strict=True) if k in plan.inputs})
    kept = release.EXPERTS
    if place.op.startswith("moe"):
        given = values.arguments(place, rows, TIMED_PREFIX, "cuda", 0)
        kept = _experts_read(given)
    made = costs.cost(place, rows, TIMED_PREFIX, kept, gpu.capability)
    gpu.poison = False
    try:
        found = timing.measure(lambda arrays: run(plan, arrays, gpu), sets)
    finally:
        gpu.poison = True
    floor_us = 1e6 * made.bytes / bandwidth
    return {
        "place": place.name, "rows": rows, **found.row(), "floor_bytes": made.bytes,
        "floor_us": floor_us, "times_floor": found.median / floor_us, "launches": made.launches,
        "argument_sets": len(sets), **({"experts": kept} if place.op.startswith("moe") else {}),
    }  # fmt: skip


def _experts_read(given: list[Any]) -> int:
    """Experts some row uses, by the reference's routing."""
    from clover_compile.kernels.moe.reference import coreset

    router, (top_k, top_p, block) = given[1].float(), given[-3:]
    if block:
        kept = coreset(torch.softmax(router, -1), top_k, top_p)
        router = torch.where(kept, router, -torch.inf)
    best = torch.sort(router, dim=-1, descending=True, stable=True)[1][..., :top_k]
    return int(torch.unique(best).numel())


def environment(dry: bool) -> dict[str, Any]:
    """Versions and the device."""
    found: dict[str, Any] = {name: version(name) for name in ("torch", "triton")}
    if not dry:
        facts = torch.cuda.get_device_properties(0)
        found |= {"device": facts.name, "capability": 10 * facts.major + facts.minor,
                  "memory": facts.total_memory}  # fmt: skip
    return found


def _guarded(what: Any, *arguments: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = what(*arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}", "right": False}
    return found


def check_all(options: argparse.Namespace) -> dict[str, Any]:
    """The whole run; what does not fit into the time is listed as left out."""
    began = time.monotonic()
    report: dict[str, Any] = {"note": DRY if options.dry else "", **environment(options.dry)}
    capability = 90 if options.dry else int(report["capability"])
    device = "cpu" if options.dry else "cuda"
    checks = [*real_checks(options.only, capability, device),
              *case_checks(options.only, capability, device)]  # fmt: skip
    lowered = {} if options.only else {n: layers.lower(x, capability) for n, x in MODELS.items()}
    plans = [x.plan for x in checks]
    plans += [plan for one in lowered.values() for plan in layers.plans_of(one).values()]
    made = jobs_of(plans, capability)
    report |= {"checks": len(checks), "kernels": len(made), "left_out": []}
    print(f"{len(checks)} checks, {len(made)} kernels to compile", file=sys.stderr)
    if options.dry:
        compiled = compile_all(dict(list(made.items())[: options.compile]), 1)
    else:
        compiled = compile_all(made)
    report["not_compiled"] = [x for x in compiled.values() if isinstance(x, str)]
    report["compile_seconds"] = time.monotonic() - began
    if options.dry:
        report["would_check"] = [x.name for x in checks]
        report["would_time"] = {name: layers.launches(one) for name, one in lowered.items()}
        report["would_build"] = end_to_end.target_for(capability)
        return report
    gpu = Gpu(compiled, capability)
    report["bandwidth"] = timing.bandwidth()
    report["times"], report["results"] = [], []
    for place in _places(options.only, capability):
        for rows in TIMED_ROWS:
            found = _guarded(measure, place, rows, gpu, report["bandwidth"])
            report["times"].append({"place": place.name, "rows": rows, **found})
    if not options.only:
        report["bundle"] = _guarded(end_to_end.run, capability, options.json.parent)
        report["layers"] = _guarded(layers.run, compiled, capability)
    for check in checks:
        if time.monotonic() - began > options.seconds:
            report["left_out"].append(check.name)
            continue
        report["results"].append({"check": check.name, **_guarded(compare, check, gpu)})
    report["seconds"] = time.monotonic() - began
    return report


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"torch {report['torch']}, triton {report['triton']}, {report.get('device', 'no GPU')}"
    ]
    if report["note"]:
        lines.append(report["note"])
    lines += [f"not compiled: {x}" for x in report["not_compiled"]]
    for row in report.get("times", []):
        if "error" in row:
            lines.append(f"{row['place']:<24} {row['rows']:>3} rows  {row['error']}")
        else:
            lines.append(
                f"{row['place']:<24} {row['rows']:>3} rows {row['median_us']:>9.2f} us  "
                f"floor {row['floor_us']:>8.2f}  {row['times_floor']:>6.2f} x"
            )
    lines += _render_whole(report)
    results = report.get("results", [])
    wrong = [x for x in results if not x["right"]]
    lines += [f"WRONG {x['check']}: {x.get('error') or x['errors']}" for x in wrong]
    if "would_check" in report:
        lines.append(
            f"{len(report['would_check'])} checks and {report['kernels']} kernels prepared"
        )
    else:
        right, left = len(results) - len(wrong), len(report["left_out"])
        lines.append(f"{right} of {len(results)} checks right, {left} left out")
    return "\n".join(lines)


def _render_whole(report: dict[str, Any]) -> list[str]:
    """The bundle and the layers; a dry run says what it would have built and timed."""
    lines = []
    if "would_build" in report:
        steps = "; ".join(f"{name}: {sum(x.values())} steps" for name, x in
                          report["would_time"].items())  # fmt: skip
        lines.append(f"would build {report['would_build']} and time {steps or 'no layers'}")
    bundle, timed = report.get("bundle", {}), report.get("layers", {})
    if bundle:
        words = bundle.get("error") or f"{bundle['outcome']} {bundle['reason']}"
        lines.append(f"bundle {bundle.get('target', '')}: {words}")
    for way, row in bundle.get("ways", {}).items():
        lines.append(
            f"    {way:<22} {row['tokens_equal']} of {row['messages']} with the oracle's tokens, "
            f"{row['answers_exact']} exact answers, {row['ms_per_answer']:.1f} ms per answer"
        )
    if "error" in timed:
        lines.append(f"layers: {timed['error']}")
    for name, found in timed.get("forty_layers_ms", {}).items():
        once = timed["models"]["one of each"][name]["least_ms"]
        lines.append(
            f"{name:<8} two layers {once:.3f} ms, forty layers {found:.2f} ms (extrapolated)"
        )
    return lines


def main() -> int:
    """0: everything ran and is right (dry: everything was prepared)."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="launch nothing; any machine")
    parser.add_argument("--compile", type=int, default=2, help="kernels a dry run compiles (2)")
    parser.add_argument("--only", default="", help="places and ops whose name holds this")
    parser.add_argument("--seconds", type=float, default=330, help="start no check after this")
    parser.add_argument("--json", type=Path, default=Path("build/gpu-check.json"))
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("gpu-check: no GPU here; --dry proves the plumbing without one", file=sys.stderr)
        return 2
    report = check_all(options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(render(report))
    wrong = [x for x in report.get("results", []) if not x["right"]]
    failed = [x for x in report.get("times", []) if "error" in x]
    whole = [report[x] for x in ("bundle", "layers") if x in report]
    failed += [x for x in whole if "error" in x or not x.get("right", True)]
    return int(bool(wrong or failed or report["not_compiled"] or report["left_out"]))


if __name__ == "__main__":
    sys.exit(main())
