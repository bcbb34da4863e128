"""`clover-compile build --plan`: what a build will need and whether it fits; imports no torch."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clover_compile.bundle import check_output
from clover_compile.checkpoint import Checkpoint
from clover_compile.kernels.architecture import ARCHITECTURES
from clover_compile.options import BuildOptions, context_of
from clover_compile.targets.estimate import Estimate
from clover_compile.targets.table import known

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def plan(options: BuildOptions) -> dict[str, Any]:
    """The needs of a build, what there is here, and whether it fits; reads headers alone.

    Refuses what the build would refuse before it reads a weight.
    """
    row = known(options.target)
    check_output(options.output, options.force)
    dtype = row.dtype(options.target, options.dtype)
    checkpoint = Checkpoint.open(options.model)
    context = context_of(options, checkpoint.config)
    needs = estimate(options, checkpoint)
    here = {
        "memory_bytes": free_memory(), "disk_bytes": free_disk(options.output),
        "device_bytes": device_memory(options.target),
    }  # fmt: skip
    least = min(needs.memory_bytes, needs.unproved_memory_bytes or needs.memory_bytes)
    short = [
        f"{word} needs {size(need)}, {where} {size(have)}"
        for word, need, where, have in (
            ("memory", least, "free here", here["memory_bytes"]),
            ("disk", needs.disk_bytes, "free here", here["disk_bytes"]),
            ("device", needs.device_bytes, "the GPU has", here["device_bytes"]),
        )
        if have is not None and need > have
    ]
    return {
        "model": str(options.model), "target": options.target, "dtype": dtype,
        "context": context, "parameters": checkpoint.parameters, "needs": asdict(needs),
        "free": here, "missing": list(row.missing()), "fits": not short, "short": short,
        "proof": have_room(needs.memory_bytes, here["memory_bytes"]),
    }  # fmt: skip


def have_room(need: int, have: int | None) -> bool:
    """Whether `need` bytes fit into `have`; None, where nobody can tell, counts as enough."""
    return have is None or need <= have


def estimate(options: BuildOptions, checkpoint: Checkpoint) -> Estimate:
    """What a build needs, as its target tells it from the checkpoint's headers."""
    module, name = known(options.target).plan.split(":")
    made: Callable[[Checkpoint, str, int], Estimate]
    made = getattr(importlib.import_module(module), name)
    dtype = known(options.target).dtype(options.target, options.dtype)
    return made(checkpoint, dtype, context_of(options, checkpoint.config))


def device_memory(target: str) -> int | None:
    """Bytes of the GPU a target is named after; None where it names none."""
    gpu = ARCHITECTURES.get(target.partition("-")[2])
    return None if gpu is None else gpu.memory


def render(found: dict[str, Any]) -> str:
    """The same for people."""
    needs, free = found["needs"], found["free"]
    low, high = needs["minutes"]
    lines = [
        f"model      {found['model']}  {found['parameters'] / 1e6:,.1f} M parameters",
        f"target     {found['target']}  {found['dtype']}",
        f"weights    {size(needs['weight_bytes'])}",
        f"memory     {size(needs['memory_bytes'])}  (free here: {size(free['memory_bytes'])})",
        f"disk       {size(needs['disk_bytes'])}  (free here: {size(free['disk_bytes'])})",
        _device(needs["device_bytes"], free["device_bytes"]),
        f"time       {low:.1f} to {high:.1f} minutes, if nothing else runs",
        "fits       " + ("yes" if found["fits"] else "no: " + "; ".join(found["short"])),
    ]
    if found["fits"] and not found["proof"]:
        lines.append(
            "proof      none: the eager model does not fit, so the build ends `unproved` "
            f"(memory of such a build: {size(needs['unproved_memory_bytes'])})"
        )
    if found["missing"]:
        lines.append(f"not installed: {', '.join(found['missing'])}")
    return "\n".join(lines)


def _device(need: int, have: int | None) -> str:
    if not need:
        return "device     none"
    held = "one state of the whole context"
    return f"device     {size(need)}  with {held}  (its memory: {size(have)})"


def size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.1f} GB" if count >= 1e10 else f"{count / 1e6:,.0f} MB"


def free_memory() -> int | None:
    """Bytes a new process may take without swapping: the machine's, or the container's if less."""
    found = [x for x in (_machine(), _container()) if x is not None]
    return min(found, default=None)


def _machine() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _container() -> int | None:
    try:
        limit = int((CGROUP / "memory.max").read_text())
        return limit - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or no limit
        return None


def free_disk(output: Path) -> int | None:
    """Bytes free where the output will lie, which need not exist yet; None where nobody tells."""
    folder = output.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None
