"""What only a fresh process can show: memory, and the time to a first token."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from clover_compile.profiling.rounds import spread

CHILD = Path(__file__).with_name("child.py")


def memory(bundle: Path, threads: int) -> dict[str, Any]:
    """Pss of a runner with every Unit open and used, beside the bytes of its fp32 weights.

    Nobody else may have the bundle mapped: Pss divides shared pages.
    """
    found = _child("memory", str(bundle), str(threads))
    manifest = json.loads((bundle / "manifest.json").read_text())
    weights = sum(group["bytes"] for group in manifest["precision"].values())
    peak = found["peak"]["Pss"]
    return {"weights": weights, **found, "peak/weights": peak / weights,
            "above weights": peak - weights}  # fmt: skip


def first_token(bundle: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds from the start of a process to its first tokens, and of one that opens the
    files; also the processor time each spent, which depends less on other jobs."""
    tasks = ("answer", "open")
    found: list[dict[str, dict[str, float]]] = []
    for turn in range(rounds + 1):
        took = {}
        for task in tasks if turn % 2 else tasks[::-1]:
            start = time.time()
            end = _child(task, str(bundle))
            took[task] = {"ms": 1e3 * (end["time"] - start), "processor ms": 1e3 * end["cpu"]}
        if turn:  # the first round fills the page cache
            found.append(took)
    return {
        kind: {task: spread([x[task][kind] for x in found]) for task in tasks}
        | {"ratio": spread([x["answer"][kind] / x["open"][kind] for x in found])}
        for kind in ("ms", "processor ms")
    }


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {ran.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found
