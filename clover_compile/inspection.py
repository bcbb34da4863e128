"""`clover-compile inspect`: what a bundle holds and what was proved of it, read from its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clover_compile.runtime.manifest import read_bundle
from clover_compile.runtime.terminal import one_line

UNUSUAL = 8
"""Experts of unusual range that are named."""


def describe(path: Path) -> dict[str, Any]:
    """Manifest, verdict and costs of a bundle; refuses a damaged bundle as `run` does."""
    checked = read_bundle(path)
    return {
        "id": checked.identity, "manifest": checked.manifest, "verdict": checked.verdict,
        "costs": checked.costs and checked.costs.to_json(), "costs_fault": checked.costs_fault,
    }  # fmt: skip


def render(found: dict[str, Any]) -> str:
    """The same for people."""
    m, v = found["manifest"], found["verdict"]
    c = m["model"]["config"]
    size = sum(entry["size"] for entry in m["files"].values())
    lines = [
        f"bundle     {found['id'][:16]}  {m['target']}  {m['dtype']}  {size / 1e6:.1f} MB",
        f"model      {m['model']['name']}  {c['num_hidden_layers']} layers, "
        f"hidden {c['hidden_size']}, "
        f"{c['num_experts']} experts top-{c['num_experts_per_tok']}, block {c['block_size']}",
        f"context    {m['context']} rows",
        f"verdict    {v['outcome']}{': ' + v['reason'] if v.get('reason') else ''}",
    ]
    for unit, row in v.get("units", {}).items():
        lines.append(
            f"    {unit:<8} {row['rows']} rows  max error {row['max_error']:.1e}  "
            f"KL {row['mean_kl']:.1e}  top-1 {row['top1']:.2%}  left out {row['rows_left_out']}"
        )
    for way, row in v.get("generations", {}).items():
        word = "equal" if row["equal"] else "different"
        lines.append(f"    {way:<22} {word} over {row['compared']} of {row['tokens']} tokens")
    lines.append("fused ops")
    for unit, ops in m["ops"].items():
        for op, row in ops.items():
            note = f"  ({row['reason']})" if row.get("reason") else ""
            lines.append(f"    {unit:<8} {row['count']:>3} {op:<16} {row['provider']}{note}")
    lines += _nodes(m["units"])
    lines += _static(m.get("static") or {})
    lines.append("weights")
    for group, row in m["precision"].items():
        lines.append(f"    {group:<22} {row['tensors']:>5} tensors  {row['bytes'] / 1e6:>10.1f} MB")
    lines += _quantisation(m.get("quantisation") or {})
    built = ", ".join(f"{name} {number}" for name, number in m["built_with"].items())
    accepts = ", ".join(f"{name} {span}" for name, span in m["accepts"].items())
    costs, fault = found["costs"], found["costs_fault"]
    told = f"{costs['kind']}, for --decode auto" if costs else "none; `clover-compile profile` adds"
    if costs and costs["origin"]:
        origin = costs["origin"]
        threads = origin["threads"]
        told += f"; {one_line(origin['processor'])[:60]}, {threads} thread{'s' * (threads > 1)}"
        told += f"\nWARNING    {one_line(origin['doubt'])}" if origin["doubt"] else ""
    told = f"not usable ({fault}); `clover-compile profile` renews them" if fault else told
    lines += [f"built with {built}", f"accepts    {accepts}", f"costs      {told}"]
    if m["unknown_keys"]:
        lines.append(f"ignored configuration keys: {', '.join(m['unknown_keys'])}")
    return "\n".join(lines)


def _nodes(units: dict[str, Any]) -> list[str]:
    """Plugin nodes of a TensorRT bundle by Unit and op, with the functions and GPUs of the kernels
    that one or more of them carry; node by node they stand in --json.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for unit, entry in units.items():
        for row in entry.get("nodes", {}).values():
            groups.setdefault((unit, row["op"]), []).append(row)
    lines = ["plugin nodes  (each of them: --json)"] if groups else []
    for (unit, op), rows in groups.items():
        keys = {key.rsplit("-", 2)[0]: None for row in rows for key in row["kernels"]}
        count = len({key for row in rows for key in row["kernels"]})
        gpus = {key.rsplit("-", 2)[1]: None for row in rows for key in row["kernels"]}
        lines.append(
            f"    {unit:<8} {len(rows):>3} {op:<16} {count:>3} kernels for {', '.join(gpus)}: "
            f"{', '.join(keys)}"
        )
    return lines


def _quantisation(found: dict[str, Any]) -> list[str]:
    """What rounding did to the weights, by group, and experts far from the others."""
    if not found:
        return []
    lines = ["quantised  error: norm of the difference over the norm"]
    for group, row in found["groups"].items():
        lines.append(
            f"    {group:<22} {row['tensors']:>5} tensors  {row['bytes_before'] / 1e6:>10.1f} -> "
            f"{row['bytes'] / 1e6:.1f} MB  error {row['error']:.2%}, at most {row['worst']:.2%}"
        )
    odd = found["unusual_experts"]
    shown = ", ".join(f"{x['tensor']} {x['expert']}" for x in odd[:UNUSUAL])
    more = f" and {len(odd) - UNUSUAL} more" if len(odd) > UNUSUAL else ""
    lines.append(f"    experts of unusual range: {shown + more if odd else 'none'}")
    return lines


def _static(found: dict[str, Any]) -> list[str]:
    """Passes by count, with what they are worth stated above them."""
    if not found:
        return []
    k = found["kernels"]
    lines = [
        f"kernels    {k['count']} for compute capability {k['capability'] / 10:.1f}, assembled by "
        f"CUDA {k['assembler']}; at most {k['registers']} registers, {k['shared'] / 1024:.0f} KB "
        f"shared, {k['stack']} B stack; {k['over_budget']} miss the released model's budget",
        f"passes     {found['note']}",
    ]
    for row in found["passes"]:
        sizes = _span(row["floor_bytes"], 1e-6, ".1f")
        times = _span(row["modelled_ms"], 1, ".3f")
        lines.append(
            f"    {row['pass']:<8} {row['rows']:>3} rows after {row['prefix']}  "
            f"{row['launches']:>4} launches  {sizes:>17} MB  {times:>13} ms  "
            f"buffers {(row['buffer_bytes'] + row['scratch_bytes']) / 1e6:.1f} MB"
        )
    return lines


def _span(pair: list[float], scale: float, shape: str) -> str:
    low, high = (format(x * scale, shape) for x in pair)
    return low if low == high else f"{low}-{high}"
