"""This machine's processor, and the cores of it that this process may keep busy."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_SYSTEM = Path("/sys")


def cores(system: Path = _SYSTEM) -> int:
    """Physical cores among the processors allowed here, no more than a container's share; >= 1.

    Two threads on one core only take its caches from each other.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
    else:
        allowed = set(range(os.cpu_count() or 1))
    siblings = {_read(system / f"devices/system/cpu/cpu{i}/topology/thread_siblings_list") or str(i)
                for i in allowed}  # fmt: skip
    share = _share(_read(system / "fs/cgroup/cpu.max"))
    return max(1, min(len(siblings), len(allowed) if share is None else share))


def processor(system: Path = Path("/proc")) -> str:
    """The processor's name as the system gives it."""
    for line in _read(system / "cpuinfo").splitlines():
        key, _, name = line.partition(":")
        if key.strip() == "model name":
            return name.strip()
    return platform.processor() or platform.machine() or "unknown"


def _share(text: str) -> int | None:
    """Whole processors of a quota such as "150000 100000", at least one; None for no limit."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or not int(parts[1]):
        return None
    return max(1, int(parts[0]) // int(parts[1]))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
